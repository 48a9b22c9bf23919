"""compose/'s files as compose and its images read them: interpolated, merged, and rendered."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.servers import ROOT

FOLDER = ROOT / "compose"
NGINX_CONF = FOLDER / "nginx.conf"
NATS_CONF = FOLDER / "nats.conf"
SECRETS = {"HEADRACE_API_KEY": "sk-compose", "NATS_PASSWORD": "1e5"}

_INTERPOLATED = re.compile(r"\$\$|\$\{(?P<name>\w+)(?:(?P<how>:?[-?])(?P<rest>[^}]*))?\}")


class Missing(Exception):
    """compose.yaml needs a variable that is not set."""


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Return a text as compose interpolates it. Raises Missing."""

    def value(match: re.Match[str]) -> str:
        name, how, rest = match["name"], match["how"] or "", match["rest"] or ""
        if name is None:
            return "$"
        found = environ.get(name)
        if found is not None and (found or not how.startswith(":")):
            return found
        if how.endswith("?"):
            raise Missing(rest)
        return rest

    return _INTERPOLATED.sub(value, text)


def services(environ: Mapping[str, str] = SECRETS) -> dict[str, dict[str, Any]]:
    """Return compose.yaml's services, merged and interpolated. Raises Missing."""
    document = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
    found: dict[str, dict[str, Any]] = _each(document, environ)["services"]
    return found


def _each(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return interpolate(value, environ)
    if isinstance(value, list):
        return [_each(item, environ) for item in value]
    if isinstance(value, dict):
        return {name: _each(item, environ) for name, item in value.items()}
    return value


def environment(service: str, environ: Mapping[str, str] = SECRETS) -> dict[str, str]:
    """Return what a service's processes find in their environment."""
    return {str(k): str(v) for k, v in services(environ)[service]["environment"].items()}


def render_nginx(folder: Path, **changed: str) -> list[str]:
    """Write nginx.conf into `folder` as the image's entrypoint does, and return nginx's command.

    The entrypoint replaces the variables that are set and match a filter, by envsubst; `changed`
    stands for what differs from compose.yaml.
    """
    environ = environment("nginx") | {"NGINX_LOCAL_RESOLVERS": "127.0.0.1"} | changed
    wanted = re.compile(environ["NGINX_ENVSUBST_FILTER"])
    text = NGINX_CONF.read_text("utf-8")
    for name, value in environ.items():
        if wanted.search(name):
            text = re.sub(rf"\$\{{{name}\}}|\${name}\b", lambda _, value=value: value, text)
    (folder / "nginx.conf").write_text(text, "utf-8")
    output = environ["NGINX_ENVSUBST_OUTPUT_DIR"]
    return [word.replace(output, str(folder)) for word in services()["nginx"]["command"]]

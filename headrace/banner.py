"""The command that `headrace up` shows to begin with. Rule: it works as it stands, or says by a
placeholder what to put there."""

import json
import os
import shlex
from collections.abc import Mapping
from typing import Final

from headrace import tenants
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.settings import ConfigFile
from headrace.tenants import Directory

VARIABLE: Final = "HEADRACE_API_KEY"


async def bearer(
    bus: Bus, config: ConfigFile, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return what clients show, as `bearer_of`; keys in the bucket count, where it can be read."""
    directory = Directory(config.keys.keys, config.tenancy)
    try:
        for (kind, name), record in (await tenants.read_bucket(bus)).items():
            directory.take(kind, name, record)
    except (BrokerAway, BrokerRefused):
        pass  # a banner is not worth more than what is known without
    return bearer_of(directory, config, environ)


def bearer_of(directory: Directory, config: ConfigFile, environ: Mapping[str, str]) -> str | None:
    """Return what stands in a client's Authorization header, as a shell takes it.

    The variable where the environment names a key, else the placeholder KEY or TOKEN; None where
    there are no keys, or a proxy's certificates stand for them.
    """
    if environ.get(VARIABLE):
        return f"${VARIABLE}"
    if not directory.guarded:
        return None
    if directory.has_keys:
        return "KEY"
    if config.tenancy.jwt is not None:
        return "TOKEN"
    return None if config.tenancy.mtls is not None else "KEY"


def curl(endpoint: str, model: str, *, bearer: str | None, redirected: bool = False) -> str:
    """Return a command, on one line, that asks the model something."""
    follow = "-L " if redirected else ""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    key = "" if bearer is None else f'-H "Authorization: Bearer {bearer}" '
    return (
        f"curl -N {follow}{endpoint}/v1/chat/completions {key}-H 'Content-Type: application/json'"
        f" -d {shlex.quote(json.dumps(body))}"
    )

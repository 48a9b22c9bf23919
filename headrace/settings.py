"""Where settings come from: a flag, else `HEADRACE_*`, else headrace.toml, else the default.

Rule: click decides the order; this file only says what there is. A node's settings are a frozen
dataclass whose fields are annotated with the option types below; `command` turns it into a command
line. Top-level keys of headrace.toml are the flags' names with underscores; a key that no node
knows is an error.
"""

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer

from headrace.command_line import CommandLine
from headrace.connection_settings import ConnectionSettings
from headrace.content_settings import NO_CONTENT, Content, read_content
from headrace.json_object import EMPTY, BadSetting, JsonObject
from headrace.option import KNOWN as _KNOWN
from headrace.option import option as _option
from headrace.sockets import PORT_MAX, is_loopback
from headrace.tenant_settings import (
    NO_KEYS,
    NO_TENANCY,
    TABLES,
    ApiKey,
    ApiKeys,
    Tenancy,
    key_of,
    read_keys,
    read_tenancy,
)

__all__ = ["ApiKey", "ApiKeys", "BadSetting", "ConnectionSettings", "JsonObject"]

CONFIG_NAME: Final = "headrace.toml"
DATA_DIR: Final = Path(".headrace")
GRACE_S: Final = 10.0
ORPHAN_S: Final = 30.0
DEFAULT_TENANT: Final = "default"

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What headrace.toml says: options by name, keys, tenants. Without a path it says nothing."""

    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: ApiKeys = NO_KEYS
    tenancy: Tenancy = NO_TENANCY
    content: Content = NO_CONTENT


NO_CONFIG: Final = ConfigFile()


def load_config(raw: "str | Path | ConfigFile") -> ConfigFile:
    """Read headrace.toml; without a name, the one in the working directory if there is one.

    Raises BadSetting for a file that cannot be read and for keys that nothing knows.
    """
    if isinstance(raw, ConfigFile):
        if raw.path is not None or not Path(CONFIG_NAME).is_file():
            return raw
        raw = CONFIG_NAME
    path = Path(raw).absolute()
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadSetting(f"{path} cannot be read: {error}") from error
    options = {name: value for name, value in document.items() if name not in TABLES}
    for name in options:
        if name not in _KNOWN or name == "config":
            raise BadSetting(f"{path}: {name!r} is no setting{_did_you_mean(name)}")
    try:
        tenancy = read_tenancy(document, path.parent)
        keys = ApiKeys(read_keys(document.get("keys", [])), tenancy.guarded)
        content = read_content(document)
    except ValueError as error:
        raise BadSetting(f"{path}: {error}") from error
    return ConfigFile(path, options, keys, tenancy, content)


def _did_you_mean(name: str) -> str:
    near = get_close_matches(name, sorted(_KNOWN | TABLES), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def api_keys(config: ConfigFile, environ: Mapping[str, str] = os.environ) -> ApiKeys:
    """Return the keys of headrace.toml and, for the default tenant, `HEADRACE_API_KEY`.

    The key itself has no flag: command lines can be read by every user of the machine.
    """
    secret = environ.get("HEADRACE_API_KEY", "")
    if not secret:
        return config.keys
    own = key_of(DEFAULT_TENANT, secret)
    return ApiKeys((own, *config.keys.keys), config.keys.guarded)


def guard_address(keys: ApiKeys, host: str) -> None:
    """Refuse to serve other machines without keys. Raises BadSetting."""
    if not keys and not is_loopback(host):
        raise BadSetting(
            f"without keys only this machine may be served, and {host} is more than that:"
            " set HEADRACE_API_KEY, or [[keys]] in headrace.toml"
        )


# Options


class EngineKind(StrEnum):
    """What runs the model."""

    SIM = "sim"
    VLLM = "vllm"


def _use_config(ctx: typer.Context, config: ConfigFile) -> ConfigFile:
    ctx.default_map = dict(config.options)
    return config


Config = Annotated[
    ConfigFile,
    _option(
        "config",
        f"Settings file. Without it, {CONFIG_NAME} in the working directory.",
        parser=load_config,
        callback=_use_config,
        is_eager=True,
        metavar="FILE",
        show_default=False,
    ),
]
NatsUrl = Annotated[
    str, _option("nats-url", "NATS servers, with commas between; the URLs may carry credentials.")
]
OptionalNatsUrl = Annotated[
    str | None,
    _option("nats-url", "NATS servers, with commas between; without it, the one of the data dir."),
]
NatsCreds = Annotated[
    Path | None, _option("nats-creds", "NATS credentials file.", exists=True, dir_okay=False)
]
NatsCa = Annotated[
    Path | None, _option("nats-ca", "CA file for NATS over TLS.", exists=True, dir_okay=False)
]
AdminHost = Annotated[str, _option("admin-host", "Address of /healthz, /readyz and /metrics.")]
AdminPort = Annotated[
    int, _option("admin-port", "Their port; 0 takes a free one.", min=0, max=PORT_MAX)
]
GraceS = Annotated[
    float, _option("grace-s", "Seconds to drain before the end.", min=0.0, max=86_400.0)
]
OrphanS = Annotated[
    float,
    _option("orphan-s", "Seconds that a request runs on without a reader.", min=0.5, max=86_400.0),
]
Name = Annotated[str | None, _option("name", "Name of this process among its peers.")]
Host = Annotated[str, _option("host", "Address to serve clients on.")]
Port = Annotated[
    int, _option("port", "Port to serve clients on; 0 takes a free one.", min=0, max=PORT_MAX)
]
PublicUrl = Annotated[
    str | None,
    _option(
        "public-url",
        "URL at which clients reach a streamer; without it, its address. `up` puts the streamer's"
        " own for {port} and {number}; `python -m streamer` takes a path on the origin they asked"
        " too.",
    ),
]
Split = Annotated[
    bool, _option("split", "Run ingress and streamers as processes of their own, no gateway.")
]
Ingress = Annotated[
    int | None,
    _option("ingress", "How many ingress to run, with --split; 1 if not said.", min=1, max=256),
]
Streamers = Annotated[
    int | None,
    _option("streamers", "How many streamers to run, with --split; 1 if not said.", min=1, max=256),
]
CorsOrigin = Annotated[
    list[str] | None,
    _option(
        "cors-origin",
        "Origin whose pages may call the API from a browser, such as https://chat.example.com;"
        " * for any. May be repeated. Without keys, this machine's pages may.",
        metavar="ORIGIN",
        show_default=False,
    ),
]
WebSocketPingS = Annotated[
    float, _option("websocket-ping-s", "Seconds between pings on a WebSocket.", min=0.1, max=3600.0)
]
QueueOrder = Annotated[
    Literal["hybrid", "fcfs", "sjf"],
    _option("queue-order", "How one tenant's waiting requests are ordered among themselves."),
]
QueuePatienceS = Annotated[
    float,
    _option(
        "queue-patience-s",
        "Seconds that a request may wait for its turn; the same for ingress and streamers.",
        min=0.1,
        max=86_400.0,
    ),
]
QUEUE_PATIENCE_S: Final = 30.0
LimitsWhenAway = Annotated[
    Literal["refuse", "admit"],
    _option("limits-when-away", "What becomes of requests while limits cannot be checked."),
]
LogPrompts = Annotated[
    bool, _option("log-prompts", "Log a line of each prompt, redacted; else none is in any log.")
]
Engine = Annotated[EngineKind, _option("engine", "What runs the model.")]
Model = Annotated[str | None, _option("model", "Model to run: a name or a directory.")]
ServedModelName = Annotated[
    str | None, _option("served-model-name", "Name that clients give the model.")
]
EngineArgs = Annotated[
    JsonObject,
    _option(
        "engine-args",
        """Engine arguments by vLLM's names, such as '{"tensor_parallel_size": 8}'.""",
        parser=JsonObject.parse,
        metavar="JSON",
        show_default=False,
    ),
]
Sim = Annotated[
    JsonObject,
    _option(
        "sim",
        "Time model of the simulated engine.",
        parser=JsonObject.parse,
        metavar="JSON",
        show_default=False,
    ),
]
Workers = Annotated[int, _option("workers", "How many workers to run.", min=0, max=1024)]
DataDir = Annotated[Path, _option("data-dir", "Where all state is kept.", file_okay=False)]
OptionalDataDir = Annotated[
    Path | None, _option("data-dir", "Where the system's state is kept.", file_okay=False)
]
PublishCard = Annotated[
    bool,
    typer.Option(
        "--publish-card", help="Publish the model's card and tokenizer, print its name, and end."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# What nodes share


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What every tier needs."""

    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    nats_creds: NatsCreds = None
    nats_ca: NatsCa = None
    admin_host: AdminHost = "127.0.0.1"
    admin_port: AdminPort = 0
    grace_s: GraceS = GRACE_S
    name: Name = None
    config: Config = NO_CONFIG


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Where clients are served."""

    host: Host = "127.0.0.1"
    port: Port = 8000


@dataclass(frozen=True, kw_only=True)
class CorsSettings:
    """Which origins' pages may call the API from a browser. Raises ValueError for no origin."""

    cors_origin: CorsOrigin = None

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin, such as https://chat.example.com")

    @property
    def cors_origins(self) -> frozenset[str]:
        """The origins; each may hold several with commas between."""
        named = ",".join(self.cors_origin or ()).split(",")
        return frozenset(origin.strip().lower() for origin in named if origin.strip())


@dataclass(frozen=True, kw_only=True)
class LineSettings:
    """How requests wait for their turn before they are queued."""

    queue_order: QueueOrder = "hybrid"
    queue_patience_s: QueuePatienceS = QUEUE_PATIENCE_S
    limits_when_away: LimitsWhenAway = "refuse"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is logged of requests."""

    log_prompts: LogPrompts = False


@dataclass(frozen=True, kw_only=True)
class WebSocketSettings:
    """How WebSockets are kept alive."""

    websocket_ping_s: WebSocketPingS = 20.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Which engine runs which model."""

    engine: Engine = EngineKind.SIM
    model: Model = None
    served_model_name: ServedModelName = None
    engine_args: EngineArgs = EMPTY
    sim: Sim = EMPTY


S = TypeVar("S")


def taking(kind: type[S], run: Callable[[S], None]) -> Callable[..., None]:
    """Return a function for typer whose parameters are the fields of the dataclass `kind`.

    It calls `run` with the value; a ValueError that the dataclass raises is a wrong setting.
    """

    def command(**values: Any) -> None:
        try:
            settings = kind(**values)
        except ValueError as error:
            raise BadSetting(str(error)) from error
        run(settings)

    signature = inspect.signature(kind, eval_str=True)
    # typer reads both; a dataclass's own signature returns None and names no type parameters.
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    command.__doc__ = run.__doc__
    return command


def command(kind: type[S], run: Callable[[S], None]) -> typer.Typer:
    """Return the command line of a node: `command(WorkerSettings, main)()` in `__main__`."""
    app = CommandLine()
    app.command()(taking(kind, run))
    return app

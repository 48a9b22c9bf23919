"""`headrace up`: a whole system on one machine. Rule: it starts the tiers and imports none."""

import asyncio
import hashlib
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace import broker, devices, lifecycle, registry, settings, topology
from headrace.broker import Broker, BrokerUnusable
from headrace.bus import BrokerAway, BrokerRefused, Bus, BusSettings, connection
from headrace.datadir import DataDir, DataDirInUse, ProcessRecord, RunRecord, started_s
from headrace.settings import EngineKind
from headrace.sockets import CannotListen, claim_port, http_url, is_loopback
from headrace.supervise import Command, Died, Supervisor, supervising

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
NATS_GRACE_S: Final = 5.0
"""nats-server ends in milliseconds once its clients are gone."""
GATEWAY_DEATHS_MAX: Final = 3
STOP_ORDER: Final = ("gateway", "worker", "nats")
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what users write


class Refused(Exception):
    """The system cannot be started as asked."""


@dataclass(frozen=True, kw_only=True)
class UpSettings(
    settings.EngineSettings,
    settings.ListenSettings,
    settings.CorsSettings,
    settings.WebSocketSettings,
):
    """What `headrace up` takes."""

    workers: settings.Workers = 1
    data_dir: settings.DataDir = settings.DATA_DIR
    nats_url: settings.OptionalNatsUrl = None
    nats_creds: settings.NatsCreds = None
    nats_ca: settings.NatsCa = None
    grace_s: settings.GraceS = settings.GRACE_S
    config: settings.Config = settings.NO_CONFIG

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return bool(settings.api_keys(self.config))


_REFUSALS: Final = (
    Refused,
    BrokerAway,
    BrokerRefused,
    BrokerUnusable,
    CannotListen,
    DataDirInUse,
    Died,
)


def run(wanted: UpSettings) -> int:
    """Start a system, keep it running until a signal, stop it; return the exit status."""
    lifecycle.log_to_stdout("up")
    data_dir = DataDir(wanted.data_dir)
    try:
        _check_host(wanted)
        with data_dir.claim():
            if ended := data_dir.end_leftovers():
                log.warning("ended what a killed up had left running: %s", ", ".join(ended))
            return _run(wanted, data_dir)
    except BrokerAway as error:
        print(f"headrace: the broker is away: {error}", file=sys.stderr)
        return 2
    except (*_REFUSALS, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


def _check_host(wanted: UpSettings) -> None:
    if not is_loopback(wanted.host) and not wanted.has_keys:
        raise Refused(
            f"serving {wanted.host} without keys would open the models to everybody who reaches"
            " it: set HEADRACE_API_KEY, or [[keys]] in headrace.toml, or serve 127.0.0.1"
        )


def _run(wanted: UpSettings, data_dir: DataDir) -> int:
    system = _System(wanted, data_dir)
    refused: list[BaseException] = []

    async def main(stop: asyncio.Event) -> None:
        try:
            async with supervising(stop_order=STOP_ORDER, on_change=system.record) as supervisor:
                system.supervisor = supervisor
                await _until(stop, system.serve())
        except* _REFUSALS as group:
            refused.extend(group.exceptions)

    status = lifecycle.run(main, at_once=system.kill)
    data_dir.forget()
    if refused:
        raise _first(refused[0])
    return status


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Do `work` until it ends or `stop` is set."""
    doing = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([doing, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, stopped):
            task.cancel()
        await asyncio.wait([doing, stopped])
    if not doing.cancelled():
        doing.result()


class _System:
    """The processes of one `up`, and what they are told."""

    def __init__(self, wanted: UpSettings, data_dir: DataDir) -> None:
        self._wanted = wanted
        self._data_dir = data_dir
        self._port = claim_port(wanted.host, wanted.port)
        self._broker: Broker | None = None
        if wanted.nats_url is None:
            self._broker = broker.prepare(data_dir)
        self._nats_url = wanted.nats_url or (self._broker.url if self._broker else "")
        self._endpoint = http_url(_WILDCARDS.get(wanted.host, wanted.host), self._port)
        self.supervisor: Supervisor | None = None

    def kill(self) -> None:
        """End everything at once: the second signal."""
        if self.supervisor is not None:
            self.supervisor.kill()
        self._data_dir.forget()

    def record(self, processes: Sequence[ProcessRecord]) -> None:
        """Write what runs, for `headrace ps` and for the next `up`."""
        self._data_dir.write(
            RunRecord(
                up_pid=os.getpid(),
                up_started_s=started_s(os.getpid()) or 0.0,
                endpoint=self._endpoint,
                nats_url=self._nats_url,
                processes=tuple(processes),
            )
        )

    async def serve(self) -> None:
        """Start everything in order, say so, and keep the model announced."""
        supervisor, wanted = self.supervisor, self._wanted
        assert supervisor is not None
        self.record([])
        if self._broker is not None:
            await supervisor.ready(await supervisor.start(self._nats(self._broker)))
        bus_settings = BusSettings(
            url=self._nats_url,
            creds=None if wanted.nats_creds is None else str(wanted.nats_creds),
            ca=None if wanted.nats_ca is None else str(wanted.nats_ca),
        )
        async with connection(bus_settings, name="up", timeout_s=CONNECT_TIMEOUT_S) as bus:
            await topology.apply(bus)
            model = await self._publish_card(supervisor)
            gateway = await supervisor.start(self._gateway())
            for number in range(1, wanted.workers + 1):
                await supervisor.start(self._worker(number))
            async with asyncio.TaskGroup() as group:
                group.create_task(_announce(bus, model), name="announce the model")
                await supervisor.ready(gateway, deaths_max=GATEWAY_DEATHS_MAX)
                self._say(model)

    def _say(self, model: str) -> None:
        print(f"headrace serves {model}", flush=True)
        print(f"endpoint: {self._endpoint}")
        print(f"NATS: {self._nats_url}")
        print(curl(self._endpoint, model, with_key=self._wanted.has_keys), flush=True)

    async def _publish_card(self, supervisor: Supervisor) -> str:
        argv = [*_python("workers"), *self._engine_flags(), "--publish-card"]
        status, output = await supervisor.once(argv, self._environ())
        *logged, model = output.strip().splitlines() or [""]
        for line in logged if status == 0 else [*logged, model]:
            print(line, flush=True)
        if status != 0 or not model:
            raise Refused(f"the model cannot be published: status {status}, reason above")
        return model

    def _nats(self, found: Broker) -> Command:
        return Command(
            name="nats",
            tier="nats",
            argv=lambda _: found.argv,
            environ=dict(os.environ),
            admin_port=lambda: found.monitor_port,
            grace_s=min(NATS_GRACE_S, self._wanted.grace_s),
            ready_path="/healthz",
        )

    def _gateway(self) -> Command:
        wanted = self._wanted
        listen = ["--host", wanted.host, "--port", str(self._port)]
        listen += ["--websocket-ping-s", str(wanted.websocket_ping_s)]
        for origin in sorted(wanted.cors_origins):
            listen += ["--cors-origin", origin]
        return self._tier("gateway", "gateway", "gateway", listen)

    def _worker(self, number: int) -> Command:
        wanted = self._wanted
        own = {}
        if wanted.engine is EngineKind.VLLM:
            own = devices.share(
                number - 1,
                workers=wanted.workers,
                per_worker=devices.ranks(wanted.engine_args.values),
                gpus=_visible_gpus(),
                cores=_usable_cores(),
                environ=os.environ,
            )
        return self._tier(f"worker-{number}", "worker", "workers", self._engine_flags(), own)

    def _tier(
        self,
        name: str,
        tier: str,
        package: str,
        flags: Sequence[str],
        environ: dict[str, str] | None = None,
    ) -> Command:
        argv = [
            *_python(package),
            *flags,
            *("--name", self._peer_name(name)),
            *("--grace-s", str(self._wanted.grace_s)),
            *("--admin-host", "127.0.0.1", "--admin-port"),
        ]
        return Command(
            name=name,
            tier=tier,
            argv=lambda port: [*argv, str(port)],
            environ=self._environ() | (environ or {}),
            # A port of its own for each start: the last one may have gone to somebody else.
            admin_port=lambda: claim_port("127.0.0.1", 0),
            grace_s=self._wanted.grace_s,
        )

    def _peer_name(self, name: str) -> str:
        """Return a process's name among its peers: with a broker of others it needs more."""
        if self._broker is not None:
            return name
        mark = hashlib.sha256(str(self._data_dir.path).encode()).hexdigest()[:6]
        return f"{socket.gethostname()}-{mark}-{name}"

    def _environ(self) -> dict[str, str]:
        # The URL holds the password, and a command line can be read by every user.
        environ = os.environ | {"HEADRACE_NATS_URL": self._nats_url}
        for name, path in (
            ("NATS_CREDS", self._wanted.nats_creds),
            ("NATS_CA", self._wanted.nats_ca),
            ("CONFIG", self._wanted.config.path),
        ):
            if path is not None:
                environ[f"HEADRACE_{name}"] = str(path.absolute())
        return environ

    def _engine_flags(self) -> list[str]:
        wanted = self._wanted
        flags = ["--engine", wanted.engine]
        if wanted.model is not None:
            flags += ["--model", wanted.model]
        if wanted.served_model_name is not None:
            flags += ["--served-model-name", wanted.served_model_name]
        return [*flags, "--engine-args", wanted.engine_args.text, "--sim", wanted.sim.text]


async def _announce(bus: Bus, model: str) -> None:
    card = await registry.read_card(bus, model)
    if card is None:
        raise Refused(f"the card of {model} is not on the broker although it was published")
    await registry.keep_alive(bus, card)


def curl(endpoint: str, model: str, *, with_key: bool) -> str:
    """Return a command, on one line, that asks the model something."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    key = '-H "Authorization: Bearer $HEADRACE_API_KEY" ' if with_key else ""
    return (
        f"curl -N {endpoint}/v1/chat/completions {key}-H 'Content-Type: application/json'"
        f" -d {shlex.quote(json.dumps(body))}"
    )


def _python(package: str) -> list[str]:
    # -P: a file in the working directory must not stand in for a tier.
    return [sys.executable, "-P", "-m", package]


def _visible_gpus() -> list[str]:
    named = os.environ.get(devices.GPUS)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listed = subprocess.run(  # noqa: S603 - NVIDIA's own tool, no input of ours
        [tool, "--list-gpus"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return [str(number) for number in range(count)]


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processes_json(record: RunRecord) -> str:
    """Return what `headrace ps --json` prints."""
    processes = [
        {
            "name": process.name,
            "tier": process.tier,
            "pid": process.pid,
            "state": process.state,
            "admin_url": process.admin_url,
        }
        for process in record.processes
    ]
    whole = {"processes": processes, "endpoint": record.endpoint, "nats_url": record.nats_url}
    return msgspec.json.encode(whole).decode()

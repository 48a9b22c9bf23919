"""`headrace up`: a whole system on one machine. Rule: it starts the tiers and imports none."""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Final

import msgspec

from headrace import addresses, banner, broker, lifecycle, registry, topology
from headrace.addresses import Refused
from headrace.broker import Broker, BrokerUnusable
from headrace.bus import BrokerAway, BrokerRefused, Bus, BusSettings, connection
from headrace.commands import Commands
from headrace.datadir import DataDir, DataDirInUse, ProcessRecord, RunRecord, started_s
from headrace.settings import EngineKind
from headrace.sockets import CannotListen
from headrace.supervise import Died, Supervisor, supervising
from headrace.up_settings import UpSettings
from headrace.upkeep import Upkeep
from schemas import subjects

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
FRONT_DEATHS_MAX: Final = 3
RECORD_RETRY_S: Final = 1.0
STOP_ORDER: Final = ("gateway", "ingress", "streamer", "worker", "nats")
"""No new requests, then no open streams, then none who would write to them."""


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
        addresses.check(wanted)
        _check_engine(wanted)
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


def _check_engine(wanted: UpSettings) -> None:
    # Else each worker would end at its start, again and again.
    if wanted.engine is EngineKind.VLLM and wanted.workers and find_spec("vllm") is None:
        raise Refused(
            f"vLLM is not installed for {sys.executable}: `make run-vllm` does that for a CPU,"
            " `pip install '.[vllm]'` in a checkout for a GPU"
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
        self._addresses = addresses.choose(wanted)
        self._keepers = addresses.keep(wanted.host, self._addresses)
        self._broker: Broker | None = None
        if wanted.nats_url is None:
            self._broker = broker.prepare(data_dir)
        self._nats_url = wanted.nats_url or (self._broker.url if self._broker else "")
        self._commands = Commands(wanted, data_dir, self._broker, self._nats_url)
        self.supervisor: Supervisor | None = None
        self._processes: Sequence[ProcessRecord] = ()
        self._unwritten: asyncio.TimerHandle | None = None

    def kill(self) -> None:
        """End everything at once: the second signal."""
        if self.supervisor is not None:
            self.supervisor.kill()
        self._data_dir.forget()

    def record(self, processes: Sequence[ProcessRecord]) -> None:
        """Write what runs, for `headrace ps` and for the next `up`; later where that fails now: a
        disk that is full ends nothing that runs."""
        self._processes = processes
        try:
            self._write(processes)
        except OSError as error:
            if self._unwritten is None:
                log.warning("the run file cannot be written: %s", error)
            else:
                self._unwritten.cancel()
            loop = asyncio.get_running_loop()
            self._unwritten = loop.call_later(RECORD_RETRY_S, self._record_again)
            return
        if self._unwritten is not None:
            self._unwritten.cancel()
            self._unwritten = None

    def _record_again(self) -> None:
        self.record(self._processes)

    def _write(self, processes: Sequence[ProcessRecord]) -> None:
        self._data_dir.write(
            RunRecord(
                up_pid=os.getpid(),
                up_started_s=started_s(os.getpid()) or 0.0,
                endpoint=self._addresses.endpoints[0],
                endpoints=self._addresses.endpoints,
                streamers=tuple(place.url for place in self._addresses.streamers),
                nats_url=self._nats_url,
                processes=tuple(processes),
            )
        )

    async def serve(self) -> None:
        """Start everything in order, say so, and keep the model announced."""
        supervisor, wanted = self.supervisor, self._wanted
        assert supervisor is not None
        self._write([])
        if self._broker is not None:
            await supervisor.ready(await supervisor.start(self._commands.nats(self._broker)))
        bus_settings = BusSettings(
            url=self._nats_url,
            creds=None if wanted.nats_creds is None else str(wanted.nats_creds),
            ca=None if wanted.nats_ca is None else str(wanted.nats_ca),
        )
        async with connection(bus_settings, name="up", timeout_s=CONNECT_TIMEOUT_S) as bus:
            await topology.apply(bus)
            model = await self._publish_card(supervisor)
            fronts = [
                await supervisor.start(command)
                for command in self._commands.fronts(self._addresses)
            ]
            for number in range(1, wanted.workers + 1):
                await supervisor.start(self._commands.worker(number))
            upkeep = Upkeep(bus)
            upkeep.on_remade(f"OBJ_{subjects.BLOBS}", partial(self._publish_again, supervisor))
            async with asyncio.TaskGroup() as group:
                group.create_task(upkeep.forever(), name="upkeep")
                group.create_task(_announce(bus, model), name="announce the model")
                for front in fronts:
                    await supervisor.ready(front, deaths_max=FRONT_DEATHS_MAX)
                self._say(model, await banner.bearer(bus, wanted.config))

    def _say(self, model: str, bearer: str | None) -> None:
        wanted, endpoints = self._wanted, self._addresses.endpoints
        lines = [
            f"headrace serves {model}",
            *(f"endpoint: {endpoint}" for endpoint in endpoints),
            *(f"WebSocket: {url}" for url in self._addresses.websockets if wanted.split),
            f"NATS: {self._nats_url}",
            banner.curl(endpoints[0], model, bearer=bearer, redirected=wanted.split),
        ]
        print(
            "\n".join([*lines, ""]), end="", flush=True
        )  # in one write: the tiers log to the same place

    async def _publish_card(self, supervisor: Supervisor) -> str:
        status, output = await supervisor.once(
            self._commands.publish_card(), self._commands.environ()
        )
        *logged, model = output.strip().splitlines() or [""]
        for line in logged if status == 0 else filter(None, [*logged, model]):
            print(line, flush=True)
        if status != 0 or not model:
            raise Refused(f"the model cannot be published: status {status}, reason above")
        return model

    async def _publish_again(self, supervisor: Supervisor) -> None:
        """Put the model's files back: with no worker nobody else has them."""
        try:
            await self._publish_card(supervisor)
        except Refused as error:
            log.error("%s", error)


async def _announce(bus: Bus, model: str) -> None:
    while True:
        try:
            card = await registry.read_card(bus, model)
            break
        except (BrokerAway, BrokerRefused) as error:  # it is brought back, as at any other time
            log.debug("the card of %s was not read: %s", model, error)
            await asyncio.sleep(topology.RETRY_S)
    if card is None:
        raise Refused(f"the card of {model} is not on the broker although it was published")
    await registry.keep_alive(bus, card)


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
    whole = {
        "processes": processes,
        "endpoint": record.endpoint,
        "endpoints": record.endpoints or (record.endpoint,),
        "streamers": record.streamers,
        "nats_url": record.nats_url,
    }
    return msgspec.json.encode(whole).decode()

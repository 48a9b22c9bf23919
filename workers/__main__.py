"""`python -m workers`: one engine and its share of the queue."""

import asyncio
import os
import socket
import sys
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import lifecycle, registry, topology
from headrace.bus import BrokerAway, BrokerRefused, connection
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, bus_settings
from headrace.settings import (
    ORPHAN_S,
    BadSetting,
    EngineSettings,
    NodeSettings,
    OrphanS,
    PublishCard,
    command,
)
from headrace.telemetry import Readiness, Reading
from headrace.upkeep import Upkeep
from schemas.model import ModelCard
from workers.engine import Engine
from workers.engine_sim import SimulatedEngine
from workers.engines import ModelSource, make_engine, read_source
from workers.lease import Leases
from workers.moderated import ModeratedEngine, moderate
from workers.orphans import Orphans
from workers.remade import attend
from workers.worker import Worker

CARD_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(NodeSettings, EngineSettings):
    """A worker's settings."""

    publish_card: PublishCard = False
    orphan_s: OrphanS = ORPHAN_S


def run(settings: WorkerSettings) -> None:
    """Run a worker: pull requests, run them on one engine, publish the tokens."""
    log_to_stdout(settings.name or "worker")
    if settings.publish_card:
        sys.exit(_publish_card(settings))
    source = read_source(settings)
    engine = moderate(make_engine(settings), settings.config)
    sys.exit(lifecycle.run(lambda stop: _main(settings, source, engine, stop)))


def _publish_card(settings: WorkerSettings) -> int:
    """Do what `headrace up` asks for, and give it a reason of one line, not a usage of ours."""
    try:
        source = read_source(settings)
    except BadSetting as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        return 1
    return asyncio.run(_publish(settings, source))


async def _publish(settings: WorkerSettings, source: ModelSource) -> int:
    try:
        async with connection(bus_settings(settings), name="card", timeout_s=CARD_TIMEOUT_S) as bus:
            await registry.publish_card(bus, source.card, source.files)
    except (BrokerAway, BrokerRefused) as error:
        print(f"the card of {source.card.name} was not published: {error}", file=sys.stderr)
        return 1
    print(source.card.name)
    return 0


async def _main(
    settings: WorkerSettings, source: ModelSource, engine: Engine, stop: asyncio.Event
) -> None:
    # The engine first: it may fork, and a child must not inherit connections.
    card = await engine.start()
    try:
        await _serve(settings, source, engine, card, stop)
    except Stopped:
        return
    finally:
        await engine.stop()


async def _serve(
    settings: WorkerSettings,
    source: ModelSource,
    engine: Engine,
    card: ModelCard,
    stop: asyncio.Event,
) -> None:
    name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
    leases = Leases(bus_settings(settings), name=name)
    async with broker(settings, name=name, stop=stop) as bus:
        await topology.wait_applied(bus, stop)
        card = await registry.publish_card(bus, card, source.files)
        worker = Worker(bus, engine, card, leases, name=name)
        orphans = Orphans(bus, worker.envelopes, patience_s=settings.orphan_s)
        upkeep = Upkeep(bus)
        attend(upkeep, bus, worker)
        leases.start()

        def readiness() -> Readiness:
            if worker.draining:
                return Readiness("draining")
            return Readiness("ready" if bus.ready else "starting", {"broker": bus.ready})

        async with (
            admin_port(
                settings, "worker", readiness, _readings(worker, engine, orphans), _pages(engine)
            ),
            running_tasks() as tasks,
        ):
            await worker.start()
            tasks.start("upkeep", upkeep.forever())
            tasks.start("pump", worker.intake.pump())
            tasks.start("looks", worker.intake.look_forever())
            tasks.start("consumers", worker.intake.mend())
            tasks.start("heartbeat", worker.beat_forever())
            tasks.start("orphans", orphans.watch())
            tasks.start("releases", worker.releases.say_forever())
            tasks.start("card", registry.keep_alive(bus, card, source.files))
            tasks.start("engine", worker.watch_engine())
            settle_memory()
            await stop.wait()
            await worker.drain(grace_s=settings.grace_s)
        leases.stop()


def _readings(worker: Worker, engine: Engine, orphans: Orphans) -> list[Reading]:
    return [
        Reading("requests_inflight", "Requests taken and not yet ended.", lambda: worker.held),
        Reading("requests_running", "Requests in the batch.", lambda: engine.load().running),
        Reading("requests_waiting", "Requests the engine queues.", lambda: engine.load().waiting),
        Reading("kv_used_ratio", "Share of KV memory in use.", lambda: engine.load().kv_used),
        Reading(
            "pulls_outstanding",
            "Requests the broker may still hand over.",
            lambda: worker.intake.credits.outstanding,
        ),
        Reading("requests_finished", "Requests answered.", lambda: worker.finished, "counter"),
        Reading("requests_failed", "Requests ended otherwise.", lambda: worker.failed, "counter"),
        Reading(
            "requests_recovered",
            "Requests taken over from another attempt.",
            lambda: worker.recovered,
            "counter",
        ),
        Reading(
            "requests_orphaned",
            "Requests cancelled because nobody read them any more.",
            lambda: orphans.cancelled,
            "counter",
        ),
        Reading("tokens", "Tokens made.", lambda: worker.tokens, "counter"),
        *(engine.readings() if isinstance(engine, ModeratedEngine) else ()),
    ]


def _pages(engine: Engine) -> list[Route]:
    simulated = engine.engine if isinstance(engine, ModeratedEngine) else engine
    if not isinstance(simulated, SimulatedEngine):
        return []

    async def ledger(_: Request) -> Response:
        return JSONResponse(simulated.ledger())

    return [Route("/sim/requests", ledger)]


if __name__ == "__main__":
    command(WorkerSettings, run)()

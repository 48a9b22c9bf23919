"""One run: learn what must come back, let clients ask while faults happen, then look for rest."""

import asyncio
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chaos.client import Client
from chaos.faults import Fault, plan
from chaos.http import Cut
from chaos.ledger import Happened, Tally, was_given_up
from chaos.orders import Expected, Order, orders, stories
from chaos.system import NotStarted, System, running
from headrace.bus import BrokerAway, BrokerRefused

log = logging.getLogger(__name__)

REST_S: Final = 180.0
"""After a front's death its requests run on for up to 30 s without a reader; the rest is patience
with the machine."""
LOOK_S: Final = 0.2
_TAKEN_OVER: Final = re.compile(r"taken over at token \d+: go on")


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is to be."""

    seconds: float
    seed: int
    per_minute: float
    streams: int
    split: bool
    recovery_s_max: float
    """What the p99 of the waits after a kill -9 of a worker may be."""


@dataclass(slots=True)
class Run:
    """What a run was. Times are of the monotonic clock, `began_s` included."""

    options: Options
    planned: tuple[Fault, ...] = ()
    began_s: float = 0.0
    began_wall_s: float = 0.0
    lasted_s: float = 0.0
    rest_after_s: float | None = None
    tallies: list[Tally] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    left_out: int = 0
    """Planned faults whose targets had not recovered yet."""
    left_over: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    """Processes that ended by themselves, did not come back, or did not end when told to."""
    started_in_vain: int = 0
    """Processes that ended before they were ready, for want of a broker, and were started again."""
    migrated: int = 0

    @property
    def given_up(self) -> list[Tally]:
        """Requests that became dead letters after as many deaths as that takes."""
        return [tally for tally in self.tallies if was_given_up(tally, self.happened)]

    @property
    def failed(self) -> list[Tally]:
        """Requests that did not come to what was promised."""
        excused = set(self.given_up)
        return [tally for tally in self.tallies if tally.failed and tally not in excused]

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, repeated, unanswered or left over."""
        return not (self.left_over or self.troubles or self.failed)


async def perform(options: Options, folder: Path) -> Run:
    """Do a run; data and logs lie in `folder`. Raises NotStarted."""
    run = Run(options)
    async with running(folder, split=options.split) as system:
        told = await _learn(system, options.seed)
        run.planned = plan(
            seed=options.seed,
            seconds=options.seconds,
            per_minute=options.per_minute,
            targets=system.targets,
        )
        run.began_s, run.began_wall_s = time.monotonic(), time.time()
        end_s = run.began_s + options.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(options.streams):
                group.create_task(_ask_on(system, run, told, number, end_s), name="client")
            for fault in run.planned:
                group.create_task(_happen(system, run, fault), name="fault")
        run.lasted_s = time.monotonic() - run.began_s
        await _come_to_rest(system, run)
        for node in system.nodes.values():
            run.troubles += node.ended_by_itself
            run.started_in_vain += node.ended_while_starting
    run.troubles += [
        f"{name} did not end within its grace, {node.slow_to_stop} times"
        for name, node in system.nodes.items()
        if node.slow_to_stop
    ]
    run.migrated = await asyncio.to_thread(_migrated, folder)
    return run


def _migrated(folder: Path) -> int:
    """Count in the workers' logs how often a request went on at another one."""
    logs = (path.read_text(errors="replace") for path in folder.glob("worker-*.log"))
    return sum(len(_TAKEN_OVER.findall(text)) for text in logs)


async def _learn(system: System, seed: int) -> dict[int, Expected]:
    """Return what each story says, by its number."""

    async def learn(order: Order) -> Expected:
        return await Client(system.doors, number=0).learn(order)

    told = stories(seed)
    answers = await asyncio.gather(*(learn(order) for order in told))
    return dict(enumerate(answers))


async def _ask_on(
    system: System, run: Run, told: dict[int, Expected], number: int, end_s: float
) -> None:
    """Ask one order after the other until it is time to stop."""
    client = Client(system.doors, number=number)
    following: Iterator[Order] = orders(run.options.seed, number)
    while time.monotonic() < end_s:
        order = next(following)
        expected = told[order.story] if order.story is not None else order.expected
        assert expected is not None
        tally = Tally(order, expected, now_s=time.monotonic())
        run.tallies.append(tally)
        await client.ask(order, tally)


async def _happen(system: System, run: Run, fault: Fault) -> None:
    """Have a fault happen when it is due, unless its target has yet to recover from another."""
    await asyncio.sleep(run.began_s + fault.at_s - time.monotonic())
    node = system.nodes[fault.target]
    if node.suffers:
        run.left_out += 1
        return
    began_s = time.monotonic()
    log.info("%.1f s: %s: %s for %.1f s", fault.at_s, fault.target, fault.kind.value, fault.lasts_s)
    try:
        await node.suffer(fault)
    except NotStarted as error:
        run.troubles.append(f"after {fault.kind.value}: {error}")
    run.happened.append(Happened(fault, began_s, time.monotonic()))


async def _come_to_rest(system: System, run: Run) -> None:
    """Wait until every gauge is 0 and the queue is empty, and note what does not become so."""
    began_s = time.monotonic()
    while True:
        try:
            run.left_over = await system.busy()
        except (Cut, BrokerAway, BrokerRefused) as error:
            run.left_over = {f"not to be seen: {error}": 1.0}
        waited_s = time.monotonic() - began_s
        if not run.left_over:
            run.rest_after_s = waited_s
            return
        if waited_s > REST_S:
            return
        await asyncio.sleep(LOOK_S)

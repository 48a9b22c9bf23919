"""`headrace backlog`, `peek`, `cancel` and `purge`: the queue seen and tended by operators."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer

from headrace import in_ingress, survey
from headrace.backlog import Backlog, By, Rates, Row, rates_of, table
from headrace.bus import Bus
from headrace.dismiss import dismiss
from headrace.in_ingress import Force, InIngress
from headrace.inquire import count_waiting, find_waiting, withdraw_one, withdraw_waiting
from headrace.operate import OperatorSettings, counted, operate, refuse
from headrace.peek import Peek, find, lines
from headrace.peek import peek as look_at
from schemas import subjects
from schemas.waiting import CountQuestion, FindAnswer, Selection

RATES_OVER_S: Final = 0.25
"""The shortest time that rates are taken over."""
WATCH_S: Final = 1.0
HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"

RequestId = Annotated[str, typer.Argument(metavar="ID", help="The request's x-request-id.")]


@dataclass(frozen=True, kw_only=True)
class BacklogSettings(OperatorSettings):
    """What `headrace backlog` takes."""

    by: Annotated[By, typer.Option("--by", help="What a row stands for.")] = By.LANE
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew each second.")] = False


@dataclass(frozen=True, kw_only=True)
class PeekSettings(OperatorSettings):
    """What `headrace peek` takes."""

    request: RequestId
    prompt: Annotated[bool, typer.Option("--prompt", help="Show the prompt's token ids too.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class CancelSettings(OperatorSettings):
    """What `headrace cancel` takes."""

    request: RequestId


@dataclass(frozen=True, kw_only=True)
class PurgeSettings(OperatorSettings):
    """What `headrace purge` takes."""

    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose requests.")] = None
    model: Annotated[str | None, typer.Option("--model", help="For which model.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False

    def __post_init__(self) -> None:
        if not self.tenant and not self.model:
            raise ValueError("purge needs --tenant or --model; with both, requests match both")
        _ = self.subject_filter  # a name that cannot be one is a usage error too

    @property
    def subject_filter(self) -> str:
        """What is to go from the queue."""
        return subjects.requests_of(model=self.model, tenant=self.tenant)

    @property
    def selection(self) -> Selection:
        """What is to go from ingress."""
        return Selection(model=self.model or None, tenant=self.tenant or None)


class Reading(NamedTuple):
    """All that `headrace backlog` shows of one moment."""

    queue: Backlog
    rates: Rates
    waiting: InIngress
    models: dict[str, Force]

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            **self.queue.as_json(self.rates),
            "ingress": self.waiting.as_json(self.queue.by),
            "models": in_ingress.forces_as_json(self.models),
        }

    def lines(self) -> list[str]:
        """Return it as lines of text."""
        return [
            *table(self.queue, self.rates),
            *in_ingress.table(self.waiting, self.queue.by),
            *in_ingress.forces_table(self.models),
        ]


class Purged(NamedTuple):
    """What a purge would end, or has ended; `nodes` of ingress answered."""

    queue: Row
    nodes: int
    in_ingress: int

    def __str__(self) -> str:
        running = counted(self.queue.running, "running request")
        in_queue = f"{self.queue.waiting} waiting and {running}"
        return f"{in_queue}, and {_in_ingress(self.in_ingress, self.nodes)}"


def backlog(wanted: BacklogSettings) -> None:
    """Show how many requests wait and run, and whose they are."""
    if wanted.watch:
        # The way out. Nothing was changed that would have to be put right, or waited for.
        signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    operate(_backlog(wanted))


async def _backlog(wanted: BacklogSettings) -> None:
    async with wanted.connected() as bus:
        if not wanted.watch:
            _show(wanted, await anext(_readings(bus, wanted.by, every_s=RATES_OVER_S)))
            return
        async for reading in _readings(bus, wanted.by, every_s=WATCH_S):
            _show(wanted, reading)


async def _readings(bus: Bus, by: By, *, every_s: float) -> AsyncIterator[Reading]:
    """Yield the backlog again and again, with the queue's rates since the last time."""
    before = await survey.mark(bus)
    while True:
        queue, answers, workers, _ = await asyncio.gather(
            survey.read_backlog(bus, by),
            count_waiting(bus, CountQuestion(by=by.value)),
            survey.read_workers(bus),
            asyncio.sleep(every_s),
        )
        after = await survey.mark(bus)
        waiting = in_ingress.summed(answers, by)
        models = in_ingress.forces_of(workers, waiting)
        yield Reading(queue, rates_of(before, after), waiting, models)
        before = after


def _show(wanted: BacklogSettings, reading: Reading) -> None:
    if wanted.as_json:
        _print_json(reading.as_json())
        return
    redraw = wanted.watch and sys.stdout.isatty()
    print((HOME_AND_CLEAR if redraw else "") + "\n".join(reading.lines()), flush=True)


def peek(wanted: PeekSettings) -> None:
    """Show where one request stands; its prompt only if asked."""
    operate(_peek(wanted))


async def _peek(wanted: PeekSettings) -> None:
    async with wanted.connected() as bus:
        found = await _look_everywhere(bus, wanted.request)
    if isinstance(found, Peek):
        shown = found.as_json(prompt=wanted.prompt)
        text = lines(found, prompt=wanted.prompt)
    else:
        assert found.place is not None
        shown = in_ingress.place_as_json(wanted.request, found.node, found.place)
        text = in_ingress.place_lines(wanted.request, found.node, found.place)
    if wanted.as_json:
        _print_json(shown)
    else:
        print("\n".join(text))


async def _look_everywhere(bus: Bus, request: str) -> Peek | FindAnswer:
    """Look into the queue, then into ingress, and once more into the queue: it may have been let
    go meanwhile. Raises typer.Exit where it is nowhere."""
    nowhere = f"{request} is neither in the queue nor among the replies"
    if not _is_plain(request):
        refuse(nowhere)
    queued = await look_at(bus, request)
    if queued is not None:
        return queued
    asked = await find_waiting(bus, request)
    found = asked.answer or await look_at(bus, request)
    return found or refuse(f"{nowhere}; {_nor_there(asked.nodes)}")


def cancel(wanted: CancelSettings) -> None:
    """End a request, whoever's it is, wherever it stands."""
    operate(_cancel(wanted))


async def _cancel(wanted: CancelSettings) -> None:
    async with wanted.connected() as bus:
        await _end_anywhere(bus, wanted.request)
    if wanted.as_json:
        _print_json({"id": wanted.request, "status": "cancelled"})
    else:
        print(f"{wanted.request} cancelled")


async def _end_anywhere(bus: Bus, request: str) -> None:
    """End a request in the queue, or in ingress, or in the queue that it came to meanwhile. Raises
    typer.Exit where it is nowhere."""
    nowhere = f"{request} is not in the queue: it has ended, or never was"
    if not _is_plain(request):
        refuse(nowhere)
    if await _end_in_queue(bus, request):
        return
    asked = await withdraw_one(bus, request)
    if asked.answer is None and await _end_in_queue(bus, request):
        return
    if asked.answer is None or not asked.answer.withdrawn:
        refuse(f"{nowhere}; {_nor_there(asked.nodes)}")


async def _end_in_queue(bus: Bus, request: str) -> bool:
    subject = await find(bus, request)
    return subject is not None and await dismiss(bus, str(subject)) > 0


def purge(wanted: PurgeSettings) -> None:
    """End all requests of a tenant or for a model. That is those that wait, those that run, and
    those that are not in the queue yet."""
    found = operate(_count(wanted))
    ended, nodes, withdrawn = 0, found.nodes, 0
    if not wanted.dry_run:
        _confirm(wanted, found)  # while no connection waits for the answer
        ended, nodes, withdrawn = operate(_purge(wanted))
    if wanted.as_json:
        known = found.in_ingress if found.nodes else None
        counts = {"waiting": found.queue.waiting, "running": found.queue.running}
        there = {"nodes": nodes, "waiting": known, "purged": withdrawn}
        _print_json(counts | {"purged": ended, "dry_run": wanted.dry_run, "ingress": there})
    elif wanted.dry_run:
        print(f"{found} would be purged")
    else:
        print(f"{counted(ended, 'request')} purged, and {_in_ingress(withdrawn, nodes)}")


async def _count(wanted: PurgeSettings) -> Purged:
    async with wanted.connected() as bus:
        queue, answers = await asyncio.gather(
            survey.read_backlog(bus, By.LANE, only=wanted.subject_filter),
            count_waiting(bus, CountQuestion(of=wanted.selection)),
        )
    return Purged(queue.total, len(answers), sum(answer.total.waiting for answer in answers))


async def _purge(wanted: PurgeSettings) -> tuple[int, int, int]:
    """Return how many left the queue, how many nodes of ingress answered, and how many left those.

    Ingress comes first: what leaves the queue makes room for what waits there.
    """
    async with wanted.connected() as bus:
        answers = await withdraw_waiting(bus, wanted.selection)
        ended = await dismiss(bus, wanted.subject_filter)
    return ended, len(answers), sum(answer.withdrawn for answer in answers)


def _confirm(wanted: PurgeSettings, found: Purged) -> None:
    """Ask whether to go on. Raises typer.Exit."""
    if wanted.yes:
        return
    if not sys.stdin.isatty():
        refuse("purge asks before it purges: without a terminal, say --yes")
    if not typer.confirm(f"Purge {found}?", err=True):
        refuse("nothing was purged")


def _in_ingress(count: int, nodes: int) -> str:
    if not nodes:
        return "none in ingress, of which no node answered"
    return f"{count} in ingress ({counted(nodes, 'node')} answered)"


def _nor_there(nodes: int) -> str:
    if not nodes:
        return "no ingress node answered whether it waits there"
    return f"nor does it wait in ingress ({counted(nodes, 'node')} answered)"


def _is_plain(request: str) -> bool:
    """Tell whether an id can stand in a subject: any other is an id that nothing has."""
    with suppress(ValueError):
        return subjects.escape(request) == request
    return False


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)

"""`headrace backlog`, `peek`, `cancel` and `purge`: the queue seen and tended by operators."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import typer

from headrace import survey
from headrace.backlog import Backlog, By, Rates, Row, rates_of, table
from headrace.bus import Bus
from headrace.dismiss import dismiss
from headrace.operate import OperatorSettings, operate, refuse
from headrace.peek import Peek, find, lines
from headrace.peek import peek as look_at
from schemas import subjects

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
        """What is to go."""
        return subjects.requests_of(model=self.model, tenant=self.tenant)


def backlog(wanted: BacklogSettings) -> None:
    """Show how many requests wait and run, and whose they are."""
    with suppress(KeyboardInterrupt):  # the way out of --watch
        operate(_backlog(wanted))


async def _backlog(wanted: BacklogSettings) -> None:
    async with wanted.connected() as bus:
        if not wanted.watch:
            found, rates = await anext(_readings(bus, wanted.by, every_s=RATES_OVER_S))
            _show(wanted, found, rates)
            return
        async for found, rates in _readings(bus, wanted.by, every_s=WATCH_S):
            _show(wanted, found, rates)


async def _readings(bus: Bus, by: By, *, every_s: float) -> AsyncIterator[tuple[Backlog, Rates]]:
    """Yield the backlog again and again, with the rates since the last time."""
    before = await survey.mark(bus)
    while True:
        found, _ = await asyncio.gather(survey.read_backlog(bus, by), asyncio.sleep(every_s))
        after = await survey.mark(bus)
        yield found, rates_of(before, after)
        before = after


def _show(wanted: BacklogSettings, found: Backlog, rates: Rates) -> None:
    if wanted.as_json:
        _print_json(found.as_json(rates))
        return
    redraw = wanted.watch and sys.stdout.isatty()
    print((HOME_AND_CLEAR if redraw else "") + "\n".join(table(found, rates)), flush=True)


def peek(wanted: PeekSettings) -> None:
    """Show where one request stands; its prompt only if asked."""
    operate(_peek(wanted))


async def _peek(wanted: PeekSettings) -> None:
    found: Peek | None = None
    async with wanted.connected() as bus:
        if _is_plain(wanted.request):
            found = await look_at(bus, wanted.request)
    if found is None:
        refuse(f"{wanted.request} is neither in the queue nor among the replies")
    if wanted.as_json:
        _print_json(found.as_json(prompt=wanted.prompt))
    else:
        print("\n".join(lines(found, prompt=wanted.prompt)))


def cancel(wanted: CancelSettings) -> None:
    """End a request, whoever's it is, wherever it stands."""
    operate(_cancel(wanted))


async def _cancel(wanted: CancelSettings) -> None:
    async with wanted.connected() as bus:
        subject = await find(bus, wanted.request) if _is_plain(wanted.request) else None
        if subject is None or not await dismiss(bus, str(subject)):
            refuse(f"{wanted.request} is not in the queue: it has ended, or never was")
    if wanted.as_json:
        _print_json({"id": wanted.request, "status": "cancelled"})
    else:
        print(f"{wanted.request} cancelled")


def purge(wanted: PurgeSettings) -> None:
    """End all requests of a tenant or for a model: those that wait and those that run."""
    found = operate(_count(wanted))
    purged = 0
    if not wanted.dry_run:
        _confirm(wanted, found)  # while no connection waits for the answer
        purged = operate(_purge(wanted))
    if wanted.as_json:
        counts = {"waiting": found.waiting, "running": found.running}
        _print_json(counts | {"purged": purged, "dry_run": wanted.dry_run})
    elif wanted.dry_run:
        print(f"{found.waiting} waiting and {found.running} running requests would be purged")
    else:
        print(f"{purged} requests purged")


async def _count(wanted: PurgeSettings) -> Row:
    async with wanted.connected() as bus:
        return (await survey.read_backlog(bus, By.LANE, only=wanted.subject_filter)).total


async def _purge(wanted: PurgeSettings) -> int:
    async with wanted.connected() as bus:
        return await dismiss(bus, wanted.subject_filter)


def _confirm(wanted: PurgeSettings, found: Row) -> None:
    """Ask whether to go on. Raises typer.Exit."""
    if wanted.yes:
        return
    if not sys.stdin.isatty():
        refuse("purge asks before it purges: without a terminal, say --yes")
    question = f"Purge {found.waiting} waiting and {found.running} running requests?"
    if not typer.confirm(question, err=True):
        refuse("nothing was purged")


def _is_plain(request: str) -> bool:
    """Tell whether an id can stand in a subject: any other is an id that nothing has."""
    with suppress(ValueError):
        return subjects.escape(request) == request
    return False


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)

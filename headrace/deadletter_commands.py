"""`headrace deadletters`: what was given up, listed, shown, requeued and dropped."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from headrace import deadletters, settings
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.command_line import CommandLine
from headrace.deadletters import NotRequeued, Stored
from headrace.deadline import DEADLINE_S, is_timeout
from headrace.operate import OperatorSettings, columns, counted, operate, refuse
from headrace.topology import DEADLINE_S_MAX
from schemas import subjects

Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose requests.")]
Model = Annotated[str | None, typer.Option("--model", help="For which model.")]
OneId = Annotated[str, typer.Argument(metavar="ID", help="The request's x-request-id.")]
OptionalId = Annotated[
    str | None, typer.Argument(metavar="ID", help="The request's x-request-id.", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help="All of --tenant, --model, or all there are.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Seconds until the new deadline.")]

HEADS = ("ID", "DIED", "AGE", "MODEL", "TENANT", "TOKENS", "REASON")


@dataclass(frozen=True, kw_only=True)
class _Filtered(OperatorSettings):
    tenant: Tenant = None
    model: Model = None

    def __post_init__(self) -> None:
        _ = subjects.deadletters_of(model=self.model, tenant=self.tenant)  # raises ValueError


@dataclass(frozen=True, kw_only=True)
class ListSettings(_Filtered):
    """What `headrace deadletters list` takes."""


@dataclass(frozen=True, kw_only=True)
class ShowSettings(OperatorSettings):
    """What `headrace deadletters show` takes."""

    request: OneId
    prompt: Annotated[bool, typer.Option("--prompt", help="Show the prompt's token ids too.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class ChosenSettings(_Filtered):
    """Which letters a command is for: one by its id, or all under the filters."""

    request: OptionalId = None
    all: All = False
    yes: Yes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.request is None) != self.all:
            raise ValueError("name one ID, or --all")
        if self.request is not None and (self.tenant or self.model):
            raise ValueError("--tenant and --model go with --all")


@dataclass(frozen=True, kw_only=True)
class DropSettings(ChosenSettings):
    """What `headrace deadletters drop` takes."""


@dataclass(frozen=True, kw_only=True)
class RequeueSettings(ChosenSettings):
    """What `headrace deadletters requeue` takes."""

    timeout_s: TimeoutS = DEADLINE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_timeout(self.timeout_s):
            raise ValueError(f"--timeout-s is above 0, at most {DEADLINE_S_MAX}")


def list_(wanted: ListSettings) -> None:
    """List the requests that were given up, the oldest first."""
    rows = operate(_rows(wanted))
    if wanted.as_json:
        _print_json({"rows": rows})
    else:
        print("\n".join(_table(rows)))


async def _rows(wanted: _Filtered) -> list[dict[str, Any]]:
    async with wanted.connected() as bus:
        now_s = await deadletters.now_s(bus)
        async with deadletters.letters(bus, model=wanted.model, tenant=wanted.tenant) as found:
            return [each.as_row(now_s=now_s) async for each in found]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = ("id", "died_at", "age_s", "model", "tenant", "tokens", "reason")
    return columns([HEADS, *(tuple(_printable(row[name]) for name in names) for row in rows)])


def _printable(value: object) -> str:
    """Names come from clients: what moves a terminal's cursor is shown as an escape."""
    text = f"{value:.0f} s" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def show(wanted: ShowSettings) -> None:
    """Show why a request was given up, and what it asked for. Its prompt only if asked."""
    found = operate(_find(wanted, wanted.request))
    if not found:
        _refuse_unknown(wanted.request)
    stored, now_s = found[-1]
    answer = stored.as_json(now_s=now_s, prompt=wanted.prompt)
    if wanted.as_json:
        _print_json(answer)
        return
    attempts = answer.pop("attempts")
    for name, value in answer.items():
        print(f"{name:<14} {value if isinstance(value, str) else _text(value)}")
    for number, attempt in enumerate(attempts, 1):
        print(f"attempt {number:<6} {_text(attempt)}")


async def _find(wanted: OperatorSettings, request: str) -> list[tuple[Stored, float]]:
    async with wanted.connected() as bus:
        now_s = await deadletters.now_s(bus)
        return [(each, now_s) for each in await deadletters.find(bus, request)]


def drop(wanted: DropSettings) -> None:
    """Forget a request that was given up, or several. --all takes those of a tenant, for a
    model, or all there are."""
    seqs = _chosen(wanted, "Drop")
    operate(_drop(wanted, seqs))
    if wanted.as_json:
        _print_json({"dropped": len(seqs)})
    else:
        print(f"{counted(len(seqs), 'dead letter')} dropped")


async def _drop(wanted: DropSettings, seqs: dict[int, str]) -> None:
    async with wanted.connected() as bus:
        await deadletters.remove(bus, list(seqs))


def requeue(wanted: RequeueSettings) -> None:
    """Run a request that was given up again, as a new one. Its id is printed."""
    chosen = _chosen(wanted, "Requeue")
    rows, failures, status = operate(_requeue(wanted, chosen))
    if wanted.as_json:
        _print_json({"rows": rows})
    else:
        for row in rows:
            print(f"{row['id']} runs again as {row['request']}")
        if wanted.all:
            print(f"{counted(len(rows), 'dead letter')} requeued")
    for failure in failures:
        print(f"headrace: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(status)


async def _requeue(
    wanted: RequeueSettings, chosen: dict[int, str]
) -> tuple[list[dict[str, str]], list[str], int]:
    """Requeue what is still there; return the old and new ids, what could not be done, and the exit
    status of that. Whatever ends it, who was requeued before is told: nothing else names those."""
    rows: list[dict[str, str]] = []
    failures: list[str] = []
    async with wanted.connected() as bus:
        try:
            await _requeue_each(bus, wanted, chosen, rows, failures)
        except BrokerRefused as error:
            failures.append(f"the broker refused: {error}")
        except BrokerAway as error:
            return rows, [*failures, f"the broker is away: {error}"], 2
    return rows, failures, 1


async def _requeue_each(
    bus: Bus,
    wanted: RequeueSettings,
    chosen: dict[int, str],
    rows: list[dict[str, str]],
    failures: list[str],
) -> None:
    done: set[str] = set()
    for seq, request in reversed(chosen.items()):  # of two letters for one id, the newest
        if request not in done:
            try:
                fresh = await _requeue_one(bus, seq, wanted.timeout_s)
            except NotRequeued as error:
                failures.append(str(error))
                continue
            rows.insert(0, {"id": request, "request": fresh})
            done.add(request)
        await deadletters.remove(bus, [seq])


async def _requeue_one(bus: Bus, seq: int, timeout_s: float) -> str:
    stored = await deadletters.at(bus, seq)
    if stored is None:
        raise NotRequeued(f"the letter at {seq} is gone: somebody else has tended it")
    return await deadletters.requeue(bus, stored, timeout_s=timeout_s)


def _chosen(wanted: ChosenSettings, verb: str) -> dict[int, str]:
    """Return the letters that a command is for, ids by sequence; ask before all. Raises Exit."""
    chosen = operate(_choose(wanted))
    if wanted.request is not None:
        return chosen or _refuse_unknown(wanted.request)
    if chosen and not wanted.yes:  # while no connection waits for the answer
        if not sys.stdin.isatty():
            refuse(f"{verb.lower()} --all asks first: without a terminal, say --yes")
        if not typer.confirm(f"{verb} {counted(len(chosen), 'dead letter')}?", err=True):
            refuse("nothing was done")
    return chosen


async def _choose(wanted: ChosenSettings) -> dict[int, str]:
    async with wanted.connected() as bus:
        if wanted.request is not None:
            found = await deadletters.find(bus, wanted.request)
            return {each.seq: each.letter.request for each in found}
        async with deadletters.letters(bus, model=wanted.model, tenant=wanted.tenant) as all_found:
            return {each.seq: each.letter.request async for each in all_found}


def _refuse_unknown(request: str) -> Any:
    refuse(f"{request} is no dead letter: requeued, dropped, over a week old, or it never was one")


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _print_json(value: object) -> None:
    print(_text(value), flush=True)


commands = CommandLine(help="Requests that were given up.")
commands.command("list")(settings.taking(ListSettings, list_))
commands.command("show")(settings.taking(ShowSettings, show))
commands.command("requeue")(settings.taking(RequeueSettings, requeue))
commands.command("drop")(settings.taking(DropSettings, drop))

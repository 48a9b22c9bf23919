"""How much stands in the queue, and whose it is. Rule: what the broker said goes in, rows come out.

Every stored request is either *running* or *waiting*. It runs when its consumer has delivered it:
its sequence is at most the consumer's `delivered.stream_seq`, and it is still in the stream, so
nobody has acknowledged it. All others wait, those of a partition without a consumer too. A request
that was given back, or whose worker died, counts as running until it is delivered again: consumer
info does not tell these apart. `num_pending` and `num_ack_pending` are not counted with, since
nats-server does not take off what a purge or a time to live has removed.

*Redelivered* are running requests that were delivered more than once (`num_redelivered`). The
broker tells their number by partition, not which they are; by tenant they are taken to be the
partition's oldest running ones.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from schemas import subjects
from schemas.subjects import Cell

FOREIGN: Final = Cell("(foreign)", "(foreign)", "(foreign)", "(foreign)")
"""Where subjects are counted that no part of ours publishes; nobody will ever pull them."""


class By(StrEnum):
    """What a row of the backlog stands for: a field of the requests' subjects."""

    LANE = "lane"
    MODEL = "model"
    PARTITION = "partition"
    TENANT = "tenant"


class Mark(NamedTuple):
    """The stream at one moment, by the broker's clock (seconds since the epoch)."""

    at_s: float
    messages: int
    last_seq: int


class Taken(NamedTuple):
    """What one consumer has delivered and is still stored: cells in the order of sequences."""

    cells: tuple[Cell, ...]
    redelivered: int


class Row(NamedTuple):
    """A line of the backlog; `oldest_age_s` is 0 where nothing stands."""

    waiting: int
    running: int
    redelivered: int
    oldest_age_s: float


class Rates(NamedTuple):
    """Requests per second that came into the queue, and that left it in whatever way."""

    interval_s: float
    arrival_per_s: float
    drain_per_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """The queue's cells: how many requests stand in each, run, and were delivered again."""

    queued: Counter[Cell] = field(default_factory=Counter)
    running: Counter[Cell] = field(default_factory=Counter)
    redelivered: Counter[Cell] = field(default_factory=Counter)

    def store(self, subjects_with_counts: Mapping[str, int]) -> None:
        """Count a page of the stream's subjects."""
        for subject, count in subjects_with_counts.items():
            self.queued[Cell.parse(subject) or FOREIGN] += count

    def take(self, taken: Taken) -> None:
        """Count what a consumer has delivered."""
        self.running.update(taken.cells)
        self.redelivered.update(taken.cells[: taken.redelivered])

    def tokens(self, by: By) -> list[str]:
        """Return the subject tokens that the rows stand for, in the order of the rows."""
        tokens = {_token(cell, by) for cell in self.queued}
        return in_order(tokens, by)


@dataclass(frozen=True, slots=True)
class Backlog:
    """The rows by name, and their sum."""

    by: By
    rows: Mapping[str, Row]
    total: Row

    def as_json(self, rates: Rates | None = None) -> dict[str, Any]:
        """Return what `--json` prints; docs/backlog.schema.json describes it."""
        answer: dict[str, Any] = {
            "rows": [{self.by.value: name, **row._asdict()} for name, row in self.rows.items()],
            "total": self.total._asdict(),
        }
        return answer if rates is None else answer | {"rates": rates._asdict()}


def backlog_of(
    standing: Standing, by: By, *, oldest_s: Mapping[str, float], now_s: float
) -> Backlog:
    """Sum the cells up to rows; `oldest_s` says by token when the oldest request was stored.

    What was delivered after the subjects were listed does not count, so waiting and running
    together are always the listed requests.
    """
    sums: dict[str, list[int]] = {token: [0, 0, 0] for token in standing.tokens(by)}
    for cell, count in standing.queued.items():
        running = min(count, standing.running[cell])
        row = sums[_token(cell, by)]
        row[0] += count - running
        row[1] += running
        row[2] += min(running, standing.redelivered[cell])
    rows = {
        name_of(token): Row(row[0], row[1], row[2], _age_s(oldest_s.get(token), now_s))
        for token, row in sums.items()
    }
    return Backlog(by, rows, _total(list(rows.values())))


def rates_of(before: Mark, after: Mark) -> Rates:
    """Compare two moments: sequences count arrivals, and what is missing of them has left."""
    interval_s = max(after.at_s - before.at_s, 1e-9)
    arrived = after.last_seq - before.last_seq
    left = arrived - (after.messages - before.messages)
    return Rates(
        interval_s=round(interval_s, 3),
        arrival_per_s=round(max(arrived, 0) / interval_s, 2),
        drain_per_s=round(max(left, 0) / interval_s, 2),
    )


def table(backlog: Backlog, rates: Rates | None = None) -> list[str]:
    """Return the backlog as lines of text."""
    heads = [backlog.by.value.upper(), "WAITING", "RUNNING", "REDELIVERED", "OLDEST"]
    body = [(printable(name), row) for name, row in backlog.rows.items()]
    body.append(("total", backlog.total))
    width = max(len(name) for name, _ in [*body, (heads[0], None)])
    lines = [f"{heads[0]:<{width}} {heads[1]:>9} {heads[2]:>9} {heads[3]:>11} {heads[4]:>10}"]
    lines += [
        f"{name:<{width}} {row.waiting:>9} {row.running:>9} {row.redelivered:>11}"
        f" {row.oldest_age_s:>8.1f} s"
        for name, row in body
    ]
    if rates is not None:
        lines.append(f"arrival {rates.arrival_per_s:g}/s, drain {rates.drain_per_s:g}/s")
    return lines


def in_order(tokens: Iterable[str], by: By) -> list[str]:
    """Return names or their tokens as rows are ordered: partitions by number, others by name."""
    return sorted(tokens, key=_by_number if by is By.PARTITION else name_of)


def name_of(token: str) -> str:
    """Return the name that a subject token stands for; a token that is none stands for itself."""
    try:
        return subjects.unescape(token)
    except ValueError:
        return token


def epoch_s(stamp: str) -> float:
    """Return the seconds since the epoch of one of the broker's RFC 3339 times."""
    return datetime.fromisoformat(stamp).timestamp()


def _token(cell: Cell, by: By) -> str:
    token: str = getattr(cell, by.value)
    return token


def _by_number(token: str) -> tuple[int, str]:
    return (int(token), "") if token.isdecimal() else (-1, token)


def _age_s(stored_s: float | None, now_s: float) -> float:
    return 0.0 if stored_s is None else round(max(now_s - stored_s, 0.0), 3)


def _total(rows: Sequence[Row]) -> Row:
    return Row(
        waiting=sum(row.waiting for row in rows),
        running=sum(row.running for row in rows),
        redelivered=sum(row.redelivered for row in rows),
        oldest_age_s=max((row.oldest_age_s for row in rows), default=0.0),
    )


def printable(name: str) -> str:
    """Return a name as a terminal may show it: users choose names, and it must not obey them."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )

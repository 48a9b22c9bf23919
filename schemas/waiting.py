"""What operators ask every ingress about the requests that wait there, and what each answers.

Rule: an answer is bounded whatever waits: `ROWS_MAX` rows, and the sum of the others. Ages are
told, never moments: two machines' clocks are not compared.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Field = Literal["lane", "model", "partition", "tenant"]

ROWS_MAX: Final = 400
"""With names of any length that we take, less than a broker's smallest usual message, 1 MB."""


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which requests are meant: those that match all that is named; `key` is a key's id."""

    tenant: str | None = None
    model: str | None = None
    request: str | None = None
    key: str | None = None


class CountQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many requests wait with you, by this field of theirs?"""

    by: Field = "lane"
    of: Selection = msgspec.field(default_factory=Selection)


class Count(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that wait, and how many came and left in a second of late; `oldest` is an id."""

    waiting: int = 0
    oldest_age_s: float = 0.0
    oldest: str | None = None
    prompt_bytes: int = 0
    arrival_per_s: float = 0.0
    drain_per_s: float = 0.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Why requests to a model wait: `queued` stand in REQUESTS, and from `watermark` on, which
    follows the `slots` of its live workers, no more are let in."""

    slots: int
    watermark: int
    queued: int


class CountAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What waits at a node. `rows` are the largest by name, `rest` the sum of the others, `classes`
    by priority class, `marks` by model."""

    node: str
    total: Count
    rows: Mapping[str, Count] = {}
    rest: Count = Count()
    classes: Mapping[str, Count] = {}
    marks: Mapping[str, Mark] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request waits. `ahead` would go before it if nobody else came, about; at
    `gives_up_in_s` it is refused."""

    lane: str
    model: str
    partition: int
    tenant: str
    priority_class: str
    age_s: float
    gives_up_in_s: float
    prompt_bytes: int
    ahead: int
    mark: Mark


class FindAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the request that was asked for waits at a node, and where."""

    node: str
    place: Place | None = None


class WithdrawAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many requests wait at a node no more; `before`: the one that was named had been taken
    out by such a word already."""

    node: str
    withdrawn: int = 0
    before: bool = False


def add(one: Count, other: Count) -> Count:
    """Return the sum of two counts; of the ages, the higher."""
    older = other if other.oldest_age_s > one.oldest_age_s else one
    return Count(
        waiting=one.waiting + other.waiting,
        oldest_age_s=older.oldest_age_s,
        oldest=older.oldest,
        prompt_bytes=one.prompt_bytes + other.prompt_bytes,
        arrival_per_s=round(one.arrival_per_s + other.arrival_per_s, 2),
        drain_per_s=round(one.drain_per_s + other.drain_per_s, 2),
    )

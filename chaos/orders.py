"""What is asked, how its client behaves, and what must come back. Rule: pure; seeded like the plan.

Two kinds of answers: pieces that the order itself hands to the engine's test hook, so that each
stream's text is its own; and stories that the engine tells by itself, a pure function of prompt and
seed. What a story says is learned before the first fault.
"""

import codecs
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODEL: Final = "sim"
STORIES: Final = 12
PIECES: Final = (30, 160)
ITL_MS: Final = (10, 50)
STORY_TOKENS: Final = (40, 120)
_MARKS: Final = ("…", "é", "中", "🙂")


class Manner(StrEnum):
    """How a client behaves."""

    READ = "read to its end"
    MOVE = "read, and moved to another node when silent"
    WHOLE = "not streamed"
    LEAVE = "left in the middle"
    CANCEL = "cancelled in the middle"


_WEIGHTS: Final = {
    Manner.READ: 10,
    Manner.MOVE: 3,
    Manner.WHOLE: 4,
    Manner.LEAVE: 2,
    Manner.CANCEL: 1,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer: its events that hold text, each with its id, and its length in tokens."""

    events: tuple[tuple[int, str], ...]
    tokens: int

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for _, text in self.events)


@dataclass(frozen=True, slots=True)
class Order:
    """A request as its client means it."""

    name: str
    manner: Manner
    path: str
    body: dict[str, Any]
    story: int | None
    expected: Expected | None
    """None for a story: what it says is learned."""
    stop_after: int
    """After so many events its client leaves, or cancels."""
    key: str | None = None
    """The Idempotency-Key that its client shows, however often it asks."""


def expected_of(pieces: Sequence[bytes]) -> Expected:
    """Return what a stream of these pieces says, one token each; half a character is held back."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    said = [decoder.decode(piece) for piece in pieces]
    events = tuple((seq, text) for seq, text in enumerate(said) if text)
    return Expected(events, len(pieces))


def stories(seed: int) -> list[Order]:
    """Return the stories, as streams to learn from."""
    dice = random.Random(f"stories {seed}")
    return [_story(dice, number) for number in range(STORIES)]


def orders(seed: int, client: int) -> Iterator[Order]:
    """Yield what one client asks, one after the other, without end."""
    dice = random.Random(f"client {seed} {client}")
    told = stories(seed)
    number = 0
    while True:
        [manner] = dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        name = f"{client}.{number}"
        base = dice.choice(told) if dice.random() < 0.25 else _scripted(dice, name)
        yield _in_manner(dice, base, name, manner)
        number += 1


def _in_manner(dice: random.Random, base: Order, name: str, manner: Manner) -> Order:
    body = dict(base.body)
    if manner is Manner.WHOLE:
        del body["stream"], body["stream_options"]
    if manner is Manner.MOVE:
        # Who moves leaves the old node, perhaps before the new one is known to read it.
        body["on_disconnect"] = "continue"
    return Order(
        name,
        manner,
        base.path,
        body,
        base.story,
        base.expected,
        stop_after=dice.randint(1, 20),
        key=dice.choice([None, f"chaos-{name}"]),
    )


def _scripted(dice: random.Random, name: str) -> Order:
    pieces = list(_pieces(dice, name))
    hook = {
        "pieces": [_hooked(piece) for piece in pieces],
        "itl_ms": dice.randint(*ITL_MS),
        "ttft_ms": 5,
    }
    prompt = f"river {dice.randrange(64)}: tell {name}"
    return _order(dice, prompt, expected_of(pieces), {"sim": hook}, story=None)


def _pieces(dice: random.Random, name: str) -> Iterator[bytes]:
    for k in range(dice.randint(*PIECES)):
        text = f"{name}/{k} "
        if dice.random() < 0.1:
            # A character whose bytes come in two tokens: a recovery between them must know.
            mark = dice.choice(_MARKS).encode()
            at = dice.randint(1, len(mark) - 1)
            yield text.encode() + mark[:at]
            yield mark[at:]
        else:
            yield text.encode()


def _hooked(piece: bytes) -> str | dict[str, str]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return {"hex": piece.hex()}


def _story(dice: random.Random, number: int) -> Order:
    more = {
        "seed": dice.randrange(1000),
        "temperature": dice.choice([0.0, 0.7, 1.0]),
        "max_tokens": dice.randint(*STORY_TOKENS),
        "ignore_eos": True,
    }
    return _order(dice, f"Once upon a time, {number},", None, more, story=number)


def _order(
    dice: random.Random,
    prompt: str,
    expected: Expected | None,
    more: dict[str, Any],
    *,
    story: int | None,
) -> Order:
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    if dice.random() < 0.5:
        body["messages"] = [{"role": "user", "content": prompt}]
        path = CHAT
    else:
        body["prompt"] = prompt
        body.setdefault("max_tokens", 4096)
        path = COMPLETIONS
    return Order(f"story {story}", Manner.READ, path, body, story, expected, stop_after=0)

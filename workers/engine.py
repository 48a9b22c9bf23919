"""What a worker asks of an engine. Rule: token ids go in, steps come out; no wire, no broker."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from schemas.model import ModelCard
from schemas.wire import Parsing, Piece, Sampling, SimHook, Usage

Emit = Callable[[Sequence[Piece]], Awaitable[None]]
"""Takes what one engine step made for one request, in order. It never blocks on the client."""


@dataclass(slots=True)
class Held:
    """Tokens that were made and are held back: charged, where the request ends meanwhile."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """One request, as an engine needs it."""

    request: str
    prompt: Sequence[int]
    sampling: Sampling
    cache_salt: str | None = None
    priority: int = 0
    sim: SimHook | None = None
    made: Sequence[Piece] = ()
    """What earlier attempts made (of one choice): the engine goes on after it."""
    parsing: Parsing | None = None
    """What the engine's parsers must know, where what it says is to be parsed."""
    tenant: str = ""
    model: str = ""
    moderated: bool = True
    """Whether what it says is looked at, where the configuration names a moderator."""
    held: Held = field(default_factory=Held)


class Finish(NamedTuple):
    """How a generation ended: one reason per choice, and what it used."""

    reasons: tuple[str, ...]
    usage: Usage


class EngineLoad(NamedTuple):
    """What the engine is busy with: requests running and waiting, share of KV memory used."""

    running: int
    waiting: int
    kv_used: float


class EngineRefused(Exception):
    """The engine cannot serve this request as it is, here or anywhere (too long, bad value)."""


class EngineFailed(Exception):
    """The engine failed on this request alone, for good."""

    code: ClassVar[str] = "engine_error"


class NotModerated(EngineFailed):
    """What the engine said could not be looked at, and must not go out unseen."""

    code = "moderation_unavailable"


class EngineDied(Exception):
    """The engine is gone, with every request in it."""


class Engine(Protocol):
    """A model that runs. One per worker process."""

    @property
    def slots(self) -> int:
        """How many requests run at once."""
        ...

    @property
    def alive(self) -> bool:
        """Whether a started engine can still serve; one that cannot never comes back."""
        ...

    async def start(self) -> ModelCard:
        """Load the model, warm it up and return its card (`files` empty). Called once, before
        the process has any connection: an engine may fork."""
        ...

    async def generate(self, work: Work, emit: Emit) -> Finish:
        """Run one request to its end, calling `emit` at each step that made something for it.

        What `work.made` holds is neither made nor emitted again, but counts: in `max_tokens`, in
        stop strings and characters that it began, and in the usage. Where its texts are less than
        its tokens say, the rest is emitted with the next token.

        Cancelling the call aborts the request in the engine. Raises EngineRefused, EngineFailed or
        EngineDied; all that was emitted before stays valid.
        """
        ...

    def load(self) -> EngineLoad:
        """Return the present load; cheap."""
        ...

    async def stop(self) -> None:
        """Free everything. May block the process for seconds: called after all else is closed."""
        ...

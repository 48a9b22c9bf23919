"""Whether a text may be asked or said: what a moderator is, and which one the configuration names.

Rule: what a moderator was shown stands in no error, log or metric. Input is checked by ingress
before anything is charged or queued, output by the worker before anything of it is published.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, cast

import msgspec

from headrace.patterns import Patterns, compile_patterns, first_match, matches_anywhere
from headrace.telemetry import Reading

log = logging.getLogger(__name__)

INLINE_CHARACTERS_MAX: Final = 4096
"""A longer input is searched in a thread: the others must not wait."""
THREADS_MAX: Final = min(32, (os.cpu_count() or 1) + 4)


class Asked(NamedTuple):
    """What a client asks: the texts of all turns, of whatever role, or its prompt."""

    tenant: str
    model: str
    texts: tuple[str, ...]


class Said(NamedTuple):
    """What one choice has said, as far as it must be looked at: the content, the reasoning, or the
    arguments of one tool call.

    What stands before `start` is published already. `ended`: nothing follows.
    """

    tenant: str
    model: str
    text: str
    start: int
    ended: bool


class Moderator(Protocol):
    """What decides. Both methods may be coroutines; those that are not run in a thread."""

    def check_input(self, asked: Asked) -> bool | Awaitable[bool]:
        """Tell whether a request is to be refused."""
        ...

    def check_output(self, said: Said) -> int | Awaitable[int | None] | None:
        """Return where in `said.text` that begins which must not be said, None for nowhere."""
        ...


class ModeratorFailed(Exception):
    """The moderator raised, took too long, or answered nonsense, and failing means to refuse."""


class ModerationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[moderation]`. `patterns` are for both ways; `options` are an own moderator's, given to its
    factory."""

    moderator: str = "patterns"
    patterns: tuple[str, ...] = ()
    input_patterns: tuple[str, ...] = ()
    output_patterns: tuple[str, ...] = ()
    input: bool = True
    output: bool = True
    hold_back_characters: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    check_every_characters: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    when_failing: Literal["refuse", "admit"] = "refuse"
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        named = (*self.patterns, *self.input_patterns, *self.output_patterns)
        compile_patterns(named)
        if self.moderator == "patterns" and not named:
            raise ValueError("there are no patterns, and no moderator of your own")
        if self.moderator == "patterns" and self.options:
            raise ValueError("options are for a moderator of your own")
        if self.moderator != "patterns":
            module, colon, factory = self.moderator.partition(":")
            if not (module and colon and factory):
                raise ValueError(
                    f"moderator is 'patterns' or 'module:factory', not {self.moderator!r}"
                )
            if named:
                raise ValueError("patterns are for the moderator 'patterns'")

    @property
    def looks_at_requests(self) -> bool:
        """Whether there is anything to look for in requests."""
        return self.input and self._looks_for(self.input_patterns)

    @property
    def looks_at_answers(self) -> bool:
        """Whether there is anything to look for in answers: else they need not be held back."""
        return self.output and self._looks_for(self.output_patterns)

    def _looks_for(self, patterns: tuple[str, ...]) -> bool:
        return self.moderator != "patterns" or bool(self.patterns or patterns)


class PatternModerator:
    """The built-in moderator: regular expressions."""

    def __init__(self, settings: ModerationSettings) -> None:
        self._input = compile_patterns((*settings.patterns, *settings.input_patterns))
        self._output = compile_patterns((*settings.patterns, *settings.output_patterns))
        self._bound = settings.hold_back_characters

    def check_input(self, asked: Asked) -> bool:
        """Tell whether a pattern matches in any of the texts."""
        patterns, bound = self._input, self._bound
        return any(matches_anywhere(patterns, text, bound=bound) for text in asked.texts)

    def check_output(self, said: Said) -> int | None:
        """Return where the first match begins."""
        return match_in(self._output, said, bound=self._bound)


def match_in(patterns: Patterns, said: Said, *, bound: int) -> int | None:
    """Return where the first match begins that does not end in what is published."""
    return first_match(
        patterns,
        said.text,
        start=said.start,
        search_from=max(0, said.start - bound),
        ended=said.ended,
        bound=bound,
    )


class Moderation:
    """A moderator under a time limit, and what becomes of its failures. Counts what it did."""

    def __init__(self, settings: ModerationSettings, moderator: Moderator) -> None:
        self.settings = settings
        self.moderated = 0
        self.failed = 0
        self._moderator = moderator
        self._fast = isinstance(moderator, PatternModerator)
        # Of its own: one that hangs keeps its thread, and others look up names in the loop's.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="moderator")
        self._free = asyncio.Semaphore(THREADS_MAX)

    async def refuses(self, asked: Asked) -> bool:
        """Tell whether a request is to be refused. Raises ModeratorFailed."""
        if self._fast and sum(map(len, asked.texts)) <= INLINE_CHARACTERS_MAX:
            found: Any = self._moderator.check_input(asked)
        else:
            found = await self._ask(self._moderator.check_input, asked, False)
        if type(found) is not bool:
            found = self._failed("answered something else than True or False", False)
        self.moderated += found
        return cast("bool", found)

    async def cut(self, said: Said) -> int | None:
        """Return where that begins which must not be said. Raises ModeratorFailed."""
        if self._fast:
            found: Any = self._moderator.check_output(said)
        else:
            found = await self._ask(self._moderator.check_output, said, None)
        if found is not None and (type(found) is not int or not 0 <= found <= len(said.text)):
            found = self._failed("answered no place in the text", None)
        self.moderated += found is not None
        return cast("int | None", found)

    async def _ask(self, check: Callable[[Any], Any], shown: Any, passing: Any) -> Any:
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                if inspect.iscoroutinefunction(check):
                    return await check(shown)
                answer = await self._in_thread(check, shown)
                return await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            return self._failed("took too long", passing)
        except Exception as error:  # it is not ours, and may raise anything
            # Its kind alone: the words may repeat what it was shown.
            return self._failed(f"raised {type(error).__name__}", passing)

    async def _in_thread(self, check: Callable[[Any], Any], shown: Any) -> Any:
        """Check in a thread, once one is free: what waits in the pool itself stays there, with
        what it would be shown, when nobody waits for its answer any more."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def free(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended before a thread that hung
                loop.call_soon_threadsafe(self._free.release)

        checking = self._threads.submit(check, shown)
        checking.add_done_callback(free)
        return await asyncio.wrap_future(checking)

    def _failed(self, what: str, passing: Any) -> Any:
        self.failed += 1
        log.error("the moderator %s", what)
        if self.settings.when_failing == "refuse":
            raise ModeratorFailed(f"the moderator {what}")
        return passing


def readings(moderation: Moderation, direction: str, what: str) -> list[Reading]:
    """Return the numbers of a tier that moderates; `what` says what happens to what is found."""
    return [
        Reading(
            f"{direction}_moderated",
            f"{what} because of what the moderator found.",
            lambda: moderation.moderated,
            "counter",
        ),
        Reading(
            f"{direction}_moderation_failures",
            "How often the moderator failed.",
            lambda: moderation.failed,
            "counter",
        ),
    ]


def moderation_of(settings: ModerationSettings) -> Moderation:
    """Return what the settings name. Raises ValueError where it cannot be had."""
    if settings.moderator == "patterns":
        return Moderation(settings, PatternModerator(settings))
    name = settings.moderator
    module, _, factory = name.partition(":")
    try:
        made = getattr(import_module(module), factory)(dict(settings.options))
    except Exception as error:  # a module of the operator's, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"[moderation] moderator {name!r} cannot be made: {reason}") from error
    for method in ("check_input", "check_output"):
        if not callable(getattr(made, method, None)):
            raise ValueError(f"[moderation] moderator {name!r} has no {method}")
    return Moderation(settings, made)

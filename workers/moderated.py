"""An engine whose answers are moderated. Rule: what goes out was looked at, and is not taken back.

It stands between engine and generation, so that the log, and with it every reader, a resumed stream
and a kept answer, holds what passed and nothing else. An answer that must not go on is aborted in
the engine and ends with the reason `content_filter`.
"""

from collections.abc import Sequence
from typing import Final

from headrace.moderation import Moderation, ModeratorFailed, Said, moderation_of, readings
from headrace.settings import BadSetting, ConfigFile
from headrace.telemetry import Reading
from schemas.model import ModelCard
from schemas.wire import Piece, Usage, span
from workers.answer import Answer, Name
from workers.engine import Emit, Engine, EngineFailed, EngineLoad, Finish, NotModerated, Work

FILTERED: Final = "content_filter"


class ModeratedEngine:
    """An `Engine` over another one."""

    def __init__(self, engine: Engine, moderation: Moderation) -> None:
        self.engine = engine
        self._moderation = moderation

    def readings(self) -> list[Reading]:
        """Return what /metrics shows of it."""
        return readings(self._moderation, "output", "Choices ended")

    @property
    def slots(self) -> int:
        """How many requests run at once."""
        return self.engine.slots

    @property
    def alive(self) -> bool:
        """Whether a started engine can still serve."""
        return self.engine.alive

    async def start(self) -> ModelCard:
        """Start the engine and return its model's card."""
        return await self.engine.start()

    async def generate(self, work: Work, emit: Emit) -> Finish:
        """Run one request; see `Engine.generate`."""
        if not work.moderated:
            return await self.engine.generate(work, emit)
        answers = _Answers(work, self._moderation, emit)
        try:
            finish = await self.engine.generate(work, answers.take)
        except _Filtered:
            usage = Usage(len(work.prompt), span(work.made) + answers.made, 0)
            return Finish(answers.reasons([FILTERED] * work.sampling.n), usage)
        except NotModerated:
            raise
        except EngineFailed:
            await answers.end()
            raise
        await answers.end()
        return Finish(answers.reasons(finish.reasons), finish.usage)

    def load(self) -> EngineLoad:
        """Return the present load; cheap."""
        return self.engine.load()

    async def stop(self) -> None:
        """Free everything."""
        await self.engine.stop()


class _Filtered(Exception):
    """Every choice has ended because of what it says: the engine need not go on."""


class _Answers:
    """The choices of one request."""

    def __init__(self, work: Work, moderation: Moderation, emit: Emit) -> None:
        self.made = self._sent = 0
        self._work = work
        self._moderation = moderation
        self._emit = emit
        settings = moderation.settings
        self._every = settings.check_every_characters
        before = "".join(piece.text for piece in work.made)  # of one choice
        self._choices = [
            Answer(choice, bound=settings.hold_back_characters, before=before)
            for choice in range(work.sampling.n)
        ]

    def reasons(self, reasons: Sequence[str]) -> tuple[str, ...]:
        """Return why each choice ended; `reasons` are the engine's."""
        pairs = zip(self._choices, reasons, strict=True)
        return tuple(FILTERED if answer.over else reason for answer, reason in pairs)

    async def take(self, pieces: Sequence[Piece]) -> None:
        """Take what a step made, and give out what may go. Raises NotModerated, and _Filtered."""
        out: list[Piece] = []
        self.made += span(pieces)
        self._work.held.tokens = self.made - self._sent  # before a moderator takes its time
        for piece in pieces:
            answer = self._choices[piece.choice]
            if not answer.over:
                await self._grow(answer, piece)
                out += answer.pieces()
        await self._send(out)
        if all(answer.over for answer in self._choices):
            raise _Filtered

    async def end(self) -> None:
        """Give out what is left, now that nothing follows. Raises NotModerated."""
        out: list[Piece] = []
        for answer in self._choices:
            if not answer.over:
                passes = await self._passes(answer, answer.current, ended=True)
                out += answer.last() if passes else answer.pieces()
        await self._send(out)

    async def _send(self, pieces: Sequence[Piece]) -> None:
        self._sent += span(pieces)
        self._work.held.tokens = self.made - self._sent
        if pieces:
            await self._emit(pieces)

    async def _grow(self, answer: Answer, piece: Piece) -> None:
        for name, text in answer.take(piece):
            before = answer.current
            if name != before and not await self._passes(answer, before, ended=True):
                return
            answer.add(name, text)
            if not await self._passes(answer, name, ended=False):
                return

    async def _passes(self, answer: Answer, name: Name, *, ended: bool) -> bool:
        """Have a text looked at, and give out what passed of it; tell whether it may go on."""
        tail = answer.tail(name)
        if not (tail.holds if ended else tail.due(self._every)):
            return True
        work = self._work
        said = Said(work.tenant, work.model, tail.text, tail.start, ended)
        try:
            cut = await self._moderation.cut(said)
        except ModeratorFailed as error:
            raise NotModerated(f"The answer could not be moderated: {error}.") from None
        if cut is None:
            answer.release(name, ended=ended)
        else:
            answer.cut(name, cut)
        return cut is None


def moderate(engine: Engine, config: ConfigFile) -> Engine:
    """Return the engine as the configuration wants it: itself, where nothing looks at answers.
    Raises BadSetting."""
    wanted = config.content.moderation
    if wanted is None or not wanted.looks_at_answers:
        return engine
    try:
        return ModeratedEngine(engine, moderation_of(wanted))
    except ValueError as error:
        raise BadSetting(f"{config.path}: {error}") from error

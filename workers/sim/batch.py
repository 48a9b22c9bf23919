"""The engine as a machine: generations go in, time passes, pieces come out.

Rule: `advance(now_s)` does all that is due by then and says when there is more to do; nothing else
makes tokens. All rows of a step get their tokens when the step ends. A generation with a pace of
its own takes slot and blocks like the others, but its tokens come by its own clock: due times are
absolute, so lateness of the caller never adds up.
"""

from array import array
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from schemas.wire import Piece, Usage
from workers.engine import EngineFailed, Work
from workers.sim.clock import Pace, TimeModel
from workers.sim.kv import KvCache, root_name
from workers.sim.ledger import Entry
from workers.sim.options import Size
from workers.sim.schedule import Row, Scheduler
from workers.sim.script import NEVER, Script
from workers.sim.story import Story
from workers.sim.vocabulary import Vocabulary
from workers.sim.voice import Speaker, speaker_of

SLACK_S: Final = 0.0005
"""What is due within half a millisecond is due: event loops wake to the millisecond."""

LATE_S: Final = 0.01
"""How late a step's end may be noticed without the next step's being put off."""


@dataclass(slots=True, eq=False)
class Generation:
    """One run of one request. `pieces` are made and not taken yet; then `done`, perhaps `error`."""

    entry: Entry
    prompt_tokens: int
    choices: "list[Choice]" = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    open: int = 0
    done: bool = False
    error: EngineFailed | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each choice ended."""
        return tuple(choice.speaker.reason or "stop" for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Tokens used: what was found in the cache is the first choice's."""
        made = sum(choice.made for choice in self.choices)
        return Usage(self.prompt_tokens, made, self.choices[0].cached or 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Choice(Row):
    """One answer of a generation, a row of the batch."""

    generation: Generation
    speaker: Speaker
    script: Script | None
    halt_at: int  # before this token something other than a token happens
    pace: Pace | None
    made: int = 0
    due_s: float = 0.0
    timer: int = 0
    owed: str = ""  # said by earlier attempts and not published


class Batch:
    """All generations of an engine."""

    def __init__(self, size: Size, time_model: TimeModel, vocabulary: Vocabulary) -> None:
        self.exit_due = False
        """Whether a hook asked for the process to end here."""
        self.news: list[Generation] = []
        """Generations with new pieces or an end; whoever hands them on empties it."""
        self._size = size
        self._time = time_model
        self._vocabulary = vocabulary
        self._kv = KvCache(size.blocks)
        self._rows: Scheduler[Choice] = Scheduler(
            self._kv,
            slots=size.slots,
            step_tokens=size.step_tokens,
            block_size=size.block_size,
            caching=size.prefix_caching,
        )
        self._arrivals = 0
        self._timers: list[tuple[float, int, Choice]] = []
        self._timer = 0
        self._step: list[Choice] = []
        self._step_end_s = 0.0

    @property
    def running(self) -> int:
        """How many choices have a slot."""
        return len(self._rows.running)

    @property
    def waiting(self) -> int:
        """How many choices wait for one."""
        return len(self._rows.waiting)

    @property
    def kv_used(self) -> float:
        """The share of KV blocks that are owned."""
        return self._kv.used

    @property
    def preemptions(self) -> int:
        """How often a choice had to give up its blocks."""
        return self._rows.preemptions

    def add(self, work: Work, script: Script | None, entry: Entry) -> Generation:
        """Take in a checked request."""
        generation = Generation(entry, len(work.prompt), open=work.sampling.n)
        for index in range(work.sampling.n):
            choice = self._choice(generation, work, script, index)
            generation.choices.append(choice)
            if choice.speaker.reason is None:
                self._rows.add(choice)
            else:
                generation.open -= 1  # it was made to its end before
        generation.done = not generation.open
        return generation

    def _choice(
        self, generation: Generation, work: Work, script: Script | None, index: int
    ) -> Choice:
        speaker = speaker_of(
            Story(
                work.prompt,
                seed=work.sampling.seed,
                choice=index,
                vocabulary=self._vocabulary,
            ),
            script,
            work.sampling,
            choice=index,
            room=self._size.model_len - len(work.prompt),
            vocabulary=self._vocabulary,
        )
        told = [token for piece in work.made for token in piece.tokens]
        # Again, to know what text it holds back, and what was held back of what it said.
        said = "".join([speaker.say(k).text for k in range(len(told))])
        published = sum(len(piece.text) for piece in work.made)
        pace = None if script is None else script.pace
        halt_at = NEVER if script is None else script.trap_at
        self._arrivals += 1
        return Choice(
            rank=(work.priority, self._arrivals),
            ids=array("I", [*work.prompt, *told]),
            made=len(told),
            root=root_name(work.cache_salt),
            paced=pace is not None,
            generation=generation,
            speaker=speaker,
            script=script,
            halt_at=halt_at if speaker.end else 0,
            pace=pace,
            owed=said[published:],
        )

    def abort(self, generation: Generation) -> None:
        """Forget a generation and free what it holds."""
        generation.done = True
        for choice in generation.choices:
            self._rows.remove(choice)

    def advance(self, now_s: float) -> float | None:
        """Do what is due; return when to come again: None is not before something is added or
        aborted, and a time that has passed is at once."""
        self._tick(now_s)
        busy = self._advance_steps(now_s)
        self._rows.admit_paced()
        if self._rows.entered:
            self._set_first_timers(now_s)
        if busy:
            return now_s
        timer_s = self._timers[0][0] if self._timers else None
        if self._step and (timer_s is None or self._step_end_s < timer_s):
            return self._step_end_s
        return timer_s

    def _advance_steps(self, now_s: float) -> bool:
        """End the step that is over, begin the next; true where there may be more at once."""
        begin_s = now_s
        if self._step:
            if self._step_end_s > now_s + SLACK_S:
                return False
            self._end_step(self._step)
            # The next step follows without a gap, unless the caller slept for longer than a timer's
            # usual lateness: then time stood still for the engine.
            if now_s - self._step_end_s < LATE_S:
                begin_s = self._step_end_s
            self._step = []
        rows = self._rows.step()
        if not rows:
            return False
        if self._time.instant:
            self._end_step(rows)
            return True
        self._step = rows
        self._step_end_s = begin_s + self._length_s(rows)
        return False

    def _length_s(self, rows: list[Choice]) -> float:
        decoding = sum(1 for row in rows if row.made and row.planned == 1)
        prefill_tokens = sum(row.planned for row in rows) - decoding
        return self._time.step_s(prefill_tokens=prefill_tokens, decoding=decoding)

    def _end_step(self, rows: list[Choice]) -> None:
        complete, say = self._rows.complete, self._say
        for row in rows:
            # A row that was aborted or lost its blocks since has nothing planned.
            if row.planned and complete(row):
                say(row)

    def _say(self, choice: Choice) -> bool:
        """Make a choice's next token; false where no further one will come by itself."""
        k = choice.made
        if k == choice.halt_at:
            self._halt(choice)
            return False
        speaker = choice.speaker
        piece = speaker.say(k)
        if choice.owed:
            piece, choice.owed = piece._replace(text=choice.owed + piece.text), ""
        choice.made = k + 1
        choice.ids.append(piece.tokens[0])
        generation = choice.generation
        if not generation.pieces:
            self.news.append(generation)
        generation.pieces.append(piece)
        generation.entry.tokens += 1
        if speaker.reason is None:
            return True
        self._end(choice)
        return False

    def _end(self, choice: Choice) -> None:
        self._rows.remove(choice)
        generation = choice.generation
        generation.open -= 1
        if not generation.open:
            generation.done = True
            self.news.append(generation)

    def _halt(self, choice: Choice) -> None:
        script = choice.script
        if script is None or choice.made != script.trap_at:  # it has nothing to say at all
            choice.speaker.reason = (script and script.reason) or "stop"
            self._end(choice)
        elif script.trap == "hang":
            self._rows.park(choice)
        elif script.trap == "exit":
            self.exit_due = True
        else:
            error = EngineFailed(f"simulated failure at token {choice.made}")
            choice.generation.error = error
            self.abort(choice.generation)
            self.news.append(choice.generation)

    def _tick(self, now_s: float) -> None:
        """Make the tokens that are due by their own clocks, one each."""
        timers = self._timers
        if not timers or timers[0][0] > now_s + SLACK_S:
            return
        due = []
        while timers and timers[0][0] <= now_s + SLACK_S:
            _, timer, choice = heappop(timers)
            if timer == choice.timer and choice in self._rows.running:
                due.append(choice)
        for choice in due:
            # An earlier one in this list may have taken its blocks, or its generation may be over.
            if choice not in self._rows.running or not self._rows.extend(choice):
                continue
            if self._say(choice):
                assert choice.pace is not None
                self._set_timer(choice, choice.due_s + choice.pace.itl_s)

    def _set_first_timers(self, now_s: float) -> None:
        for choice in self._rows.entered:
            assert choice.pace is not None
            wait_s = choice.pace.itl_s if choice.made else choice.pace.ttft_s
            self._set_timer(choice, now_s + wait_s)
        self._rows.entered.clear()
        if len(self._timers) > 2 * self.running + 64:
            # Most are of choices that are gone.
            self._timers = [
                entry
                for entry in self._timers
                if entry[1] == entry[2].timer and entry[2] in self._rows.running
            ]
            heapify(self._timers)

    def _set_timer(self, choice: Choice, due_s: float) -> None:
        self._timer += 1
        choice.timer = self._timer
        choice.due_s = due_s
        heappush(self._timers, (due_s, self._timer, choice))

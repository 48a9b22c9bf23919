"""What goes out of an engine whose answers are moderated, however its text is cut into tokens."""

import asyncio
import re
from collections.abc import Awaitable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.moderation import Moderation, ModerationSettings, PatternModerator, Said
from schemas.model import ModelCard
from schemas.wire import Piece, Sampling, TokenLogprob, Usage, span
from workers.engine import EngineFailed, EngineLoad, Finish, NotModerated, Work
from workers.moderated import ModeratedEngine

BOUND = 8
PROMPT = (1, 2, 3)


class Speaking:
    """An engine that says what it was told, a piece a step, and goes on after what was made."""

    slots = 1
    alive = True

    def __init__(
        self, pieces: Sequence[Piece], *, reasons: tuple[str, ...] = ("stop",), fails: bool = False
    ) -> None:
        self._pieces = pieces
        self._reasons = reasons
        self._fails = fails
        self.ended = False
        self.said = 0

    async def start(self) -> ModelCard:
        raise NotImplementedError

    async def generate(self, work: Work, emit: Any) -> Finish:
        made = len(work.made)
        said = "".join(piece.text for piece in self._pieces[:made])
        owed = said[sum(len(piece.text) for piece in work.made) :]
        for piece in self._pieces[made:]:
            self.said += len(piece.text)
            await emit([piece._replace(text=owed + piece.text)])
            owed = ""
        if self._fails:
            raise EngineFailed("it failed")
        self.ended = True
        return Finish(self._reasons, Usage(len(work.prompt), span(self._pieces), 2))

    def load(self) -> EngineLoad:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError


class Outcome:
    """What went out, and how it ended."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.finish: Finish | None = None

    async def emit(self, pieces: Sequence[Piece]) -> None:
        assert all(piece.tokens for piece in pieces)  # a seq counts tokens
        self.pieces += pieces

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    @property
    def reasons(self) -> tuple[str, ...]:
        assert self.finish is not None
        return self.finish.reasons


def moderation(*patterns: str, **more: Any) -> Moderation:
    settings = ModerationSettings(
        patterns=patterns or ("x",), **{"hold_back_characters": BOUND, **more}
    )
    return Moderation(settings, PatternModerator(settings))


def run(
    engine: Speaking,
    moderated: Moderation,
    *,
    made: Sequence[Piece] = (),
    n: int = 1,
    looked_at: bool = True,
) -> Outcome:
    outcome = Outcome()
    work = Work("r", PROMPT, Sampling(max_tokens=1000, n=n), made=made, moderated=looked_at)

    async def go() -> None:
        outcome.finish = await ModeratedEngine(engine, moderated).generate(work, outcome.emit)

    asyncio.run(go())
    return outcome


def cut(text: str, cuts: Sequence[int]) -> list[Piece]:
    """Return a text as pieces of a token each, cut at places."""
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    parts = [text[a:b] for a, b in pairwise(edges)] or [""]
    return [Piece(0, part, (number,)) for number, part in enumerate(parts)]


CUTS = st.lists(st.integers(0, 60), max_size=60)
TEXTS = st.text(alphabet="abcs3 é", max_size=40)
PATTERNS = ("abc", r"\bcab\b", "a{2,6}s", "(?i)SaS", r"\b3{4,8}\b", "(?<=b)é", "c(?!a)s")


@given(st.text("abc ", max_size=30), CUTS)
@example("abcabc", list(range(9)))
def test_a_word_never_goes_out_and_all_before_it_does(text: str, cuts: list[int]) -> None:
    outcome = run(Speaking(cut(text, cuts)), moderation("abc"))
    before, found, _ = text.partition("abc")
    assert outcome.text() == before
    assert outcome.reasons == (("content_filter",) if found else ("stop",))


@given(TEXTS, CUTS, st.sets(st.sampled_from(PATTERNS), min_size=1))
def test_no_character_of_a_match_goes_out(text: str, cuts: list[int], patterns: set[str]) -> None:
    pieces = cut(text, cuts)
    outcome = run(Speaking(pieces), moderation(*sorted(patterns)))
    assert outcome.finish is not None
    read = "".join(piece.text for piece in pieces[: outcome.finish.usage.completion_tokens])
    filtered = outcome.reasons == ("content_filter",)
    assert read.startswith(outcome.text())
    found = [
        match.span()
        for pattern in patterns
        for match in re.finditer(pattern, read)
        # What reaches the end of what was read is not believed before more is there.
        if match.end() < len(read) or read == text
    ]
    if not filtered:
        assert not found
        assert outcome.text() == text
    else:
        assert min(begin for begin, _ in found) == len(outcome.text())


@given(st.text("abc ", max_size=30), CUTS, st.integers(0, 40))
def test_another_worker_goes_on_as_if_there_had_been_one(
    text: str, cuts: list[int], died_after: int
) -> None:
    pieces = cut(text, cuts)
    alone = run(Speaking(pieces), moderation("abc"))
    made = alone.pieces[: min(died_after, len(alone.pieces) - 1)]  # the last one goes with the end
    on = run(Speaking(pieces), moderation("abc"), made=made)
    assert "".join(piece.text for piece in made) + on.text() == alone.text()
    assert on.finish is not None
    assert alone.finish is not None
    assert on.reasons == alone.reasons
    assert on.finish.usage.completion_tokens == alone.finish.usage.completion_tokens


def test_a_match_longer_than_the_bound_ends_the_answer_where_it_is_noticed() -> None:
    outcome = run(Speaking(cut("so " + "a" * 30 + "!", range(60))), moderation("a{12}"))
    assert outcome.reasons == ("content_filter",)
    assert outcome.text() == ("so " + "a" * 11)[: 1 - BOUND]


def test_less_than_the_bound_is_held_back() -> None:
    class Watched(Outcome):
        async def emit(self, pieces: Sequence[Piece]) -> None:
            await super().emit(pieces)
            behind.append((engine.said - len(self.text()), work.held.tokens))

    behind: list[tuple[int, int]] = []
    outcome = Watched()
    work = Work("r", PROMPT, Sampling(max_tokens=1000))
    engine = Speaking(cut("b" * 40, range(60)))
    asyncio.run(ModeratedEngine(engine, moderation("abc")).generate(work, outcome.emit))
    assert outcome.text() == "b" * 40
    assert behind == [(BOUND - 1, BOUND - 1)] * (40 - BOUND + 1) + [(0, 0)]


def test_the_engine_is_ended_and_what_it_made_is_charged() -> None:
    engine = Speaking(cut("one abc and much more", range(60)))
    outcome = run(engine, moderation("abc"))
    assert outcome.reasons == ("content_filter",)
    assert not engine.ended
    assert outcome.finish is not None
    assert outcome.finish.usage == Usage(len(PROMPT), len("one abc "), 0)


def test_who_is_not_to_be_moderated_is_not() -> None:
    engine = Speaking(cut("one abc", range(60)))
    outcome = run(engine, moderation("abc"), looked_at=False)
    assert outcome.text() == "one abc"
    assert len(outcome.pieces) == 7


def test_each_choice_ends_by_itself() -> None:
    said = [Piece(k % 2, text, (k,)) for k, text in enumerate(["good ", "bad ", "day", "abc", "!"])]
    outcome = run(Speaking(said, reasons=("stop", "length")), moderation("abc"), n=2)
    assert outcome.text(0) == "good day!"
    assert outcome.text(1) == "bad "
    assert outcome.reasons == ("stop", "content_filter")


def call(index: int, arguments: str, **head: str) -> dict[str, Any]:
    function = {"name": head.pop("name")} if "name" in head else {}
    return {"index": index, **head, "function": function | {"arguments": arguments}}


def calls_of(outcome: Outcome) -> dict[int, str]:
    """Return the arguments of each call; its id and name come once."""
    found: dict[int, str] = {}
    named = []
    for piece in outcome.pieces:
        for each in (piece.delta or {}).get("tool_calls", ()):
            index = each["index"]
            if "id" in each:
                named.append((index, each["id"], each["function"]["name"]))
            found[index] = found.get(index, "") + each["function"]["arguments"]
    assert named == [(index, f"call_{index}", "f") for index in found]
    return found


def called(second: str) -> list[Piece]:
    first, second = '{"q": "ab"}', f'{{"q": "{second}"}}'
    deltas = [call(0, "", id="call_0", name="f"), *(call(0, part) for part in first)]
    deltas += [call(1, "", id="call_1", name="f"), *(call(1, part) for part in second)]
    return [Piece(0, "", (k,), None, {"tool_calls": [d]}) for k, d in enumerate(deltas)]


def test_arguments_of_tool_calls_arrive_whole() -> None:
    outcome = run(Speaking(called("cab")), moderation("abc"))
    assert calls_of(outcome) == {0: '{"q": "ab"}', 1: '{"q": "cab"}'}
    assert outcome.reasons == ("stop",)


def test_arguments_of_tool_calls_are_moderated_each_by_itself() -> None:
    outcome = run(Speaking(called("abc")), moderation("abc"))
    assert calls_of(outcome) == {0: '{"q": "ab"}', 1: '{"q": "'}
    assert outcome.reasons == ("content_filter",)


def test_a_call_that_is_cut_in_the_step_that_begins_it_keeps_its_name() -> None:
    name, arguments = call(0, "", id="call_0", name="f"), call(0, "ok abc")
    both = Piece(0, "", (0,), None, {"tool_calls": [name, arguments]})  # as vLLM's parsers do
    outcome = run(Speaking([both]), moderation("abc"))
    assert calls_of(outcome) == {0: "ok "}
    assert outcome.reasons == ("content_filter",)


def thought(*parts: str) -> list[Piece]:
    return [Piece(0, "", (k,), None, {"reasoning": part}) for k, part in enumerate(parts)]


def test_reasoning_is_moderated_and_out_before_the_content() -> None:
    answer = [Piece(0, "c", (5,)), Piece(0, "d", (6,))]
    outcome = run(Speaking([*thought("I ", "think ", "ab"), *answer]), moderation("abc"))
    said = [(p.text, (p.delta or {}).get("reasoning", "")) for p in outcome.pieces]
    assert "".join(reasoning for _, reasoning in said) == "I think ab"
    first_content = next(number for number, (text, _) in enumerate(said) if text)
    assert not any(reasoning for _, reasoning in said[first_content + 1 :])
    assert outcome.text() == "cd"
    bad = run(Speaking([*thought("I ", "think ", "ab", "c"), *answer]), moderation("abc"))
    assert "".join((p.delta or {}).get("reasoning", "") for p in bad.pieces) == "I think "
    assert (bad.text(), bad.reasons) == ("", ("content_filter",))


def with_logprobs(*texts: tuple[str, str]) -> list[Piece]:
    """Return pieces of (what the engine gives out, what its token says)."""
    return [
        Piece(0, out, (k,), (TokenLogprob(token, -1.0, ()),))
        for k, (out, token) in enumerate(texts)
    ]


def logged(outcome: Outcome) -> str:
    return "".join(t.text for piece in outcome.pieces for t in piece.logprobs or ())


@given(st.text("abc ", max_size=30), CUTS)
def test_log_probabilities_come_with_their_text_and_not_before(text: str, cuts: list[int]) -> None:
    class Watched(Outcome):
        async def emit(self, pieces: Sequence[Piece]) -> None:
            await super().emit(pieces)
            assert self.text().startswith(logged(self))

    outcome = Watched()
    tokens = [(piece.text, piece.text) for piece in cut(text, cuts)]
    work = Work("r", PROMPT, Sampling(max_tokens=1000))
    engine = ModeratedEngine(Speaking(with_logprobs(*tokens)), moderation("abc"))
    finish = asyncio.run(engine.generate(work, outcome.emit))
    if finish.reasons == ("stop",):
        assert logged(outcome) == text


def test_log_probabilities_wait_for_text_that_the_engine_holds_back() -> None:
    tokens = [("", "a"), ("", "b"), ("abc", "c"), ("d" * 20, "d" * 20)]
    outcome = run(Speaking(with_logprobs(*tokens)), moderation("abc"))
    assert (outcome.text(), logged(outcome)) == ("", "")
    passed = run(Speaking(with_logprobs(*tokens)), moderation("x"))
    assert (passed.text(), logged(passed)) == ("abc" + "d" * 20,) * 2


def test_what_was_said_before_an_engine_failed_goes_out() -> None:
    outcome = Outcome()
    engine = ModeratedEngine(Speaking(cut("good", range(9)), fails=True), moderation("abc"))
    work = Work("r", PROMPT, Sampling(max_tokens=1000))
    with pytest.raises(EngineFailed, match="it failed"):
        asyncio.run(engine.generate(work, outcome.emit))
    assert outcome.text() == "good"


class Own:
    """An operator's moderator: no digits. It is asked over the network, as it were."""

    def __init__(self, *, broken: bool = False) -> None:
        self.asked: list[Said] = []
        self._broken = broken

    def check_input(self, asked: Any) -> bool:
        raise NotImplementedError

    def check_output(self, said: Said) -> Awaitable[int | None]:
        async def answer() -> int | None:
            self.asked.append(said)
            if self._broken:
                raise OSError(f"no connection to send {said.text!r}")
            found = re.search(r"\d", said.text[said.start :])
            return None if found is None else said.start + found.start()

        return answer()


def own(moderator: Own, **more: Any) -> Moderation:
    settings = ModerationSettings(moderator="m:f", timeout_s=60, hold_back_characters=BOUND, **more)
    return Moderation(settings, moderator)


def test_an_own_moderator_is_asked_every_so_many_characters() -> None:
    moderator = Own()
    engine = Speaking(cut("abcdefghij" * 4, range(60)))
    outcome = run(engine, own(moderator, check_every_characters=10))
    assert outcome.text() == "abcdefghij" * 4
    assert [(len(said.text), said.ended) for said in moderator.asked] == [
        (10, False),
        (20, False),
        (30, False),
        (34, False),  # of what is out, twice the bound and a character
        (24, True),
    ]
    assert run(Speaking(cut("ab1cd", range(9))), own(Own())).text() == "ab"


def test_what_a_moderator_is_being_asked_about_is_held_back_by_then() -> None:
    class Asked(Own):
        def check_output(self, said: Said) -> Awaitable[int | None]:
            held.append(work.held.tokens)
            return super().check_output(said)

    held: list[int] = []
    work = Work("r", PROMPT, Sampling(max_tokens=1000))
    engine = ModeratedEngine(Speaking(cut("abc", range(9))), own(Asked()))
    asyncio.run(engine.generate(work, Outcome().emit))
    assert held == [1, 2, 3, 3]


def test_where_a_moderator_fails_nothing_goes_out_unless_that_is_wanted() -> None:
    failing = own(Own(broken=True))
    outcome = Outcome()
    work = Work("r", PROMPT, Sampling(max_tokens=1000))
    engine = ModeratedEngine(Speaking(cut("good", range(9))), failing)
    with pytest.raises(NotModerated) as raised:
        asyncio.run(engine.generate(work, outcome.emit))
    assert outcome.text() == ""
    assert failing.failed == 1
    assert "no connection" not in str(raised.value)  # nor what it was shown
    assert raised.value.code == "moderation_unavailable"
    lenient = own(Own(broken=True), when_failing="admit")
    assert run(Speaking(cut("good", range(9))), lenient).text() == "good"
    assert lenient.failed == 5

"""The simulated engine honours what bounds an answer, and refuses what it cannot do."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.wire import Piece, SimHook, Structured
from tests.workers.test_engine_sim import once, work
from workers.engine import EngineRefused


def test_min_tokens_put_a_storys_end_off() -> None:
    whole, _ = once(work())
    wanted = len(whole.pieces) + 20
    longer, finish = once(work(min_tokens=wanted))
    assert len(longer.pieces) == finish.usage.completion_tokens == wanted
    assert finish.reasons == ("stop",)
    assert longer.text().startswith(whole.text())


def test_a_stop_token_ends_the_answer_and_is_none_of_its_text() -> None:
    whole, _ = once(work())
    [token] = whole.pieces[5].tokens
    first = [piece.tokens[0] for piece in whole.pieces].index(token)
    heard, finish = once(work(stop_token_ids=(token,)))
    assert finish.reasons == ("stop",)
    assert len(heard.pieces) == first + 1
    assert heard.text() == "".join(piece.text for piece in whole.pieces[:first])


def test_a_stop_token_is_not_heeded_before_min_tokens() -> None:
    whole, _ = once(work())
    [token] = whole.pieces[0].tokens
    heard, _ = once(work(stop_token_ids=(token,), min_tokens=3))
    assert len(heard.pieces) > 3


def test_a_stop_string_is_part_of_the_text_where_it_is_asked_for() -> None:
    whole, _ = once(work())
    stop = whole.pieces[5].text[-2:] + whole.pieces[6].text[:2]
    heard, finish = once(work(stop=(stop,), include_stop_str_in_output=True))
    assert heard.text() == whole.text().split(stop)[0] + stop
    assert finish.reasons == ("stop",)


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured": Structured(json_object=True)},
        {"bad_words": ("a",)},
        {"allowed_token_ids": (5,)},
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_by_name(sampling: dict[str, Any]) -> None:
    [name] = sampling
    with pytest.raises(EngineRefused, match=name):
        once(work(**sampling))


def test_the_form_of_a_text_that_it_is_told_is_not_its_affair() -> None:
    told = SimHook(pieces=("{", "}"))
    heard, _ = once(work(structured=Structured(json_object=True), sim=told))
    assert heard.text() == "{}"


def test_text_of_a_token_that_was_published_in_part_comes_with_the_next() -> None:
    hook = SimHook(pieces=("one ", "two ", "three"))
    made = (Piece(0, "one ", (1,)), Piece(0, "t", (2,)))
    heard, finish = once(replace(work(sim=hook), made=made))
    assert heard.text() == "wo three"
    assert finish.usage.completion_tokens == 3

"""What a request may use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.cost import Cost, cost_of
from schemas.errors import ContextLengthExceeded, InvalidRequest


def cost(prompt: int, asked: int | None, *, choices: int = 1, context: int = 100) -> Cost:
    return cost_of(
        prompt_tokens=prompt,
        asked_tokens=asked,
        choices=choices,
        max_model_len=context,
        param="messages",
    )


def test_without_a_bound_the_answer_may_fill_the_context() -> None:
    assert cost(30, None) == Cost(30, 70, 1)


def test_the_clients_bound_is_kept() -> None:
    assert cost(30, 5) == Cost(30, 5, 1)
    assert cost(30, 70) == Cost(30, 70, 1)


def test_every_choice_is_counted_the_prompt_once() -> None:
    assert cost(30, 5, choices=3).total_tokens == 45


def test_a_bound_over_the_context_is_refused_naming_it() -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        cost(30, 71)
    assert refused.value.param == "max_tokens"
    assert refused.value.code == "context_length_exceeded"
    assert "100" in refused.value.message


@pytest.mark.parametrize("prompt", [100, 101, 10_000])
def test_a_prompt_that_leaves_no_token_for_the_answer_is_refused(prompt: int) -> None:
    for asked in (None, 1):
        with pytest.raises(ContextLengthExceeded) as refused:
            cost(prompt, asked)
        assert refused.value.param == "messages"
        assert str(prompt) in refused.value.message


def test_a_prompt_that_leaves_one_token_is_served() -> None:
    assert cost(99, None) == Cost(99, 1, 1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        cost(0, 5)
    assert refused.value.param == "messages"


@given(st.integers(1, 200), st.none() | st.integers(1, 200), st.integers(1, 8))
def test_a_cost_always_fits_the_context(prompt: int, asked: int | None, choices: int) -> None:
    try:
        found = cost(prompt, asked, choices=choices)
    except ContextLengthExceeded:
        assert prompt + (asked or 1) > 100
        return
    assert 1 <= found.output_tokens <= 100 - prompt
    assert found.total_tokens == prompt + choices * found.output_tokens

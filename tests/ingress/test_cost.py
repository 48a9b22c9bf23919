"""What a request may use."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.cost import Cost, cost_of
from schemas.errors import ContextLengthExceeded, InvalidRequest, OverPolicy


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
    with pytest.raises(ContextLengthExceeded) as refused:
        cost_of(
            prompt_tokens=30,
            asked_tokens=71,
            choices=1,
            max_model_len=100,
            param="messages",
            output_param="max_completion_tokens",
        )
    assert refused.value.param == "max_completion_tokens"
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


def bounded(**more: Any) -> Cost:
    known = {"prompt_tokens": 10, "asked_tokens": None, "choices": 1, "max_model_len": 100}
    return cost_of(**(known | {"param": "messages", "output_param": None} | more))


def test_a_tenants_bound_on_the_prompt_names_the_prompt() -> None:
    assert bounded(input_max=10).prompt_tokens == 10
    with pytest.raises(OverPolicy) as refused:
        bounded(input_max=9)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_answer_that_nobody_bounded_is_cut_to_the_tenants_bound() -> None:
    assert bounded(output_max=50).output_tokens == 50
    assert bounded(output_max=1000).output_tokens == 90
    assert bounded(output_max=50, choices=3) == Cost(10, 16, 3)
    assert bounded(asked_tokens=16, output_max=5).output_tokens == 5


@pytest.mark.parametrize(
    ("asked", "choices", "param"),
    [(51, 1, "max_tokens"), (51, 2, "max_tokens"), (26, 2, "n"), (None, 51, "n")],
)
def test_a_bound_that_is_over_the_tenants_is_400(
    asked: int | None, choices: int, param: str
) -> None:
    named = None if asked is None else "max_tokens"
    with pytest.raises(OverPolicy) as refused:
        bounded(asked_tokens=asked, choices=choices, output_max=50, output_param=named)
    assert refused.value.param == param
    assert refused.value.code == "token_limit_exceeded"


def test_a_bound_within_the_tenants_stays() -> None:
    assert bounded(asked_tokens=50, output_max=50, output_param="max_tokens") == Cost(10, 50, 1)
    assert (
        bounded(asked_tokens=25, choices=2, output_max=50, output_param="max_tokens").choices == 2
    )

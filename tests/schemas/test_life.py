"""The states of a request: only the steps of the design's table."""

import itertools

import pytest

from schemas.life import ImpossibleStep, State, step

PATH = [
    *("received", "authenticated", "costed", "reserved", "queued", "published"),
    *("delivered", "generating", "finished", "settled"),
]
ENDS = ["failed", "cancelled", "expired"]
STEPS = (
    set(itertools.pairwise(PATH))
    | {(state, end) for state in PATH[:8] for end in ENDS}
    | {(end, "settled") for end in ENDS}
    | {("delivered", "delivered"), ("generating", "delivered")}
)


@pytest.mark.parametrize("before", list(State))
@pytest.mark.parametrize("after", list(State))
def test_only_the_steps_of_the_table_are_possible(before: State, after: State) -> None:
    if (before.value, after.value) in STEPS:
        assert step(before, after) is after
    else:
        with pytest.raises(ImpossibleStep, match=f"{before} → {after}"):
            step(before, after)

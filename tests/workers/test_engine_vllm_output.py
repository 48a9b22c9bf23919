"""What vLLM's reasons for an end mean. vLLM itself is not needed."""

import pytest

from workers.engine import EngineDied, EngineFailed
from workers.engine_vllm_output import check_end


@pytest.mark.parametrize("reasons", [[], ["stop"], ["length"], ["stop", "length"]])
def test_an_answer_that_came_to_its_end_is_one(reasons: list[str]) -> None:
    check_end(reasons)


@pytest.mark.parametrize("reasons", [["abort"], [""], ["stop", "abort"], ["stop", ""]])
def test_an_abort_that_nobody_asked_for_is_the_workers_death(reasons: list[str]) -> None:
    with pytest.raises(EngineDied):
        check_end(reasons)


@pytest.mark.parametrize("reasons", [["error"], ["stop", "error"], ["abort", "error"]])
def test_an_error_is_that_requests_own(reasons: list[str]) -> None:
    with pytest.raises(EngineFailed):
        check_end(reasons)

"""Facts about what vLLM finds in its environment. vLLM itself is not needed."""

import os
from typing import Any

import pytest

from workers import engine_vllm_setup
from workers.engine_vllm_setup import set_environment


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(engine_vllm_setup, "_usable_cores", lambda: 8)
    return found


def test_on_a_cpu_a_core_is_left_to_the_rest_of_the_machine(environ: dict[str, str]) -> None:
    set_environment("/model", {}, on_cpu=True)
    assert environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("given", "args", "on_cpu"),
    [
        ({"OMP_NUM_THREADS": "3"}, {}, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-7"}, {}, True),
        ({}, {"distributed_executor_backend": "mp"}, True),
        ({}, {}, False),
    ],
    ids=["told", "bound", "vLLM's own arrangement", "a GPU"],
)
def test_else_the_threads_are_as_the_user_or_vllm_has_them(
    environ: dict[str, str], given: dict[str, str], args: dict[str, Any], on_cpu: bool
) -> None:
    environ.update(given)
    set_environment("/model", args, on_cpu=on_cpu)
    assert environ.get("OMP_NUM_THREADS") == given.get("OMP_NUM_THREADS")

import math

import pytest

from schemas.wire import HexPiece, SimHook, ToolCall
from workers.engine import EngineRefused
from workers.sim.script import NEVER, Line, script_of


def test_tool_calls_come_after_the_text_one_token_per_argument_piece() -> None:
    calls = (ToolCall("f", ("{", "}")), ToolCall("g", ()))
    script = script_of(SimHook(pieces=("a", HexPiece("f09f")), tool_calls=calls))
    assert script.lines == (
        Line(b"a"),
        Line(b"\xf0\x9f"),
        Line(b"{", 0, "f"),
        Line(b"}", 0),
        Line(b"", 1, "g"),
    )
    assert (script.texts, script.reason) == (2, "tool_calls")


def test_a_hook_without_pieces_leaves_the_story_alone() -> None:
    script = script_of(SimHook(itl_ms=20))
    assert (script.lines, script.trap_at) == (None, NEVER)
    assert script.pace is not None
    assert (script.pace.ttft_s, script.pace.itl_s) == (0.0, 0.02)


def test_the_first_trap_counts() -> None:
    script = script_of(SimHook(fail_at=5, hang_at=3, exit_at=9))
    assert (script.trap, script.trap_at) == ("hang", 3)


def test_logprobs_may_be_minus_infinity() -> None:
    assert script_of(SimHook(logprobs=(-1, "-inf"))).logprobs == (-1.0, -math.inf)


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        (SimHook(pieces=("a", HexPiece("xy"))), r"pieces\[1\]"),
        (SimHook(fail_at=-1), "fail_at"),
        (SimHook(itl_ms=-1), "itl_ms"),
        (SimHook(ttft_ms=math.inf), "ttft_ms"),
        (SimHook(logprobs=("inf",)), "logprobs"),
        (SimHook(logprobs=(math.nan,)), "logprobs"),
    ],
)
def test_what_a_hook_cannot_have_is_refused_by_name(hook: SimHook, named: str) -> None:
    with pytest.raises(EngineRefused, match=named):
        script_of(hook)

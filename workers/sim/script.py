"""What a test told the engine to say and to suffer: the hook, checked and spread over positions.

Rule: one token per piece, of the text first and of the tool calls' arguments after it. What the
hook asks and cannot be had raises EngineRefused, before anything runs.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from schemas.wire import HexPiece, SimHook
from workers.engine import EngineRefused
from workers.sim.clock import Pace

Trap = Literal["fail", "hang", "exit"]

NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class Line:
    """One token of a script: bytes of the text, or a part of a tool call's arguments."""

    content: bytes
    call: int | None = None
    name: str | None = None  # the tool's, with its first part alone

    def delta(self, call_id: str) -> dict[str, Any] | None:
        """Return what the line adds to a chat delta."""
        if self.call is None:
            return None
        function: dict[str, Any] = {"arguments": self.content.decode()}
        if self.name is None:
            return {"tool_calls": [{"index": self.call, "function": function}]}
        head = {"index": self.call, "id": call_id, "type": "function"}
        return {"tool_calls": [head | {"function": {"name": self.name} | function}]}


@dataclass(frozen=True, slots=True)
class Script:
    """The hook of one request. `lines` is None where the engine speaks for itself."""

    lines: tuple[Line, ...] | None
    texts: int  # how many lines, from the first, are text
    reason: str | None
    logprobs: tuple[float, ...]
    pace: Pace | None
    trap: Trap
    trap_at: int


def script_of(hook: SimHook) -> Script:
    """Read a hook. Raises EngineRefused naming the member that cannot be served."""
    lines: tuple[Line, ...] | None = None
    texts = () if hook.pieces is None else _texts(hook.pieces)
    if hook.pieces is not None or hook.tool_calls is not None:
        lines = texts + _calls(hook)
    trap, trap_at = _trap(hook)
    return Script(
        lines=lines,
        texts=len(texts),
        reason=hook.finish_reason or ("tool_calls" if hook.tool_calls else None),
        logprobs=tuple(_logprob(value) for value in hook.logprobs or ()),
        pace=_pace(hook),
        trap=trap,
        trap_at=trap_at,
    )


def _texts(pieces: tuple[str | HexPiece, ...]) -> tuple[Line, ...]:
    lines = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            lines.append(Line(piece.encode(errors="replace")))
            continue
        try:
            lines.append(Line(bytes.fromhex(piece.hex)))
        except ValueError:
            raise EngineRefused(f"sim.pieces[{index}].hex is not hexadecimal") from None
    return tuple(lines)


def _calls(hook: SimHook) -> tuple[Line, ...]:
    # A call without arguments is a call still: one token of none.
    return tuple(
        Line(part.encode(errors="replace"), index, None if position else call.name)
        for index, call in enumerate(hook.tool_calls or ())
        for position, part in enumerate(call.arguments or ("",))
    )


def _trap(hook: SimHook) -> tuple[Trap, int]:
    """Return the first trap: the generation comes no further than that."""
    places: list[tuple[int, int, Trap]] = []
    members: tuple[tuple[int | None, Trap], ...] = (
        (hook.exit_at, "exit"),
        (hook.fail_at, "fail"),
        (hook.hang_at, "hang"),
    )
    for order, (place, trap) in enumerate(members):
        if place is not None and place < 0:
            raise EngineRefused(f"sim.{trap}_at must be 0 or more")
        if place is not None:
            places.append((place, order, trap))
    if not places:
        return "fail", NEVER
    place, _, trap = min(places)
    return trap, place


def _pace(hook: SimHook) -> Pace | None:
    for name, value in (("ttft_ms", hook.ttft_ms), ("itl_ms", hook.itl_ms)):
        if value is not None and not 0 <= value < math.inf:
            raise EngineRefused(f"sim.{name} must be 0 or more, and finite")
    if hook.ttft_ms is None and hook.itl_ms is None:
        return None
    return Pace(ttft_s=(hook.ttft_ms or 0) / 1000, itl_s=(hook.itl_ms or 0) / 1000)


def _logprob(value: float | str) -> float:
    if value == "-inf":
        return -math.inf
    if isinstance(value, str) or math.isnan(value) or value == math.inf:
        raise EngineRefused('sim.logprobs takes numbers and "-inf"')
    return float(value)

"""What a model's engine can do. Rule: what it cannot do is refused here, by the field's name.

Pure; what any engine here cannot do is refused where the request is read (`schemas.refused`).
"""

from typing import Final

from schemas.errors import InvalidRequest
from schemas.model import ModelCard
from schemas.openai import ChatRequest, CompletionRequest, Generation

_NOT_SIMULATED: Final = ("bad_words", "allowed_token_ids")


def check_able(ask: ChatRequest | CompletionRequest, card: ModelCard) -> None:
    """Check that the model's engine can do what a request asks for. Raises InvalidRequest."""
    if card.simulated:
        _check_simulated(ask)
        return
    if ask.sim is not None:
        raise InvalidRequest("'sim' is for the simulated engine only.", param="sim")
    if ask.temperature == 0 and (ask.n or 1) > 1:
        raise InvalidRequest("At temperature 0 there is one choice.", param="n")  # vLLM's rule
    if isinstance(ask, ChatRequest) and ask.choice != "none" and card.tool_parser is None:
        raise InvalidRequest(
            "This model cannot call tools: its workers have no tool_call_parser.",
            param="tools" if ask.tool_choice is None else "tool_choice",
        )


def _check_simulated(ask: ChatRequest | CompletionRequest) -> None:
    if ask.structured is not None and (ask.sim is None or ask.sim.pieces is None):
        raise InvalidRequest(
            "The simulated engine cannot give its answers a form: only 'sim.pieces' can.",
            param=_form_field(ask),
        )
    for name in _NOT_SIMULATED:
        if getattr(ask, name):
            raise InvalidRequest(f"The simulated engine cannot do '{name}'.", param=name)
    if not isinstance(ask, ChatRequest) or ask.choice in ("none", "auto"):
        return
    if ask.sim is None or not ask.sim.tool_calls:
        raise InvalidRequest(
            "The simulated engine calls tools only where 'sim.tool_calls' says so.",
            param="tool_choice",
        )


def _form_field(ask: Generation) -> str:
    return "response_format" if ask.structured_outputs is None else "structured_outputs"

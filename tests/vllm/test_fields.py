"""Fields with vLLM and a small real model: forms are kept and tools are called, in both modes.

One system serves all tests: starting one takes up to a minute.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import ROOT
from tests.vllm import asking
from tests.vllm.asking import PARIS, WEATHER_IN_PARIS, chat, collect, said, stream
from tests.vllm.forced import call, forced
from tests.vllm.serving import serving

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what vLLM imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

MODEL = Path(
    os.environ.get("HEADRACE_TEST_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct")
).absolute()
NAME = MODEL.name
ARGS = {
    "tool_call_parser": "hermes",
    "max_model_len": 2048,
    # A small model may otherwise fill an object with blanks for ever.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
NO_SCHEMA = {"type": "no type"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(MODEL, ARGS, tmp_path_factory.mktemp("fields")) as found:
        yield found


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def test_an_answer_of_a_schema_is_json_that_the_schema_allows(client: httpx.Client) -> None:
    body = chat("Ann is 41 years old. Who?", response_format=asking.SCHEMA, max_tokens=64)
    for seed in range(2):
        found = json.loads(text_of(collect(client, NAME, body | {"temperature": 1, "seed": seed})))
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 12
        assert 0 <= found["age"] <= 99


def test_a_json_object_is_one(client: httpx.Client) -> None:
    form = {"type": "json_object"}
    body = chat('Write {"a": 1} and no more.', response_format=form, max_tokens=40)
    answer = collect(client, NAME, body)
    assert text_of(answer).lstrip().startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text_of(answer)), dict)


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of tool calls in a stream."""
    return [
        call
        for chunk in chunks
        for part in chunk["choices"]
        for call in part["delta"].get("tool_calls", ())
    ]


@pytest.mark.parametrize("choice", [asking.NAMED, "required"], ids=["named", "required"])
def test_a_strict_tool_call_arrives_complete_in_both_modes(
    client: httpx.Client, choice: Any
) -> None:
    body = chat(WEATHER_IN_PARIS, tools=[asking.WEATHER], tool_choice=choice, max_tokens=64)
    [whole] = said(collect(client, NAME, body))["choices"]
    for _ in range(3):  # a busy machine may have deltas come merged
        chunks = stream(client, NAME, body)
        deltas = deltas_of(chunks)
        if len(deltas) > 2:
            break
    [parts] = asking.joined(chunks)["choices"]
    assert whole == parts
    assert whole["reason"] == ("tool_calls" if choice == "required" else "stop")
    for name, arguments in whole["calls"].values():
        assert name == "get_weather"
        found = json.loads(arguments)
        assert list(found) == ["city"]
        assert isinstance(found["city"], str)
    assert len(deltas) > 2
    assert all(type(call["index"]) is int for call in deltas)
    assert len([call for call in deltas if "id" in call]) == len(whole["calls"]) >= 1


def test_a_call_that_the_model_chooses_arrives_complete_in_both_modes(client: httpx.Client) -> None:
    body = forced(call())
    [whole] = said(collect(client, NAME, body))["choices"]
    [parts] = asking.joined(stream(client, NAME, body))["choices"]
    assert whole == parts
    assert (whole["text"], whole["reason"]) == ("", "tool_calls")
    [(name, arguments)] = whole["calls"].values()
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_log_probabilities_are_finite_in_both_modes(client: httpx.Client) -> None:
    body = chat(PARIS, logprobs=True, top_logprobs=3)
    whole = collect(client, NAME, body)["choices"][0]["logprobs"]["content"]
    chunks = stream(client, NAME, body)
    parts = [part for chunk in chunks for part in chunk["choices"] if part.get("logprobs")]
    streamed = [token for part in parts for token in part["logprobs"]["content"]]
    assert [token["token"] for token in streamed] == [token["token"] for token in whole]
    for token in whole:
        assert all(math.isfinite(each["logprob"]) for each in (token, *token["top_logprobs"]))


def test_two_choices_have_their_own_form(client: httpx.Client) -> None:
    body = chat("Who?", response_format=asking.SCHEMA, n=2, temperature=1, seed=5, max_tokens=64)
    answer = collect(client, NAME, body)
    for choice in range(2):
        assert set(json.loads(text_of(answer, choice))) == {"name", "age"}


@pytest.mark.parametrize(
    "change",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "no grammar"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": NO_SCHEMA},
            }
        },
        {"logit_bias": {"900000": 1}},
        {"allowed_token_ids": [900000]},
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_vllm_refuses_is_a_400(client: httpx.Client, change: dict[str, Any]) -> None:
    answer = client.post(asking.path_of({}), json={"model": NAME} | chat(PARIS) | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"

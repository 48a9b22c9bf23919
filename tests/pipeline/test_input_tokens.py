"""`POST /v1/responses/input_tokens`: the response's own number, through the official SDK."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.asking import refusal
from tests.pipeline.conftest import System

COUNT = "/v1/responses/input_tokens"
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look a place up.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
}
TURNS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Where is the river?"}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "In Ulm."},
]


def sdk(system: System) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=20, max_retries=0)


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "Say hello."},
        {"input": "word " * 5000},
        {"input": "Say hello.", "instructions": "Be brief."},
        {"input": TURNS, "tools": [TOOL], "reasoning": {"effort": "low"}},
    ],
    ids=["text", "long", "instructions", "items and tools"],
)
def test_the_count_is_what_the_response_is_charged(system: System, asked: dict[str, Any]) -> None:
    with sdk(system) as client:
        counted = client.responses.input_tokens.count(model="sim", **asked)
        made = client.responses.create(model="sim", max_output_tokens=1, **asked)
    assert counted.object == "response.input_tokens"
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


def test_a_turn_is_counted_with_those_before_it_by_the_asynchronous_sdk(system: System) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{system.url}/v1", api_key="none", timeout=20, max_retries=0
        ) as client:
            first = await client.responses.create(model="sim", input="a", max_output_tokens=8)
            asked: dict[str, Any] = {"input": "b", "previous_response_id": first.id}
            counted = await client.responses.input_tokens.count(model="sim", **asked)
            second = await client.responses.create(model="sim", max_output_tokens=1, **asked)
            alone = await client.responses.input_tokens.count(model="sim", input="b")
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens > alone.input_tokens

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "none"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", None),
        ({"input": []}, 400, "input", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]", None),
        ({"input": "word " * 40_000}, 400, "input", "context_length_exceeded"),
        ({"conversation": "conv_1"}, 400, "conversation", None),
        ({"truncation": "auto"}, 400, "truncation", None),
        (
            {"previous_response_id": "resp_1"},
            400,
            "previous_response_id",
            "previous_response_not_found",
        ),
    ],
)
def test_what_the_response_would_be_refused_for_is_refused(
    system: System, change: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    with system.client() as client:
        answer = client.post(COUNT, json={"model": "sim", "input": "x"} | change)
    assert answer.status_code == status
    assert answer.headers["x-request-id"].startswith("req_")
    found = refusal(answer)
    assert (found["code"], found["param"]) == (code, param)


def test_nothing_runs_for_a_count(system: System) -> None:
    # An answer is there before its request has left the queue.
    system.wait_at_rest(within_s=system.leaves_within_s)
    with system.client() as client:
        answer: httpx.Response = client.post(COUNT, json={"model": "sim", "input": "x"})
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 12}
    assert system.ledger(answer.headers["x-request-id"])["starts"] == 0
    assert system.queued() == 0


def test_compaction_is_not_served(system: System) -> None:
    with system.client() as client:
        answer = client.post("/v1/responses/compact", json={"model": "sim", "input": "x"})
    assert answer.status_code == 405
    assert refusal(answer)["code"] == "method_not_allowed"

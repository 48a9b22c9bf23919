"""`POST /v1/responses` over the whole path, most of it through the official SDK."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.asking import CHAT, refusal
from tests.pipeline.conftest import System
from tests.sse import events_of

RESPONSES = "/v1/responses"


@pytest.fixture
def sdk(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{system.url}/v1", api_key="none", timeout=20, max_retries=0
    ) as client:
        yield client


def hooked(*pieces: str, **more: Any) -> dict[str, Any]:
    """Return the body's further member that makes the engine say these pieces."""
    return {"sim": {"pieces": pieces} | more}


def test_the_official_sdk_gets_a_response(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(
        model="sim",
        instructions="Be brief.",
        input="Say hello.",
        metadata={"a": "b"},
        temperature=0.5,
        extra_body=hooked("Hel", "lo"),
    )
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.id.startswith("resp_")
    assert response.model == "sim"
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0.5
    assert response.usage is not None
    assert response.usage.output_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + 2


def test_the_official_sdk_streams_what_it_collects(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "input": "Tell me.", "max_output_tokens": 30}
    whole = sdk.responses.create(**asked)
    with sdk.responses.stream(**asked) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "".join(deltas) == whole.output_text
    assert whole.status == last.response.status == "incomplete"
    assert whole.incomplete_details == last.response.incomplete_details
    assert whole.usage is not None
    assert last.response.usage is not None
    assert whole.usage.output_tokens == last.response.usage.output_tokens == 30


def test_a_response_says_what_a_chat_of_its_messages_says(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(
        model="sim",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tell me."},
        ],
        seed=3,
        max_tokens=20,
    )
    response = sdk.responses.create(
        model="sim",
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Tell me."}]}],
        max_output_tokens=20,
        extra_body={"seed": 3},
    )
    assert response.output_text == chat.choices[0].message.content


TURNS = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Well,"}]


@pytest.mark.parametrize(
    ("plain", "more"),
    [
        (hooked("one ", "two <E", "ND> three"), {"stop": "<END>"}),
        (
            hooked("one ", "two <E", "ND> three") | {"stop": ["<END>"]},
            {"include_stop_str_in_output": True},
        ),
        ({"seed": 1}, {"seed": 2}),
        ({"seed": 1}, {"min_tokens": 300}),
        ({"seed": 1}, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_vllm_adds_does_to_a_response_what_it_does_to_a_chat(
    system: System, plain: dict[str, Any], more: dict[str, Any]
) -> None:
    def said(by: str, **asked: Any) -> tuple[str, int, int]:
        with system.client() as client:
            answer = client.post(by, json={"model": "sim"} | asked)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        usage = found["usage"]
        if by == CHAT:
            text = found["choices"][0]["message"]["content"]
            return text, usage["prompt_tokens"], usage["completion_tokens"]
        [message] = found["output"]
        return message["content"][0]["text"], usage["input_tokens"], usage["output_tokens"]

    without = said(RESPONSES, input=TURNS, max_output_tokens=400, **plain)
    given = said(RESPONSES, input=TURNS, max_output_tokens=400, **plain | more)
    assert without == said(CHAT, messages=TURNS, max_tokens=400, **plain)
    assert given == said(CHAT, messages=TURNS, max_tokens=400, **plain | more)
    assert given != without


def test_calls_of_tools_are_items(sdk: openai.OpenAI) -> None:
    calls = [
        {"name": "weather", "arguments": ['{"at"', ': "Bern"}']},
        {"name": "time", "arguments": ["{", "}"]},
    ]
    asked: dict[str, Any] = {
        "model": "sim",
        "input": "Weather?",
        "tools": [
            {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
            for name in ("weather", "time")
        ],
        "extra_body": hooked("Let me see.", tool_calls=calls),
    }
    whole = sdk.responses.create(**asked)
    with sdk.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, first, second = response.output
        assert message.type == "message"
        assert first.type == second.type == "function_call"
        assert (first.name, first.arguments) == ("weather", '{"at": "Bern"}')
        assert (second.name, second.arguments) == ("time", "{}")
        assert first.call_id != second.call_id


def test_log_probabilities_are_included_where_asked(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(
        model="sim",
        input="x",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body=hooked("a", "b", logprobs=[-0.5, "-inf"]),
    )
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [token.logprob for token in part.logprobs] == [-0.5, -9999.0]


def test_events_have_names_and_ids_and_no_done(system: System) -> None:
    body = {"model": "sim", "input": "x", "stream": True} | hooked("a", "b")
    with system.client() as client:
        answer = client.post(RESPONSES, json=body)
    events = events_of(answer.content)
    assert [event.name for event in events] == [event.json["type"] for event in events]
    assert [event.id for event in events] == [str(number) for number in range(len(events))]
    assert events[-1].name == "response.completed"
    request = answer.headers["x-request-id"]
    name = request.replace("req_", "resp_")
    assert events[0].json["response"]["id"] == name
    with system.client() as client:
        again = client.get(f"{RESPONSES}/{name}", params={"stream": "true"})
        url = f"{system.socket_end.url}/v1/streams/{request}"
        rest = client.get(url, headers={"last-event-id": "3"})
    assert again.content == answer.content
    assert events_of(rest.content) == events[4:]


def test_the_opening_does_not_wait_for_the_first_token(system: System) -> None:
    body = {"model": "sim", "input": "x", "stream": True} | hooked("a", ttft_ms=120_000)
    with system.client() as client, client.stream("POST", RESPONSES, json=body) as answer:
        raw = b""
        for part in answer.iter_raw():
            raw += part
            if raw.count(b"\n\n") == 2:
                break
    names = [event.name for event in events_of(raw)]
    assert names == ["response.created", "response.in_progress"]
    system.wait_at_rest(within_s=system.leaves_within_s)


def test_an_engine_s_failure_is_a_failed_response(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "sim",
        "input": "x",
        "extra_body": hooked("a", "b", "c", fail_at=2),
    }
    events = list(sdk.responses.create(**asked, stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert last.response.output_text == "ab"
    with pytest.raises(openai.InternalServerError) as error:
        sdk.responses.create(**asked)
    assert error.value.code == "engine_error"


@pytest.mark.parametrize(
    ("more", "status", "param", "code"),
    [
        ({"model": "nonsense"}, 404, "model", "model_not_found"),
        ({"input": []}, 400, "input", None),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", None),
        ({"max_output_tokens": 10**9}, 400, "max_output_tokens", "context_length_exceeded"),
        ({"input": "word " * 100_000}, 400, "input", "context_length_exceeded"),
        ({"stream": True, "input": 5}, 400, "input", None),
        ({"structured_outputs": {"choice": ["a"]}}, 400, "structured_outputs", None),
        ({"bad_words": ["a"]}, 400, "bad_words", None),
        ({"min_tokens": 9, "max_output_tokens": 8}, 400, "min_tokens", None),
        ({"continue_final_message": True}, 400, "continue_final_message", None),
        ({"vllm_xargs": {"a": 1}}, 400, "vllm_xargs", None),
        ({"service_tier": "flex"}, 400, "service_tier", None),
    ],
)
def test_a_refusal_is_in_a_response_s_own_words(
    system: System, more: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    with system.client() as client:
        answer = client.post(RESPONSES, json={"model": "sim", "input": "x"} | more)
    assert answer.status_code == status
    error = refusal(answer)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 100_000),
        b'{"model": "sim", "input": "x", "temperature": NaN}',
        b'{"model": "sim", "input": "\\ud800"}',
        b'{"model": "sim", "input": [{"type": "message"}]}',
        b'{"model": "sim", "input": [{"type": 5, "role": "user", "content": "x"}]}',
        b'{"model": "sim", "input": "x", "tools": [{}]}',
        b'{"model": "sim", "input": "x", "previous_response_id": "' + b"r" * 100_000 + b'"}',
    ],
    ids=lambda body: str(body[:50]),
)
def test_a_bad_body_is_400_and_the_next_good_one_succeeds(system: System, body: bytes) -> None:
    with system.client() as client:
        answer = client.post(RESPONSES, content=body)
        assert answer.status_code == 400
        refusal(answer)
        good = {"model": "sim", "input": "x"} | hooked("a")
        assert client.post(RESPONSES, json=good).status_code == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_other_methods_are_not_allowed(system: System, method: str) -> None:
    with httpx.Client(base_url=system.url, timeout=10) as client:
        assert client.request(method, RESPONSES).status_code == 405

"""Requests that are well-formed and mean harm: an answer in the API's shape, and all live on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.memory import peak_bytes, resident_bytes
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import Node, System, worker
from tests.servers import wait_ready
from tests.waiting import wait_for


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, dict[str, Any]] = {
    "an integer over 64 bits in the hook": {"sim": {"fail_at": 2**70}},
    "an integer under 64 bits in the hook": {"sim": {"hang_at": -(2**70)}},
    "a pace beyond any clock": {"sim": hook("a", ttft_ms=-1e308)},
    "a bad log probability": {"logprobs": True, "sim": hook("a", logprobs=["nan"])},
    "a negative trap": {"sim": {"fail_at": -5}},
    "a hook's piece that is no hex": {"sim": hook({"hex": "zz"})},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hook_that_cannot_be_served_is_the_clients_error(system: System, kind: str) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(**HOSTILE[kind]), timeout=30)
        assert refusal(answer)
        assert refusal(answer)["code"] != "internal_error", answer.text
        assert collect(client, chat(sim=hook("lives")))["choices"][0]["message"]["content"]


ANSWERED: dict[str, dict[str, Any]] = {
    "deep tool calls": {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [{"a": _nested(900)}]}]
    },
    "deep tools": {"tools": [{"type": "function", "function": _nested(900)}]},
    "a tool call of numbers over 64 bits": {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [{"a": 2**70}]}]
    },
    "a template in the content": {
        "messages": [{"role": "user", "content": "{{ ''.__class__ }}{% for x in y %}"}]
    },
    "special tokens in the content": {"messages": [{"role": "user", "content": "<|im_end|>" * 50}]},
    "a content of null": {"messages": [{"role": "user", "content": None}]},
    "parts without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "a bias for a token that is not": {"logit_bias": {"99999999": 5}},
    "128 choices": {"n": 128},
    "a name of a megabyte": {"user": "u" * 1_000_000, "prompt_cache_key": "k" * 1_000_000},
    "the smallest seed": {"seed": -(2**63)},
    "the largest seed": {"seed": 2**63 - 1},
    "a session with a surrogate pair": {"session_id": "😀\u0000"},
    "tokens without text": {"sim": hook("", "", "")},
}


@pytest.mark.parametrize("kind", ANSWERED)
def test_an_odd_request_is_served_or_refused_but_never_our_fault(system: System, kind: str) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(max_tokens=2) | ANSWERED[kind], timeout=30)
    assert answer.status_code in (200, 400, 413), answer.text
    if answer.status_code != 200:
        refusal(answer)


PROMPTS: dict[str, Any] = {
    "a token outside the vocabulary": [2**31 - 1],
    "an empty string": "",
    "no token": [],
    "no token in a list": [[]],
    "two prompts": ["a", "b"],
    "two token prompts": [[1], [2]],
    "a mix": [1, "a"],
    "a negative token": [-1],
    "a token over 64 bits": [2**70],
    "a boolean": [True],
    "an object": {"text": "a"},
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_that_cannot_be_served_is_400_naming_it(system: System, kind: str) -> None:
    body = {"model": "sim", "prompt": PROMPTS[kind], "max_tokens": 2}
    with system.client() as client:
        answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    param = refusal(answer)["param"]
    assert param is not None
    assert param.startswith("prompt")


@pytest.mark.parametrize("prompt", ["one", ["one"]])
def test_a_prompt_in_a_list_of_one_is_the_prompt(system: System, prompt: Any) -> None:
    body = {"model": "sim", "prompt": "one", "max_tokens": 8}
    with system.client() as client:
        plain = collect(client, body, COMPLETIONS)
        listed = collect(client, body | {"prompt": prompt}, COMPLETIONS)
    assert listed["choices"] == plain["choices"]


def test_a_prompt_as_token_ids_is_counted_by_them(system: System) -> None:
    body = {"model": "sim", "prompt": [300, 301, 302], "max_tokens": 8}
    with system.client() as client:
        plain = collect(client, body, COMPLETIONS)
        nested = collect(client, body | {"prompt": [[300, 301, 302]]}, COMPLETIONS)
    assert plain["usage"]["prompt_tokens"] == 3
    assert nested["choices"] == plain["choices"]


def test_a_completion_makes_16_tokens_unless_told_otherwise(system: System) -> None:
    body = {"model": "sim", "prompt": "Once", "ignore_eos": True}
    with system.client() as client:
        assert collect(client, body, COMPLETIONS)["usage"]["completion_tokens"] == 16


def test_a_script_of_no_pieces_is_an_empty_answer_in_both_modes(system: System) -> None:
    with system.client() as client:
        whole = collect(client, chat(sim=hook()))
        parts = stream(client, chat(sim=hook()))
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 0
    assert parts.text() == ""
    assert parts.reasons() == {0: whole["choices"][0]["finish_reason"]}


def test_a_finish_reason_of_the_hook_arrives(system: System) -> None:
    with system.client() as client:
        whole = collect(client, chat(sim=hook("a", finish_reason="content_filter")))
    assert whole["choices"][0]["finish_reason"] == "content_filter"


def test_one_failing_request_leaves_the_others_of_its_worker_alone(system: System) -> None:
    with system.client() as client:
        for number in range(20):
            bad = client.post(CHAT, json=chat("same", sim=hook("a", "b", fail_at=number % 2)))
            assert refusal(bad)["code"] == "engine_error"
            assert collect(client, chat("same", sim=hook("ok")))["choices"][0]["finish_reason"]


@pytest.fixture
def victim(system: System, tmp_path: Path) -> Iterator[Node]:
    """A worker of its own, since what happens to it may happen to it only."""
    found = worker("victim-0", system.nats_url, tmp_path, "--served-model-name", "victim")
    try:
        wait_ready(found.process, found.admin_url)
        wait_for(lambda: system.knows("victim"), within_s=15, what="the model")
        yield found
    finally:
        found.process.kill()


def test_a_pace_of_years_does_not_stop_the_worker(system: System, victim: Node) -> None:
    body = chat(model="victim", stream=True, sim=hook("a", ttft_ms=1e300))
    ledger = f"{victim.admin_url}/sim/requests"
    with system.client() as client:
        with client.stream("POST", CHAT, json=body) as answer:
            if answer.status_code == 200:
                wait_for(lambda: bool(client.get(ledger).json()), within_s=15, what="a start")
            assert client.get(f"{victim.admin_url}/healthz", timeout=20).status_code == 200
        body = chat(model="victim", sim=hook("lives"))
        assert collect(client, body)["choices"][0]["message"]["content"] == "lives"


def test_a_long_stop_string_takes_memory_of_its_own_order_only(
    system: System, victim: Node
) -> None:
    before = resident_bytes(victim.process.pid)
    body = chat(model="victim", max_tokens=2, stop=["x" * 12_000])
    with system.client() as client:
        assert client.post(CHAT, json=body, timeout=30).status_code in (200, 400)
    peak = peak_bytes(victim.process.pid)
    assert peak - before < 20 * 1024 * 1024

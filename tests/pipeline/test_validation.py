"""What cannot be served is refused in the API's own shape, and the process lives on."""

import json
import socket
from typing import Any

import pytest

from tests.memory import own_bytes
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, refusal
from tests.pipeline.conftest import System
from tests.pipeline.fuzz import malformed

LIMIT_BYTES = 16 * 1024 * 1024
NUMBERS = ["null", "0", "-1", "1e12", '"5"', "1.5", "NaN", str(2**70), "Infinity", "-Infinity"]
NO_JSON = {"NaN", "Infinity", "-Infinity"}
# What each field takes of NUMBERS; null stands for the default everywhere.
TAKEN = {
    "max_tokens": {"null"},
    "max_completion_tokens": {"null"},
    "temperature": {"null", "0", "1.5"},
    "top_p": {"null"},
    "n": {"null"},
    "seed": {"null", "0", "-1"},
    "presence_penalty": {"null", "0", "-1", "1.5"},
    "frequency_penalty": {"null", "0", "-1", "1.5"},
    "top_logprobs": {"null", "0"},
    "top_k": {"null", "0", "-1"},
    "min_p": {"null", "0"},
    "repetition_penalty": {"null", "1.5"},
    "min_tokens": {"null", "0"},
    "priority": {"null", "0"},
    "logprobs": {"null", "0"},
    "best_of": {"null"},
}
CHATS_OWN = {"max_completion_tokens", "top_logprobs"}
COMPLETIONS_OWN = {"logprobs", "best_of"}
ASKED = [
    *((CHAT, field) for field in sorted(TAKEN.keys() - COMPLETIONS_OWN)),
    *((COMPLETIONS, field) for field in sorted(TAKEN.keys() - CHATS_OWN)),
]


def _raw(path: str, field: str, value: str) -> bytes:
    more = '"logprobs":true,' if field == "top_logprobs" else ""
    bound = '"max_tokens":2,' if field != "max_tokens" else ""
    prompt = '"messages":[{"role":"user","content":"x"}]' if path == CHAT else '"prompt":"x"'
    return f'{{"model":"sim",{more}{bound}{prompt},"{field}":{value}}}'.encode()


@pytest.mark.parametrize(("path", "field"), ASKED)
def test_numbers_out_of_range_are_400_with_their_param(
    system: System, path: str, field: str
) -> None:
    with system.client() as client:
        for value in NUMBERS:
            answer = client.post(path, content=_raw(path, field, value))
            if value in TAKEN[field]:
                assert answer.status_code == 200, (value, answer.text)
                continue
            assert answer.status_code == 400, (value, answer.text)
            error = refusal(answer)
            assert error["type"] == "invalid_request_error"
            assert error["param"] == (None if value in NO_JSON else field), value


def test_null_is_the_default_of_every_field(system: System) -> None:
    fields = [
        *(TAKEN.keys() - COMPLETIONS_OWN),
        "stop",
        "stream",
        "stream_options",
        "logit_bias",
        "user",
        "logprobs",
    ]
    fields += ["tools", "response_format", "ignore_eos", "session_id", "prompt_cache_key", "sim"]
    with system.client() as client:
        plain = collect(client, chat(seed=None))
        nulls = collect(client, chat(**dict.fromkeys(fields)))
    assert nulls["choices"] == plain["choices"]


def test_unknown_fields_and_those_of_the_envelope_have_no_effect(system: System) -> None:
    with system.client() as client:
        plain = collect(client, chat())
        envelope = {"request": "req_1", "tenant": "b", "reply": "replies.a.b.c", "version": 9}
        ours = {"shape": [], "deadline_s": 1, "prompt_": "x", "parsing": {}}
        more = collect(client, chat(**envelope, **ours, top_q="x", extra_body={"a": [None]}))
    assert more["choices"] == plain["choices"]


@pytest.mark.parametrize("name", ["none", "sim ", "SIM", "si.m", "*", ">", "a/b", "x" * 5000, "\0"])
def test_an_unknown_model_is_404_and_never_queued(system: System, name: str) -> None:
    system.wait_at_rest(within_s=system.leaves_within_s)
    before = system.api("STREAM.INFO.REQUESTS")["state"]["last_seq"]
    with system.client() as client:
        answer = client.post(CHAT, json=chat(model=name))
    assert answer.status_code == 404
    error = refusal(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert system.api("STREAM.INFO.REQUESTS")["state"]["last_seq"] == before


def test_content_as_parts_is_the_same_prompt_as_a_string(system: System) -> None:
    text = {"type": "text", "text": "What is it?"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is it?"},
    ]
    parts = [{"content": [text], "role": "user"} if n == 2 else t for n, t in enumerate(turns)]
    with system.client() as client:
        plain = collect(client, {"model": "sim", "messages": turns, "max_tokens": 20})
        again = collect(client, {"max_tokens": 20, "messages": parts, "model": "sim"})
    assert again["choices"] == plain["choices"]
    assert again["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


BODIES = {
    "empty": b"",
    "blank": b" \n",
    "malformed": b'{"model":"sim",',
    "trailing comma": b'{"model":"sim","messages":[],}',
    "two values": b"{}{}",
    "an array": b"[]",
    "a string": b'"model"',
    "null": b"null",
    "invalid UTF-8": b'{"model":"sim","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "overlong UTF-8": b'{"model":"\xc0\x80","messages":[]}',
    "UTF-16": '{"model":"sim"}'.encode("utf-16"),
    "100,000 brackets": b"[" * 100_000,
    "100,000 objects": b'{"messages":' * 100_000,
    "brackets in an unknown field": b'{"model":"sim","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "brackets in tools": b'{"model":"sim","messages":[{"role":"user","content":"x"}],"tools":'
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}",
    "a form": b"model=sim&messages=x",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_is_no_request_is_400(system: System, kind: str, path: str) -> None:
    with system.client() as client:
        answer = client.post(path, content=BODIES[kind])
    assert answer.status_code in (400, 415), answer.text
    refusal(answer)
    assert all(node.process.alive for node in system.front)


WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": 40_000}, "max_tokens"),
    ({"sim": {"unknown": 1}}, "sim"),
    ({"sim": {"pieces": 5}}, "sim"),
    ({"user": 5}, "user"),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[json.dumps(c)[:60] for c, _ in WRONG])
def test_a_wrong_field_is_400_naming_it(system: System, change: dict[str, Any], param: str) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat() | change)
    assert answer.status_code == 400, answer.text
    found = refusal(answer)["param"]
    assert found is not None
    assert found == param or found.startswith(f"{param}.")


def test_a_refused_hook_is_an_error_not_a_silent_stop(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(sim={"fail_at": -1}))
    assert answer.status_code >= 400
    assert refusal(answer)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_405_in_the_apis_shape(system: System, method: str, path: str) -> None:
    headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    with system.client() as client:
        answer = client.request(method, path, headers=headers if method == "OPTIONS" else {})
    assert answer.status_code in (204, 405)
    if answer.status_code == 405:
        assert answer.headers["allow"] == "POST"
        if method != "HEAD":
            assert refusal(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/nothing", "/%00"])
def test_an_unknown_path_is_404_in_the_apis_shape(system: System, path: str) -> None:
    with system.client() as client:
        for method in ("GET", "POST"):
            answer = client.request(method, path)
            assert answer.status_code == 404
            assert refusal(answer)["type"] == "invalid_request_error"


def test_the_request_id_is_made_by_us_and_never_repeated(system: System) -> None:
    with system.client() as client:
        own = {"x-request-id": "mine"}
        answers = [client.post(CHAT, json=chat(max_tokens=1), headers=own) for _ in range(3)]
        answers += [client.get("/v1/models", headers=own), client.get("/none", headers=own)]
        answers.append(client.post(CHAT, content=b"", headers=own))
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert all(len(identity) >= len("req_") + 24 for identity in ids)
    assert answers[0].json()["id"].endswith(ids[0].removeprefix("req_"))


def test_a_body_over_16_mib_is_413_naming_the_limit(system: System) -> None:
    body = chat("x" * LIMIT_BYTES)
    with system.client() as client:
        known = client.post(CHAT, json=body)
        pieces = (b"x" * 1_000_000 for _ in range(18))
        chunked = client.post(CHAT, content=pieces)
    for answer in (known, chunked):
        assert answer.status_code == 413
        error = refusal(answer)
        assert error["code"] == "request_too_large"
        assert str(LIMIT_BYTES) in error["message"]


def test_a_declared_length_over_the_limit_is_refused_before_the_body(system: System) -> None:
    host, port = system.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode())
        assert client.recv(20).startswith(b"HTTP/1.1 413")


def test_a_request_over_the_brokers_payload_limit_is_413_at_once(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(sim=hook("y" * 1_100_000)), timeout=20)
    assert answer.status_code == 413
    error = refusal(answer)
    assert error["code"] == "request_too_large"
    assert str(1024 * 1024) in error["message"]


def test_twenty_bad_requests_then_a_good_one_succeeds(system: System) -> None:
    with system.client() as client:
        for number in range(20):
            assert client.post(CHAT, json=chat(n=-number)).status_code == 400
        assert collect(client, chat(sim=hook("good")))["choices"][0]["message"]["content"] == "good"


@pytest.mark.slow
def test_a_thousand_malformed_requests_are_4xx_and_memory_stays_flat(system: System) -> None:
    bodies = malformed(seed=11, count=1000)
    with system.client() as client:
        for body in bodies[:200]:
            client.post(CHAT, content=body)
        before = sum(own_bytes(door.process.pid) for door in system.doors)
        for body in bodies:
            answer = client.post(CHAT, content=body)
            assert 400 <= answer.status_code < 500, (body[:300], answer.text)
            refusal(answer)
        after = sum(own_bytes(door.process.pid) for door in system.doors)
        assert collect(client, chat(sim=hook("lives")))
    assert after - before < 8 * 1024 * 1024
    assert all("Traceback" not in node.process.said() for node in system.front)

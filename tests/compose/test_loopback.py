"""compose's path as its clients see it: nginx's and NATS' own configuration, and our tiers."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.compose.conftest import KEY, PATIENCE_S, STREAMERS, Composed
from tests.pipeline.asking import CHAT, chat, collect, hook, refusal, stream
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SAID = ["one ", "two ", "three"]


def sdk(system: Composed, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{system.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
    )


def hooked(**more: Any) -> dict[str, Any]:
    return {"sim": hook(*SAID, **more)}


def location(client: httpx.Client, **more: Any) -> str:
    """Return where a POST is sent."""
    answer = client.post(CHAT, json=chat(stream=True, **more))
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def test_the_sdk_streams_and_collects_with_the_key(composed: Composed) -> None:
    with sdk(composed) as client:
        chunks = client.chat.completions.create(
            model="sim", messages=HELLO, stream=True, extra_body=hooked()
        )
        assert [c.choices[0].delta.content or "" for c in chunks][:3] == SAID
        whole = client.chat.completions.create(model="sim", messages=HELLO, extra_body=hooked())
        assert whole.choices[0].message.content == "".join(SAID)
        assert [model.id for model in client.models.list()] == ["sim"]


def test_both_streamers_are_reached_by_their_paths_on_the_same_origin(composed: Composed) -> None:
    paths: set[str] = set()

    def both() -> bool:
        paths.add(location(client, max_tokens=1).rpartition("/v1/replies/")[0])
        return len(paths) >= len(STREAMERS)

    with composed.client() as client:  # one that stands still for a moment is passed over
        wait_for(both, within_s=15, what=lambda: f"both, not {paths}")
    assert paths == {f"/streams/{host}" for host in STREAMERS}


def test_a_token_is_passed_on_when_it_comes(composed: Composed) -> None:
    # Nothing comes behind the fifth: who waited for more would wait for longer than the client.
    body = chat(stream=True, sim=hook(*"abcdef", ttft_ms=0, itl_ms=100, hang_at=5))
    said = []
    with (
        composed.client() as client,
        client.stream("POST", CHAT, json=body, follow_redirects=True) as answer,
    ):
        for line in answer.iter_lines():
            said += [line] if '"content"' in line else []
            if len(said) == 5:
                break
    assert [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in said] == [*"abcde"]


@pytest.mark.parametrize("key", ["wrong", None])
def test_without_the_key_it_is_401(composed: Composed, key: str | None) -> None:
    with composed.client(key) as client:
        answer = client.post(CHAT, json=chat())
    assert answer.status_code == 401
    assert refusal(answer)["code"] == "invalid_api_key"
    if key is not None:
        with sdk(composed, key) as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_websocket_ends_at_a_streamer(composed: Composed, path: str) -> None:
    url = composed.url.replace("http", "ws") + path
    ask = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    body = {"model": "sim", "sim": hook(*SAID)} | ask
    headers = {"authorization": f"Bearer {KEY}"}
    with connect(url, additional_headers=headers, open_timeout=PATIENCE_S) as socket:
        socket.send(json.dumps({"id": "a", "body": body}))
        said = ""
        while not (message := json.loads(socket.recv(timeout=PATIENCE_S))).get("done"):
            [choice] = message["chunk"]["choices"]
            said += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert said == "".join(SAID)


def test_a_websocket_with_a_wrong_key_is_closed(composed: Composed) -> None:
    url = composed.url.replace("http", "ws") + CHAT
    headers = {"authorization": "Bearer wrong"}
    with (
        connect(url, additional_headers=headers, open_timeout=PATIENCE_S) as socket,
        pytest.raises(ConnectionClosed, match="1008"),
    ):
        socket.recv(timeout=PATIENCE_S)


def test_a_tampered_ticket_is_403(composed: Composed) -> None:
    with composed.client() as client:
        there = location(client, max_tokens=1)
        for wrong in (there[:-1] + ("A" if there[-1] != "A" else "B"), there + "%0d", there + "/x"):
            answer = client.get(wrong)
            assert answer.status_code == 403, wrong
            assert refusal(answer)["code"] == "forbidden"


def test_a_ticket_is_good_once_and_at_its_own_streamer(composed: Composed) -> None:
    with composed.client(None) as client:
        with composed.client() as keyed:
            there = location(keyed, max_tokens=1)
            assert client.get(there).status_code == 200
            assert client.get(there).status_code == 410
            other = location(keyed, max_tokens=1)
        first, second = STREAMERS if STREAMERS[0] in other else STREAMERS[::-1]
        assert client.get(other.replace(first, second)).status_code == 410


@pytest.mark.parametrize("host", ["127.0.0.1", "example.org", "nats", "127.0.0.22", ""])
def test_nginx_is_no_proxy_to_other_hosts(composed: Composed, host: str) -> None:
    with composed.client() as client:
        answer = client.get(f"/streams/{host}/v1/replies/a.b")
    assert answer.status_code == 403
    assert refusal(answer)["code"] == "forbidden"


def test_a_streamer_that_is_gone_is_503_in_the_apis_shape(composed: Composed) -> None:
    with composed.client() as client:
        answer = client.get("/streams/127.0.0.4/v1/replies/a.b")
    assert answer.status_code == 503
    assert refusal(answer)["code"] == "stream_interrupted"
    assert int(answer.headers["retry-after"]) >= 1


def test_no_log_holds_a_ticket_or_the_key(composed: Composed) -> None:
    with composed.client() as client:
        ticket = location(client, max_tokens=1).rpartition("/")[2]
        assert client.get("/streams/127.0.0.2/v1/replies/" + ticket).status_code in (200, 410)
    log = composed.processes["nginx"]
    wait_for(lambda: '"/streams/…"' in log.said(), within_s=15, what="the line")
    assert ticket not in log.said()
    assert not any(KEY in process.said() for process in composed.processes.values())


def test_a_link_that_nginx_cannot_follow_is_in_no_log(composed: Composed) -> None:
    """nginx writes the whole address of a request that it cannot pass on into its error log, where
    an EventSource's ticket was good for a quarter of an hour."""
    log = composed.processes["nginx"]
    with composed.client() as client:
        request = client.post(CHAT, json=chat(stream=True, **hooked())).headers["x-request-id"]
        resumed = client.get(f"/v1/streams/{request}", headers={"accept": "text/event-stream"})
        ticket = resumed.headers["location"].rpartition("/")[2]
        before = log.said().count('"/streams/…" 503')
        assert client.get("/streams/127.0.0.4/v1/replies/" + ticket).status_code == 503
    wait_for(
        lambda: log.said().count('"/streams/…" 503') > before, within_s=15, what="the access line"
    )
    assert ticket not in log.said()


def test_a_body_of_16_mib_passes_and_a_larger_one_is_413(composed: Composed) -> None:
    mib16 = 16 * 1024 * 1024
    with composed.client() as client:
        for size, status in ((mib16, 400), (mib16 + 1, 413)):
            answer = client.post(CHAT, content=b" " * size)
            assert answer.status_code == status
            refusal(answer)


def test_health_is_shown_and_metrics_are_not(composed: Composed) -> None:
    with composed.client(None) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200
        for path in ("/metrics", "/nothing"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert refusal(answer)["code"] == "not_found"


def test_a_request_that_is_no_http_is_400_in_the_apis_shape(composed: Composed) -> None:
    with composed.client() as client:
        answer = client.get("/v1/models", headers={"x": "a" * 40_000})
    assert answer.status_code == 400
    assert refusal(answer)["type"] == "invalid_request_error"


def test_an_upgrade_to_something_else_is_a_plain_request(composed: Composed) -> None:
    headers = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": ""}
    with composed.client() as client:
        answer = client.post(CHAT, json=chat(**hooked()), headers=headers, follow_redirects=True)
    assert answer.json()["choices"][0]["message"]["content"] == "".join(SAID)


def test_a_client_that_leaves_frees_its_slot(composed: Composed) -> None:
    url = f"http://127.0.0.1:{composed.ports['worker admin']}/metrics"

    def held() -> float:
        text = httpx.get(url, timeout=PATIENCE_S).text
        [count] = re.findall(r"^headrace_worker_requests_inflight (\S+)", text, re.M)
        return float(count)

    body = chat(stream=True, sim=hook("x", "y", hang_at=1))  # it does not end by itself
    with (
        composed.client() as client,
        client.stream("POST", CHAT, json=body, follow_redirects=True) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: held() == 1, within_s=PATIENCE_S, what="a busy worker")
    wait_for(lambda: held() == 0, within_s=PATIENCE_S, what="an idle worker")


def test_with_the_ingress_down_it_is_503_in_the_apis_shape_until_it_is_back(
    composed: Composed,
) -> None:
    composed.processes["ingress"].stop()
    try:
        with composed.client() as client:
            answer = client.post(CHAT, json=chat())
            assert answer.status_code == 503
            assert refusal(answer)["code"] == "unavailable"
            assert int(answer.headers["retry-after"]) >= 1
        with sdk(composed) as client, pytest.raises(openai.InternalServerError) as error:
            client.models.list()
        assert error.value.type == "service_unavailable_error"
    finally:
        composed.start_ingress()
    with composed.client() as client:
        wait_for(
            lambda: "sim" in client.get("/v1/models").text, within_s=PATIENCE_S, what="the model"
        )
        client.follow_redirects = True
        assert stream(client, chat(**hooked())).text() == "".join(SAID)
        assert collect(client, chat(**hooked()))["usage"]["completion_tokens"] == len(SAID)


def test_a_request_without_websocket_handshake_is_no_socket(composed: Composed) -> None:
    url = composed.url.replace("http", "ws") + "/v1/models"
    with pytest.raises(InvalidStatus):
        connect(
            url,
            additional_headers={"authorization": f"Bearer {KEY}"},
            open_timeout=PATIENCE_S,
        )

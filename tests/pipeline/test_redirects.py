"""Where ingress and streamers are apart: tickets, clients that do not follow, and deaths."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace import topology
from headrace.bus import Bus
from headrace.ticket import Ticket, load_tickets
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import Mode, Node, System, front, models_at
from tests.servers import START_S_MAX, NatsServer, answers, node, wait_ready
from tests.sse import events_of
from tests.waiting import wait_for

pytestmark = pytest.mark.parametrize("mode", ["split"], indirect=True, scope="session")

PIECES = [f"<{number}>" for number in range(40)]


def post(system: System, body: dict[str, Any]) -> httpx.Response:
    """Ask, and do not follow the redirect."""
    with httpx.Client(base_url=system.url, timeout=30, verify=False) as client:
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 303, answer.text
        return answer


def get(url: str) -> httpx.Response:
    with httpx.Client(timeout=20, verify=False) as client:
        return client.get(url)


def streamers_known(system: System, count: int) -> None:
    """Wait until every ingress sees so many live streamers."""

    def known() -> bool:
        with httpx.Client(timeout=30, verify=False) as client:
            pages = [client.get(f"{door.admin_url}/readyz").json() for door in system.doors]
        return all(page["streamers"] == count for page in pages)

    wait_for(known, within_s=15, what=f"{count} live streamers")


@pytest.fixture
def third(system: System, tmp_path: Path) -> Iterator[Node]:
    """A further streamer, which a test may end; what it leaves is forgotten before the next."""
    found = front("streamer", system.nats_url, tmp_path, name="third")
    try:
        wait_ready(found.process, found.admin_url)
        streamers_known(system, 3)
        yield found
    finally:
        found.process.kill()
        streamers_known(system, 2)


def sent_to(system: System, streamer: Node, body: dict[str, Any]) -> httpx.Response:
    """Ask until the redirect names one streamer; follow the others and leave, so that they end.

    None names it while it is passed over, as it is where it stood still a moment ago.
    """
    found: list[httpx.Response] = []

    def is_sent_there() -> bool:
        answer = post(system, body)
        location = answer.headers["location"]
        if location.startswith(streamer.url + "/"):
            found.append(answer)
            return True
        with httpx.stream("GET", location, timeout=20, verify=False) as other:
            assert other.status_code == 200
        return False

    wait_for(is_sent_there, within_s=5, what="a redirect to it")
    return found[0]


def one_waits_at(*streamers: Node) -> bool:
    """Tell whether one reply has begun whose client has not come."""
    waiting = "headrace_streamer_replies_waiting"
    return sum(streamer.metrics()[waiting] for streamer in streamers) == 1


def test_a_post_is_sent_on_to_a_live_streamer_and_is_never_cached(system: System) -> None:
    answer = post(system, chat(stream=True, sim=hook("a")))
    location = answer.headers["location"]
    assert any(location.startswith(f"{node.url}/v1/replies/") for node in system.streamers)
    assert answer.headers["cache-control"] == "no-store"
    followed = get(location)
    assert followed.headers["x-request-id"] == answer.headers["x-request-id"]
    assert followed.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("streamed", [True, False])
def test_who_comes_after_the_end_gets_the_whole_answer(system: System, streamed: bool) -> None:
    answer = post(system, chat(stream=streamed, sim=hook(*PIECES, ttft_ms=0, itl_ms=0)))
    wait_for(lambda: system.queued() == 0, within_s=15, what="the end of the request")
    followed = get(answer.headers["location"])
    assert followed.status_code == 200
    if streamed:
        assert [piece for piece in PIECES if piece in followed.text] == PIECES
        assert events_of(followed.content)[-1].data == "[DONE]"
    else:
        assert followed.json()["choices"][0]["message"]["content"] == "".join(PIECES)


def test_who_comes_in_the_middle_misses_and_repeats_nothing(system: System) -> None:
    for delay_s in (0.0, 0.05, 0.1, 0.2, 0.4):
        answer = post(system, chat(stream=True, sim=hook(*PIECES, ttft_ms=0, itl_ms=10)))
        time.sleep(delay_s)
        events = events_of(get(answer.headers["location"]).content)
        text = "".join(
            part["delta"].get("content") or ""
            for event in events[:-1]
            for part in event.json["choices"]
        )
        assert text == "".join(PIECES)
        assert events[-1].data == "[DONE]"


@pytest.mark.parametrize("streamed", [True, False])
def test_tampered_tickets_are_403_and_used_ones_410(system: System, streamed: bool) -> None:
    answer = post(system, chat(stream=streamed, sim=hook("a")))
    location = answer.headers["location"]
    for bad in (location[:-1] + ("A" if location[-1] != "A" else "B"), location + "x"):
        told = get(bad)
        assert told.status_code == 403
        assert refusal(told)["code"] == "forbidden"
    assert get(location).status_code == 200
    again = get(location)
    assert again.status_code == 410
    assert refusal(again)["code"] == "gone"


def test_a_ticket_of_another_streamer_and_an_old_one_are_410(system: System) -> None:
    answer = post(system, chat(sim=hook("a")))
    location = answer.headers["location"]
    [other] = [node for node in system.streamers if not location.startswith(node.url + "/")]
    ticket = location.rpartition("/")[2]
    wrong = get(f"{other.url}/v1/replies/{ticket}")
    assert (wrong.status_code, refusal(wrong)["code"]) == (410, "gone")
    assert get(location).status_code == 200

    async def old(bus: Bus) -> str:
        tickets = await load_tickets(bus)
        past_s = time.time() - 1
        return tickets.sign(Ticket("any", "default", "req_1", past_s, past_s, True))

    late = get(f"{other.url}/v1/replies/{with_bus(system.nats_url, old)}")
    assert (late.status_code, refusal(late)["code"]) == (410, "gone")


def test_an_error_of_the_engine_has_its_status_when_not_streamed(system: System) -> None:
    followed = get(post(system, chat(sim=hook("a", fail_at=0))).headers["location"])
    assert followed.status_code == 500
    assert refusal(followed)["code"] == "engine_error"


def test_a_redirect_that_is_not_followed_is_cancelled_and_its_ticket_gone(system: System) -> None:
    system.wait_at_rest(within_s=system.leaves_within_s)
    asked_s = time.monotonic()
    answer = post(system, chat(stream=True, sim=hook("a", ttft_ms=60_000)))
    request = answer.headers["x-request-id"]
    wait_for(
        lambda: one_waits_at(*system.streamers), within_s=15, what="one that waits for its client"
    )
    aborted = {"starts": 1, "aborts": 1, "tokens": 0}
    wait_for(lambda: system.ledger(request) == aborted, within_s=7.5, what="an abort")
    assert time.monotonic() - asked_s > 4.5
    system.wait_at_rest()
    told = get(answer.headers["location"])
    assert (told.status_code, refusal(told)["code"]) == (410, "gone")


def test_streams_of_a_killed_ingress_go_on(system: System, tmp_path: Path) -> None:
    door = front("ingress", system.nats_url, tmp_path, name="brief")
    try:
        wait_ready(door.process, door.admin_url)
        with httpx.Client(
            base_url=door.url, timeout=10, follow_redirects=True, verify=False
        ) as client:
            wait_for(lambda: "sim" in models_at(door.url), within_s=15, what="the model")
            body = chat(stream=True, sim=hook(*PIECES, ttft_ms=200, itl_ms=10))
            with client.stream("POST", CHAT, json=body) as answer:
                door.process.kill()
                text = answer.read().decode()
    finally:
        door.process.kill()
    assert all(piece in text for piece in PIECES)
    assert text.endswith("data: [DONE]\n\n")


def test_new_requests_go_to_the_living_when_a_streamer_is_killed_and_its_tickets_are_gone(
    system: System, third: Node, tmp_path: Path
) -> None:
    held = sent_to(system, third, chat(stream=True, sim=hook("a", ttft_ms=300)))
    port = third.url.rpartition(":")[2]
    third.process.kill()
    streamers_known(system, 2)
    for _ in range(8):
        with system.client() as client:
            assert collect(client, chat(sim=hook("b")))["choices"][0]["finish_reason"] == "stop"
    # The same address, as `up` would bring it back.
    args = ("--nats-url", system.nats_url, "--port", port, "--name", "third")
    back = node("streamer", *args, log=tmp_path / "back.log")
    try:
        wait_for(lambda: _listens(third.url), within_s=START_S_MAX, what="it is back")
        told = get(held.headers["location"])
        assert (told.status_code, refusal(told)["code"]) == (410, "gone")
        streamers_known(system, 3)
        assert (
            "b"
            in get(
                sent_to(system, third, chat(stream=True, sim=hook("b"))).headers["location"]
            ).text
        )
    finally:
        back.stop()
    system.wait_at_rest(within_s=system.leaves_within_s)


def _listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/none", timeout=10).status_code == 404
    except httpx.TransportError:
        return False


def test_a_streamer_told_to_stop_waits_for_who_is_on_the_way_and_for_its_streams(
    system: System, third: Node
) -> None:
    """It ended at once when no stream was open, and a client that had just been sent there met a
    closed port."""
    slow = hook(*PIECES, ttft_ms=0, itl_ms=150)
    held = sent_to(system, third, chat(stream=True, sim=slow))
    # Until then it lingers for a moment only, as for anybody.
    wait_for(lambda: one_waits_at(third), within_s=15, what="one that waits for its client")
    os.kill(third.process.pid, signal.SIGTERM)
    wait_for(lambda: not answers(f"{third.admin_url}/readyz"), within_s=15, what="readiness 503")
    assert answers(f"{third.admin_url}/healthz")
    text = get(held.headers["location"]).text
    assert text.endswith("data: [DONE]\n\n")
    wait_for(lambda: not third.process.alive, within_s=15, what="its end")
    assert third.process.stop() == 0
    assert "Traceback" not in third.process.said()
    with system.client() as client:
        assert stream(client, chat(sim=hook("after"))).text() == "after"


def test_a_streamer_past_its_grace_ends_streams_with_an_error_and_leaves_nothing_running(
    system: System, tmp_path: Path
) -> None:
    brief = front("streamer", system.nats_url, tmp_path, "--grace-s", "0.7", name="brief")
    try:
        wait_ready(brief.process, brief.admin_url)
        streamers_known(system, 3)
        body = chat(stream=True, sim=hook(*PIECES, ttft_ms=0, itl_ms=300))
        texts: list[str] = []
        held = sent_to(system, brief, body)
        reading = threading.Thread(target=lambda: texts.append(get(held.headers["location"]).text))
        reading.start()
        wait_for(
            lambda: brief.metrics()["headrace_streamer_replies_open"] == 1,
            within_s=15,
            what="a stream",
        )
        assert brief.process.stop() == 0
        reading.join()
    finally:
        brief.process.kill()
    assert '"code":"stream_interrupted"' in texts[0]
    streamers_known(system, 2)
    system.wait_at_rest(within_s=30)  # it may be resumed, so it runs on, to its end here


def test_without_a_live_streamer_a_request_is_503_and_nothing_is_queued(
    mode: Mode, own_nats: NatsServer, tmp_path: Path
) -> None:
    with_bus(own_nats.url, topology.apply)
    door = front("ingress", own_nats.url, tmp_path)
    try:
        wait_for(
            lambda: answers(f"{door.admin_url}/healthz"), within_s=START_S_MAX, what="the ingress"
        )
        wait_for(lambda: _listens(door.url), within_s=START_S_MAX, what="its port")
        assert not answers(f"{door.admin_url}/readyz")
        with httpx.Client(base_url=door.url, timeout=10, verify=False) as client:
            answer = client.post(CHAT, json=chat())
        assert answer.status_code == 503
        assert refusal(answer)["code"] == "no_streamers"
        assert int(answer.headers["retry-after"]) >= 1

        async def stored(bus: Bus) -> int:
            return int((await bus.api("STREAM.INFO.REQUESTS"))["state"]["last_seq"])

        assert with_bus(own_nats.url, stored) == 0
        assert door.process.stop() == 0
    finally:
        door.process.kill()


def test_a_handshake_at_an_ingress_names_the_url_at_which_a_streamer_serves_it(
    system: System,
) -> None:
    door = system.doors[0]
    with pytest.raises(InvalidStatus) as caught:
        connect(door.url.replace("http", "ws", 1) + CHAT, proxy=None, open_timeout=20)
    assert caught.value.response.status_code == 404
    message = json.loads(caught.value.response.body or b"")["error"]["message"]
    [url] = re.findall(r"connect to (ws:\S+)\.$", message)
    with connect(url, proxy=None, open_timeout=20) as socket:
        socket.send(json.dumps({"id": "a", "body": chat(sim=hook("here"))}))
        assert '"here"' in str(socket.recv(timeout=20))
    assert "without completing handshake" not in door.process.said()


def test_a_browser_that_follows_a_redirect_may_ask_again_there(system: System) -> None:
    url = f"{system.streamers[0].url}/v1/replies/any"
    foreign = {
        "origin": "null",
        "access-control-request-method": "GET",
        "access-control-request-headers": "idempotency-key",
    }
    with httpx.Client(timeout=30) as client:
        asked = client.options(url, headers=foreign)
        other = client.options(url, headers={"origin": "null"})
        answer = client.get(url, headers={"origin": "null"})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "null"
    assert asked.headers["access-control-allow-headers"] == "idempotency-key"
    assert other.status_code == 405
    assert answer.status_code == 403
    for refused in (other, answer):
        assert refused.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]

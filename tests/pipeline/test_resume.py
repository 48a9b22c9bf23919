"""A client that lost its stream goes on at the next event; a request is cancelled from any node."""

import re
import time
from collections.abc import Callable

import httpx
import pytest

from schemas.subjects import new_request_id
from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import System

PIECES = [f"{number} " for number in range(40)]


def kept(**more: object) -> dict[str, object]:
    """A streamed request of 40 tokens, 10 ms apart, that runs on without a reader."""
    return chat(
        stream=True,
        stream_options={"include_usage": True},
        on_disconnect="continue",
        sim=hook(*PIECES, itl_ms=10, ttft_ms=0),
        **more,
    )


def begun(system: System, events: int) -> tuple[str, bytes]:
    """Begin a stream, read so many events of it and leave; return its id and those events."""
    with system.client() as client, client.stream("POST", CHAT, json=kept()) as answer:
        raw = b""
        for part in answer.iter_raw():
            raw += part
            if raw.count(b"\n\n") >= events:
                break
        request = answer.headers["x-request-id"]
    return request, b"".join(event + b"\n\n" for event in raw.split(b"\n\n")[:events])


def every_kind(system: System) -> list[str]:
    """Return the URL of one node of every kind that clients speak to."""
    return list(dict.fromkeys([system.socket_end.url, system.doors[0].url]))


def asked(system: System, at: str, request: str, **more: dict[str, str]) -> httpx.Response:
    with system.client() as client:
        answer = client.get(f"{at}/v1/streams/{request}", **more)
    assert [each.status_code for each in answer.history] in ([], [303])
    return answer


def rest(system: System, request: str, **more: dict[str, str]) -> bytes:
    """Return the rest of a stream, which is the same at every kind of node."""
    rests = set()
    for at in every_kind(system):
        answer = asked(system, at, request, **more)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == request
        rests.add(answer.content)
    [found] = rests
    return found


def test_a_resumed_stream_is_equal_byte_for_byte_live_and_replayed(system: System) -> None:
    request, first = begun(system, 10)
    live = rest(system, request, headers={"last-event-id": "9"})
    whole = rest(system, request)
    assert first + live == whole
    assert rest(system, request, params={"starting_after": "9"}) == live
    assert re.findall(rb"^id: (\d+)$", whole, re.M) == [b"%d" % seq for seq in range(42)]
    assert whole.endswith(b"data: [DONE]\n\n")
    assert rest(system, request, headers={"last-event-id": "41"}) == b"data: [DONE]\n\n"
    system.wait_at_rest()


def test_an_event_source_is_told_when_to_come_again_and_with_204_that_it_has_all(
    system: System,
) -> None:
    request, first = begun(system, 10)
    accept = {"accept": "text/event-stream"}
    live = rest(system, request, headers=accept | {"last-event-id": "9"})
    assert live.startswith(b"retry: 1000\nid: 10\n")
    assert first + live.removeprefix(b"retry: 1000\n") == rest(system, request)
    # Its URL stays the same when it asks again.
    again = {"params": {"starting_after": "9"}, "headers": accept | {"last-event-id": "40"}}
    assert rest(system, request, **again).startswith(b"retry: 1000\nid: 41\n")
    for at in every_kind(system):
        answer = asked(system, at, request, headers=accept | {"last-event-id": "41"})
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["x-request-id"] == request
    system.wait_at_rest()


def test_an_event_source_of_a_response_is_answered_with_204_after_its_last_event(
    system: System,
) -> None:
    body = {"model": "sim", "input": "x", "stream": True, "sim": hook("a", "b")}
    accept = {"accept": "text/event-stream"}
    with system.client() as client:
        made = client.post("/v1/responses", json=body)
        request, last = made.headers["x-request-id"], made.content.count(b"\n\n") - 1
    for at in every_kind(system):
        rests = [
            asked(system, at, request, headers=accept | {"last-event-id": str(seq)})
            for seq in (last - 1, last)
        ]
        assert b"event: response.completed\n" in rests[0].content
        assert [answer.status_code for answer in rests] == [200, 204]


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (lambda: "nonsense", 404),
        (new_request_id, 404),
        (lambda: new_request_id(now_s=time.time() - 3600), 410),
    ],
    ids=["nonsense", "new", "old"],
)
def test_a_stream_that_is_not_there_is_404_and_one_too_old_is_410(
    system: System, made: Callable[[], str], status: int
) -> None:
    request_id = made()
    for at in every_kind(system):
        for accept in ("*/*", "text/event-stream"):
            answer = asked(system, at, request_id, headers={"accept": accept})
            assert answer.status_code == status
            assert refusal(answer)["code"] == ("gone" if status == 410 else "not_found")


def test_an_event_id_that_is_no_number_is_400(system: System) -> None:
    for at in every_kind(system):
        answer = asked(system, at, new_request_id(), params={"starting_after": "x"})
        assert answer.status_code == 400
        assert refusal(answer)["param"] == "starting_after"


def test_a_running_request_is_cancelled_from_every_kind_of_node_and_again_the_same(
    system: System,
) -> None:
    for node in (system.doors[0], system.socket_end):
        slow = chat(stream=True, sim=hook(*PIECES, itl_ms=500, ttft_ms=0))
        with system.client() as client, client.stream("POST", CHAT, json=slow) as answer:
            request = answer.headers["x-request-id"]
            url = f"{node.url}/v1/requests/{request}/cancel"
            with system.client() as other:
                said = other.post(url)
                assert said.status_code == 200
                assert said.json() == {"id": request, "status": "cancelled"}
                end = answer.read().decode()
                assert '"code":"request_cancelled"' in end
                assert "[DONE]" not in end
                assert other.post(url).json() == {"id": request, "status": "cancelled"}
                unknown = other.post(f"{node.url}/v1/requests/{new_request_id()}/cancel")
                assert unknown.status_code == 404
    system.wait_at_rest()


def test_cancelling_a_finished_request_says_that_it_finished(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(max_tokens=2))
        request = answer.headers["x-request-id"]
        system.wait_at_rest()  # the end is in the log, too
        said = client.post(f"{system.doors[0].url}/v1/requests/{request}/cancel")
    assert said.json() == {"id": request, "status": "finished"}

"""Requests over a WebSocket, against real processes: messages, ids, errors, and who is let in."""

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, hook, stream
from tests.pipeline.conftest import System
from tests.pipeline.sockets import on_socket
from tests.talk import Talk
from tests.waiting import until

MIB = 1024 * 1024


def plain(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chunks without what differs from request to request: what was in a worker's cache
    is among it."""
    found = [{name: c[name] for name in c if name not in ("id", "created")} for c in chunks]
    for chunk in found:
        if chunk.get("usage"):
            chunk["usage"] = dict(chunk["usage"], prompt_tokens_details=None)
    return found


# Messages


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_chunks_are_the_objects_that_sse_carries(system: System, path: str, usage: bool) -> None:
    body: dict[str, Any] = {"model": "sim", "seed": 4, "max_tokens": 40}
    body |= chat("Tell me about chunks.", **body) if path == CHAT else {"prompt": "Once"}
    if usage:
        body["stream_options"] = {"include_usage": True}
    with system.client() as client:
        expected = stream(client, body, path).chunks

    async def test(talk: Talk) -> None:
        heard = await talk.ask("a", body)
        assert heard.done
        assert plain(heard.chunks) == plain(expected)
        assert len({chunk["id"] for chunk in heard.chunks}) == 1
        assert bool(heard.chunks[-1].get("usage")) is usage

    on_socket(system, test, path)


def test_stream_need_not_be_said_and_may_be_false(system: System) -> None:
    async def test(talk: Talk) -> None:
        for number, more in enumerate([{}, {"stream": False}, {"stream": True}]):
            heard = await talk.ask(f"{number}", chat(sim=hook("a", "b"), **more))
            assert [len(heard.chunks), heard.text(), heard.done] == [3, "ab", True]

    on_socket(system, test)


def test_many_requests_run_at_once(system: System) -> None:
    async def test(talk: Talk) -> None:
        pieces = [f"{k} " for k in range(20)]
        bodies = [chat(f"{n}", sim=hook(f"<{n}>", *pieces, itl_ms=20)) for n in range(50)]
        stay = hook("a", "b", ttft_ms=0, itl_ms=600_000)
        staying = [await talk.begin(f"stays {n}", chat(f"{n}", sim=stay)) for n in range(50)]
        all_heard = [await talk.begin(f"{n}", body) for n, body in enumerate(bodies)]
        await talk.ended(*all_heard)
        for number, heard in enumerate(all_heard):
            assert heard.text() == f"<{number}>" + "".join(pieces)
            assert heard.done
        for number, heard in enumerate(staying):
            await talk.chunks_came(heard, 1)
            assert not heard.ended.is_set(), "one after the other"
            await talk.cancel(f"stays {number}")
        await talk.ended(*staying)

    on_socket(system, test)
    system.wait_at_rest()


def test_an_id_may_be_used_again_once_its_request_has_ended(system: System) -> None:
    async def test(talk: Talk) -> None:
        for number in range(30):
            assert (await talk.ask("same", chat(sim=hook(f"{number}")))).text() == f"{number}"
        for _ in range(10):
            held = await talk.begin("same", chat(sim=hook("a", ttft_ms=600_000)))
            await talk.cancel("same")
            await talk.ended(held)
        assert (await talk.ask("same", chat(sim=hook("b")))).text() == "b"
        assert not talk.nameless

    on_socket(system, test)


@pytest.mark.parametrize("name", ["x" * 256, "日本 🙂", '"\\\n\u0000', "null"])
def test_ids_come_back_as_they_went(system: System, name: str) -> None:
    async def test(talk: Talk) -> None:
        assert (await talk.ask(name, chat(sim=hook("a")))).text() == "a"

    on_socket(system, test)


# Cancelling


def test_a_cancelled_request_ends_in_an_error_and_the_others_go_on(system: System) -> None:
    pieces = [f"{k} " for k in range(40)]

    async def test(talk: Talk) -> None:
        long = await talk.begin("long", chat("1", sim=hook(*pieces, itl_ms=20)))
        held = await talk.begin("held", chat("2", sim=hook("a", "b", itl_ms=600_000, ttft_ms=0)))
        silent = await talk.begin("silent", chat("3", sim=hook("a", ttft_ms=600_000)))
        await talk.chunks_came(held, 1)
        await talk.cancel("held")
        await talk.cancel("silent")
        await talk.ended(held, silent)
        assert held.error is not None
        assert silent.error is not None
        assert held.error["code"] == silent.error["code"] == "request_cancelled"
        assert held.text() == "a"
        await talk.ended(long)
        assert long.text() == "".join(pieces)
        request = "req_" + held.chunks[0]["id"].removeprefix("chatcmpl-")
        assert await until(lambda: system.ledger(request)["aborts"] == 1, within_s=15)

    on_socket(system, test)
    system.wait_at_rest()


def test_a_cancel_right_behind_its_request_is_not_lost(system: System) -> None:
    async def test(talk: Talk) -> None:
        for number in range(20):
            heard = await talk.begin(f"{number}", chat(sim=hook("a", ttft_ms=600_000)))
            await talk.cancel(f"{number}")
            await talk.ended(heard)
            assert heard.error is not None
            assert heard.error["code"] == "request_cancelled"

    on_socket(system, test)
    system.wait_at_rest()


def test_cancelling_what_has_ended_or_never_was_is_silent(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.ask("a", chat(sim=hook("a")))
        await talk.cancel("a")
        await talk.cancel("never")
        assert (await talk.ask("b", chat(sim=hook("b")))).text() == "b"
        assert not talk.nameless

    on_socket(system, test)


# Errors


NO_OBJECTS = ["", "x", "{", "[]", "5", "null", '"a"', '{"id":"a"}{}', '{"id":NaN}', "[" * 100_000]


@pytest.mark.parametrize("text", NO_OBJECTS, ids=lambda text: text[:9] or "empty")
def test_text_that_is_no_object_is_an_error_of_no_request(system: System, text: str) -> None:
    async def test(talk: Talk) -> None:
        await talk.say(text)
        error = await talk.nameless_error()
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 300
        assert (await talk.ask("a", chat(sim=hook("lives")))).text() == "lives"

    on_socket(system, test)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "id"),
        ({"id": None, "body": {}}, "id"),
        ({"id": 5, "body": {}}, "id"),
        ({"id": "", "body": {}}, "id"),
        ({"id": "x" * 257, "body": {}}, "id"),
        ({"type": "cancel"}, "id"),
        ({"id": "a", "type": 5}, "type"),
        ({"type": "auth", "key": "x"}, "type"),
    ],
)
def test_a_message_without_a_proper_id_names_the_member(
    system: System, message: Any, param: str
) -> None:
    async def test(talk: Talk) -> None:
        await talk.say(message)
        assert (await talk.nameless_error())["param"] == param

    on_socket(system, test)


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({}, None, "body"),
        ({"type": "begin", "body": chat()}, None, "type"),
        ({"body": 5}, None, None),
        ({"body": None}, None, None),
        ({"body": chat() | {"messages": 5}}, None, "messages"),
        ({"body": chat(temperature=9)}, None, "temperature"),
        ({"body": chat(max_tokens=10**7)}, "context_length_exceeded", "max_tokens"),
        ({"body": chat("word " * 40_000)}, "context_length_exceeded", "messages"),
        ({"body": chat(model="none")}, "model_not_found", "model"),
    ],
)
def test_a_wrong_request_is_an_error_with_its_id_and_the_member(
    system: System, message: Any, code: str | None, param: str | None
) -> None:
    async def test(talk: Talk) -> None:
        await talk.say({"id": "a"} | message)
        heard = talk.heard("a")
        await talk.ended(heard)
        assert heard.error is not None
        assert (heard.error["code"], heard.error["param"]) == (code, param)
        if set(message) == {"body"}:
            with system.client() as client:
                answer = client.post(CHAT, content=json.dumps(message["body"])).json()
            assert heard.error == answer["error"], "not as over HTTP"
        assert (await talk.ask("b", chat(sim=hook("lives")))).text() == "lives"

    on_socket(system, test)


def test_an_error_in_the_middle_is_one_message_and_the_others_go_on(system: System) -> None:
    async def test(talk: Talk) -> None:
        other = await talk.begin("other", chat("1", sim=hook(*"abcdefgh", itl_ms=30)))
        heard = await talk.ask("a", chat("2", sim=hook(*"abcdefgh", fail_at=5)))
        assert heard.text() == "abcde"
        assert heard.error is not None
        assert heard.error["code"] == "engine_error"
        await talk.ended(other)
        assert other.text() == "abcdefgh"

    on_socket(system, test)


def test_a_repeated_id_is_an_error_of_no_request_and_the_first_goes_on(system: System) -> None:
    async def test(talk: Talk) -> None:
        pieces = [f"{k} " for k in range(10_000)]  # of some ten minutes
        first = await talk.begin("a", chat(sim=hook(*pieces, itl_ms=60, ttft_ms=0)))
        await talk.chunks_came(first, 1)
        for message in ({"body": chat()}, {}, {"type": "what"}):
            await talk.say({"id": "a"} | message)
            assert await talk.nameless_error()
        await talk.chunks_came(first, len(first.chunks) + 3)
        assert not first.ended.is_set()
        assert "".join(pieces).startswith(first.text())
        await talk.cancel("a")
        await talk.ended(first)

    on_socket(system, test)


def test_the_257th_request_at_once_is_refused_and_then_there_is_room(system: System) -> None:
    async def test(talk: Talk) -> None:
        slow = hook("a", ttft_ms=600_000)
        running = [await talk.begin(f"{n}", chat(f"{n}", sim=slow)) for n in range(256)]
        more = await talk.ask("more", chat())
        assert more.error is not None
        assert more.error["code"] == "rate_limit_exceeded"
        await talk.cancel("0")
        await talk.ended(running[0])
        assert (await talk.ask("more", chat(sim=hook("fits")))).text() == "fits"

    on_socket(system, test)
    system.wait_at_rest(within_s=6)


# The handshake


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}]
)
def test_without_keys_another_host_or_origin_is_403(
    system: System, headers: dict[str, str]
) -> None:
    refused = _refused(system, CHAT, headers)
    assert refused.response.status_code == 403
    assert json.loads(refused.response.body or b"")["error"]["code"] == "forbidden"


def test_a_page_of_this_machine_is_served(system: System) -> None:
    async def test(talk: Talk) -> None:
        assert (await talk.ask("a", chat(sim=hook("a")))).text() == "a"

    on_socket(system, test, additional_headers={"Origin": "http://localhost:3000"})


def test_a_path_without_sockets_is_404(system: System) -> None:
    refused = _refused(system, "/v1/models", {})
    assert refused.response.status_code == 404
    assert json.loads(refused.response.body or b"")["error"]["code"] == "not_found"


def _refused(system: System, path: str, headers: dict[str, str]) -> InvalidStatus:
    async def run() -> None:
        url = system.socket_end.url.replace("http", "ws", 1) + path
        others = {name: value for name, value in headers.items() if name != "Host"}
        host = headers.get("Host")
        more = (
            {}
            if host is None
            else {"host": "127.0.0.1", "port": int(system.socket_end.url.rpartition(":")[2])}
        )
        url = url if host is None else f"ws://{host}{path}"
        async with connect(url, additional_headers=others, proxy=None, **more):
            pass

    with pytest.raises(InvalidStatus) as refused:
        asyncio.run(run())
    return refused.value

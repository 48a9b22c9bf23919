"""How sockets end, and with which code, against real processes."""

import asyncio
import contextlib
import json

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from tests.pipeline.asking import chat, collect, hook
from tests.pipeline.conftest import System
from tests.pipeline.sockets import on_socket
from tests.talk import Talk
from tests.waiting import until

MIB = 1024 * 1024


def test_the_client_closes_with_1000(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.ask("a", chat(sim=hook("a")))
        await talk.socket.close()
        assert await talk.end() == 1000

    on_socket(system, test)


def test_binary_closes_with_1003(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.begin("a", chat(sim=hook("a", ttft_ms=600_000)))
        await talk.socket.send(b"{}")
        assert await talk.end() == 1003

    on_socket(system, test)
    system.wait_at_rest()


def test_bad_utf_8_closes_with_1007_and_leaves_no_traceback(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.begin("a", chat(sim=hook("a", ttft_ms=600_000)))
        await talk.socket.send(b'{"id":"\xff"}', text=True)
        assert await talk.end() == 1007

    on_socket(system, test)
    system.wait_at_rest()
    assert "Traceback" not in system.socket_end.process.said()


def test_a_message_over_16_mib_closes_with_1009_while_streams_run(system: System) -> None:
    async def test(talk: Talk) -> None:
        heard = await talk.begin("a", chat(sim=hook("a", "b", ttft_ms=0, itl_ms=600_000)))
        await talk.chunks_came(heard, 1)
        with contextlib.suppress(ConnectionClosed):  # the other end may be faster than its bytes
            await talk.say("x" * (16 * MIB + 1))
        assert await talk.end() == 1009

    on_socket(system, test)
    system.wait_at_rest()
    assert "Traceback" not in system.socket_end.process.said()


def test_a_message_of_16_mib_is_taken(system: System) -> None:
    async def test(talk: Talk) -> None:
        text = json.dumps({"id": "a", "body": chat(sim=hook("a"))})
        await talk.say(text + " " * (16 * MIB - len(text)))
        await talk.ended(talk.heard("a"))
        assert talk.heard("a").text() == "a"

    on_socket(system, test)


def test_a_protocol_fault_closes_with_1002(system: System) -> None:
    async def test(talk: Talk) -> None:
        talk.socket.protocol.send_frame(Frame(Opcode.CONT, b"x"))
        talk.socket.send_data()
        assert await talk.end() == 1002

    on_socket(system, test)


def test_fragments_without_end_close_with_1009(system: System) -> None:
    async def test(talk: Talk) -> None:
        protocol = talk.socket.protocol
        protocol.send_frame(Frame(Opcode.TEXT, b"x", fin=False))
        for _ in range(70_000):
            protocol.send_frame(Frame(Opcode.CONT, b"", fin=False))
        talk.socket.send_data()
        assert await talk.end() == 1009

    on_socket(system, test)


@pytest.mark.parametrize("how", ["close", "cut"])
def test_the_end_of_a_socket_aborts_what_runs_and_takes_out_what_waits(
    system: System, how: str
) -> None:
    requests: list[str] = []

    async def test(talk: Talk) -> None:
        sim = hook("a", "b", ttft_ms=0, itl_ms=600_000)
        running = await talk.begin("runs", chat("1", model="tiny", sim=sim))
        await talk.chunks_came(running, 1)
        requests.append("req_" + running.chunks[0]["id"].removeprefix("chatcmpl-"))
        for number in range(8):  # one slot, one in the queue, and some before it
            await talk.begin(f"{number}", chat(model="tiny", sim=hook("never")))
        await until(lambda: asyncio.to_thread(lambda: system.unanswered() == 9))
        if how == "cut":
            talk.socket.transport.abort()
        else:
            await talk.socket.close()

    on_socket(system, test)
    system.wait_at_rest()
    assert system.ledger(requests[0]) == {"starts": 1, "aborts": 1, "tokens": 1}
    with system.client() as client:
        body = chat(model="tiny", sim=hook("next"))
        assert collect(client, body)["choices"][0]["message"]["content"] == "next"

"""What has ended is freed at once: the garbage collector looks for cycles very seldom here."""

import asyncio
import gc
import time
import weakref
from typing import Any

from headrace import topology
from headrace.bus import Bus
from schemas.subjects import new_request_id
from schemas.wire import Finished, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from tests.broker import with_bus

SHAPE = Shape("completion", "m", 5, False, 1, False)


async def receive() -> dict[str, Any]:
    """Wait for ever: the client stays."""
    await asyncio.Event().wait()
    return {}


async def _relayed(bus: Bus) -> "weakref.ref[Any]":
    """Relay a stream to its end, of which tokens are written as they come."""
    mailbox = Mailbox(bus, "s")
    reply = mailbox.open(tenant="t", request=new_request_id(), deadline_s=time.time() + 60)
    written = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            written.set()

    relaying = asyncio.create_task(
        Relay(mailbox, reply, stream=True, headers={})({}, receive, send)
    )
    claim = await bus.store(reply.log_subject, encode_frame(Started(0, "w", 0, SHAPE)))
    for seq in range(3):
        written.clear()
        reply.frame(encode_frame(Tokens(claim.seq, seq, (Piece(0, "t ", (seq,)),))))
        if not seq:
            reply.look_at_log()
        async with asyncio.timeout(15):
            await written.wait()
    reply.frame(encode_frame(Finished(claim.seq, 3, (), ("stop",), Usage(1, 3, 0), {})))
    await relaying
    return weakref.ref(reply)


def test_a_stream_that_has_ended_is_freed_without_the_garbage_collector(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        gc.disable()
        try:
            reply = await _relayed(bus)
            await asyncio.sleep(0)  # its tasks' last steps
            assert reply() is None
        finally:
            gc.enable()

    with_bus(nats_url, run)

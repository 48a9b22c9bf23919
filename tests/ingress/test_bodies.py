"""What is kept of a body once it was read: what it says, which may be far less than its bytes."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.inline import Inline
from headrace import topology
from headrace.bus import Bus
from headrace.cors import Cors
from ingress.auth import Caller
from ingress.desk import Desk
from ingress.respond import Respond
from ingress.routes import Generate
from schemas.subjects import new_request_id
from streamer.mailbox import Mailbox
from tests.broker import with_bus
from tests.ingress.test_no_workers import Door
from tests.servers import NatsServer
from tests.waiting import until

PADDED: dict[str, Any] = {"model": "m", "max_tokens": 1, "unknown": "x" * 100_000}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Once", "max_output_tokens": 1, "store": False},
}


async def posted(door: Door, path: str, bodies: list[bytes]) -> None:
    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Event().wait()  # it stays
        return {"type": "http.request", "body": bodies.pop()}

    async def send(_: Any) -> None:
        pass

    handoff = Inline(door.bus, Mailbox(door.bus, "s"))
    cors = Cors((), keyless=True)
    app = (
        Respond(door.ingress, handoff, cors)
        if path == "/v1/responses"
        else Generate(door.ingress, handoff, cors, chat=False)
    )
    await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)


async def said(door: Door, path: str, bodies: list[bytes]) -> None:
    desk, caller, deadline_s = Desk(door.ingress), Caller("default"), time.time() + 60
    where: Any = {"request": new_request_id(), "streamer": "s", "deadline_s": deadline_s}
    if path == "/v1/responses":
        await desk.admit_response(caller, bodies.pop(), before=None, **where)
    else:
        await desk.admit(caller, bodies.pop(), chat=False, **where)


def held(coroutine: Any) -> list[bytes]:
    """Return the bytes that a coroutine and those that it awaits have variables for."""
    found: list[bytes] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        found += [value for value in frame.f_locals.values() if isinstance(value, bytes)]
        coroutine = coroutine.cr_await
    return found


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("ask", [posted, said])
def test_a_body_is_let_go_while_its_request_waits_for_its_turn(
    own_nats: NatsServer, path: str, ask: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """16 MiB of it, of which a few bytes say something, were held for up to 30 s, on each of a
    socket's 256 requests and of a node's connections."""

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        door = Door(bus)
        await door.open()
        await door.staff()
        for _ in range(2):  # as many as may stand in the queue
            await door.ask()
        body = json.dumps(PADDED | TEXTS[path]).encode()
        asked = ask(door, path, [body])
        asking = asyncio.create_task(asked)
        await until(lambda: door.ingress.line.room.depth == 1)
        assert body not in held(asked)
        asking.cancel()
        await asyncio.wait([asking])

    with_bus(own_nats.url, test)

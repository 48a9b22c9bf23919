"""How a WebSocket's handshake is refused. Rule: in the API's shape, as a POST would be."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from schemas.errors import NotFound, Refusal
from schemas.subjects import new_request_id

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


async def reject(send: Send, refusal: Refusal) -> None:
    """Answer the handshake as a POST would be answered."""
    content = msgspec.json.encode(refusal.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"x-request-id", new_request_id().encode()),
    ]
    head = {"status": refusal.status, "headers": headers}
    await send({"type": "websocket.http.response.start", **head})
    await send({"type": "websocket.http.response.body", "body": content})


def not_served(path: str) -> NotFound:
    """Return the refusal of a path without sockets."""
    return NotFound(f"No WebSocket is served at {path[:200]}.")


async def serve_none(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
    """Refuse every handshake: the application of a port that has no sockets."""
    await receive()  # websocket.connect
    await reject(send, not_served(scope["path"]))

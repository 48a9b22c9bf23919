"""WebSockets at an ingress: there are none, and who tries is told where they are.

Rule: a handshake cannot be handed over as a POST is, since few clients follow its redirect.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headrace.handshake import Receive, Send, not_served, reject
from schemas.errors import NotFound
from schemas.model import StreamerEntry

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Where streamers serve them."""


class Elsewhere:
    """The ASGI application: refuses each handshake, and names a live streamer's URL."""

    def __init__(self, live: Callable[[], Sequence[StreamerEntry]]) -> None:
        """`live` returns the streamers that clients may be sent to."""
        self._live = live

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        await reject(send, refusal_at(scope["path"], self._live()))


def refusal_at(path: str, live: Sequence[StreamerEntry]) -> NotFound:
    """Return what a handshake at an ingress's path is refused with."""
    if path not in PATHS:
        return not_served(path)
    # A public URL may be a path on the origin that was asked: then a proxy knows the streamers.
    urls = sorted(entry.public_url for entry in live if entry.public_url.startswith("http"))
    where = f"; connect to ws{urls[0].removeprefix('http')}{path}" if urls else ""
    return NotFound(f"WebSockets are served by the streamers, not by an ingress{where}.")

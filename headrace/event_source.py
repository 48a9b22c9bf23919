"""What a browser's EventSource needs to be told (WHATWG HTML, section 9.2).

It asks again by itself, after a stream's end as after a connection's loss, and gives up at every
status but 200. So it is told first how long to wait, a refusal that time heals comes as an error
event, and who has seen the end is answered with 204.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import Refusal
from schemas.subjects import new_request_id

RETRY: Final = b"retry: 1000\n"
"""When a browser's EventSource is to come again, in ms; left to themselves they wait 3 to 5 s."""


def asks(request: Request) -> bool:
    """Tell whether a browser's EventSource asks, or who says that it does as one."""
    return "text/event-stream" in request.headers.get("accept", "").lower()


def error_event(refusal: Refusal) -> bytes:
    """Return the event that ends a stream with an error."""
    body: dict[str, Any] = refusal.body()
    return b"data: %b\n\n" % msgspec.json.encode(body)


def come_again(refusal: Refusal, more_headers: Mapping[str, str] | None = None) -> Response:
    """Return a stream that says why there is none now."""
    return Response(
        RETRY + error_event(refusal),
        headers={
            "cache-control": "no-store",
            "x-request-id": new_request_id(),
            **(more_headers or {}),
        },
        media_type="text/event-stream",
    )

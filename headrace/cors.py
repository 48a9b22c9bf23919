"""Which browser pages may read the answers (WHATWG Fetch, section 3.3, "CORS protocol").

Rule: only headers, and nothing around a token's write. Credentials in the browser's sense (cookies)
are never allowed; a page shows its key itself.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.sockets import is_local_origin

RawHeaders = Sequence[tuple[bytes, bytes]]

METHODS: Final = "GET, POST, DELETE"
MAX_AGE_S: Final = 600
EXPOSED: Final = ", ".join(
    [
        "retry-after",
        "x-request-id",
        *(
            f"x-ratelimit-{what}-{unit}"
            for what in ("limit", "remaining", "reset")
            for unit in ("requests", "tokens")
        ),
    ]
)


class Cors:
    """Knows the origins that are allowed; without keys, those of this machine as well."""

    def __init__(self, origins: Collection[str], *, keyless: bool) -> None:
        """`origins` are in lower case; `*` is any."""
        self._origins = frozenset(origins)
        self.keyless = keyless

    def headers(self, asked: RawHeaders) -> dict[str, str]:
        """Return the headers that let the page which asks read the answer; none if it may not."""
        origin = _value(asked, b"origin")
        if origin is None or not self._allows(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED,
            "vary": "origin",
        }

    def preflight(self, asked: RawHeaders) -> dict[str, str] | None:
        """Return the headers that answer a preflight; None where this is none, or is refused."""
        allowed = self.headers(asked)
        if not allowed or _value(asked, b"access-control-request-method") is None:
            return None
        wanted = _value(asked, b"access-control-request-headers")
        return allowed | {
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE_S),
            **({} if wanted is None else {"access-control-allow-headers": wanted}),
        }

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have an application answer a request of HTTP, and let the page that asks read that."""
        if scope["method"] == "OPTIONS":
            headers = self.preflight(scope["headers"])
            if headers is not None:
                await Response(status_code=204, headers=headers)(scope, receive, send)
                return
        await app(scope, receive, _with_headers(send, self.headers(scope["headers"])))

    def _allows(self, origin: str) -> bool:
        if self.keyless:  # whatever is configured: others are refused by the gate
            return is_local_origin(origin)
        return "*" in self._origins or origin.lower() in self._origins


def _value(headers: RawHeaders, wanted: bytes) -> str | None:
    for name, value in headers:
        if name == wanted:
            return value.decode("latin-1")
    return None


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a `send` that adds headers to the answer's own."""
    if not headers:
        return send
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *raw]
        await send(message)

    return send_more

"""Answers that are not streams, in the API's own shape, and how faults become answers."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, Refusal
from schemas.subjects import new_request_id


def as_json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def refused(
    refusal: Refusal, request: str | None = None, more_headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer that a refusal gets; `request` is the request's id, made here if None."""
    headers = {"x-request-id": request or new_request_id(), **(more_headers or {})}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return as_json(refusal.body(), status=refusal.status, headers=headers)


def written(answer: Response) -> bytes:
    """Return an answer as it stands on a connection that is closed after it."""
    phrase = HTTPStatus(answer.status_code).phrase.encode()
    lines = [b"HTTP/1.1 %d %s\r\n" % (answer.status_code, phrase)]
    lines += [b"%s: %s\r\n" % header for header in answer.raw_headers]
    return b"".join([*lines, b"connection: close\r\n\r\n", bytes(answer.body)])


async def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        answer = refused(MethodNotAllowed(f"{what} is not allowed."))
    elif error.status_code == 404:
        answer = refused(NotFound(f"{what} does not exist."))
    else:
        answer = refused(InvalidRequest(error.detail))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _on_fault(_request: Request, _error: Exception) -> Response:
    """Answer our own fault; the server's log says what it was."""
    return refused(InternalError("The server failed; the fault is ours."))


EXCEPTION_HANDLERS: Final[dict[Any, Any]] = {
    Refusal: _on_refusal,
    HTTPException: _on_http_error,
    Exception: _on_fault,
}
"""Starlette's table of what becomes of an exception; every tier's application has it."""

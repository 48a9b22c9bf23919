"""Every refusal a client can get: its code, HTTP status, type and whether trying again may help.

A refusal is an answer, not a fault: it reaches the client as
`{"error": {"message", "type", "param", "code"}}`, before, during or after a stream.
"""

from typing import Any, ClassVar


class Refusal(Exception):
    """A request is answered with an error."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = max(1, retry_after_s or 1) if self.retryable else None

    def body(self) -> dict[str, Any]:
        """Return the object that the client reads."""
        return error_body(self.message, type_=self.type, param=self.param, code=self.code)


def error_body(
    message: str, *, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in the API's own shape."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


class InvalidRequest(Refusal):
    """The request is malformed, of a wrong type, out of range, or asks what cannot be served."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and wanted output together are longer than the model's context."""

    code = "context_length_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    """The response that is to be gone on from is unknown here, or not stored."""

    code = "previous_response_not_found"


class OverPolicy(InvalidRequest):
    """The request is larger than its tenant's requests may be."""

    code = "token_limit_exceeded"


class ContentPolicyViolation(InvalidRequest):
    """The operator's moderator does not let the request pass."""

    code = "content_policy_violation"


class RefusedByEngine(InvalidRequest):
    """The engine says that the request cannot be served as it is."""

    code = "invalid_request"


class InvalidApiKey(Refusal):
    """The request carries no key, or none that is known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(Refusal):
    """The request may not be made from there, or shows a ticket that was not signed here."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class NotFound(Refusal):
    """There is nothing at this address, or it belongs to another tenant."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """No model of this name is served here."""

    code = "model_not_found"


class MethodNotAllowed(Refusal):
    """The address exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(Refusal):
    """The client took too long to send its request."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class IdempotencyConflict(Refusal):
    """The Idempotency-Key belongs to a request with another body."""

    status = 409
    type = "idempotency_error"
    code = "idempotency_conflict"


class Gone(Refusal):
    """What was here is not any more."""

    status = 410
    type = "invalid_request_error"
    code = "gone"


class RequestTooLarge(Refusal):
    """The request is larger than a limit that its message names."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class HeadersTooLarge(Refusal):
    """The request's line and headers are larger than a limit that its message names."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class TooManyRequests(Refusal):
    """The client is at a limit: requests or tokens per minute, open or waiting requests."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True


class TooManyConnections(Refusal):
    """The client's address has as many connections open as it may."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_connections"
    retryable = True


class ConnectionsFull(Refusal):
    """This node has as many connections open as it takes."""

    status = 503
    type = "service_unavailable_error"
    code = "connections_full"
    retryable = True


class QueueFull(Refusal):
    """The queue of this model holds as many requests as it may."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retryable = True


class QueueTimeout(Refusal):
    """The queue does not take the request within its bound."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"
    retryable = True


class NoWorkers(Refusal):
    """The model is known, but no worker that serves it is alive."""

    status = 503
    type = "service_unavailable_error"
    code = "no_workers"
    retryable = True


class NoStreamers(Refusal):
    """No streamer is alive to carry the answer."""

    status = 503
    type = "service_unavailable_error"
    code = "no_streamers"
    retryable = True


class BrokerUnavailable(Refusal):
    """The broker cannot be reached, so nothing can be accepted."""

    status = 503
    type = "service_unavailable_error"
    code = "broker_unavailable"
    retryable = True


class ModerationUnavailable(Refusal):
    """The operator's moderator failed, and nothing passes unseen."""

    status = 503
    type = "service_unavailable_error"
    code = "moderation_unavailable"
    retryable = True


class Draining(Refusal):
    """This node is stopping; another one, or this one in a moment, takes the request."""

    status = 503
    type = "service_unavailable_error"
    code = "draining"
    retryable = True


class DeadlineExceeded(Refusal):
    """The request's deadline passed before its answer was complete."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestCancelled(Refusal):
    """The request was cancelled."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class EngineError(Refusal):
    """The engine failed on this request."""

    code = "engine_error"


class WorkerLost(Refusal):
    """The worker that ran the request is gone and no other could go on with it."""

    status = 503
    type = "service_unavailable_error"
    code = "worker_lost"
    retryable = True


class StreamInterrupted(Refusal):
    """The stream broke on its way to the client; it can be resumed."""

    status = 503
    type = "service_unavailable_error"
    code = "stream_interrupted"
    retryable = True


class InternalError(Refusal):
    """Something failed here that should not have; the log says what."""

    code = "internal_error"


REFUSALS: dict[str, type[Refusal]] = {
    kind.code: kind
    for kind in (
        DeadlineExceeded,
        EngineError,
        InternalError,
        ModerationUnavailable,
        NoWorkers,
        QueueFull,
        RefusedByEngine,
        RequestCancelled,
        StreamInterrupted,
        WorkerLost,
    )
    if kind.code is not None
}
"""The refusals that may arrive in a `failed` frame, by code."""


def refusal_of(code: str, message: str) -> Refusal:
    """Return the refusal that a `failed` frame names; an unknown code is an engine error."""
    kind = REFUSALS.get(code, EngineError)
    return kind(message)

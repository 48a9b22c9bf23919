"""Questions to the NATS service `ingress`, and its answers: JSON, so that `nats request` can ask.

`ingress.identify` says whose key this is, `ingress.admit` puts a request into the queue,
`ingress.respond` a response.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from schemas.errors import (
    BrokerUnavailable,
    ContentPolicyViolation,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    ModerationUnavailable,
    NoWorkers,
    OverPolicy,
    PreviousResponseNotFound,
    QueueFull,
    QueueTimeout,
    Refusal,
    RequestCancelled,
    RequestTooLarge,
    TooManyRequests,
)
from schemas.wire import Shape

SERVICE: Final = "ingress"
IDENTIFY: Final = "identify"
ADMIT: Final = "admit"
RESPOND: Final = "respond"

_REFUSALS: Final[dict[str, type[Refusal]]] = {
    kind.__name__: kind
    for kind in (
        BrokerUnavailable,
        ContentPolicyViolation,
        ContextLengthExceeded,
        DeadlineExceeded,
        Draining,
        Forbidden,
        InternalError,
        InvalidApiKey,
        InvalidRequest,
        ModelNotFound,
        ModerationUnavailable,
        NoWorkers,
        OverPolicy,
        PreviousResponseNotFound,
        QueueFull,
        QueueTimeout,
        RequestCancelled,
        RequestTooLarge,
        TooManyRequests,
    )
}


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client: its tenant, the id of its key, and when its token expires (s)."""

    tenant: str
    key: str | None = field(default=None, compare=False)
    until_s: float | None = field(default=None, compare=False)


class Identify(msgspec.Struct, frozen=True):
    """Whose are these headers (name and value, as on the wire), or whose is this key?

    `local` says that only this machine reaches the node that asks: without keys, no other is
    served, and its clients could write any Host header. `peer` is the address they come from.
    """

    headers: tuple[tuple[str, str], ...] = ()
    key: str | None = None
    local: bool = True
    peer: str | None = None


class Admit(msgspec.Struct, frozen=True):
    """Put this request into the queue; its reply goes to the streamer that asks."""

    tenant: str
    chat: bool
    body: msgspec.Raw
    request: str
    streamer: str
    deadline_s: float
    key: str | None = None
    until_s: float | None = None

    @property
    def caller(self) -> Caller:
        """Whose request it is."""
        return Caller(self.tenant, self.key, self.until_s)


class AdmitResponse(msgspec.Struct, frozen=True):
    """Put this response into the queue, as `Admit`; `before` is the conversation that it goes on
    from, where that is stored nowhere but on its socket."""

    tenant: str
    body: msgspec.Raw
    request: str
    streamer: str
    deadline_s: float
    key: str | None = None
    until_s: float | None = None
    before: list[msgspec.Raw] | None = None

    @property
    def caller(self) -> Caller:
        """Whose response it is."""
        return Caller(self.tenant, self.key, self.until_s)


class AdmittedResponse(NamedTuple):
    """A response that was admitted: its shape; what it was made from, as JSON, if that is stored
    nowhere; and the frames of its reply if it is not run."""

    shape: Shape
    made_from: bytes | None = None
    frames: tuple[bytes, ...] = ()


def items_of(array: bytes | None) -> list[msgspec.Raw] | None:
    """Return the members of a JSON array as they are: msgspec knows no optional raw value."""
    return None if array is None else msgspec.json.decode(array, type=list[msgspec.Raw])


class RefusalText(msgspec.Struct, frozen=True):
    """A refusal on its way between nodes."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @staticmethod
    def of(refusal: Refusal) -> "RefusalText":
        """Return a refusal as text; of a kind that only its node knows, as what that is one of."""
        kinds = (kind.__name__ for kind in type(refusal).__mro__)
        kind = next((kind for kind in kinds if kind in _REFUSALS), type(refusal).__name__)
        return RefusalText(kind, refusal.message, refusal.param, refusal.retry_after_s)

    def refusal(self) -> Refusal:
        """Return the refusal; one of a kind that we do not know is our own fault."""
        kind = _REFUSALS.get(self.kind, InternalError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


class Answer(msgspec.Struct, frozen=True):
    """The answer to all: the caller (None for one who must still show a key), or a refusal; and
    the model of a request that was admitted.

    Of a response also its `shape`; `made_from` are the items of one that is stored nowhere,
    `frames` the whole reply to one that is not run.
    """

    tenant: str | None = None
    refusal: RefusalText | None = None
    key: str | None = None
    until_s: float | None = None
    model: str = ""
    shape: Shape | None = None
    made_from: list[msgspec.Raw] | None = None
    frames: tuple[bytes, ...] = ()

    @staticmethod
    def of(caller: Caller | None) -> "Answer":
        """Return the answer that names a caller."""
        if caller is None:
            return Answer()
        return Answer(caller.tenant, key=caller.key, until_s=caller.until_s)

    @property
    def caller(self) -> Caller | None:
        """Who was identified."""
        return None if self.tenant is None else Caller(self.tenant, self.key, self.until_s)

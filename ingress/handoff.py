"""How one POST gets its stream. A handoff is chosen at start; routes know this protocol alone.

`inline`: the streamer is in this process. `redirect`: 303 to a streamer elsewhere. `accel` would be
a `Handoff` that chooses as `redirect` does and answers with the path of the same ticket in
`X-Accel-Redirect`: nginx then fetches it by GET on the same client connection, keeping few of the
answer's headers, so the streamer sets all that a client reads.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send


class Answer(Protocol):
    """An ASGI response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any: ...


class Expected(Protocol):
    """A streamer that expects a reply, before its request is in the queue."""

    @property
    def streamer(self) -> str:
        """The streamer's name, as in the reply's subject."""
        ...

    def answer(self, *, stream: bool, headers: Mapping[str, str], lingers: bool = False) -> Answer:
        """Return the client's answer, after the request was accepted.

        `lingers`: the client may come back in a moment when it leaves.
        """
        ...

    def drop(self) -> None:
        """Expect nothing any more: the request was refused."""
        ...


class Handoff(Protocol):
    """Chooses the streamer of a request."""

    def expect(
        self, *, tenant: str, request: str, deadline_s: float, keep: bool, model: str = ""
    ) -> Expected:
        """Have a streamer expect the reply. Raises a Refusal when none can.

        `keep`: the request runs on when its last reader leaves. `model` is the one asked for: at
        the deadline the streamer looks whether a worker serves it.
        """
        ...

    async def attach(
        self,
        *,
        tenant: str,
        request: str,
        deadline_s: float,
        stream: bool,
        headers: Mapping[str, str],
        after: int = -1,
        returns: bool = False,
    ) -> Answer:
        """Return the answer of a further reader of a reply, from its beginning on.

        It may be on any streamer. `deadline_s` (epoch s) is the request's own; infinite for one
        that has ended. `after` is the id of the last event that the client has. `returns`: it asks
        again by itself after the end, until it is answered with 204. Raises a Refusal.
        """
        ...

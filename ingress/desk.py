"""Ingress for those who are not HTTP: the NATS service `ingress`, and the same in process.

WebSockets end at streamers; what comes over them is admitted by the same function as a POST.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from headrace.bus import Bus
from ingress.admit import Ingress, Origin, parse
from ingress.respond import admit_response
from ingress.waiting import Left
from schemas import admit
from schemas.admit import (
    Admit,
    AdmitResponse,
    AdmittedResponse,
    Answer,
    Caller,
    Identify,
    RefusalText,
)
from schemas.errors import Forbidden, InvalidApiKey, InvalidRequest, Refusal
from schemas.responses import parse_response

Question = TypeVar("Question", bound=msgspec.Struct)
RawHeaders = Sequence[tuple[bytes, bytes]]


class Desk:
    """Identifies and admits for WebSockets; an `Admission` for those in the same process."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def identify(
        self, headers: RawHeaders, *, peer: str | None = None, local: bool = True
    ) -> Caller | None:
        """Return whose headers these are, None where a key is needed and none is shown.

        `local` says that only this machine reaches who asks. Raises InvalidApiKey or Forbidden.
        """
        gate = self._ingress.gate
        if gate.keyless and not local:
            raise Forbidden("Without keys this machine's own clients are served only.")
        if not gate.keyless and gate.shows_nothing(headers, peer=peer):
            return None
        return await gate.recognise(headers, peer=peer)

    async def identify_key(self, key: str) -> Caller:
        """Return whose key this is. Raises InvalidApiKey."""
        gate = self._ingress.gate
        if gate.keyless:
            raise InvalidApiKey("This node has no keys.")
        return await gate.recognise_key(key.encode())

    async def admit(
        self,
        caller: Caller,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
        left: Left | None = None,
    ) -> str:
        """Put a streamed request into the queue and return its model. Raises a Refusal.

        `left` returns once nobody waits for the request.
        """
        with self._counted():
            ask = parse(body, chat=chat, streamed=True)
            body_bytes = len(body)
            del body  # as for a POST
            origin = self._origin(caller, request, streamer, deadline_s, left)
            await self._ingress.admit(origin, ask, body_bytes=body_bytes)
        return ask.model

    async def admit_response(
        self,
        caller: Caller,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
        left: Left | None = None,
    ) -> AdmittedResponse:
        """Put a response into the queue, as `respond.admit_response`. Raises a Refusal."""
        with self._counted():
            origin = self._origin(caller, request, streamer, deadline_s, left)
            ask = parse_response(body, streamed=True)
            body_bytes = len(body)
            del body
            return await admit_response(
                self._ingress, origin, ask, body_bytes=body_bytes, before=before
            )

    def _origin(
        self, caller: Caller, request: str, streamer: str, deadline_s: float, left: Left | None
    ) -> Origin:
        """Return where a socket's request comes from. Raises InvalidApiKey for a revoked key."""
        gate = self._ingress.gate
        gate.check(caller)
        own_s = gate.policy(caller).deadline_s
        if own_s is not None:
            deadline_s = min(deadline_s, time.time() + own_s)
        return Origin(caller, request, streamer, deadline_s, left=left)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        counts = self._ingress.counts
        counts.received += 1
        counts.inflight += 1
        try:
            yield
        except Refusal:
            counts.refused += 1
            raise
        finally:
            counts.inflight -= 1
        counts.accepted += 1


async def serve(bus: Bus, desk: Desk) -> None:
    """Offer the NATS service. Raises BrokerAway."""

    async def identify(data: bytes) -> bytes:
        return await _answered(data, Identify, lambda asked: _identify(desk, asked))

    async def admit_(data: bytes) -> bytes:
        return await _answered(data, Admit, lambda asked: _admit(desk, asked))

    async def respond(data: bytes) -> bytes:
        return await _answered(data, AdmitResponse, lambda asked: _respond(desk, asked))

    await bus.add_service(
        admit.SERVICE,
        "Identifies clients and admits their requests",
        {admit.IDENTIFY: identify, admit.ADMIT: admit_, admit.RESPOND: respond},
    )


async def _identify(desk: Desk, asked: Identify) -> Answer:
    if asked.key is not None:
        return Answer.of(await desk.identify_key(asked.key))
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in asked.headers]
    return Answer.of(await desk.identify(headers, peer=asked.peer, local=asked.local))


async def _admit(desk: Desk, asked: Admit) -> Answer:
    model = await desk.admit(
        asked.caller,
        bytes(asked.body),
        chat=asked.chat,
        request=asked.request,
        streamer=asked.streamer,
        deadline_s=asked.deadline_s,
    )
    return Answer(tenant=asked.tenant, model=model)


async def _respond(desk: Desk, asked: AdmitResponse) -> Answer:
    admitted = await desk.admit_response(
        asked.caller,
        bytes(asked.body),
        request=asked.request,
        streamer=asked.streamer,
        deadline_s=asked.deadline_s,
        before=None if asked.before is None else msgspec.json.encode(asked.before),
    )
    return Answer(
        tenant=asked.tenant,
        model=admitted.shape.model,
        shape=admitted.shape,
        made_from=admit.items_of(admitted.made_from),
        frames=admitted.frames,
    )


async def _answered(
    data: bytes, kind: type[Question], act: Callable[[Question], Awaitable[Answer]]
) -> bytes:
    try:
        question = msgspec.json.decode(data, type=kind)
        answer = await act(question)
    except msgspec.MsgspecError as error:
        answer = Answer(refusal=RefusalText.of(InvalidRequest(str(error))))
    except Refusal as refusal:
        answer = Answer(refusal=RefusalText.of(refusal))
    return msgspec.json.encode(answer)

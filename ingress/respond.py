"""`POST /v1/responses`: a chat underneath, whose answer is a Responses object or its events."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from starlette.types import Receive, Scope

from headrace.answers import as_json
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel_surely
from headrace.cors import Cors
from headrace.kept import keep
from ingress import stored
from ingress.admit import Ingress, Origin
from ingress.handoff import Answer, Expected, Handoff
from ingress.idempotency import Attach
from ingress.routes import Asked, Generate
from ingress.stored import Record, Stored
from schemas.admit import AdmittedResponse
from schemas.errors import (
    BrokerUnavailable,
    InvalidRequest,
    NotFound,
    PreviousResponseNotFound,
)
from schemas.response_events import ResponseEvents
from schemas.response_items import Item
from schemas.responses import (
    ResponseRequest,
    as_chat,
    own_words,
    parse_response,
    repeated,
    request_of,
)
from schemas.wire import Envelope, Finished, Frame, Shape, Started, Usage, encode_frame

PREVIOUS: Final = "previous_response_id"
ENDING_S: Final = 0.5
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class AskedResponse(Asked):
    """What a body asks for, and what its response is made from."""

    background: bool = False
    items: Sequence[Item] = ()


async def asked_of(
    bus: Bus,
    ask: ResponseRequest,
    *,
    tenant: str,
    request: str,
    before: bytes | None = None,
) -> AskedResponse:
    """Return what a request asks for. Raises a Refusal.

    `before` is the conversation that it goes on from, in JSON, where this is not stored.
    """
    if before is None:
        gone_on_from, before_bytes = await _before(bus, ask, tenant)
    else:
        gone_on_from, before_bytes = msgspec.json.decode(before, type=list[Item]), len(before)
    items = [*gone_on_from, *ask.items(request)]
    return AskedResponse(
        as_chat(ask, items),
        stream=bool(ask.stream),
        response=repeated(ask),
        stored=ask.stored,
        background=bool(ask.background),
        items=items,
        before_bytes=before_bytes,
    )


async def _before(bus: Bus, ask: ResponseRequest, tenant: str) -> tuple[list[Item], int]:
    """Return the stored conversation that a request goes on from, and its size in bytes. Raises a
    Refusal."""
    if ask.previous_response_id is None:
        return [], 0
    name = ask.previous_response_id
    request = request_of(name)
    found = None
    if request is not None:
        try:
            found = await _ended(bus, tenant, request)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("Stored responses cannot be reached.") from error
    if found is None:
        what = f"Previous response with id '{name[:100]}' not found."
        raise PreviousResponseNotFound(what, param=PREVIOUS)
    if not found.events.gone_on_from:
        status = found.events.status
        what = f"Response '{name}' is {status.replace('_', ' ')}, so it cannot be gone on from."
        raise InvalidRequest(what, param=PREVIOUS)
    output = found.events.output()
    size = len(found.record.items) + len(msgspec.json.encode(output))
    return [*found.items, *output], size


async def _ended(bus: Bus, tenant: str, request: str) -> Stored | None:
    """Return a stored response, a moment later if it has not ended: the broker may have told its
    client of the end before it has stored it."""
    found = await stored.look(bus, tenant=tenant, request=request)
    give_up_s = time.monotonic() + ENDING_S
    while found is not None and not found.over and time.monotonic() < give_up_s:
        await asyncio.sleep(LOOK_S)
        found = await stored.look(bus, tenant=tenant, request=request)
    return found


async def record(bus: Bus, asked: AskedResponse, envelope: Envelope) -> None:
    """Store what an accepted request is made from, or cancel it. Raises a Refusal."""
    if not asked.stored:
        return
    tenant, request = envelope.tenant, envelope.request
    found = Record(
        1, envelope.shape, envelope.deadline_s, asked.background, msgspec.json.encode(asked.items)
    )
    try:
        try:
            await stored.store(bus, found, tenant=tenant, request=request)
        except BaseException:
            # Its client is refused, so nothing of it is charged, whoever has it by now.
            await cancel_surely(bus, tenant=tenant, request=request, begun=False)
            raise
    except (BrokerAway, BrokerRefused) as error:
        raise BrokerUnavailable("The response cannot be stored.") from error


async def admit_response(
    ingress: Ingress,
    origin: Origin,
    ask: ResponseRequest,
    *,
    body_bytes: int,
    before: bytes | None,
) -> AdmittedResponse:
    """Put a response that came over a socket into the queue. Raises a Refusal.

    `before` as in `asked_of`, `body_bytes` as in `Ingress.admit`.
    """
    tenant, request = origin.caller.tenant, origin.request
    frames: tuple[bytes, ...] = ()
    try:
        asked = await asked_of(ingress.bus, ask, tenant=tenant, request=request, before=before)
        if ask.generate is False:
            shape, frames = await _prepare(ingress, origin, asked)
        else:
            admitted = await ingress.admit(
                replace(origin, keep_answer=asked.stored),
                asked.ask,
                body_bytes=body_bytes + asked.before_bytes,
                response=asked.response,
            )
            shape = admitted.envelope.shape
            await record(ingress.bus, asked, admitted.envelope)
    except InvalidRequest as refusal:
        raise own_words(refusal) from None
    made_from = None if asked.stored else msgspec.json.encode(asked.items)
    return AdmittedResponse(shape, made_from, frames)


async def _prepare(
    ingress: Ingress, origin: Origin, asked: AskedResponse
) -> tuple[Shape, tuple[bytes, ...]]:
    """Keep what a response is made from without running it; return the shape and the frames of its
    reply, which has no choices and so no output. Raises a Refusal."""
    ingress.catalogue.find(asked.ask.model, ingress.gate.policy(origin.caller))
    response = asked.response or b""
    shape = Shape("response", asked.ask.model, int(time.time()), False, 1, False, response=response)
    frames: tuple[Frame, ...] = (
        Started(1, "", 0, shape),
        Finished(1, 0, (), (), Usage(0, 0, 0), {}),
    )
    encoded = tuple(encode_frame(frame) for frame in frames)
    if asked.stored:
        bus, tenant, request = ingress.bus, origin.caller.tenant, origin.request
        found = Record(1, shape, origin.deadline_s, False, msgspec.json.encode(asked.items))
        try:
            await keep(bus, tenant=tenant, request=request, frames=encoded)
            await stored.store(bus, found, tenant=tenant, request=request)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The response cannot be stored.") from error
    return shape, encoded


class _Unread:
    """A reply in the background: its client has the object at once, and no streamer waits."""

    def __init__(self, expected: Expected, body: bytes) -> None:
        self._expected = expected
        self._body = body

    @property
    def streamer(self) -> str:
        """The streamer's name."""
        return self._expected.streamer

    def answer(self, *, stream: bool, headers: Mapping[str, str], lingers: bool = False) -> Answer:
        """Return the object."""
        self._expected.drop()
        return as_json(msgspec.Raw(self._body), headers=dict(headers))

    def drop(self) -> None:
        """Expect nothing any more."""
        self._expected.drop()


class Respond(Generate):
    """The POST, as an ASGI application."""

    def __init__(self, ingress: Ingress, handoff: Handoff, cors: Cors) -> None:
        super().__init__(ingress, handoff, cors, chat=True)

    async def _admit(
        self, scope: Scope, receive: Receive, request: str, headers: dict[str, str]
    ) -> Answer:
        try:
            return await super()._admit(scope, receive, request, headers)
        except InvalidRequest as refusal:
            raise own_words(refusal) from None

    async def _parse(self, body: bytes, *, tenant: str, request: str) -> AskedResponse:
        return await asked_of(
            self._ingress.bus, parse_response(body), tenant=tenant, request=request
        )

    async def _accepted(self, asked: Asked, envelope: Envelope, expected: Expected) -> Expected:
        assert isinstance(asked, AskedResponse)
        await record(self._ingress.bus, asked, envelope)
        if asked.background and not asked.stream:
            queued = ResponseEvents(envelope.request, envelope.shape)
            return _Unread(expected, queued.response())
        return expected

    async def _attach(
        self, asked: Asked, tenant: str, there: Attach, headers: Mapping[str, str]
    ) -> Answer:
        assert isinstance(asked, AskedResponse)
        if not asked.background or asked.stream:
            return await super()._attach(asked, tenant, there, headers)
        request = there.request
        try:
            found = await stored.look(self._ingress.bus, tenant=tenant, request=request)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("Stored responses cannot be reached.") from error
        if found is None:
            raise NotFound("The response of this key was deleted.")
        body = msgspec.Raw(found.events.response())
        return as_json(body, headers={"x-request-id": request, **headers})

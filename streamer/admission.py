"""What a WebSocket needs of an ingress: who its client is, and that its requests are admitted.

In the gateway the ingress is in the same process; a streamer that stands alone asks the NATS
service `ingress`. Both end in the same function as the HTTP route.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from headrace.bus import BrokerAway, Bus
from schemas import admit, subjects
from schemas.admit import Admit, AdmitResponse, AdmittedResponse, Answer, Caller, Identify
from schemas.errors import BrokerUnavailable, Draining, InternalError, RequestTooLarge

IDENTIFY_TIMEOUT_S: Final = 5.0
ADMIT_MARGIN_S: Final = 5.0
"""Beyond the wait for its turn: as long as ingress itself waits for the broker's word."""
WITHDRAW_S: Final = 0.25
"""How often: the signal may come before its request."""
DRAINING_TRIES: Final = 20
DRAINING_PAUSE_S: Final = 0.05
_ENVELOPE_BYTES: Final = 1024
_PRIVATE: Final = frozenset({b"cookie"})
"""All others are shown: ingress alone knows which one a proxy puts a certificate's subject in."""

RawHeaders = Sequence[tuple[bytes, bytes]]
Left = Callable[[], Awaitable[None]]


class Admission(Protocol):
    """The door to an ingress."""

    async def identify(self, headers: RawHeaders, *, peer: str | None = None) -> Caller | None:
        """Return whom the headers name, None where they show no key but one is needed.

        `peer` is the address that they come from.

        Raises InvalidApiKey for a wrong one, Forbidden, BrokerUnavailable.
        """
        ...

    async def identify_key(self, key: str) -> Caller:
        """Return whose key this is. Raises InvalidApiKey, BrokerUnavailable."""
        ...

    async def admit(
        self,
        caller: Caller,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
        left: Left,
    ) -> str:
        """Put a streamed request into the queue and return its model. Raises a Refusal.

        `left` returns once nobody waits for the request: then it need not be queued any more.
        """
        ...

    async def admit_response(
        self,
        caller: Caller,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
        left: Left,
    ) -> AdmittedResponse:
        """Put a response into the queue. Raises a Refusal.

        `before` is the conversation that it goes on from, where this is stored nowhere else.
        """
        ...


class RemoteAdmission:
    """Asks any ingress, through NATS. An `Admission`."""

    def __init__(self, bus: Bus, *, local: bool, patience_s: float) -> None:
        """`local` says that only this machine reaches this streamer; `patience_s` is how long a
        request may wait for its turn in ingress."""
        self._bus = bus
        self._local = local
        self._admit_timeout_s = patience_s + ADMIT_MARGIN_S

    async def identify(self, headers: RawHeaders, *, peer: str | None = None) -> Caller | None:
        """As `Admission.identify`."""
        shown = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in headers
            if name not in _PRIVATE
        )
        question = Identify(shown, local=self._local, peer=peer)
        return (await self._ask(admit.IDENTIFY, question, IDENTIFY_TIMEOUT_S)).caller

    async def identify_key(self, key: str) -> Caller:
        """As `Admission.identify_key`."""
        answer = await self._ask(admit.IDENTIFY, Identify(key=key), IDENTIFY_TIMEOUT_S)
        assert answer.caller is not None  # a key names somebody, or is refused
        return answer.caller

    async def admit(
        self,
        caller: Caller,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
        left: Left,
    ) -> str:
        """As `Admission.admit`."""
        self._check_size(len(body))
        question = Admit(
            caller.tenant,
            chat,
            msgspec.Raw(body),
            request,
            streamer,
            deadline_s,
            caller.key,
            caller.until_s,
        )
        answer = await self._ask_while(
            caller.tenant, request, self._ask(admit.ADMIT, question, self._admit_timeout_s), left
        )
        return answer.model

    async def _ask_while(
        self, tenant: str, request: str, asked: Awaitable[Answer], left: Left
    ) -> Answer:
        """Await an admission; withdraw it once nobody waits for it."""
        withdrawing = asyncio.create_task(self._withdraw(tenant, request, left))
        try:
            return await asked
        except BrokerUnavailable:
            # An ingress that gave no answer in time may have it wait yet, to be run for nobody.
            await self._signal(tenant, request)
            raise
        finally:
            withdrawing.cancel()

    async def _withdraw(self, tenant: str, request: str, left: Left) -> None:
        """Have a request that nobody waits for leave ingress's waiting room, once it is there."""
        await left()
        while True:
            await self._signal(tenant, request)
            await asyncio.sleep(WITHDRAW_S)

    async def _signal(self, tenant: str, request: str) -> None:
        with contextlib.suppress(BrokerAway):
            await self._bus.publish(subjects.cancel_signal(tenant, request), b"")

    async def admit_response(
        self,
        caller: Caller,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
        left: Left,
    ) -> AdmittedResponse:
        """As `Admission.admit_response`."""
        self._check_size(len(body) + len(before or b""))
        question = AdmitResponse(
            caller.tenant,
            msgspec.Raw(body),
            request,
            streamer,
            deadline_s,
            caller.key,
            caller.until_s,
            admit.items_of(before),
        )
        answer = await self._ask_while(
            caller.tenant, request, self._ask(admit.RESPOND, question, self._admit_timeout_s), left
        )
        made_from = None if answer.made_from is None else msgspec.json.encode(answer.made_from)
        if answer.shape is None:  # an ingress of an older version
            raise InternalError("The server failed; the fault is ours.")
        return AdmittedResponse(answer.shape, made_from, answer.frames)

    def _check_size(self, size: int) -> None:
        if size + _ENVELOPE_BYTES > self._bus.payload_bytes_max:
            raise RequestTooLarge(
                f"The request is {size} bytes; the broker's limit is"
                f" {self._bus.payload_bytes_max} bytes a message."
            )

    async def _ask(self, endpoint: str, question: msgspec.Struct, timeout_s: float) -> Answer:
        # Of several ingress the broker chooses one, and that may be stopping just now.
        for _ in range(DRAINING_TRIES):
            try:
                return await self._ask_one(endpoint, question, timeout_s)
            except Draining:
                await asyncio.sleep(DRAINING_PAUSE_S)
        return await self._ask_one(endpoint, question, timeout_s)

    async def _ask_one(self, endpoint: str, question: msgspec.Struct, timeout_s: float) -> Answer:
        subject = f"{admit.SERVICE}.{endpoint}"
        try:
            data = await self._bus.request(
                subject, msgspec.json.encode(question), timeout_s=timeout_s
            )
        except BrokerAway as error:
            raise BrokerUnavailable("No ingress answers.") from error
        answer = msgspec.json.decode(data, type=Answer)
        if answer.refusal is not None:
            raise answer.refusal.refusal()
        return answer

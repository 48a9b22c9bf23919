"""What a WebSocket needs of an ingress: who its client is, and that its requests are admitted.

In the gateway the ingress is in the same process; a streamer that stands alone asks the NATS
service `ingress`. Both end in the same function as the HTTP route.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from headrace.bus import BrokerAway, Bus
from schemas import admit
from schemas.admit import Admit, AdmitResponse, Admitted, Answer, Identify
from schemas.errors import BrokerUnavailable, RequestTooLarge

IDENTIFY_TIMEOUT_S: Final = 5.0
ADMIT_TIMEOUT_S: Final = 35.0  # longer than ingress itself waits for the broker's word
_ENVELOPE_BYTES: Final = 1024
_HEADERS: Final = frozenset({b"authorization", b"host", b"origin"})

RawHeaders = Sequence[tuple[bytes, bytes]]


class Admission(Protocol):
    """The door to an ingress."""

    async def identify(self, headers: RawHeaders) -> str | None:
        """Return the tenant whom the headers name, None where they show no key but one is needed.

        Raises InvalidApiKey for a wrong one, Forbidden, BrokerUnavailable.
        """
        ...

    async def identify_key(self, key: str) -> str:
        """Return whose key this is. Raises InvalidApiKey, BrokerUnavailable."""
        ...

    async def admit(
        self,
        tenant: str,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
    ) -> None:
        """Put a streamed request into the queue. Raises a Refusal."""
        ...

    async def admit_response(
        self,
        tenant: str,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
    ) -> Admitted:
        """Put a response into the queue. Raises a Refusal.

        `before` is the conversation that it goes on from, where this is stored nowhere else.
        """
        ...


class RemoteAdmission:
    """Asks any ingress, through NATS. An `Admission`."""

    def __init__(self, bus: Bus, *, local: bool) -> None:
        """`local` says that only this machine reaches this streamer."""
        self._bus = bus
        self._local = local

    async def identify(self, headers: RawHeaders) -> str | None:
        """As `Admission.identify`."""
        shown = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in headers
            if name in _HEADERS
        )
        question = Identify(shown, local=self._local)
        return (await self._ask(admit.IDENTIFY, question, IDENTIFY_TIMEOUT_S)).tenant

    async def identify_key(self, key: str) -> str:
        """As `Admission.identify_key`."""
        answer = await self._ask(admit.IDENTIFY, Identify(key=key), IDENTIFY_TIMEOUT_S)
        return answer.tenant or ""

    async def admit(
        self,
        tenant: str,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
    ) -> None:
        """As `Admission.admit`."""
        self._check_size(len(body))
        question = Admit(tenant, chat, msgspec.Raw(body), request, streamer, deadline_s)
        await self._ask(admit.ADMIT, question, ADMIT_TIMEOUT_S)

    async def admit_response(
        self,
        tenant: str,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
    ) -> Admitted:
        """As `Admission.admit_response`."""
        self._check_size(len(body) + len(before or b""))
        question = AdmitResponse(
            tenant,
            msgspec.Raw(body),
            request,
            streamer,
            deadline_s,
            admit.items_of(before),
        )
        answer = await self._ask(admit.RESPOND, question, ADMIT_TIMEOUT_S)
        made_from = answer.made_from
        return Admitted(
            None if made_from is None else msgspec.json.encode(made_from), answer.frames
        )

    def _check_size(self, size: int) -> None:
        if size + _ENVELOPE_BYTES > self._bus.payload_bytes_max:
            raise RequestTooLarge(
                f"The request is {size} bytes; the broker's limit is"
                f" {self._bus.payload_bytes_max} bytes a message."
            )

    async def _ask(self, endpoint: str, question: msgspec.Struct, timeout_s: float) -> Answer:
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

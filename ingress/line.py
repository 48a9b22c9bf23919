"""What a costed request passes before it is queued: its tenant's limits, then its turn.

A reservation is settled by whoever ends the request: the worker that ran it, or this node when it
was never queued. Whatever comes of a request, its reservation is settled once or expires.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

from headrace.bus import Bus, Message, Subscription
from headrace.settings import LineSettings
from headrace.settle import read_settlement
from headrace.tenants import Directory
from headrace.workforce import Workforce
from ingress.admission import Order, Ticket
from ingress.cost import Cost
from ingress.inquiry import Inquiry
from ingress.limits import Limits, Standings
from ingress.prediction import Predictor
from ingress.reservations import Reservations
from ingress.waiting import PATIENCE_S, Left, WaitingRoom
from schemas import subjects
from schemas.subjects import RequestSubject, Settlement
from schemas.tenant import Policy, lane_of

log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 4
STOP_S: Final = 1.0
"""How long the last settlements may take to be written."""


class Line:
    """The line before the queue, of one ingress node; run `release_forever` as a task."""

    def __init__(
        self,
        bus: Bus,
        policies: Directory,
        workforce: Workforce,
        *,
        order: Order = Order.HYBRID,
        patience_s: float = PATIENCE_S,
        open_when_away: bool = False,
        node: str = "ingress",
    ) -> None:
        """`patience_s` is how long a request may wait; `open_when_away`: what `Reservations` does
        while the accounts cannot be reached; `node`: what operators know this process by."""
        self.reservations = Reservations(
            bus,
            lambda tenant: Limits.of(policies.policy(tenant)),
            clock=time.time,
            open_when_away=open_when_away,
        )
        self.room = WaitingRoom(
            bus, workforce.slots, clock=time.monotonic, order=order, patience_s=patience_s
        )
        self._inquiry = Inquiry(bus, self.room, node=node, clock=time.monotonic)
        self._bus = bus
        self._predictor = Predictor()
        self._settling: Subscription | None = None

    async def start(self) -> None:
        """Hear what ended requests have used, which are wanted no more, and who asks what waits.
        Raises BrokerAway."""
        await self._bus.subscribe(subjects.SETTLEMENTS, self._ended)
        self._settling = await self._bus.subscribe(
            subjects.SETTLEMENTS, self._settled, queue="ingress"
        )
        await self._bus.subscribe(subjects.CANCEL_SIGNALS, self._cancelled)
        await self._inquiry.start()

    async def stop(self) -> None:
        """Leave further settlements to other nodes, and write those that came here: nobody else
        heard of them in order to write them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                if self._settling is not None and self._bus.connected:
                    await self._settling.drain()
                await self.reservations.written()

    async def release_forever(self) -> None:
        """Let go who waits, as there is room."""
        await self.room.release_forever()

    async def check(
        self, *, tenant: str, request: str, model: str, policy: Policy, deadline_s: float
    ) -> None:
        """Refuse who would be refused whatever its prompt is: nobody has to read it for that.

        Raises what `WaitingRoom.check` and `Reservations.check` do.
        """
        least = Cost(prompt_tokens=0, output_tokens=1, choices=1)
        lane = lane_of(policy.priority_class)
        subject = RequestSubject(lane, model, 0, tenant, request)  # as far as that matters here
        self.room.check(model, self._ticket(subject, least, policy, deadline_s, None))
        await self.reservations.check(tenant)

    @asynccontextmanager
    async def turn(
        self,
        subject: RequestSubject,
        *,
        cost: Cost,
        policy: Policy,
        deadline_s: float,
        key: str | None,
        left: Left | None,
    ) -> AsyncIterator[Standings]:
        """Reserve, wait for the turn, and hold both for a block that queues the request under its
        subject. `key` is the id of its key.

        Where the block fails, all is given back. Raises what `Reservations.reserve` and
        `WaitingRoom.enter` raise.
        """
        tenant, request, model = subject.tenant, subject.request, subject.model
        ticket = self._ticket(subject, cost, policy, deadline_s, key)
        self.room.check(model, ticket)
        standings = await self.reservations.reserve(
            tenant, request=request, tokens=cost.total_tokens, deadline_s=deadline_s
        )
        try:
            await self.room.enter(model, ticket, left=left)
            try:
                yield standings
            finally:
                self.room.landed(subject.model, subject.lane)
        except BaseException:
            self.reservations.settle(tenant, request=request, tokens=None)
            raise

    def _ticket(
        self,
        subject: RequestSubject,
        cost: Cost,
        policy: Policy,
        deadline_s: float,
        key: str | None,
    ) -> Ticket:
        now_s = time.monotonic()
        output_tokens = self._predictor.predict(
            subject.tenant, subject.model, tokens_max=cost.output_tokens * cost.choices
        )
        return Ticket(
            request=subject.request,
            tenant=subject.tenant,
            priority_class=policy.priority_class,
            weight=policy.weight,
            cost_tokens=cost.prompt_tokens + output_tokens,
            output_tokens=output_tokens,
            prompt_bytes=cost.prompt_tokens * TOKEN_BYTES,
            arrived_s=now_s,
            give_up_s=now_s + min(self.room.patience_s, deadline_s - time.time()),
            tenant_max=policy.queued_requests,
            lane=subject.lane,
            partition=subject.partition,
            key=key,
        )

    async def _cancelled(self, message: Message) -> None:
        try:
            _, tenant, request = message.subject.split(".")
            self.room.withdraw(request, tenant=subjects.unescape(tenant))
        except ValueError as error:
            log.warning("a cancel that names no request: %s", error)

    async def _ended(self, message: Message) -> None:
        settlement = _read(message)
        if settlement is None:
            return
        self.reservations.ended(settlement.tenant, request=settlement.request)
        if settlement.completion_tokens:
            self._predictor.learn(
                settlement.tenant, settlement.model, tokens=settlement.completion_tokens
            )

    async def _settled(self, message: Message) -> None:
        settlement = _read(message)
        if settlement is not None:
            self.reservations.settle(
                settlement.tenant, request=settlement.request, tokens=settlement.tokens
            )


def _read(message: Message) -> Settlement | None:
    try:
        return read_settlement(message.data)
    except msgspec.MsgspecError as error:
        log.warning("a settlement that cannot be read: %s", error)
        return None


def line_of(
    settings: LineSettings, bus: Bus, policies: Directory, workforce: Workforce, *, node: str
) -> Line:
    """Return the line of a node with these settings; `node` is its name."""
    return Line(
        bus,
        policies,
        workforce,
        order=Order(settings.queue_order),
        patience_s=settings.queue_patience_s,
        open_when_away=settings.limits_when_away == "admit",
        node=node,
    )

"""Hears all replies of this streamer and hands each frame to the client that waits for it.

One subscription for all: a subscription per reply would cost the broker a route per request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from headrace import topology
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message, Subscription
from headrace.cancel import cancel, cancel_late
from schemas import subjects
from schemas.errors import Draining, StreamInterrupted
from schemas.subjects import ReplySubject, ShownQuestion, UnreadQuestion
from schemas.wire import encode_frame
from streamer import readers
from streamer.buffer import BUFFER_BYTES_MAX, OpenReply

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
LINGER_S: Final = 0.6
"""How long a client with an Idempotency-Key may take to come back. A slot must be free within a
second of its client's leaving; OpenAI's SDKs try again after 0.4 to 0.5 s."""
STOPPING: Final = "This node is stopping; resume the stream elsewhere."


class Mailbox:
    """The open replies of one streamer, by request."""

    def __init__(
        self, bus: Bus, streamer: str, *, serves: Callable[[str], bool] = lambda model: True
    ) -> None:
        """`serves` tells whether a worker serves a model."""
        self.streamer = streamer
        self._serves = serves
        self.opened = 0
        self.tokens = 0
        self.draining = False
        self._over = False
        self._bus = bus
        self._open: dict[str, OpenReply] = {}
        self._attached: dict[OpenReply, list[Subscription]] = {}
        self.unexpected: Callable[[Message], None] = lambda message: None
        self.awaited: Callable[[str], bool] = lambda request: False
        self._empty = asyncio.Event()

    @property
    def open_count(self) -> int:
        """How many replies have a client."""
        return len(self._open) + len(self._attached)

    @property
    def replies(self) -> list[OpenReply]:
        """All that are open."""
        return [*self._open.values(), *self._attached]

    async def start(self) -> None:
        """Begin to listen. Raises BrokerAway."""
        await self._bus.listen(subjects.replies_of(self.streamer), self._message)
        await self._bus.subscribe(subjects.streamer_shown(self.streamer), self._shown)
        await self._bus.subscribe(subjects.streamer_reads(self.streamer), self._reads)
        await self._bus.subscribe(subjects.streamer_unread(self.streamer), self._unread)
        self._bus.on_reconnect(self._reconnected)

    def _message(self, message: Message) -> None:
        reply = self._open.get(message.subject.rpartition(".")[2])
        if reply is None:
            self.unexpected(message)
        else:
            reply.frame(message.data)

    async def _shown(self, message: Message) -> None:
        """Tell a worker that takes a request over how far its client has seen."""
        question = msgspec.json.decode(message.data, type=ShownQuestion)
        reply = self._open.get(question.request)
        answer = b"" if reply is None else encode_frame(reply.shown(question.have))
        await self._bus.publish(message.reply, answer)

    async def _reads(self, message: Message) -> None:
        """Tell another streamer whether the client that came with a request is here, or will be."""
        request = message.data.decode()
        here = request in self._open or self.awaited(request)
        await self._bus.publish(message.reply, readers.HERE if here else b"")

    async def _unread(self, message: Message) -> None:
        """Tell a worker which of its requests nobody reads here."""
        question = msgspec.json.decode(message.data, type=UnreadQuestion)
        unread = [
            request
            for request in question.requests
            if request not in self._open and not self.awaited(request)
        ]
        await self._bus.publish(message.reply, msgspec.json.encode(unread))

    async def _reconnected(self) -> None:
        for reply in self.replies:
            reply.reconnected()

    def open(
        self,
        *,
        tenant: str,
        request: str,
        deadline_s: float,
        keep: bool = False,
        model: str = "",
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> OpenReply:
        """Expect a reply; called before its request is published, so no frame is missed."""
        reply = OpenReply(
            self._bus,
            tenant=tenant,
            request=request,
            log_subject=str(ReplySubject(self.streamer, tenant, request)),
            deadline_s=deadline_s,
            now_s=time.monotonic(),
            keep=keep,
            model=model,
            serves=self._serves,
            buffer_bytes_max=buffer_bytes_max,
        )
        self._open[request] = reply
        self._opened(reply)
        return reply

    def _opened(self, reply: OpenReply) -> None:
        self.opened += 1
        if self._over:
            reply.refuse(StreamInterrupted(STOPPING))

    async def attach(
        self, *, tenant: str, request: str, deadline_s: float | None = None
    ) -> OpenReply:
        """Read a reply that this or another streamer relays, from its beginning in the log on.

        Raises BrokerAway, and Draining: another streamer can go on for longer.
        """
        if self.draining:
            raise Draining("This node is stopping.")
        latest_s = subjects.made_s(request) + topology.DEADLINE_S_MAX
        reply = OpenReply(
            self._bus,
            tenant=tenant,
            request=request,
            log_subject=subjects.replies_to(request, tenant=tenant),
            deadline_s=latest_s if deadline_s is None else deadline_s,
            now_s=time.monotonic(),
            serves=self._serves,
        )

        async def frame(message: Message) -> None:
            reply.heard_on = message.subject
            reply.frame(message.data)

        async def here(message: Message) -> None:
            """Tell a streamer that this reader is here, or a worker how far it has seen."""
            answer = readers.HERE
            if message.data:
                question = msgspec.json.decode(message.data, type=ShownQuestion)
                answer = encode_frame(reply.shown(question.have))
            await self._bus.publish(message.reply, answer)

        self._attached[reply] = [
            await self._bus.subscribe(reply.log_subject, frame),
            await self._bus.subscribe(subjects.readers_of(tenant=tenant, request=request), here),
        ]
        self._opened(reply)
        return reply

    async def detach(self, reply: OpenReply) -> None:
        """Read an attached reply no more."""
        subscriptions = self._attached.pop(reply, ())
        self._closed(reply)
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def close(self, reply: OpenReply) -> None:
        """Forget a reply."""
        if self._open.pop(reply.request, None) is not None:
            self._closed(reply)

    def _closed(self, reply: OpenReply) -> None:
        self.tokens += reply.tokens
        if not self.open_count:
            self._empty.set()

    async def finish(self, reply: OpenReply) -> None:
        """Forget a reply; cancel its request if its last reader left, or was refused, before the
        end."""
        attached = reply in self._attached
        if attached:
            await self.detach(reply)
        else:
            self.close(reply)
        if reply.reply.ended or isinstance(reply.refusal, StreamInterrupted):
            return
        left_s = time.monotonic()
        if reply.left and (reply.kept or await self._is_read(reply, attached=attached)):
            return
        if reply.left and reply.lingers:
            await asyncio.sleep(max(0.0, left_s + LINGER_S - time.monotonic()))
            if await self._is_read(reply, attached=attached):
                return
        try:
            await self._cancel(reply)
        except (BrokerAway, BrokerRefused) as error:
            log.info("%s is cancelled when the broker is back: %s", reply.request, error)
            self._bus.errands.owe(lambda: self._cancel_unread(reply, attached=attached))

    async def _cancel(self, reply: OpenReply) -> None:
        await cancel(
            self._bus, tenant=reply.tenant, request=reply.request, begun=reply.reply.started
        )

    async def _cancel_unread(self, reply: OpenReply, *, attached: bool) -> None:
        """Cancel what a cut-off node could not: its client may have gone on elsewhere since."""
        if not (reply.left and await self._is_read(reply, attached=attached)):
            await cancel_late(
                self._bus, tenant=reply.tenant, request=reply.request, begun=reply.reply.started
            )

    async def _is_read(self, reply: OpenReply, *, attached: bool) -> bool:
        """Ask whether somebody else reads this reply, which is no longer open here: a client that
        came back, most of all."""
        request = reply.request
        if request in self._open or any(each.request == request for each in self._attached):
            return True
        asked = [readers.is_attached(self._bus, tenant=reply.tenant, request=request)]
        if attached:
            asked.append(self._is_read_first(reply))
        return any(await asyncio.gather(*asked))

    async def _is_read_first(self, reply: OpenReply) -> bool:
        """Ask the streamer of the client that came with the request whether it is there still."""
        if reply.heard_on is not None:
            streamer: str | None = ReplySubject.parse(reply.heard_on).streamer
        else:
            streamer = await readers.streamer_of(self._bus, reply.request)
        return streamer is not None and await readers.is_read_at(
            self._bus, streamer, request=reply.request
        )

    async def drain(self, *, grace_s: float) -> None:
        """Let open replies end for `grace_s`; end the rest, and what is opened from then on, with
        an error that can be resumed."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.open_count:  # another may have come since the last one ended
                    self._empty.clear()
                    await self._empty.wait()
        self._over = True
        for reply in self.replies:
            reply.refuse(StreamInterrupted(STOPPING))

    async def tick_forever(self) -> None:
        """Look after every open reply a few times a second."""
        while True:
            await asyncio.sleep(TICK_S)
            now_s, wall_s = time.monotonic(), time.time()
            for reply in self.replies:
                reply.tick(now_s=now_s, wall_s=wall_s)

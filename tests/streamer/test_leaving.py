"""Who leaves a reader's place before the request has begun, or at a node that is cut off."""

import asyncio
import math
import time

import pytest

from chaos.links import Link
from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from schemas.subjects import ReplySubject, RequestSubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape, encode_envelope
from streamer import readers
from streamer.attach import attach
from streamer.mailbox import Mailbox
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


async def _queue(bus: Bus, *, keep: bool) -> str:
    """Queue a request whose streamer is no more; return its id."""
    request = new_request_id()
    envelope = Envelope(
        request=request,
        tenant="t",
        model="m",
        reply=str(ReplySubject("gone", "t", request)),
        prompt=b"",
        sampling=Sampling(max_tokens=1),
        shape=Shape("chat", "m", 5, False, 1, False, keep),
        deadline_s=time.time() + 600,
    )
    subject = RequestSubject("online", "m", 1, "t", request)
    await bus.store(str(subject), encode_envelope(envelope))
    return request


async def _is_queued(bus: Bus) -> bool:
    info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
    return bool(info["state"].get("subjects"))


def test_who_leaves_a_request_that_continues_before_it_has_begun_does_not_cancel_it(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        for keep in (True, False):
            mailbox = Mailbox(bus, "s")
            reply = await attach(bus, mailbox, tenant="t", request=await _queue(bus, keep=keep))
            assert reply.kept is keep
            reply.leave()
            await mailbox.finish(reply)
            assert await _is_queued(bus) is keep
            await bus.purge("REQUESTS", "requests.>")

    with_bus(own_nats.url, test)


# nats-py leaves connections behind that break before they greet.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_node_that_was_cut_off_does_not_cancel_what_its_client_reads_elsewhere_by_now(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "ANSWER_S", 20.0)

    async def test() -> None:
        link = Link(own_nats.port)
        await link.open()
        async with (
            connection(BusSettings(link.url), name="here", timeout_s=10) as here,
            connection(BusSettings(own_nats.url), name="there", timeout_s=10) as there,
        ):
            await topology.apply(there)
            read, unread = [await _queue(there, keep=False) for _ in range(2)]
            cut_off, other = Mailbox(here, "here"), Mailbox(there, "there")
            replies = [
                await attach(here, cut_off, tenant="t", request=request, deadline_s=math.inf)
                for request in (read, unread)
            ]
            await attach(there, other, tenant="t", request=read)
            link.cut()
            await until(lambda: not here.connected)
            for reply in replies:
                reply.leave()
                await cut_off.finish(reply)
            link.mend()

            async def only_read() -> bool:
                info = await there.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
                queued = info["state"].get("subjects") or {}
                return [name.rpartition(".")[2] for name in queued] == [read]

            await until(only_read)  # they are looked after in their order
        await link.close()

    asyncio.run(test())

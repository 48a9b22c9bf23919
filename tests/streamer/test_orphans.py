"""A reply whose request is in neither queue nor log ends with an error; any other is left alone."""

import asyncio
import time

import pytest

from headrace import topology
from headrace.bus import Bus
from schemas.errors import BrokerUnavailable
from streamer import orphans
from streamer.mailbox import Mailbox
from streamer.orphans import Orphans
from tests.broker import with_bus
from tests.queue import place, put
from tests.servers import NatsServer
from tests.waiting import until


def test_only_what_the_queue_has_lost_is_given_up_once_it_was_made_anew(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "LOOK_S", 0.05)
    monkeypatch.setattr(orphans, "PUT_BACK_S", 0.1)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        mailbox = Mailbox(bus, "s")
        queued, lost = place(), place()
        await put(bus, [queued])
        replies = [
            mailbox.open(tenant="t", request=each.request, deadline_s=time.time() + 60)
            for each in (queued, lost, place())
        ]
        replies[2].queued = False  # it waits for its turn
        found = Orphans(bus, mailbox)
        watching = asyncio.create_task(found.watch())
        await found.queue_remade()
        await until(lambda: replies[1].refusal is not None, within_s=5)
        watching.cancel()
        assert isinstance(replies[1].refusal, BrokerUnavailable)
        assert replies[0].refusal is None
        assert replies[0].asked_s > 0  # it was looked for too
        assert replies[2].refusal is None
        replies[2].now_queued(now_s=time.monotonic())
        assert replies[2].asked_s > 0

    with_bus(own_nats.url, test)


def test_a_quiet_reply_is_looked_for_without_any_news_of_the_queue(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "LOOK_S", 0.05)
    monkeypatch.setattr(orphans, "QUIET_S", 0.2)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        mailbox = Mailbox(bus, "s")
        lost = place()
        reply = mailbox.open(tenant="t", request=lost.request, deadline_s=time.time() + 60)
        watching = asyncio.create_task(Orphans(bus, mailbox).watch())
        await until(lambda: reply.refusal is not None, within_s=5)
        watching.cancel()

    with_bus(own_nats.url, test)

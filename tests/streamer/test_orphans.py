"""A reply whose request is in neither queue nor log ends with an error; any other is left alone."""

import asyncio
import time

import pytest

from gateway.inline import Inline
from headrace import topology
from headrace.bus import Bus
from schemas.errors import BrokerUnavailable
from schemas.subjects import new_request_id
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
            for each in (queued, lost)
        ]
        found = Orphans(bus, mailbox)
        watching = asyncio.create_task(found.watch())
        await found.queue_remade()
        await until(lambda: replies[1].refusal is not None)
        watching.cancel()
        assert isinstance(replies[1].refusal, BrokerUnavailable)
        assert replies[0].refusal is None
        assert replies[0].asked_s > 0  # it was looked for too

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
        await until(lambda: reply.refusal is not None)
        watching.cancel()

    with_bus(own_nats.url, test)


def test_who_waits_in_ingress_for_its_turn_is_lost_by_no_queue(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "LOOK_S", 0.05)
    monkeypatch.setattr(orphans, "QUIET_S", 0.1)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        mailbox, lost = Mailbox(bus, "s"), place()
        inline = Inline(bus, mailbox)
        later_s = time.time() + 60
        waiting = inline.expect(
            tenant="t", request=new_request_id(), deadline_s=later_s, keep=False
        )
        [waits] = mailbox.replies
        reply = mailbox.open(tenant="t", request=lost.request, deadline_s=later_s)
        watching = asyncio.create_task(Orphans(bus, mailbox).watch())
        await until(lambda: reply.refusal is not None)
        assert (waits.absences, waits.refusal) == (0, None)  # it is as quiet, and older
        waiting.answer(stream=True, headers={})
        await until(lambda: waits.refusal is not None)
        watching.cancel()

    with_bus(own_nats.url, test)

"""A streamer asks any ingress; one that is stopping is not the last word."""

import asyncio
import time

import msgspec
import pytest

from headrace.bus import Bus, Message
from schemas import admit, subjects
from schemas.admit import Answer, Caller, RefusalText
from schemas.errors import BrokerUnavailable, Draining, InvalidApiKey, Refusal
from schemas.subjects import new_request_id
from streamer import admission
from streamer.admission import DRAINING_TRIES, RemoteAdmission
from tests.broker import with_bus


class Ingress:
    """An ingress that refuses so often, and then lets everybody in."""

    def __init__(self, refusal: Refusal, times: int) -> None:
        self.asked = 0
        self._refusal = refusal
        self._times = times

    async def answer(self, _: bytes) -> bytes:
        self.asked += 1
        refused = self.asked <= self._times
        answer = Answer(refusal=RefusalText.of(self._refusal)) if refused else Answer(tenant="t")
        return msgspec.json.encode(answer)


def identified(url: str, ingress: Ingress) -> str:
    async def ask(bus: Bus) -> str:
        await bus.add_service(admit.SERVICE, "for a test", {admit.IDENTIFY: ingress.answer})
        return (await RemoteAdmission(bus, local=True, patience_s=30).identify_key("k")).tenant

    return with_bus(url, ask)


def test_an_ingress_that_stops_is_asked_again_until_another_answers(nats_url: str) -> None:
    ingress = Ingress(Draining("This node is stopping."), times=3)
    assert identified(nats_url, ingress) == "t"
    assert ingress.asked == 4


def test_where_all_are_stopping_the_client_is_told(nats_url: str) -> None:
    ingress = Ingress(Draining("This node is stopping."), times=1000)
    with pytest.raises(Draining):
        identified(nats_url, ingress)
    assert ingress.asked == DRAINING_TRIES + 1


def test_another_refusal_is_final(nats_url: str) -> None:
    ingress = Ingress(InvalidApiKey("No."), times=1)
    with pytest.raises(InvalidApiKey):
        identified(nats_url, ingress)
    assert ingress.asked == 1


def test_a_request_whose_admission_is_not_answered_in_time_is_cancelled(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ADMIT_MARGIN_S", 0.1)
    request = new_request_id()

    async def have_it_wait(_: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    async def run(bus: Bus) -> str:
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def cancelled(message: Message) -> None:
            heard.set_result(message.subject)

        await bus.subscribe(subjects.CANCEL_SIGNALS, cancelled)
        await bus.add_service(admit.SERVICE, "for a test", {admit.ADMIT: have_it_wait})
        with pytest.raises(BrokerUnavailable):
            await RemoteAdmission(bus, local=True, patience_s=0.1).admit(
                Caller("t"),
                b"{}",
                chat=True,
                request=request,
                streamer="s",
                deadline_s=time.time() + 60,
                left=asyncio.Event().wait,
            )
        async with asyncio.timeout(15):
            return await heard

    assert with_bus(nats_url, run) == subjects.cancel_signal("t", request)

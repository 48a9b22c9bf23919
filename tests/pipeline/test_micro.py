"""What `nats micro` is told of the service that streamers ask."""

import json
from typing import Any

import pytest

from headrace.bus import Bus
from headrace.messages import Message
from tests.broker import with_bus
from tests.pipeline.conftest import System
from tests.waiting import until

pytestmark = pytest.mark.parametrize("mode", ["split"], indirect=True, scope="session")


def test_each_ingress_says_what_it_answers_and_that_all_share_the_questions(
    system: System,
) -> None:
    async def ask(bus: Bus) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []

        async def take(message: Message) -> None:
            heard.append(json.loads(message.data))

        inbox = bus.new_inbox()
        await bus.subscribe(inbox, take)
        await bus.publish("$SRV.INFO.ingress", b"", reply=inbox)
        await until(lambda: len(heard) == len(system.doors), within_s=30)
        return heard

    told = with_bus(system.nats_url, ask)
    assert {each["name"] for each in told} == {"ingress"}
    assert {each["type"] for each in told} == {"io.nats.micro.v1.info_response"}
    assert len({each["id"] for each in told}) == len(system.doors)
    for each in told:
        offered = {one["name"]: (one["subject"], one["queue_group"]) for one in each["endpoints"]}
        assert offered == {
            name: (f"ingress.{name}", "q") for name in ("identify", "admit", "respond")
        }

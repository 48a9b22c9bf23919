"""The tenants' accounts are gone while the broker lives: the configured choice is taken and told.

The last door lets requests pass meanwhile, the first refuses them, which is the default.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from headrace.bus import BrokerRefused, Bus
from tests.broker import with_bus
from tests.pipeline.asking import refusal
from tests.pipeline.conftest import Mode, Node, page
from tests.pipeline.metered import Metered, metered
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

TENANTS = {"free": "", "limited": "requests_per_minute = 600"}
SQUATTER = {"name": "SQUATTER", "subjects": ["$KV.limits.>"], "storage": "memory"}


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("limits-away")
    admitting = ("--limits-when-away", "admit")
    with metered(
        mode, folder, tenants=TENANTS, models={"sim": "{}"}, doors=2, last=admitting
    ) as found:
        yield found


@contextmanager
def _accounts_gone(nats_url: str) -> Iterator[None]:
    """Delete the bucket `limits` for a block: a stream with its subjects keeps it from being made
    again."""

    async def squat(bus: Bus) -> None:
        async def squats() -> bool:
            with suppress(BrokerRefused):
                await bus.api("STREAM.DELETE.KV_limits")
            try:
                await bus.api("STREAM.CREATE.SQUATTER", SQUATTER)
            except BrokerRefused:  # a node has made it again in between
                return False
            return True

        await until(squats)

    with_bus(nats_url, squat)
    try:
        yield
    finally:
        with_bus(nats_url, lambda bus: bus.api("STREAM.DELETE.SQUATTER"))


def _says(door: Node) -> tuple[str, float]:
    """Return what readiness says of the limits of a node that is ready, and the gauge."""
    ready: dict[str, Any] = json.loads(page(f"{door.admin_url}/readyz"))
    assert ready["state"] == "ready"
    return ready["limits"], _metric(door, "limits_away")


def _metric(door: Node, name: str) -> float:
    [found] = [n for key, n in door.metrics().items() if key.split("_", 2)[2] == name]
    return found


def test_without_the_accounts_the_configured_choice_is_taken_and_told(house: Metered) -> None:
    refusing, admitting = house.doors[0], house.doors[-1]
    last = len(house.doors) - 1
    assert house.ask("limited").status_code == 200
    assert [_says(door) for door in (refusing, admitting)] == [("ok", 0), ("ok", 0)]
    with _accounts_gone(house.nats_url):
        refused = house.ask("limited")
        assert (refused.status_code, refusal(refused)["code"]) == (503, "broker_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert _says(refusing) == ("away: refusing", 1)
        assert _metric(refusing, "limits_away_refused_total") == 1
        assert house.ask("free").status_code == 200
        assert _says(admitting) == ("ok", 0)  # nobody with limits has asked there
        assert house.ask("limited", last).status_code == 200
        assert _says(admitting) == ("away: admitting", 1)
        assert _metric(admitting, "unlimited_requests_total") == 1
        assert _says(refusing) == ("away: refusing", 1)
    for door in (refusing, admitting):
        wait_for(lambda door=door: _says(door) == ("ok", 0), within_s=15, what="the accounts")
    assert house.ask("limited").status_code == 200
    assert _metric(refusing, "limits_away_refused_total") == 1

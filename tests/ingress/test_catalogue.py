"""Which models a door knows, over a real broker."""

import time

import msgspec
import pytest

from headrace import registry, topology
from headrace.bus import Bus
from ingress.catalogue import Catalogue
from schemas.errors import BrokerUnavailable, ModelNotFound
from schemas.tenant import Policy
from tests.broker import with_bus
from tests.servers import NatsServer
from workers.engine_sim import SimulatedEngine, tokenizer_files


def test_a_model_whose_files_cannot_be_read_yet_is_unavailable_and_not_unknown(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        card = SimulatedEngine().card()
        missing = msgspec.structs.replace(card, files={"tokenizer.json": "0" * 64})
        await bus.store("$KV.models.sim", msgspec.json.encode(missing))
        catalogue = Catalogue(bus, clock=time.monotonic)
        await catalogue.start()
        with pytest.raises(BrokerUnavailable):
            catalogue.find("sim")
        with pytest.raises(ModelNotFound):
            catalogue.find("other")
        with pytest.raises(ModelNotFound):
            catalogue.find("sim", Policy(models=frozenset({"other"})))
        await registry.publish_card(bus, card, tokenizer_files())
        again = Catalogue(bus, clock=time.monotonic)
        await again.start()
        assert again.find("sim").card.name == "sim"

    with_bus(own_nats.url, test)


def test_a_model_whose_files_are_of_no_use_is_not_served(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        card = SimulatedEngine().card()
        await registry.publish_card(bus, card, {"tokenizer.json": b"{}"})
        catalogue = Catalogue(bus, clock=time.monotonic)
        await catalogue.start()
        with pytest.raises(ModelNotFound):
            catalogue.find("sim")

    with_bus(own_nats.url, test)

"""How requests are looked at, however large they are."""

import asyncio
import hashlib
import json
import time

import pytest

from headrace import topology
from headrace.bus import Bus
from headrace.moderation import Asked, Moderation, ModerationSettings
from ingress.admit import Origin, parse
from ingress.auth import Gate
from ingress.catalogue import Model
from ingress.inspection import Inspection
from ingress.prompt import Prompter
from ingress.prompt_log import PromptLog
from schemas.errors import InvalidApiKey
from schemas.model import ModelCard
from schemas.subjects import new_request_id
from schemas.tenant import Entry, Key, Policy
from tests.broker import with_bus
from tests.ingress.test_no_workers import BODY, Door
from tests.servers import NatsServer
from workers.sim.vocabulary import tokenizer_files


def test_others_go_on_while_a_large_request_is_looked_at() -> None:
    card = ModelCard(name="m", created_s=0, max_model_len=1000, files={})
    model = Model(card, Prompter(tokenizer_files()))
    messages = [{"role": "user", "content": "u"}]
    documents = [{"a": ["b"] * 20_000}]
    body = json.dumps({"model": "m", "messages": messages, "documents": documents}).encode()
    ask = parse(body, chat=True)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        inspection = Inspection(None, PromptLog(redact=(), characters_max=10))
        going_on = asyncio.create_task(others())
        await inspection.look("r", "t", Policy(), ask, model, body_bytes=len(body))
        going_on.cancel()

    asyncio.run(scenario())
    assert turns


class Revoking:
    """A moderator in whose time an operator revokes a key."""

    def __init__(self, gate: Gate, key: Key) -> None:
        self.gate = gate
        self.key = key

    async def check_input(self, asked: Asked) -> bool:
        self.gate.directory.take("key", self.key.id, Entry(value=self.key, gone_s=1.0))
        return False

    async def check_output(self, said: object) -> None:
        raise AssertionError


def test_a_request_whose_key_was_revoked_while_it_was_looked_at_is_not_queued(
    own_nats: NatsServer,
) -> None:
    key = Key(tenant="t", sha256=hashlib.sha256(b"k").hexdigest())

    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        door = Door(bus)
        await door.open()
        gate = door.ingress.gate = Gate([(key.tenant, key.sha256)])
        moderation = Moderation(ModerationSettings(moderator="m:f"), Revoking(gate, key))
        door.ingress.inspection = Inspection(moderation, None)
        origin = Origin(gate.identify_key(b"k"), new_request_id(), "s", time.time() + 60)
        with pytest.raises(InvalidApiKey):
            await door.ingress.admit(origin, parse(BODY, chat=False), body_bytes=len(BODY))
        assert (await bus.api("STREAM.INFO.REQUESTS"))["state"]["last_seq"] == 0

    with_bus(own_nats.url, scenario)

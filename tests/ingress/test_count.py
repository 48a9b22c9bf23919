"""How the tokens of a response's prompt are counted; the numbers are `tests.pipeline`'s affair."""

import hashlib
import json

from starlette.requests import Request
from starlette.types import Message, Scope

from headrace import topology
from headrace.bus import Bus
from ingress.auth import Gate
from ingress.count import count
from schemas.tenant import Entry, Key
from tests.broker import with_bus
from tests.ingress.test_no_workers import Door
from tests.servers import NatsServer


def test_a_body_that_ends_after_its_key_was_revoked_is_not_counted(own_nats: NatsServer) -> None:
    key = Key(tenant="t", sha256=hashlib.sha256(b"k").hexdigest())
    gate = Gate([(key.tenant, key.sha256)])
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses/input_tokens",
        "headers": [(b"authorization", b"Bearer k")],
        "query_string": b"",
    }

    async def revoked_meanwhile() -> Message:
        gate.directory.take("key", key.id, Entry(value=key, gone_s=1.0))
        body = {"model": "m", "input": "Once"}
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        door = Door(bus)
        await door.open()
        door.ingress.gate = gate
        answer = await count(door.ingress)(Request(scope, revoked_meanwhile))
        assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (
            401,
            "invalid_api_key",
        )

    with_bus(own_nats.url, scenario)

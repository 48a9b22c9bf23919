"""What one tenant has stored is not found by another; a socket shows its key first."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.pipeline.conftest import Node, _apply, front, worker
from tests.servers import NatsServer, wait_ready
from tests.waiting import wait_for

KEYS = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in ("acme", "b.co")}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A gateway with a key for each of two tenants, in a system of its own: what the bucket holds
    of tenants would guard the others' doors."""
    folder = tmp_path_factory.mktemp("tenants")
    digests = {tenant: hashlib.sha256(key.encode()).hexdigest() for tenant, key in KEYS.items()}
    tables = [f'[[keys]]\ntenant = "{name}"\nsha256 = "{digests[name]}"\n' for name in KEYS]
    config = folder / "headrace.toml"
    config.write_text("".join(tables))
    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)
        engine = worker("worker-0", nats.url, folder)
        cleanup.callback(engine.process.stop)
        found = front("gateway", nats.url, folder, "--config", str(config))
        cleanup.callback(found.process.stop)
        for each in (engine, found):
            wait_ready(each.process, each.admin_url)
        wait_for(
            lambda: "sim" in httpx.get(f"{found.url}/readyz", timeout=30).json()["models"],
            within_s=30,
            what="the model",
        )
        yield found


def sdk(keyed: Node, tenant: str) -> openai.OpenAI:
    url = f"{keyed.url}/v1"
    return openai.OpenAI(base_url=url, api_key=KEYS[tenant], timeout=20, max_retries=0)


def test_another_tenants_response_is_not_found(keyed: Node) -> None:
    with sdk(keyed, "acme") as own, sdk(keyed, "b.co") as other:
        made = own.responses.create(model="sim", input="x", background=True, max_output_tokens=4)
        for ask in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id, stream=True)
        with pytest.raises(openai.BadRequestError) as error:
            other.responses.create(model="sim", input="y", previous_response_id=made.id)
        assert error.value.code == "previous_response_not_found"
        assert own.responses.retrieve(made.id).id == made.id


def test_without_a_key_nothing_is_told(keyed: Node) -> None:
    with sdk(keyed, "acme") as own, httpx.Client(base_url=keyed.url, timeout=30) as client:
        name = own.responses.create(model="sim", input="x", max_output_tokens=1).id
        ways = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
        for method, path in ways:
            answer = client.request(method, f"/v1/responses/{name}{path}")
            assert answer.status_code == 401
        assert client.post("/v1/responses", json={"model": "sim"}).status_code == 401


def test_a_key_in_the_first_message_opens_the_socket(keyed: Node) -> None:
    body = {"type": "response.create", "model": "sim", "input": "x", "max_output_tokens": 1}
    url = keyed.url.replace("http", "ws", 1) + "/v1/responses"

    async def opened(*messages: dict[str, Any]) -> dict[str, Any]:
        async with connect(url, compression=None, proxy=None) as socket, asyncio.timeout(20):
            for message in messages:
                await socket.send(json.dumps(message))
            found: dict[str, Any] = json.loads(await socket.recv())
            return found

    async def run() -> None:
        key = {"type": "auth", "key": KEYS["acme"]}
        assert (await opened(key, body))["type"] == "response.created"
        for first in (body, {"type": "auth", "key": "sk-wrong"}):
            with pytest.raises(ConnectionClosed) as closed:
                await opened(first)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008

    asyncio.run(run())

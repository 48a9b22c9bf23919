"""Facts about serving: ports, several servers in a loop, and two ways to stop."""

import asyncio

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headrace.http import CannotListen, Serving, serve
from tests.waiting import until


def app(text: str, gate: asyncio.Event | None = None) -> Starlette:
    async def answer(_: Request) -> PlainTextResponse:
        if gate is not None:
            await gate.wait()
        return PlainTextResponse(text)

    return Starlette(routes=[Route("/", answer)])


async def at(text: str, gate: asyncio.Event | None = None) -> Serving:
    return await serve(app(text, gate), host="127.0.0.1", port=0)


def test_two_servers_share_a_loop_and_know_their_ports() -> None:
    async def scenario() -> None:
        one, two = await at("one"), await at("two")
        async with httpx.AsyncClient() as client:
            assert (await client.get(one.url)).text == "one"
            assert (await client.get(two.url)).text == "two"
            assert (one.connections, two.connections) == (1, 1)
        await asyncio.gather(one.close(), two.close())

    uvloop.run(scenario())


def test_a_port_in_use_is_refused() -> None:
    async def scenario() -> None:
        serving = await at("first")
        with pytest.raises(CannotListen, match=str(serving.port)):
            await serve(app("second"), host="127.0.0.1", port=serving.port)
        await serving.close()

    uvloop.run(scenario())


def test_close_cuts_what_outlasts_the_grace() -> None:
    async def scenario() -> None:
        serving = await at("never", asyncio.Event())
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.get(serving.url))
            await until(lambda: serving.connections)
            async with asyncio.timeout(5):
                await serving.close(grace_s=0)
                with pytest.raises(httpx.HTTPError):
                    (await request).raise_for_status()

    uvloop.run(scenario())

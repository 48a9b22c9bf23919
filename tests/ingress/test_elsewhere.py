"""A handshake at an ingress is refused, and told where WebSockets are."""

import json
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headrace.http import WebSocketDoor, serve
from ingress.elsewhere import PATHS, Elsewhere, refusal_at
from schemas.model import StreamerEntry
from streamer.rooms import ROOMS

CHAT = "/v1/chat/completions"


def entry(url: str) -> StreamerEntry:
    return StreamerEntry(name=url, public_url=url)


def test_all_that_streamers_serve_is_known() -> None:
    assert ROOMS.keys() == PATHS


@pytest.mark.parametrize(
    ("public_url", "socket_url"),
    [
        ("http://127.0.0.1:8001", "ws://127.0.0.1:8001/v1/chat/completions"),
        ("https://llm.example/s1", "wss://llm.example/s1/v1/chat/completions"),
    ],
)
def test_the_refusal_names_a_live_streamers_url(public_url: str, socket_url: str) -> None:
    said = refusal_at(CHAT, [entry("/streams/a"), entry(public_url)]).body()["error"]["message"]
    assert said == (
        f"WebSockets are served by the streamers, not by an ingress; connect to {socket_url}."
    )


@pytest.mark.parametrize("live", [[], [entry("/streams/a")]], ids=["none", "behind a proxy"])
def test_without_a_url_it_names_the_streamers_alone(live: list[StreamerEntry]) -> None:
    said = refusal_at(CHAT, live).body()["error"]["message"]
    assert said == "WebSockets are served by the streamers, not by an ingress."


def test_a_path_that_no_streamer_serves_is_refused_as_it_is_there() -> None:
    said = refusal_at("/v1/models", [entry("http://a")]).body()["error"]["message"]
    assert said == "No WebSocket is served at /v1/models."


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_client_is_answered_with_404_in_the_apis_shape(path: str) -> None:
    async def scenario() -> None:
        door = WebSocketDoor(Elsewhere(lambda: [entry("http://a.example:1")]))
        serving = await serve(Starlette(), host="127.0.0.1", port=0, websocket=door)
        with pytest.raises(InvalidStatus) as caught:
            await connect(serving.url.replace("http", "ws", 1) + path, proxy=None)
        await serving.close()
        answer = caught.value.response
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"
        error: dict[str, Any] = json.loads(answer.body or b"")["error"]
        assert error["code"] == "not_found"
        assert error["message"].endswith(f"connect to ws://a.example:1{path}.")

    uvloop.run(scenario())

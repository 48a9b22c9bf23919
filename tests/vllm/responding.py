"""The same responses asked of vLLM's own server and of ours, and what they say."""

import json
from itertools import groupby
from typing import Any, NamedTuple

import httpx

from tests.vllm.asking import CITY, ONE_OF_TWO, PARIS, WEATHER_IN_PARIS, parsed_events

TOOL = {"type": "function", "name": "get_weather", "parameters": ONE_OF_TWO, "strict": True}


def response(asked: str, **more: Any) -> dict[str, Any]:
    """Return a request for a response."""
    return {"input": asked, "temperature": 0, "max_output_tokens": 200, "store": False} | more


RESPONSES: dict[str, dict[str, Any]] = {
    "thoughts and a required call": response(
        WEATHER_IN_PARIS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ),
    "thoughts and a named call": response(
        WEATHER_IN_PARIS, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}
    ),
    "thoughts and an object": response(
        PARIS, text={"format": {"type": "json_schema", "name": "city", "schema": ONE_OF_TWO}}
    ),
    "thoughts that are cut": response(PARIS, max_output_tokens=5),
}


OSLO = TOOL | {"parameters": CITY | {"properties": {"city": {"type": "string", "enum": ["Oslo"]}}}}
BAD_RESPONSE = response(WEATHER_IN_PARIS, tools=[OSLO], tool_choice="required")
"""Calls a function with arguments that must not go out."""


class Response(NamedTuple):
    """What a response says: its items and usage, and the types of its events, runs as one."""

    status: str
    items: list[tuple[str, ...]]
    tokens: tuple[int, int, int]
    events: tuple[str, ...] = ()


def respond(client: httpx.Client, model: str, body: dict[str, Any]) -> Response:
    """Ask for a whole response."""
    answer = client.post("/v1/responses", json={"model": model} | body)
    assert answer.status_code == 200, answer.text
    return _said(answer.json())


def respond_in_events(client: httpx.Client, model: str, body: dict[str, Any]) -> Response:
    """Ask for a streamed response: its deltas must add up to its items."""
    with client.stream(
        "POST", "/v1/responses", json={"model": model, "stream": True} | body
    ) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    events = parsed_events(answer.text)
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    found = events[-1]["response"]
    said = _said(found)
    for item, (_, *_, text) in zip(found["output"], said.items, strict=True):
        assert texts.get(item["id"], "") == text
    # The last is always `response.completed` with vLLM, whatever it says.
    kinds = tuple(kind for kind, _ in groupby(event["type"] for event in events[:-1]))
    return said._replace(events=kinds)


def meant(response: Response) -> Response:
    """Return the same with the arguments of calls as vLLM's server writes them anew."""
    items = [
        (*item[:-1], json.dumps(json.loads(item[-1]))) if item[0] == "function_call" else item
        for item in response.items
    ]
    return response._replace(items=items)


def _said(found: dict[str, Any]) -> Response:
    usage = found["usage"]
    return Response(
        found["status"],
        [_item(item) for item in found["output"]],
        (
            usage["input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        ),
    )


def _item(item: dict[str, Any]) -> tuple[str, ...]:
    match item["type"]:
        case "function_call":
            return ("function_call", item["name"], item["arguments"])
        case kind:
            return (kind, "".join(part["text"] for part in item["content"] or ()))

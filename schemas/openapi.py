"""The API's description in OpenAPI 3.1, made from the types that requests are decoded with.

A new endpoint is one more `Operation`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from schemas import fields, refused
from schemas.answers import (
    Cancelled,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorAnswer,
    Model,
    ModelList,
)
from schemas.openai import ChatRequest, CompletionRequest
from schemas.response_answers import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from schemas.responses import ResponseRequest

_REFERENCE: Final = "#/components/schemas/{name}"
_DONE: Final = "[DONE]"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"


class Parameter(NamedTuple):
    """What may be asked beside path and body."""

    name: str
    schema: Mapping[str, Any]
    note: str
    place: str = "query"


class Operation(NamedTuple):
    """One method of one path. `asks` is the body's type; `events` those of a stream's events;
    `empty` says when the answer is 204."""

    method: str
    path: str
    summary: str
    answers: Any
    asks: Any = None
    events: tuple[Any, ...] = ()
    statuses: tuple[int, ...] = (401,)
    parameters: tuple[Parameter, ...] = ()
    empty: str = ""


class Told(NamedTuple):
    """What is said of a body's fields, and which of them are left out because they are refused."""

    notes: Mapping[str, str]
    left_out: Mapping[str, str]


_GENERATE: Final = (400, 401, 404, 409, 413, 429, 500, 503, 504)
_STORED: Final = (400, 401, 404, 503)
_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_POST: Final = (
    Parameter(
        "Idempotency-Key",
        {"type": "string", "pattern": "^[!-~]{1,255}$"},
        "The same key and body get one run and one answer, for 24 hours; another body is 409.",
        "header",
    ),
    Parameter(
        "x-request-timeout",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 840},
        "The deadline, in seconds from now.",
        "header",
    ),
)
_AFTER: Final = Parameter("starting_after", _NUMBER, "The last event that is not wanted again.")
_STREAM: Final = Parameter("stream", {"type": "boolean"}, "Whether to answer with the events.")
_PAGE: Final = (
    Parameter("order", {"enum": ["asc", "desc"]}, "Default `desc`."),
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Default 20."),
    Parameter("after", {"type": "string"}, "The id of the last item of the page before."),
)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        asks=ChatRequest,
        events=(ChatCompletionChunk, ErrorAnswer),
        statuses=_GENERATE,
        parameters=_POST,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text.",
        Completion,
        asks=CompletionRequest,
        events=(Completion, ErrorAnswer),
        statuses=_GENERATE,
        parameters=_POST,
    ),
    Operation("get", "/v1/models", "List the served models.", ModelList),
    Operation("get", "/v1/models/{model}", "Describe a model.", Model, statuses=(401, 404)),
    Operation(
        "get",
        "/v1/streams/{request}",
        "Read a reply again, from the event after Last-Event-ID.",
        None,
        events=(ChatCompletionChunk, Completion, ResponseEvent, ErrorAnswer),
        statuses=(400, 401, 404, 410, 503),
        parameters=(
            _AFTER,
            Parameter("Last-Event-ID", {"type": "string"}, "As `starting_after`.", "header"),
        ),
        empty="An EventSource has seen all of an ended stream.",
    ),
    Operation(
        "post",
        "/v1/requests/{request}/cancel",
        "End a request.",
        Cancelled,
        statuses=(401, 404, 503),
    ),
    Operation(
        "post",
        "/v1/responses",
        "Make a response.",
        ResponseObject,
        asks=ResponseRequest,
        events=(ResponseEvent,),
        statuses=_GENERATE,
        parameters=_POST,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a response's prompt, without making it.",
        InputTokens,
        asks=ResponseRequest,
        statuses=(400, 401, 404, 413, 429, 500, 503),
    ),
    Operation(
        "get",
        "/v1/responses/{response}",
        "Read a stored response as it stands, or its events.",
        ResponseObject,
        events=(ResponseEvent,),
        statuses=_STORED,
        parameters=(_STREAM, _AFTER),
    ),
    Operation(
        "delete",
        "/v1/responses/{response}",
        "Forget a stored response.",
        DeletedResponse,
        statuses=_STORED,
    ),
    Operation(
        "post",
        "/v1/responses/{response}/cancel",
        "End a response in the background.",
        ResponseObject,
        statuses=_STORED,
    ),
    Operation(
        "get",
        "/v1/responses/{response}/input_items",
        "List what a stored response was made from.",
        InputItems,
        statuses=_STORED,
        parameters=_PAGE,
    ),
)

TOLD: Final[Mapping[Any, Told]] = {
    ChatRequest: Told(fields.CHAT, refused.CHAT),
    CompletionRequest: Told(fields.COMPLETION, refused.COMPLETION),
    ResponseRequest: Told(fields.RESPONSE, refused.RESPONSE),
}


def document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """Return the description of some operations."""
    types = {ErrorAnswer}
    for each in operations:
        types |= {each.answers, each.asks, *each.events}
    types.discard(None)
    ordered = sorted(types, key=lambda kind: str(kind.__name__))
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    for kind, told in TOLD.items():
        if (schema := schemas.get(kind.__name__)) is not None:
            _tell(schema, told)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": "1",
            "description": "OpenAI's API for text. Fields that are not listed have no effect,"
            " unless docs/api.md says that they are refused.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _tell(schema: dict[str, Any], told: Told) -> None:
    properties = schema["properties"]
    for name in told.left_out:
        properties.pop(name, None)
    for name, note in told.notes.items():
        if name in properties:
            properties[name]["description"] = note


def _operation(each: Operation) -> dict[str, Any]:
    content = {}
    if each.answers is not None:
        content[_JSON] = {"schema": _reference(each.answers)}
    if each.events:
        content[_EVENTS] = {"schema": _event(each.events)}
    error = {"description": "An error.", "content": {_JSON: {"schema": _reference(ErrorAnswer)}}}
    found: dict[str, Any] = {
        "summary": each.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(status): error for status in each.statuses},
        },
    }
    if each.empty:
        found["responses"]["204"] = {"description": each.empty}
    if each.asks is not None:
        body = {_JSON: {"schema": _reference(each.asks)}}
        found["requestBody"] = {"required": True, "content": body}
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    in_path: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    beside = [
        {"name": name, "in": place, "description": note, "schema": schema}
        for name, schema, note, place in each.parameters
    ]
    if in_path or beside:
        found["parameters"] = in_path + beside
    return found


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _event(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of one event: before OpenAPI 3.2 that is what a stream's is taken for."""
    text = {"type": "string"}
    carried = [_reference(kind) for kind in kinds]
    schema = carried[0] if len(carried) == 1 else {"anyOf": carried}
    # OpenAI's streams end in an event that is no JSON.
    data = [{"const": _DONE}, text | {"contentMediaType": _JSON, "contentSchema": schema}]
    properties = {"id": text, "event": text, "data": {"anyOf": data}}
    return {"type": "object", "properties": properties, "required": ["data"]}

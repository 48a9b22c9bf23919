"""The API's description: whole, of the types that decode, and silent of what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from schemas import refused
from schemas.openapi import OPERATIONS, Operation, document
from tests.schemas.test_fields import CHAT, REFUSED, SCHEMA, named, tool, turn

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for member in value.values():
            yield from references(member)
    elif isinstance(value, list):
        for member in value:
            yield from references(member)


def validator(name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    return jsonschema.Draft202012Validator(schema)


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    found = set(references(DOCUMENT))
    assert len(found) > 30
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in SCHEMAS
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(msgspec.json.encode(DOCUMENT)) == json.loads(json.dumps(DOCUMENT))


def test_every_operation_is_there_with_its_errors() -> None:
    for each in OPERATIONS:
        operation = DOCUMENT["paths"][each.path][each.method]
        empty = {"204"} if each.empty else set()
        assert set(operation["responses"]) == {"200", *empty, *map(str, each.statuses)}
        assert ("requestBody" in operation) == (each.asks is not None)


def test_what_is_refused_is_not_described() -> None:
    for name, reasons in (
        ("ChatRequest", refused.CHAT),
        ("CompletionRequest", refused.COMPLETION),
        ("ResponseRequest", refused.RESPONSE),
    ):
        assert not SCHEMAS[name]["properties"].keys() & reasons.keys()
        assert all("description" in member for member in SCHEMAS[name]["properties"].values())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stop": ["a"], "n": 3, "logit_bias": {"5": -1.5}, "stream": True, "seed": None},
        {"tools": [tool(parameters=SCHEMA, strict=True)], "tool_choice": named("f")},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"structured_outputs": {"choice": ["a"]}, "unknown": [1]},
        turn("tool", content=[{"type": "text", "text": "4"}], tool_call_id="c"),
    ],
    ids=str,
)
def test_what_is_taken_is_described(change: dict[str, Any]) -> None:
    validator("ChatRequest").validate(CHAT | change)


TYPES = [
    (change, param)
    for change, param in REFUSED
    if param in ("tools", "top_k", "min_p", "metadata", "service_tier", "priority", "bad_words")
]


@pytest.mark.parametrize(("change", "param"), TYPES, ids=lambda value: str(value)[:40])
def test_what_is_out_of_range_is_not_described(change: dict[str, Any], param: str) -> None:
    assert not validator("ChatRequest").is_valid(CHAT | change), param


def test_another_endpoint_is_one_more_operation() -> None:
    class Asked(msgspec.Struct):
        """A body."""

        x: int

    more = Operation("post", "/v1/more", "More.", Asked, asks=Asked, statuses=(400,))
    found = document([*OPERATIONS, more])
    assert found["components"]["schemas"]["Asked"]["properties"] == {"x": {"type": "integer"}}
    body = found["paths"]["/v1/more"]["post"]["requestBody"]["content"]["application/json"]
    assert body == {"schema": {"$ref": "#/components/schemas/Asked"}}

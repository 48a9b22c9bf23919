"""docs/simulator.md names every member of the hook and every option, with what may stand there."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.wire import SimHook
from workers.sim import options
from workers.sim.script import script_of

DOCUMENT = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()


def member_rows() -> list[str]:
    """Return how the rows of the hook's members begin."""
    members = msgspec.json.schema(SimHook)["$defs"]["SimHook"]["properties"]
    return [f"| `{name}` | {_value(schema)} |" for name, schema in members.items()]


def _value(schema: dict[str, Any]) -> str:
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    return " or ".join(_kind(each) for each in kinds)


def _kind(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "object")  # a reference is one
    if kind == "array":
        return f"list of {_value(schema['items'])}"
    if "maximum" in schema:
        return f"{kind}, {schema['minimum']} to {schema['maximum']}"
    return "text" if kind == "string" else str(kind)


def option_rows() -> list[str]:
    """Return how the rows of --sim and of the engine's arguments begin."""
    kinds = (options._SimArgs(), options._EngineArgs())
    defaults = {
        name: value for kind in kinds for name, value in msgspec.structs.asdict(kind).items()
    }
    return [f"| `{name}` | {json.dumps(value)} |" for name, value in defaults.items()]


@pytest.mark.parametrize("row", [*member_rows(), *option_rows()], ids=lambda row: row.split("`")[1])
def test_the_document_has_a_row(row: str) -> None:
    found = [line for line in DOCUMENT.splitlines() if line.startswith(row)]
    assert len(found) == 1
    assert len(found[0].removeprefix(row).strip(" |")) > 0


def test_the_document_has_no_row_of_what_is_not_there() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    known = (*member_rows(), *option_rows())
    assert [row for row in rows if not row.startswith(known)] == []


def test_the_documents_examples_are_taken() -> None:
    hooks = [json.loads(each) for each in re.findall(r"```json\n(.*?)\n```", DOCUMENT, re.S)]
    [body] = re.findall(r"-d '(\{.*?\})'\n", DOCUMENT, re.S)
    hooks.append(json.loads(body)["sim"])
    assert len(hooks) == 3
    for hook in hooks:
        script_of(msgspec.convert(hook, SimHook))
    [model] = re.findall(r"--sim '(.*?)'", DOCUMENT)
    options.time_model_of(json.loads(model))
    [size] = re.findall(r"--engine-args '(.*?)'", DOCUMENT)
    options.size_of(json.loads(size))

"""docs/api.md and docs/responses.md say of every field and every refusal what the code does, line
by line, and know every field that OpenAI's SDK sends."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens

from schemas import fields, refused
from schemas.errors import Refusal
from schemas.openai import ChatRequest, CompletionRequest
from schemas.responses import ResponseRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
RESPONSES = DOCUMENT.with_name("responses.md")
KINDS = (
    (ChatRequest, fields.CHAT, refused.CHAT),
    (CompletionRequest, fields.COMPLETION, refused.COMPLETION),
)


def field_rows() -> list[str]:
    """Return the lines of the table of fields."""
    names: dict[str, None] = {}
    for kind, notes, reasons in KINDS:
        names |= dict.fromkeys([*notes, *reasons])
        assert set(kind.__struct_fields__) == notes.keys() | reasons.keys()
        assert not notes.keys() & reasons.keys()
    return [_field_row(name) for name in names]


def _field_row(name: str) -> str:
    states = [_state(name, notes, reasons) for _, notes, reasons in KINDS]
    told = [
        {**reasons, **notes}[name] for _, notes, reasons in KINDS if name in {**reasons, **notes}
    ]
    note = " ".join(dict.fromkeys(told)) if len(told) > 1 else told[0]
    if len(set(told)) > 1:
        note = f"{told[0]} Completions: {told[1][0].lower()}{told[1][1:]}"
    return f"| `{name}` | {states[0]} | {states[1]} | {note} |"


def _state(name: str, notes: Any, reasons: Any) -> str:
    if name in reasons:
        return "refused"
    if name not in notes:
        return "unknown"
    if "epeated in the object" in notes[name]:
        return "repeated"
    return "no effect" if "ithout effect" in notes[name] else "served"


def response_rows() -> list[str]:
    """Return the lines of the table of a response's fields."""
    reasons = refused.RESPONSE
    told = fields.RESPONSE | reasons
    assert set(ResponseRequest.__struct_fields__) == told.keys()
    assert not fields.RESPONSE.keys() & reasons.keys()
    return [
        f"| `{name}` | {_state(name, fields.RESPONSE, reasons)} | {note} |"
        for name, note in told.items()
    ]


def refusal_rows() -> list[str]:
    """Return the lines of the table of refusals."""
    return [_refusal_row(kind) for kind in sorted(kinds_of(Refusal), key=_order)]


def kinds_of(kind: type[Refusal]) -> set[type[Refusal]]:
    """Return the kinds that clients can tell apart: those of schemas.errors."""
    found = {sub for each in kind.__subclasses__() for sub in {each} | kinds_of(each)}
    return {each for each in found if each.__module__ == Refusal.__module__}


def _order(kind: type[Refusal]) -> tuple[int, str]:
    return kind.status, kind.code or ""


def _refusal_row(kind: type[Refusal]) -> str:
    headers = ["`Retry-After`"] if kind.retryable else []
    headers += ["`WWW-Authenticate: Bearer`"] if kind.status == 401 else []
    told = " ".join((kind.__doc__ or "").split())
    code = f"`{kind.code}`" if kind.code else "null"
    return f"| {kind.status} | {code} | `{kind.type}` | {', '.join(headers)} | {told} |"


@pytest.mark.parametrize("row", field_rows(), ids=lambda row: row.split("`")[1])
def test_a_fields_row_is_in_the_document(row: str) -> None:
    assert row in DOCUMENT.read_text().splitlines()


@pytest.mark.parametrize("row", response_rows(), ids=lambda row: row.split("`")[1])
def test_a_responses_fields_row_is_in_its_document(row: str) -> None:
    assert row in RESPONSES.read_text().splitlines()


def test_the_table_of_a_responses_fields_has_no_further_row() -> None:
    lines = RESPONSES.read_text().splitlines()
    begin = lines.index("| field | state | note |") + 2
    rows = lines[begin : lines.index("", begin)]
    assert [row for row in rows if row not in response_rows()] == []


TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""What the SDK's methods take that is no part of a body."""


@pytest.mark.parametrize(
    ("method", "document", "column"),
    [
        (Chats.create, DOCUMENT, 0),
        (Completions.create, DOCUMENT, 1),
        (Responses.create, RESPONSES, 0),
        (InputTokens.count, RESPONSES, 0),
    ],
    ids=["chat", "completions", "responses", "input_tokens"],
)
def test_every_field_that_the_official_sdk_sends_is_in_the_tables(
    method: Callable[..., Any], document: Path, column: int
) -> None:
    sent = inspect.signature(method).parameters.keys() - TRANSPORT
    assert len(sent) > 10
    assert sent - documented(document, column) == set()


def documented(document: Path, column: int) -> set[str]:
    """Return the fields of which a document says in a column what becomes of them."""
    states = {"served", "no effect", "repeated", "refused"}
    rows = [line.split(" | ") for line in document.read_text().splitlines() if line[:3] == "| `"]
    return {row[0][3:-1] for row in rows if len(row) > column + 1 and row[column + 1] in states}


@pytest.mark.parametrize("row", refusal_rows(), ids=lambda row: row[:40])
def test_a_refusals_row_is_in_the_document(row: str) -> None:
    assert row in DOCUMENT.read_text().splitlines()


def test_the_document_has_no_row_of_what_is_not_there() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    known = [*field_rows(), *refusal_rows()]
    heads = ("| field", "| status", "| engine")
    assert [row for row in rows if row not in known and not row.startswith(heads)] == []


def test_429_and_503_say_when_to_come_again_and_no_other() -> None:
    for kind in kinds_of(Refusal):
        assert kind.retryable == (kind.status in (429, 503)), kind

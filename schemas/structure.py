"""What form an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs`.

Rule: one constraint at most, whichever field asks for it.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest
from schemas.sampling import Structured

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """A JSON object of whatever members."""


class JsonSchema(msgspec.Struct, frozen=True):
    """A JSON schema and its name; it is always enforced, whatever `strict` says."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, frozen=True, tag_field="type", tag="structural_tag"):
    """vLLM's: text in which tags begin parts of a form; in either of its two notations."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def text(self) -> str:
        """The tag as JSON text, as vLLM takes it."""
        members = {
            "type": "structural_tag",
            "format": self.format,
            "structures": self.structures,
            "triggers": self.triggers,
        }
        return _json({name: value for name, value in members.items() if value is not None})


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's constraint, of exactly one kind. `json` is a schema, or its text."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


def structured_of(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Structured | None:
    """Return the constraint that a request asks for. Raises InvalidRequest for two of them."""
    if response_format is not None and not isinstance(response_format, TextFormat):
        if outputs is not None:
            raise InvalidRequest(
                "'structured_outputs' asks for a second form, and there is one at most.",
                param="structured_outputs",
            )
        return _of_format(response_format)
    return None if outputs is None else _of_outputs(outputs)


def _of_format(
    asked: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
) -> Structured:
    match asked:
        case JsonObjectFormat():
            return Structured(json_object=True)
        case JsonSchemaFormat(json_schema):
            return Structured(json=_json(json_schema.schema))
        case StructuralTagFormat():
            return Structured(structural_tag=asked.text)


def _of_outputs(asked: StructuredOutputs) -> Structured:
    given = [name for name in _KINDS if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"'structured_outputs' takes exactly one of {', '.join(_KINDS)}.",
            param="structured_outputs",
        )
    schema = asked.json
    return Structured(
        json=schema if schema is None or isinstance(schema, str) else _json(schema),
        json_object=bool(asked.json_object),
        regex=asked.regex,
        choice=tuple(asked.choice or ()),
        grammar=asked.grammar,
        structural_tag=asked.structural_tag,
        whitespace_pattern=asked.whitespace_pattern,
        disable_any_whitespace=bool(asked.disable_any_whitespace),
        disable_additional_properties=bool(asked.disable_additional_properties),
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

"""A setting that is a JSON object, and the error of every setting that is wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import typer


class BadSetting(typer.BadParameter):
    """A setting names nothing that exists, or has a value that cannot be used."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object given as an option, or as a table in headrace.toml."""

    text: str = "{}"

    @property
    def values(self) -> dict[str, Any]:
        """The object's members."""
        members: dict[str, Any] = json.loads(self.text)
        return members

    @staticmethod
    def parse(raw: "str | Mapping[str, Any] | JsonObject") -> "JsonObject":
        """Read an object. Raises BadSetting when it is none."""
        if isinstance(raw, JsonObject):
            return raw
        if isinstance(raw, Mapping):
            return JsonObject(json.dumps(raw))
        try:
            members = json.loads(raw)
        except ValueError as error:
            raise BadSetting(f"{raw!r} is no JSON: {error}") from error
        if not isinstance(members, dict):
            raise BadSetting(f'{raw!r} is no JSON object, such as {{"name": 1}}')
        return JsonObject(raw)


EMPTY: Final = JsonObject()

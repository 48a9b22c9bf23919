"""The part of JSON Schema that our documents use. A keyword that it does not know is an error."""

from typing import Any

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
NOTES = {"$schema", "title", "description"}


def faults(value: Any, schema: dict[str, Any], at: str = "$") -> list[str]:
    """Return where a value departs from a schema."""
    found: list[str] = []
    apply = ("type",) if value is None else tuple(schema)  # the others are about other types
    for keyword, rule in [(name, schema[name]) for name in apply]:
        match keyword:
            case "type":
                if not _is_of_type(value, rule):
                    return [f"{at}: no {rule}: {value!r}"]
            case "minimum":
                found += [] if value >= rule else [f"{at}: {value} < {rule}"]
            case "items":
                for number, item in enumerate(value):
                    found += faults(item, rule, f"{at}[{number}]")
            case "properties":
                for name in value.keys() & rule.keys():
                    found += faults(value[name], rule[name], f"{at}.{name}")
            case "required":
                found += [f"{at}: no {name}" for name in rule if name not in value]
            case "additionalProperties":
                assert rule is False
                extra = value.keys() - schema["properties"].keys()
                found += [f"{at}: {name} is unknown" for name in sorted(extra)]
            case "oneOf":
                fitting = sum(not faults(value, each, at) for each in rule)
                found += [] if fitting == 1 else [f"{at}: {fitting} of oneOf fit"]
            case _:
                assert keyword in NOTES, f"{at}: what is {keyword}?"
    return found


def _is_of_type(value: Any, names: str | list[str]) -> bool:
    one_of = [names] if isinstance(names, str) else names
    return not isinstance(value, bool) and any(isinstance(value, TYPES[name]) for name in one_of)

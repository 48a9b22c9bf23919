"""`/openapi.json`, and `/docs`: the same as a page without scripts, of nothing from elsewhere."""

from html import escape
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from schemas.openapi import document

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}"
    "th,td{text-align:left;vertical-align:top;border-bottom:1px solid #ccc;padding:.25rem .5rem}"
    "code{font:13px ui-monospace,monospace}h2{margin-top:2rem}"
)
_BOUNDS: Final = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("minLength", "length ≥ {}"),
    ("maxLength", "length ≤ {}"),
    ("minItems", "items ≥ {}"),
    ("maxItems", "items ≤ {}"),
    ("pattern", "{}"),
)


def specification() -> Any:
    """Return the handler of `GET /openapi.json`."""
    content = msgspec.json.encode(document())

    async def handle(_: Request) -> Response:
        return Response(content, media_type="application/json")

    return handle


def page() -> Any:
    """Return the handler of `GET /docs`."""
    content = page_of(document())
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

    async def handle(_: Request) -> Response:
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    return handle


def page_of(described: dict[str, Any]) -> str:
    """Return an API's description as a page."""
    info = described["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = described["components"]["schemas"]
    types = [_type(name, schemas[name]) for name in sorted(schemas)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}'
        f"</title><style>{_STYLE}</style><h1>{escape(info['title'])}</h1>"
        f'<p>{escape(info["description"])} <a href="openapi.json">openapi.json</a></p>'
        f"{''.join(operations)}<h2>Types</h2>{''.join(types)}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).values()
    asks = "".join(f"<p>Takes {_kind(each['schema'])}.</p>" for each in body)
    asks += "".join(
        f"<p><code>{escape(each['name'])}</code> in the {each['in']}: {_kind(each['schema'])}."
        f" {escape(each['description'])}</p>"
        for each in operation.get("parameters", ())
        if "description" in each
    )
    rows = "".join(
        f"<tr><td><code>{status}</code><td>{_answers(answer)}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}"
        f"</p>{asks}<table><tr><th>Status<th>Answer{rows}</table>"
    )


def _answers(answer: dict[str, Any]) -> str:
    if "content" not in answer:
        return escape(answer["description"])
    return "<br>".join(
        f"{_kind(_carried(each['schema']))} as <code>{escape(media)}</code>"
        for media, each in answer["content"].items()
    )


def _carried(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the type of an answer, or of what a stream's events carry."""
    data: dict[str, Any] = schema.get("properties", {}).get("data", {})
    for text in data.get("anyOf", ()):
        if "contentSchema" in text:
            carried: dict[str, Any] = text["contentSchema"]
            return carried
    return schema


def _type(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}"
        f"<td>{_kind(kind)}<td>{escape(kind.get('description', ''))}"
        for field, kind in schema.get("properties", {}).items()
    )
    return (
        f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        f"<table><tr><th>Field<th>Type<th>{rows}</table>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """Return a type in words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if parts := schema.get("anyOf"):
        return " or ".join(_kind(part) for part in parts if part != {"type": "null"})
    if values := schema.get("enum"):
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    words = escape(str(schema.get("type", "any")))
    if items := schema.get("items"):
        words += f" of {_kind(items)}"
    bounds = [escape(form.format(schema[name])) for name, form in _BOUNDS if name in schema]
    return f"{words} ({', '.join(bounds)})" if bounds else words

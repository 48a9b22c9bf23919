"""Facts about how deeply JSON may be nested."""

import json
import tracemalloc
from typing import Any

import pytest

from schemas.depth import CONTAINERS_MAX, DEPTH_MAX, check_depth
from schemas.errors import InvalidRequest
from schemas.openai import parse_chat, parse_completion
from schemas.responses import parse_response

MIB = 1024 * 1024


def nested(levels: int, *, objects: bool = False, inside: str = "") -> str:
    opening, closing = ('{"a":', "}") if objects else ("[", "]")
    return opening * levels + (inside or "1") + closing * levels


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("inside", ["", '"[[[[{{{{"', r'"\"[[[[\\"', r'"\\\\\"["', '"]]]["'])
def test_the_bound_is_exact_whatever_strings_hold(objects: bool, inside: str) -> None:
    check_depth(nested(DEPTH_MAX, objects=objects, inside=inside).encode())
    with pytest.raises(InvalidRequest, match=f"at most {DEPTH_MAX} deep"):
        check_depth(nested(DEPTH_MAX + 1, objects=objects, inside=inside).encode())


@pytest.mark.parametrize(
    "value",
    [
        ["[" * 10_000],
        [["]"] * 1000, "[" * 1000],
        ["\\" * 7 + '"[' * 500] * 3,
        [{"[[[": "}}}"}] * 500,
        ["é[\u2028[" * 500],
    ],
)
def test_brackets_inside_strings_do_not_count(value: Any) -> None:
    for ascii_only in (True, False):
        check_depth(json.dumps(value, ensure_ascii=ascii_only).encode())


def test_brackets_behind_strings_do() -> None:
    deep = json.loads(nested(DEPTH_MAX))
    with pytest.raises(InvalidRequest):
        check_depth(json.dumps({'a"[': '\\"', "b": ["]]]", "", deep]}).encode())


@pytest.mark.parametrize(
    "text",
    [b"[" * 16 * MIB, b'{"a":' * 3 * MIB, b"[" + b"[]," * 5 * MIB, nested(100).encode() * 80_000],
    ids=["lists", "objects", "wide", "both"],
)
def test_megabytes_of_brackets_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        check_depth(text)


def test_as_many_lists_as_there_may_be_pass() -> None:
    check_depth(b"[" + b"[]," * (CONTAINERS_MAX - 2) + b"[]]")


def test_strings_with_brackets_between_lists_are_counted_before_they_are_taken_apart() -> None:
    check_depth(b"[" + b'["["],' * (CONTAINERS_MAX - 2) + b'["["]]')
    text = b"[" + b'["["],' * (16 * MIB // 6) + b"1]"
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"more than {CONTAINERS_MAX}"):
        check_depth(text)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * len(text)  # as pieces of two characters it would be 20 times as much


@pytest.mark.parametrize(
    "text",
    [
        b'{"a' + b"[" * 500,
        b'{"a":"' + b'\\"' * MIB + b"[" * 500,
        b"\\" * MIB + b'"',
        b"]" * 500 + b"[" * 500,
        b"\xff[" * 500,
        b"[" * 500 + b'"',
    ],
)
def test_what_is_no_json_is_refused_whatever_its_brackets_say(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(text)


DEEP = nested(DEPTH_MAX).encode()  # a member's value stands one deeper
PLACES = [b"metadata", b"x", b"sim", b"tools", b"user", b"response_format", b"stop", b"input"]


@pytest.mark.parametrize("place", PLACES)
def test_every_endpoint_has_the_same_bound_in_every_member(place: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_response):
        with pytest.raises(InvalidRequest, match=f"at most {DEPTH_MAX} deep"):
            parse(b'{"model":"sim","%b":%b}' % (place, DEEP))


def test_a_schema_as_deep_as_it_may_be_is_served() -> None:
    schema = json.loads(nested(100, objects=True, inside="{}"))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    assert parse_chat(json.dumps(body).encode()).tools is not None

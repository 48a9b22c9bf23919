"""Malformed requests, the same for the same seed. Each of them is wrong for certain."""

import json
import random
from collections.abc import Callable
from typing import Any

FIELDS = ("max_tokens", "temperature", "top_p", "n", "presence_penalty", "top_logprobs")
HUGE = ("1e400", "-1e400", str(2**70), str(-(2**70)), "9" * 400, "1e12", "1" + "0" * 4000)
JUNK = ([], {}, "text", [[1]], {"a": None})


def _base(choose: random.Random) -> dict[str, Any]:
    content = "".join(choose.choices('abc é日🙂"\\\n', k=choose.randrange(30)))
    return {"model": "sim", "messages": [{"role": "user", "content": content}]}


def _cut(choose: random.Random) -> bytes:
    raw = json.dumps(_base(choose)).encode()
    return raw[: choose.randrange(len(raw))]


def _invalid_utf8(choose: random.Random) -> bytes:
    raw = json.dumps(_base(choose), ensure_ascii=False).encode()
    at = raw.index(b'"content": "') + len(b'"content": "')
    bad = choose.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80"])
    return raw[:at] + bad + raw[at:]


def _wrong_type(choose: random.Random) -> bytes:
    body = _base(choose)
    field = choose.choice(["model", "messages", "stream", "seed", "temperature", "user", "n"])
    wrong = {} if field in ("messages", "user", "model") else choose.choice(JUNK)
    return json.dumps(body | {field: wrong}).encode()


def _huge(choose: random.Random) -> bytes:
    raw = json.dumps(_base(choose))[:-1]
    return f'{raw}, "{choose.choice(FIELDS)}": {choose.choice(HUGE)}}}'.encode()


def _no_json_number(choose: random.Random) -> bytes:
    raw = json.dumps(_base(choose))[:-1]
    value = choose.choice(["NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10", "1_0"])
    return f'{raw}, "{choose.choice(FIELDS)}": {value}}}'.encode()


def _nested(choose: random.Random) -> bytes:
    depth = choose.randrange(2_000, 60_000)
    return choose.choice([b"[", b'{"messages":', b'{"x":[', b'{"sim":']) * depth


def _noise(choose: random.Random) -> bytes:
    return b"\x00" + choose.randbytes(choose.randrange(400))


def _control(choose: random.Random) -> bytes:
    raw = json.dumps(_base(choose)).encode()
    at = raw.index(b'"content": "') + len(b'"content": "')
    return raw[:at] + bytes([choose.randrange(0x20)]) + raw[at:]


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _cut,
    _invalid_utf8,
    _wrong_type,
    _huge,
    _no_json_number,
    _nested,
    _noise,
    _control,
)


def malformed(*, seed: int, count: int) -> list[bytes]:
    """Return so many bodies, of every kind in turn."""
    choose = random.Random(seed)
    return [KINDS[number % len(KINDS)](choose) for number in range(count)]

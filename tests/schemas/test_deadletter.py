"""Dead letters: what was written stays readable."""

import msgpack
import msgspec
import pytest

from schemas.deadletter import BadLetter, DeadLetter, PastAttempt, decode_letter, encode_letter

LETTER = DeadLetter(
    request="req_1",
    tenant="t",
    model="m",
    reason="why",
    died_s=1.5,
    tokens=2,
    envelope=b"\x01",
    place="requests.online.m.1.t.req_1",
    history=(PastAttempt(worker="w", started_s=1.0, heard_s=1.25, tokens=1, ended="died"),),
)


def test_a_letter_is_what_was_written() -> None:
    assert decode_letter(encode_letter(LETTER)) == LETTER


def test_a_letter_from_before_there_was_a_history_can_be_read() -> None:
    old = bytes.fromhex(
        "88a776657273696f6e01a772657175657374a57265715f31a674656e616e74a174a56d6f64656ca16d"
        "a6726561736f6ea3776879a6646965645f73cb3ff8000000000000a6746f6b656e7302a8656e76656c"
        "6f7065c40101"
    )
    assert decode_letter(old) == msgspec.structs.replace(LETTER, place="", history=())


@pytest.mark.parametrize("data", [b"", b"what", msgpack.packb({"version": 1})])
def test_other_bytes_are_no_letter(data: bytes) -> None:
    with pytest.raises(BadLetter):
        decode_letter(data)


def test_a_newer_version_is_not_misread() -> None:
    with pytest.raises(BadLetter, match="version 2"):
        decode_letter(encode_letter(msgspec.structs.replace(LETTER, version=2)))

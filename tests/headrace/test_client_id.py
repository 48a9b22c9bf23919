"""What is logged of a client's own `x-request-id`."""

import logging

import pytest

from headrace.client_id import CHARACTERS_MAX, log_client_id


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b"abc-123", "abc-123"),
        (b"{a:'\"b\\%s%d}", "{a:'\"b\\%s%d}"),
        (b"a b\tc\r\nd\x1b[2J\x00\x7f", "a?b?c??d?[2J??"),
        ("é…".encode(), "?????"),
        (b"x" * 10_000, "x" * CHARACTERS_MAX),
    ],
)
def test_it_is_one_bounded_word_of_visible_ascii(
    caplog: pytest.LogCaptureFixture, sent: bytes, shown: str
) -> None:
    caplog.set_level(logging.INFO)
    log_client_id([(b"accept", b"*/*"), (b"x-request-id", sent)], "req_1")
    assert caplog.messages == [f"req_1 has its client's own x-request-id {shown}"]


def test_of_several_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_client_id([(b"x-request-id", b"a"), (b"x-request-id", b"b")], "req_1")
    assert caplog.messages == ["req_1 has its client's own x-request-id a"]


def test_without_one_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log_client_id([(b"accept", b"*/*"), (b"x-request-id", b"")], "req_1")
    assert caplog.messages == []

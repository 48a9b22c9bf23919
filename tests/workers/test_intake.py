"""What an ack subject tells of a delivery."""

import pytest

from workers.intake import deliveries


@pytest.mark.parametrize(
    ("ack", "told"),
    [
        ("$JS.ACK.REQUESTS.online-m-0.1.7.9.1700000000500000000.3", (1, 1700000000.5)),
        ("$JS.ACK._.ABC.REQUESTS.online-m-0.4.7.9.1700000000500000000.3.tok", (4, 1700000000.5)),
        ("_INBOX.x", (0, 0.0)),
        ("$JS.ACK.REQUESTS.online-m-0.x.7.9.y.3", (0, 0.0)),
    ],
)
def test_an_ack_subject_tells_the_count_and_when_it_was_stored(
    ack: str, told: tuple[int, float]
) -> None:
    assert deliveries(ack) == told

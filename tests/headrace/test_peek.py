"""Where one request stands: from its message, its consumer and its reply's frames."""

import pytest

from headrace.bus import Bus
from headrace.peek import Delivery, delivery_of, progress_of
from schemas.wire import Failed, Finished, Frame, Keepalive, Piece, Started, Tokens, Usage
from tests.broker import with_bus
from tests.queue import ODD_MODEL, ODD_TENANT, asked, envelope, headrace, place, pull, put, stored

REPLY = "replies.s=20one.t.req_1"
STARTED = Started(0, "w", 0, envelope(place()).shape)
PIECE = Piece(0, "a", (1,))
USAGE = Usage(1, 2, 0)


@pytest.mark.parametrize(
    ("frames", "claims", "tokens", "ended", "code"),
    [
        ([], 0, 0, None, None),
        ([STARTED], 1, 0, None, None),
        ([STARTED, Tokens(1, 0, (PIECE, PIECE)), Keepalive(1, 1)], 1, 2, None, None),
        ([STARTED, Tokens(1, 0, (PIECE,)), STARTED, Tokens(3, 0, (PIECE,))], 2, 1, None, None),
        ([STARTED, Finished(1, 4, (PIECE,), ("stop",), USAGE, {})], 1, 5, "finished", None),
        ([STARTED, Failed(1, 0, (), "worker_lost", "", USAGE)], 1, 0, "failed", "worker_lost"),
    ],
)
def test_frames_add_up_to_claims_tokens_and_an_end(
    frames: list[Frame], claims: int, tokens: int, ended: str | None, code: str | None
) -> None:
    found = progress_of(REPLY, enumerate(frames, start=1))
    assert (found.streamer, found.tenant) == ("s one", "t")
    assert (found.claims, found.tokens, found.ended, found.code) == (
        claims,
        tokens,
        ended,
        code,
    )


def test_what_a_worker_says_again_of_its_claim_is_no_further_claim() -> None:
    again = STARTED._replace(attempt=1)
    assert progress_of(REPLY, enumerate([STARTED, again, again], start=1)).claims == 1


def test_what_an_attempt_said_after_another_had_taken_over_is_no_part_of_the_reply() -> None:
    late = Finished(1, 0, (PIECE, PIECE, PIECE), ("stop",), USAGE, {})
    frames = [STARTED, STARTED._replace(resume_at=None), STARTED._replace(attempt=2, resume_at=1)]
    found = progress_of(REPLY, enumerate([*frames, Tokens(2, 1, (PIECE,)), late], start=1))
    assert (found.claims, found.tokens, found.ended) == (2, 2, None)
    found = progress_of(REPLY, enumerate([*frames[:2], late], start=1))
    assert (found.tokens, found.ended) == (3, "finished")


def consumer(*, delivered: int, pending: int = 0, redelivered: int = 0) -> dict[str, object]:
    return {
        "delivered": {"stream_seq": delivered},
        "num_ack_pending": pending,
        "num_redelivered": redelivered,
    }


@pytest.mark.parametrize(
    ("info", "claims", "delivery"),
    [
        (None, 0, Delivery(0, True)),
        (consumer(delivered=4), 0, Delivery(0, True)),
        (consumer(delivered=5, pending=3), 1, Delivery(1, True)),
        (consumer(delivered=9, pending=3, redelivered=1), 1, Delivery(1, False)),
        (consumer(delivered=9, pending=3, redelivered=1), 3, Delivery(3, False)),
        (consumer(delivered=9, pending=3, redelivered=3), 1, Delivery(2, False)),
    ],
)
def test_deliveries_are_told_as_far_as_the_broker_knows(
    info: dict[str, object] | None, claims: int, delivery: Delivery
) -> None:
    assert delivery_of(5, info, claims=claims) == delivery


def test_a_waiting_request_is_found_whoevers_it_is(url: str) -> None:
    (subject,) = stored(url, [place(tenant=ODD_TENANT, model=ODD_MODEL, partition=1)])
    found = asked(url, "peek", subject.request)
    assert 0 <= found.pop("age_s") < 60
    assert 500 < found.pop("expires_in_s") <= 600
    assert found == {
        "id": subject.request,
        "state": "waiting",
        "lane": "online",
        "model": ODD_MODEL,
        "partition": "1",
        "tenant": ODD_TENANT,
        "deliveries": 0,
        "deliveries_exact": True,
        "prompt_tokens": 3,
        "reply": None,
    }


def test_the_prompt_is_shown_only_if_asked(url: str) -> None:
    (subject,) = stored(url, [place()])
    assert "[1,2,3]" not in headrace(url, "peek", subject.request).stdout
    assert "[1,2,3]" in headrace(url, "peek", subject.request, "--prompt").stdout
    assert asked(url, "peek", subject.request, "--prompt")["prompt"] == [1, 2, 3]


def test_a_running_request_shows_its_deliveries(url: str) -> None:
    first, second = place(), place()

    async def give(bus: Bus) -> None:
        await put(bus, [first, second])
        await pull(bus, 1)

    with_bus(url, give)
    found = asked(url, "peek", first.request)
    assert (found["state"], found["deliveries"], found["deliveries_exact"]) == ("running", 1, True)
    assert asked(url, "peek", second.request)["state"] == "waiting"

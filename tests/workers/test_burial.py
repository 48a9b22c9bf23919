"""What a dead letter tells of the attempts that led to it."""

import asyncio
import time

import pytest

from headrace import journal, topology
from headrace.bus import Bus
from schemas.deadletter import PastAttempt, decode_letter
from schemas.subjects import RequestSubject, new_request_id
from schemas.wire import Keepalive, Piece, Released, Shape, Started, Tokens, encode_frame
from tests.broker import with_bus
from tests.queue import envelope
from workers.burial import Heard, bury, history_of

SHAPE = Shape("chat", "m", 1, False, 1, False)


def started(worker: str, resume_at: int | None = 0) -> Started:
    return Started(0, worker, resume_at, SHAPE)


def test_an_attempt_has_its_worker_its_times_its_tokens_and_its_end() -> None:
    heard: list[Heard] = [
        (1, 10.0, started("w1")),
        (2, 11.0, Tokens(1, 0, (Piece(0, "a", (1, 2)),))),
        (3, 12.5, Keepalive(1, 1)),
        (4, 20.0, started("w2", None)),
        (5, 20.1, Started(4, "w2", 2, SHAPE)),
        (6, 21.0, Released(4, 1)),
        (7, 30.0, started("w3", None)),
        (8, 31.0, Keepalive(4, 1)),
        (9, 40.0, started("w4", None)),
        (10, 41.0, Tokens(7, 2, (Piece(0, "c", (3,)),))),
        (11, 50.0, started("mine", None)),
    ]

    def past(worker: str, started_s: float, heard_s: float, tokens: int, ended: str) -> PastAttempt:
        return PastAttempt(
            worker=worker, started_s=started_s, heard_s=heard_s, tokens=tokens, ended=ended
        )

    assert history_of(heard, attempt=11) == (
        past("w1", 10.0, 12.5, 2, "died"),
        past("w2", 20.0, 31.0, 2, "released"),
        past("w3", 30.0, 41.0, 3, "outlived"),
        past("w4", 40.0, 40.0, 0, "died"),
    )


@pytest.mark.parametrize("prompt_tokens", [3, 2**18])
def test_a_request_is_buried_once_and_without_its_prompt_where_that_is_too_large(
    nats_url: str, prompt_tokens: int
) -> None:
    subject = RequestSubject("online", f"buried-{prompt_tokens}", 3, "t", new_request_id())
    request = envelope(subject, prompt=range(prompt_tokens))

    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        before_s = time.time()
        first = await bus.store(request.reply, encode_frame(started("w1")))
        mine = await bus.store(request.reply, encode_frame(started("w2", None)))
        await asyncio.gather(
            *[
                bury(bus, request, place=str(subject), reason="why", tokens=0, attempt=mine.seq)
                for _ in range(2)
            ]
        )
        name = f"deadletters.buried-{prompt_tokens}.t"
        [entry] = await journal.read(bus, "DEADLETTERS", name)
        letter = decode_letter(entry.data)
        assert (letter.request, letter.reason) == (subject.request, "why")
        assert letter.place == str(subject)
        assert bool(letter.envelope) is (prompt_tokens == 3)
        [attempt] = letter.history
        assert (attempt.worker, attempt.ended) == ("w1", "died")
        assert before_s - 1 < attempt.started_s < time.time() + 1
        assert first.seq < mine.seq

    with_bus(nats_url, scenario)

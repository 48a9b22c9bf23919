"""`headrace cancel` and `headrace purge`: what goes, what stays, and who is told."""

import asyncio
import os
import pty
import subprocess
from typing import Any

import pytest

from headrace.bus import Bus, Message
from schemas.reply import Broken, Reply, Shown
from schemas.subjects import RequestSubject
from schemas.wire import Failed, Finished, Piece, Started, Tokens, Usage, encode_frame
from tests.broker import with_bus
from tests.queue import (
    ODD_MODEL,
    ODD_TENANT,
    asked,
    command,
    envelope,
    frames_of,
    headrace,
    heard_during,
    place,
    pull,
    put,
    stored,
    subjects_of,
)
from tests.servers import ROOT


def waiting(url: str) -> int:
    found: int = asked(url, "backlog")["total"]["waiting"]
    return found


@pytest.mark.parametrize("request_id", ["req_" + 32 * "0", "a.b", "*", ">", "ü", ""])
def test_an_id_that_nothing_has_is_exit_status_1(url: str, request_id: str) -> None:
    stored(url, [place()])
    for name in ("peek", "cancel"):
        result = headrace(url, name, request_id)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("headrace: ")
    assert waiting(url) == 1


def test_cancelling_a_waiting_request_takes_it_out_and_tells_its_reader_why(url: str) -> None:
    gone, stays = stored(url, [place(tenant=ODD_TENANT), place(tenant=ODD_TENANT)])
    heard = heard_during(url, lambda: asked(url, "cancel", gone.request), count=1)
    assert heard == [f"cancels.a=2Fb=20c.{gone.request}"]
    assert with_bus(url, subjects_of) == {str(stays): 1}
    frames = with_bus(url, lambda bus: frames_of(bus, gone))
    reply = Reply()
    events = [event for seq, frame in frames for event in reply.take(frame, stored_seq=seq)]
    assert [type(event) for event in events] == [Broken]
    assert isinstance(events[0], Broken)
    assert events[0].code == "request_cancelled"
    found = asked(url, "peek", gone.request)
    assert (found["state"], found["reply"]["ended"]) == ("ended", "failed")
    assert found["reply"]["code"] == "request_cancelled"
    assert headrace(url, "cancel", gone.request).exit_code == 1


async def begin(bus: Bus, subject: RequestSubject, *, tokens: int) -> None:
    """Take a request as a worker does, and make some tokens."""
    await put(bus, [subject])
    (given,) = await pull(bus, 1)
    assert given.subject == str(subject)
    reply = envelope(subject).reply
    claim = await bus.store(reply, encode_frame(Started(0, "w", 0, envelope(subject).shape)))
    for seq in range(tokens):
        await bus.store(reply, encode_frame(Tokens(claim.seq, seq, (Piece(0, "a", (seq,)),))))


def test_a_request_that_runs_is_ended_by_its_worker(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dismiss.WORKER_S", 60.0)
    subject = place()

    async def scenario(bus: Bus) -> None:
        await begin(bus, subject, tokens=2)

        async def end(message: Message) -> None:
            assert message.subject == f"cancels.t.{subject.request}"
            end = Failed(1, 2, (), "request_cancelled", "", Usage(3, 2, 0))
            await bus.store(envelope(subject).reply, encode_frame(end))

        await bus.subscribe("cancels.>", end)
        await bus.api("INFO")  # the broker knows of it now
        found = await asyncio.to_thread(asked, url, "peek", subject.request)
        assert (found["state"], found["reply"]["worker"]) == ("running", "w")
        assert found["reply"]["tokens"] == 2
        await asyncio.to_thread(asked, url, "cancel", subject.request)
        assert await subjects_of(bus) == {}
        frames = [frame for _, frame in await frames_of(bus, subject)]
        assert [type(frame) for frame in frames] == [Started, Tokens, Tokens, Failed]

    with_bus(url, scenario)


def test_a_request_whose_worker_is_dead_is_ended_after_the_tokens_it_made(url: str) -> None:
    subject = place()
    with_bus(url, lambda bus: begin(bus, subject, tokens=2))
    asked(url, "cancel", subject.request)
    assert with_bus(url, subjects_of) == {}
    frames = with_bus(url, lambda bus: frames_of(bus, subject))
    live, replayed = Reply(), Reply()
    for seen in (
        [event for _, frame in frames for event in live.take(frame)],
        [event for seq, frame in frames for event in replayed.take(frame, stored_seq=seq)],
    ):
        assert [type(event) for event in seen] == [Shown, Shown, Broken]
        assert isinstance(seen[-1], Broken)
        assert seen[-1].code == "request_cancelled"


def test_the_end_of_an_attempt_that_had_lost_its_request_is_not_taken_for_the_requests(
    url: str,
) -> None:
    subject = place()

    async def scenario(bus: Bus) -> None:
        await begin(bus, subject, tokens=1)
        reply, shape = envelope(subject).reply, envelope(subject).shape
        [(first, _), *_] = await frames_of(bus, subject)
        claim = await bus.store(reply, encode_frame(Started(0, "v", 1, shape)))
        await bus.store(reply, encode_frame(Tokens(claim.seq, 1, (Piece(0, "a", (1,)),))))
        pieces = tuple(Piece(0, "b", (seq,)) for seq in range(5))
        late = Finished(first, 0, pieces, ("stop",), Usage(3, 5, 0), {})
        await bus.store(reply, encode_frame(late))

    with_bus(url, scenario)
    asked(url, "cancel", subject.request)
    frames = with_bus(url, lambda bus: frames_of(bus, subject))
    reply = Reply()
    seen = [event for seq, frame in frames for event in reply.take(frame, stored_seq=seq)]
    assert [type(event) for event in seen] == [Shown, Shown, Broken]


def test_a_dry_run_says_what_would_go_and_changes_nothing(url: str) -> None:
    stored(url, [place(tenant=tenant) for tenant in (ODD_TENANT, "b", ODD_TENANT)])
    with_bus(url, lambda bus: pull(bus, 1))
    before = with_bus(url, subjects_of)
    heard = heard_during(url, lambda: headrace(url, "purge", "--tenant", ODD_TENANT, "--dry-run"))
    told = asked(url, "purge", "--tenant", ODD_TENANT, "--dry-run")
    assert told == {
        "waiting": 1,
        "running": 1,
        "purged": 0,
        "dry_run": True,
        "ingress": {"nodes": 0, "waiting": None, "purged": 0},
    }
    assert (with_bus(url, subjects_of), heard) == (before, [])


def test_a_purge_of_a_tenant_leaves_the_others(url: str) -> None:
    requests = stored(
        url, [place(tenant=tenant, partition=number % 3) for number in range(150)
              for tenant in ("a", "ab", "b")]
    )  # fmt: skip
    with_bus(url, lambda bus: pull(bus, 2))
    told: dict[str, Any] = {}
    heard = heard_during(
        url, lambda: told.update(asked(url, "purge", "--tenant", "a", "--yes")), count=150
    )
    assert told == {
        "waiting": 149,
        "running": 1,
        "purged": 150,
        "dry_run": False,
        "ingress": {"nodes": 0, "waiting": None, "purged": 0},
    }
    assert len(heard) == 150
    assert all(subject.startswith("cancels.a.") for subject in heard)
    left = {str(subject) for subject in requests if subject.tenant != "a"}
    assert with_bus(url, subjects_of).keys() == left


def test_a_purge_of_a_model_leaves_the_others(url: str) -> None:
    kept, *_ = stored(url, [place(), *[place(model=ODD_MODEL, partition=1) for _ in range(450)]])
    assert asked(url, "purge", "--model", ODD_MODEL, "--yes")["purged"] == 450
    assert with_bus(url, subjects_of) == {str(kept): 1}


def test_a_purge_names_what_it_purges(url: str) -> None:
    stored(url, [place()])
    assert headrace(url, "purge", "--yes").exit_code == 2
    assert headrace(url, "purge", "--tenant", "", "--yes").exit_code == 2
    assert waiting(url) == 1


def test_without_a_terminal_a_purge_needs_yes(url: str) -> None:
    stored(url, [place()])
    result = headrace(url, "purge", "--tenant", "t")
    assert (result.exit_code, "--yes" in result.stderr) == (1, True)
    assert waiting(url) == 1


@pytest.mark.parametrize(("count", "told"), [(1, "1 request purged,"), (2, "2 requests purged,")])
def test_a_purge_counts_in_words(url: str, count: int, told: str) -> None:
    stored(url, [place() for _ in range(count)])
    assert headrace(url, "purge", "--tenant", "t", "--yes").stdout.startswith(told)


@pytest.mark.parametrize(("answer", "status", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 1)])
def test_on_a_terminal_a_purge_asks(url: str, answer: bytes, status: int, left: int) -> None:
    stored(url, [place()])
    terminal, end = pty.openpty()
    try:
        os.write(terminal, answer)
        asking = subprocess.run(
            command("purge", "--tenant", "t", "--nats-url", url),
            stdin=end,
            capture_output=True,
            cwd=ROOT,
            timeout=120,
        )
    finally:
        os.close(terminal)
        os.close(end)
    assert asking.returncode == status, asking.stderr
    assert b"Purge 1 waiting and 0 running requests, and none in ingress" in asking.stderr
    assert len(with_bus(url, subjects_of)) == left


def test_a_request_cancelled_by_an_operator_is_ended_with_a_claim_and_a_failure(url: str) -> None:
    (subject,) = stored(url, [place()])
    asked(url, "cancel", subject.request)
    (claimed, started), (_, failed) = with_bus(url, lambda bus: frames_of(bus, subject))
    assert isinstance(started, Started)
    assert isinstance(failed, Failed)
    assert failed.attempt == claimed

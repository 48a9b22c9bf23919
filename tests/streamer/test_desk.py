"""Tickets at a streamer: what each is worth, and who is cancelled because nobody came."""

import asyncio
import secrets
from typing import Any

import pytest

from headrace import topology
from headrace.bus import Bus
from headrace.ticket import RETURNS_S, TICKET_S, Ticket, Tickets
from schemas import subjects
from schemas.errors import Forbidden, Gone
from schemas.subjects import ReplySubject, new_request_id
from schemas.wire import Finished, Frame, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer import readers
from streamer.app import Replies
from streamer.desk import CLAIM_S, REMEMBER_S, Desk
from streamer.mailbox import Mailbox
from tests.broker import with_bus
from tests.sse import events_of
from tests.waiting import until

NOW_S = 1_000_000.0
TICKETS = Tickets(secrets.token_bytes(32))
STARTED = Started(0, "w", 0, Shape("completion", "m", 5, False, 1, False))
PIECES = tuple(Piece(0, f"t{seq} ", (seq,)) for seq in range(3))
FINISHED = Finished(1, 3, (), ("stop",), Usage(1, 3, 0), {})


class NoBus:
    """Nothing here may be asked of a broker."""


NO_BUS: Any = NoBus()


def desk(bus: Any = NO_BUS) -> Desk:
    return Desk(bus, TICKETS, "s")


def ticket(request: str, *, streamer: str = "s", now_s: float = NOW_S, stream: bool = True) -> str:
    return TICKETS.sign(Ticket(streamer, "default", request, now_s + 600, now_s + TICKET_S, stream))


def hear(at: Desk, request: str, *frames: Frame, now_s: float = NOW_S) -> None:
    for frame in frames:
        at.unexpected(str(ReplySubject("s", "default", request)), encode_frame(frame), now_s=now_s)


def test_a_ticket_is_good_once() -> None:
    at, text = desk(), ticket("req_1")
    assert at.claim(text, now_s=NOW_S).ticket.request == "req_1"
    with pytest.raises(Gone, match="has been used"):
        at.claim(text, now_s=NOW_S + 1)


def test_a_ticket_is_not_good_again_when_the_desk_has_forgotten_it() -> None:
    async def scenario() -> None:
        at, text = desk(), ticket("req_1")
        at.claim(text, now_s=NOW_S + TICKET_S)
        for later_s in (TICKET_S + 0.001, TICKET_S + REMEMBER_S + 1):
            await at.tick(now_s=NOW_S + later_s)
            with pytest.raises(Gone):
                at.claim(text, now_s=NOW_S + later_s)

    asyncio.run(scenario())


def test_an_old_ticket_and_another_streamers_are_gone() -> None:
    with pytest.raises(Gone, match="expired"):
        desk().claim(ticket("req_1"), now_s=NOW_S + TICKET_S + 0.1)
    with pytest.raises(Gone, match="streamer of this ticket"):
        desk().claim(ticket("req_1", streamer="other"), now_s=NOW_S)


def test_an_event_sources_ticket_is_good_again_and_everywhere_until_it_has_expired() -> None:
    at, until_s = desk(), NOW_S + RETURNS_S
    text = TICKETS.sign(
        Ticket("another", "default", "req_1", until_s, until_s, True, attach="a", returns=True)
    )
    for now_s in (NOW_S, NOW_S + 1, until_s):
        claim = at.claim(text, now_s=now_s)
        assert (claim.ticket.request, claim.heard_seq) == ("req_1", -1)
    with pytest.raises(Gone, match="expired"):
        at.claim(text, now_s=until_s + 1)


def test_no_ticket_with_one_letter_changed_is_ours() -> None:
    text = ticket("req_1")
    for at, letter in enumerate(text):
        changed = text[:at] + ("A" if letter != "A" else "B") + text[at + 1 :]
        with pytest.raises(Forbidden):
            desk().claim(changed, now_s=NOW_S)


@pytest.mark.parametrize("text", ["", ".", "a", "a.b", "é.é", "\0", "=" * 5000, "." * 5000])
def test_what_is_no_ticket_is_forbidden(text: str) -> None:
    with pytest.raises(Forbidden):
        desk().claim(text, now_s=NOW_S)


def test_another_key_signs_nothing_here() -> None:
    other = Tickets(secrets.token_bytes(32))
    text = other.sign(Ticket("s", "default", "req_1", NOW_S, NOW_S + 9, True))
    with pytest.raises(Forbidden):
        desk().claim(text, now_s=NOW_S)


def test_what_was_heard_before_the_client_came_is_told_with_the_claim() -> None:
    at = desk()
    hear(at, "req_1", STARTED)
    hear(at, "req_2", STARTED, Tokens(1, 0, PIECES))
    hear(at, "req_3", STARTED, Tokens(1, 0, PIECES), FINISHED)
    assert at.waiting == 2
    heard = [at.claim(ticket(f"req_{n}"), now_s=NOW_S).heard_seq for n in (1, 2, 3, 4)]
    assert heard == [-1, 2, 3, -1]
    assert at.waiting == 0


def test_a_request_that_may_continue_waits_for_nobody() -> None:
    async def scenario() -> None:
        at = desk()  # without a broker: cancelling would raise
        kept = STARTED._replace(shape=STARTED.shape._replace(keep=True))
        hear(at, "req_1", kept, Tokens(1, 0, PIECES))
        assert at.waiting == 0
        await at.tick(now_s=NOW_S + CLAIM_S + 1)
        assert at.claim(ticket("req_1"), now_s=NOW_S + CLAIM_S + 1).heard_seq == 2

    asyncio.run(scenario())


def test_a_request_nobody_came_for_is_cancelled_after_its_time_and_its_ticket_gone(
    nats_url: str,
) -> None:
    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        at, request = desk(bus), new_request_id()
        signals: list[str] = []

        async def note(message: Any) -> None:
            signals.append(message.subject)

        await bus.subscribe(subjects.cancel_signal("default", request), note)
        hear(at, request, STARTED)
        await at.tick(now_s=NOW_S + CLAIM_S - 0.1)
        assert at.waiting == 1
        await at.tick(now_s=NOW_S + CLAIM_S + 0.1)
        await until(lambda: len(signals) == 1)
        assert at.waiting == 0
        with pytest.raises(Gone, match="Nobody came"):
            at.claim(ticket(request), now_s=NOW_S + CLAIM_S + 0.2)
        hear(at, request, FINISHED)
        assert at.waiting == 0

    with_bus(nats_url, scenario)


def test_a_request_nobody_came_for_runs_on_as_long_as_somebody_else_reads_it(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "ANSWER_S", 20.0)

    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        at, request, mailbox = desk(bus), new_request_id(), Mailbox(bus, "other")
        hear(at, request, STARTED)
        reader = await mailbox.attach(tenant="default", request=request)
        await at.tick(now_s=NOW_S + CLAIM_S + 0.1)
        assert at.awaits(request)
        await mailbox.detach(reader)
        await at.tick(now_s=NOW_S + 2 * CLAIM_S)
        assert at.awaits(request)
        await at.tick(now_s=NOW_S + 2 * CLAIM_S + 0.2)
        assert not at.awaits(request)

    with_bus(nats_url, scenario)


def test_tickets_to_attach_are_good_once_each_and_leave_the_first_clients_alone() -> None:
    at = desk()
    first = ticket("req_1")
    more = [
        TICKETS.sign(Ticket("s", "default", "req_1", 4e9, 4e9, True, attach=name))
        for name in ("a", "b")
    ]
    hear(at, "req_1", STARTED)
    for text in more:
        assert at.claim(text, now_s=NOW_S).ticket.request == "req_1"
    assert at.awaits("req_1")
    assert at.claim(first, now_s=NOW_S).ticket.attach == ""
    for text in (first, *more):
        with pytest.raises(Gone, match="has been used"):
            at.claim(text, now_s=NOW_S)


def test_a_finished_answer_waits_for_its_client_and_is_then_forgotten() -> None:
    async def scenario() -> None:
        at = desk()  # without a broker: nothing may be cancelled
        hear(at, "req_1", STARTED, Tokens(1, 0, PIECES), FINISHED)
        await at.tick(now_s=NOW_S + TICKET_S)
        assert at.claim(ticket("req_1"), now_s=NOW_S + TICKET_S).heard_seq == 3
        hear(at, "req_2", STARTED, FINISHED)
        await at.tick(now_s=NOW_S + REMEMBER_S + 1)
        assert not at._unclaimed

    asyncio.run(scenario())


class _Client:
    """A client at the other end of ASGI."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.raw = b""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", ()))
        self.raw += message.get("body", b"")

    async def ask(self, replies: Replies, text: str, method: str = "GET") -> None:
        path = f"/v1/replies/{text}"
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        async with asyncio.timeout(13):
            await replies(scope, self.receive, self.send)


def test_an_end_that_was_heard_before_it_was_stored_reaches_a_client_that_came_between(
    nats_url: str,
) -> None:
    """The broker hands a frame to us before its stream has it: the first look at the log came too
    early, and nothing made a second one before 15 s of quiet had passed."""

    async def scenario(bus: Bus) -> None:
        await topology.apply(bus)
        at, request = desk(bus), new_request_id()
        mailbox = Mailbox(bus, "s")
        ticking = asyncio.create_task(mailbox.tick_forever())
        subject = str(ReplySubject("s", "default", request))
        try:
            now_s = asyncio.get_running_loop().time()
            hear(at, request, STARTED, Tokens(1, 0, PIECES), FINISHED, now_s=now_s)
            client, replies = _Client(), Replies(bus, mailbox, at)
            await bus.store(subject, encode_frame(STARTED))
            await bus.store(subject, encode_frame(Tokens(1, 0, PIECES)))
            far = TICKETS.sign(Ticket("s", "default", request, 4e9, 4e9, True))
            asking = asyncio.create_task(client.ask(replies, far))
            await until(lambda: b"t2" in client.raw)
            await bus.store(subject, encode_frame(FINISHED))
            await asking
        finally:
            ticking.cancel()
        assert events_of(client.raw)[-1].data == "[DONE]"
        assert mailbox.open_count == 0

    with_bus(nats_url, scenario)


def test_a_look_at_the_link_with_head_does_not_use_the_ticket_up() -> None:
    async def scenario() -> None:
        at = desk()
        far = TICKETS.sign(Ticket("s", "default", "req_1", 4e9, 4e9, True))
        for method in ("HEAD", "POST", "OPTIONS"):
            client = _Client()
            await client.ask(Replies(NO_BUS, Mailbox(NO_BUS, "s"), at), far, method)
            assert (client.status, client.headers[b"allow"]) == (405, b"GET")
        assert at.claim(far, now_s=NOW_S).ticket.request == "req_1"

    asyncio.run(scenario())

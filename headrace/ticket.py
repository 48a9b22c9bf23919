"""Tickets: a signed, short-lived right to read one reply at one streamer.

`base64url(body) "." base64url(HMAC-SHA256(key, body))`. All nodes share the key: `topology apply`
makes it once and keeps it in the bucket `secrets`. Whoever has the link needs no key of their own,
since SDKs drop the Authorization header when they follow a redirect to another host.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Final

import msgspec

from headrace import journal, topology
from headrace.bus import BrokerRefused, Bus
from schemas import subjects
from schemas.errors import Forbidden, Gone

TICKET_S: Final = 30.0
RETURNS_S: Final = float(topology.REPLIES_MAX_AGE_S)
"""For how long an EventSource may come back with its ticket: as long as there is a log to read."""
_KEY_BYTES: Final = 32
_KEY_SUBJECT: Final = f"$KV.{subjects.SECRETS}.tickets"
_WRONG_LAST_SEQUENCE: Final = 10071


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The right to read one reply: where, whose, until when (epoch seconds), and in what form.

    `attach` is empty for the client that came with the request. A further reader's ticket has a
    name of its own there, since each is good once. `lingers` says that the client may come back,
    `after` what it has: the id of an event. `ratelimit` are the headers that say what its tenant
    has left: the client reads the streamer's. `returns` is for an EventSource, which asks
    again by itself, in some browsers at the address that it was redirected to and never again at
    the first: such a ticket is good more than once and at every streamer, for `RETURNS_S`.
    """

    streamer: str
    tenant: str
    request: str
    deadline_s: float
    expires_s: float
    stream: bool
    keep: bool = False
    attach: str = ""
    lingers: bool = False
    model: str = ""
    after: int = -1
    ratelimit: dict[str, str] = {}
    returns: bool = False


class Tickets:
    """Signs and reads tickets."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def sign(self, ticket: Ticket) -> str:
        """Return a ticket as a part of a URL."""
        body = msgspec.msgpack.encode(ticket)
        return f"{_text(body)}.{_text(self._digest(body))}"

    def read(self, text: str, *, now_s: float) -> Ticket:
        """Return a valid ticket. Raises Forbidden for one we did not sign, Gone for an old one."""
        body_text, _, signature = text.partition(".")
        try:
            body, digest = _bytes(body_text), _bytes(signature)
        except (binascii.Error, ValueError):
            raise Forbidden("This is no ticket.") from None
        if not hmac.compare_digest(digest, self._digest(body)):
            raise Forbidden("This ticket was not signed here.")
        ticket = msgspec.msgpack.decode(body, type=Ticket)
        if now_s > ticket.expires_s:
            raise Gone("This ticket has expired.")
        return ticket

    def _digest(self, body: bytes) -> bytes:
        return hmac.digest(self.key, body, hashlib.sha256)


async def load_tickets(bus: Bus) -> Tickets:
    """Return tickets signed with the nodes' common key, made now if there is none.

    Raises BrokerAway and BrokerRefused.
    """
    return Tickets(await _common_key(bus, secrets.token_bytes(_KEY_BYTES)))


async def put_back(bus: Bus, tickets: Tickets) -> None:
    """Put the nodes' common key into a bucket that was made anew; take another's that is there.

    Raises BrokerAway and BrokerRefused.
    """
    tickets.key = await _common_key(bus, tickets.key)


async def _common_key(bus: Bus, proposal: bytes) -> bytes:
    """Return the key that is stored, which is `proposal` if there was none."""
    stream = f"KV_{subjects.SECRETS}"
    found = await journal.read(bus, stream, _KEY_SUBJECT)
    if found:
        return found[-1].data
    try:
        await bus.store(
            _KEY_SUBJECT, proposal, headers={"Nats-Expected-Last-Subject-Sequence": "0"}
        )
    except BrokerRefused as error:
        if error.code != _WRONG_LAST_SEQUENCE:
            raise
    else:
        return proposal
    # Another node was faster. The leader has its key; a follower, which may answer `read`, lags.
    stored = await bus.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": _KEY_SUBJECT})
    return base64.b64decode(stored["message"]["data"])


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    # Strict, so that a ticket has one spelling and a changed last letter is a changed ticket.
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(raw) != text:
        raise ValueError("not canonical")
    return raw

"""One run for one Idempotency-Key, whatever the client retries. Rule: who writes the claim runs the
request; everybody else attaches to it, or is told 409 where the body is another.

A claim stands in `responses`, under the tenant and the SHA-256 of the key, and is only ever written
by compare-and-set. It names the request and the digest of path and body, as sent. It is no lock:
what has become of its request is looked up where requests stand (log, queue, kept answers), so a
request that failed, was cancelled or is nowhere gives its key back without anybody's doing. Between
claim and queue a request is nowhere too. There the ingress that admits it answers on a subject of
its own; where nobody does, it died, and the next client takes the claim over. One that was only cut
off finds its claim taken when it confirms it, and cancels what it has queued.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from headrace import journal
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message
from headrace.cancel import cancel_surely
from headrace.kept import kept
from headrace.messages import NobodyAnswers
from headrace.peek import find, progress_in
from schemas import subjects
from schemas.errors import BrokerUnavailable, IdempotencyConflict, InvalidRequest, QueueTimeout
from schemas.wire import BadFrame, Finished, decode_frame

log = logging.getLogger(__name__)

HEADER: Final = "Idempotency-Key"
WAIT_S: Final = 35.0
"""Longer than the first client's ingress waits for the broker's word."""
LOOK_S: Final = 0.05
ASK_S: Final = 1.0
FROZEN_S: Final = 60.0
"""An ingress that neither answers nor is known to be dead holds a claim no longer than this."""
ENDING_S: Final = 2.0
"""How long a request that has left the queue without an end may take to write one."""
_VISIBLE: Final = re.compile(rb"[!-~]{1,255}")
_WRONG_LAST_SEQUENCE: Final = 10071
_STREAM: Final = f"KV_{subjects.RESPONSES}"


class Dropped(Protocol):
    """What was begun, and can be given up."""

    def drop(self) -> None:
        """Give it up."""
        ...


T = TypeVar("T", bound=Dropped)
RawHeaders = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A request with a key: its tenant, the digests of key and body, and the id and deadline
    (epoch s) that it has if it is the one that runs."""

    tenant: str
    request: str
    deadline_s: float
    key_digest: str
    body_digest: str


class Attach(NamedTuple):
    """The client is to be attached to this request, which ends by its own deadline (epoch s); it
    is infinite where the request has ended."""

    request: str
    deadline_s: float


class Claim(msgspec.Struct, frozen=True):
    """What stands under a key. `accepted` once the request is known to be in the queue."""

    request: str
    body: str
    at_s: float  # seconds since the epoch
    deadline_s: float
    accepted: bool = False


class Standing(Enum):
    """What has become of a claim's request."""

    ADMITTING = "on its way into the queue"
    THERE = "waiting, running or finished: there is an answer to attach to"
    ENDING = "neither queued nor ended: its worker writes the end now, or is dead"
    FREE = "failed, cancelled, or never queued: the key is free again"


class Seen(NamedTuple):
    """What was found of a claim's request. `ended` and `kept` are `finished`, `failed` or None."""

    admitting: bool
    begun: bool
    ended: str | None
    queued: bool
    kept: str | None

    @property
    def end(self) -> str | None:
        """How the request ended, None where it has not."""
        return self.ended or self.kept


def standing_of(seen: Seen) -> Standing:
    """Judge what was found; pure."""
    if seen.end is not None:
        return Standing.THERE if seen.end == "finished" else Standing.FREE
    if seen.queued:
        return Standing.THERE
    if seen.begun:
        return Standing.ENDING
    return Standing.ADMITTING if seen.admitting else Standing.FREE


def keyed(
    headers: RawHeaders, *, tenant: str, request: str, deadline_s: float, path: str, body: bytes
) -> Keyed | None:
    """Return the request as its key names it, None without one. Raises InvalidRequest."""
    key = key_of(headers)
    if key is None:
        return None
    digest = hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
    return Keyed(tenant, request, deadline_s, hashlib.sha256(key).hexdigest(), digest)


def key_of(headers: RawHeaders) -> bytes | None:
    """Return the key that headers show, None without one. Raises InvalidRequest."""
    keys = [value for name, value in headers if name == b"idempotency-key"]
    if not keys:
        return None
    if len(keys) > 1 or not _VISIBLE.fullmatch(keys[0]):
        what = f"'{HEADER}' is one header of 1 to 255 visible ASCII characters."
        raise InvalidRequest(what, param=HEADER)
    return keys[0]


class Keys:
    """The claims of all tenants; one per ingress."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def once(self, asked: Keyed, begin: Callable[[], Awaitable[T]]) -> T | Attach:
        """Begin a request unless its key's own is there; return what was begun, or whom to attach.

        `begin` puts the request into the queue, and raises a Refusal where it is not taken; then
        the key is free again. Raises IdempotencyConflict, QueueTimeout, BrokerUnavailable.
        """
        subject = subjects.claim_key(tenant=asked.tenant, digest=asked.key_digest)
        if not self._bus.connected:
            raise BrokerUnavailable("The queue cannot be reached.")
        try:
            async with self._admitting(asked):
                taken = await self._take(subject, asked)
                if isinstance(taken, Attach):
                    return taken
                try:
                    begun = await begin()
                except BaseException:
                    await self._release(subject, taken)
                    raise
                if await self._confirm(subject, asked, taken):
                    return begun
                begun.drop()
                # Another one runs in its place, so nothing of it is charged.
                await cancel_surely(
                    self._bus, tenant=asked.tenant, request=asked.request, begun=False
                )
            return await self._attach_only(subject, asked)
        except (BrokerAway, BrokerRefused) as error:
            log.warning("%s: its key cannot be looked up: %s", asked.request, error)
            raise BrokerUnavailable("The broker cannot be reached.") from error

    @contextlib.asynccontextmanager
    async def _admitting(self, asked: Keyed) -> AsyncIterator[None]:
        """Tell who asks that this process is admitting the request."""

        async def here(message: Message) -> None:
            await self._bus.publish(message.reply, b"here")

        subject = subjects.claimant_of(tenant=asked.tenant, request=asked.request)
        answering = await self._bus.subscribe(subject, here)
        try:
            yield
        finally:
            await answering.unsubscribe()

    async def _take(self, subject: str, asked: Keyed) -> int | Attach:
        """Write the claim and return its sequence, or say whom to attach to."""
        claim = Claim(asked.request, asked.body_digest, time.time(), asked.deadline_s)
        give_up_s = time.monotonic() + WAIT_S
        ending: dict[str, float] = {}  # until when a request's end is waited for
        last_seq = 0
        while time.monotonic() < give_up_s:
            taken = await self._write(subject, claim, last_seq=last_seq)
            if taken is not None:
                return taken
            last_seq, found = await self._read(subject)
            if found is None:
                continue
            seen = await self._look(asked.tenant, found)
            standing = standing_of(seen)
            if standing is Standing.ENDING:
                until_s = ending.setdefault(found.request, time.monotonic() + ENDING_S)
                if time.monotonic() > until_s:
                    standing = Standing.FREE
            elif standing is not Standing.FREE and found.body != asked.body_digest:
                what = f"This '{HEADER}' belongs to a request with another body."
                raise IdempotencyConflict(what, param=HEADER)
            if standing is Standing.THERE:
                return Attach(found.request, math.inf if seen.end else found.deadline_s)
            if standing is not Standing.FREE:
                last_seq = 0  # not ours to take: the next write must fail while it stands
                await asyncio.sleep(LOOK_S)
        raise QueueTimeout(f"The first request with this '{HEADER}' was not accepted in time.")

    async def _attach_only(self, subject: str, asked: Keyed) -> Attach:
        """Attach to who took our claim over; our own request was cancelled."""
        taken = await self._take(subject, asked)
        if isinstance(taken, Attach):
            return taken
        await self._release(subject, taken)
        raise BrokerUnavailable("The broker was away; try again.")

    async def _write(self, subject: str, claim: Claim, *, last_seq: int) -> int | None:
        """Write a claim over what has this sequence (0: over nothing); None where that changed."""
        headers = {"Nats-Expected-Last-Subject-Sequence": str(last_seq)}
        try:
            stored = await self._bus.store(subject, msgspec.json.encode(claim), headers=headers)
        except BrokerRefused as error:
            if error.code != _WRONG_LAST_SEQUENCE:
                raise
            return None
        return stored.seq

    async def _read(self, subject: str) -> tuple[int, Claim | None]:
        """Return the sequence of what stands under a key, and the claim if it is one."""
        found = await journal.read(self._bus, _STREAM, subject)
        if not found:
            return 0, None
        entry = found[-1]
        if entry.deleted:
            return entry.seq, None
        try:
            return entry.seq, msgspec.json.decode(entry.data, type=Claim)
        except msgspec.MsgspecError as error:
            log.warning("a claim that we cannot read, taken over: %s", error)
            return entry.seq, None

    async def _confirm(self, subject: str, asked: Keyed, seq: int) -> bool:
        """Note that the request is in the queue; False where the claim was taken over."""
        claim = Claim(
            asked.request, asked.body_digest, time.time(), asked.deadline_s, accepted=True
        )
        try:
            return await self._write(subject, claim, last_seq=seq) is not None
        except (BrokerAway, BrokerRefused) as error:
            log.info("%s: its claim is not confirmed: %s", asked.request, error)
            return True  # it is in the queue, and will be found there

    async def _release(self, subject: str, seq: int) -> None:
        """Give a key back."""
        headers = {"KV-Operation": "DEL", "Nats-Expected-Last-Subject-Sequence": str(seq)}
        with contextlib.suppress(BrokerAway, BrokerRefused):  # then it is found that nobody admits
            await self._bus.store(subject, b"", headers=headers)

    async def _look(self, tenant: str, claim: Claim) -> Seen:
        """Find out where a claim's request stands.

        In this order: each place is left only after the next one has it.
        """
        request = claim.request
        says = False if claim.accepted else await self._is_admitting(tenant, claim)
        if says:
            return Seen(True, False, None, False, None)
        admitting = says is None and time.time() - claim.at_s < FROZEN_S
        progress = await progress_in(self._bus, subjects.replies_to(request, tenant=tenant))
        ended = None if progress is None else progress.ended
        if ended is not None:
            return Seen(admitting, True, ended, False, None)
        if await find(self._bus, request) is not None:
            return Seen(admitting, progress is not None, None, True, None)
        return Seen(admitting, progress is not None, None, False, await self._kept(tenant, request))

    async def _is_admitting(self, tenant: str, claim: Claim) -> bool | None:
        """Ask whether an ingress is at it still; None where it is there and does not say."""
        subject = subjects.claimant_of(tenant=tenant, request=claim.request)
        try:
            await self._bus.request(subject, b"", timeout_s=ASK_S)
        except NobodyAnswers:
            return False
        except BrokerAway:
            return None
        return True

    async def _kept(self, tenant: str, request: str) -> str | None:
        frames = await kept(self._bus, tenant=tenant, request=request)
        if not frames:
            return None
        try:
            return "finished" if isinstance(decode_frame(frames[-1]), Finished) else "failed"
        except BadFrame:
            return None

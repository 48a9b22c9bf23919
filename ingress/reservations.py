"""Reserves from the tenants' accounts, which all ingress nodes share. Rule: one pump per tenant.

What waits for a tenant's account is decided together and written by one compare-and-set; alone it
takes a fraction of a millisecond, and fifty writers of one key would take eighty each. A pump
remembers the account as it last wrote it, and reads it again when another node has written, or
before it refuses anybody or drops a settlement.

Where an account cannot be reached, what is to be settled is tried until it can, though nobody asks:
by a write even where nothing has changed, since a store that is read may take none.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headrace import versioned
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.versioned import Changed, Versioned
from ingress import limits as deciding
from ingress.limits import Account, Exceeded, Limits, Standings, standings_of
from schemas import subjects
from schemas.errors import BrokerUnavailable, TooManyRequests

log = logging.getLogger(__name__)

BATCH_MAX: Final = 512
RETRIES_MAX: Final = 30
PUMPS_MAX: Final = 10_000
SETTLES_MAX: Final = 100_000
FRESH_S: Final = 0.25
"""How old an account may be that is shown; one that decides is never older than the last write."""
SETTLING_S: Final = 0.003
"""How long a message takes at most that was sent before a client heard of an end: with it a node
hears that another will write the settlement."""
SETTLED_S: Final = 0.05
"""How long is waited for that to be written."""
SWEEP_S: Final = 1.0
RETRY_S: Final = 0.25
SETTLE_S: Final = 0.002
"""How long a settlement waits for a reservation whose write it can share."""
MARGIN_S: Final = 5.0
"""How long an entry outlives its request's deadline: the end is settled before."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Account).decode


def _refusal(exceeded: Exceeded) -> TooManyRequests:
    seconds = exceeded.retry_after_s
    return TooManyRequests(
        deciding.explain(exceeded), retry_after_s=60 if seconds is None else math.ceil(seconds)
    )


_Answer = asyncio.Future[tuple[Exceeded | None, Standings]]


@dataclass(slots=True)
class _Ask:
    """A reservation that waits; `answer` holds what became of it and the standings afterwards.

    Without a request it only asks whether anything fits."""

    request: str | None
    tokens: int
    expires_s: float
    answer: _Answer


@dataclass(frozen=True, slots=True)
class _Settle:
    """A settlement that waits."""

    request: str
    tokens: int | None


@dataclass(slots=True)
class _Pump:
    """What waits for one tenant's account."""

    asks: list[_Ask] = field(default_factory=list)
    settles: list[_Settle] = field(default_factory=list)
    known: Versioned | None = None
    known_s: float = 0.0
    known_open: int = 0
    ended_s: dict[str, float] = field(default_factory=dict)  # open yet, as far as is known here
    swept_s: float = 0.0
    running: bool = False
    settling: asyncio.TimerHandle | None = None


class Reservations:
    """The tenants' accounts, as one ingress node reserves from them.

    `limits_of` tells a tenant's limits now. `open_when_away` lets requests pass unlimited while the
    accounts cannot be reached, as `away` says of the last try; otherwise they are refused.
    """

    def __init__(
        self,
        bus: Bus,
        limits_of: Callable[[str], Limits],
        *,
        clock: Callable[[], float],
        open_when_away: bool = False,
    ) -> None:
        self.away = False
        self.away_refused = 0
        self.unlimited_passed = 0
        self._bus = bus
        self._limits_of = limits_of
        self._clock = clock
        self._open_when_away = open_when_away
        self._pumps: dict[str, _Pump] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        """What operators read: whether limits can be checked, and what becomes of requests."""
        if not self.away:
            return "ok"
        return "away: admitting" if self._open_when_away else "away: refusing"

    async def check(self, tenant: str) -> None:
        """Refuse at once, before anybody has read its prompt, a request for which no open one of
        its tenant makes room. Raises TooManyRequests, and nothing where in doubt."""
        open_max = self._limits_of(tenant).concurrent_requests
        pump = self._pumps.get(tenant)
        if open_max is None or pump is None or pump.known_open < open_max:
            return
        try:
            exceeded = await self._looked(tenant, pump)
        except (BrokerAway, BrokerRefused):
            return
        if exceeded is not None:
            raise _refusal(exceeded)

    async def _looked(self, tenant: str, pump: _Pump) -> Exceeded | None:
        """Look where nothing fits, until every end that its client may know of is settled."""
        asked_s = time.monotonic()
        while True:
            await asyncio.sleep(SETTLING_S)
            exceeded, _ = await self._asked(tenant, None, 0, 0.0)
            _forget_old(pump.ended_s)
            oldest_s = next(iter(pump.ended_s.values()), math.inf)
            if exceeded is None or oldest_s > asked_s + SETTLING_S:
                return exceeded

    def ended(self, tenant: str, *, request: str) -> None:
        """Hear that a request has ended, which some node will settle."""
        pump = self._pumps.get(tenant)
        if pump is None or self._limits_of(tenant).concurrent_requests is None:
            return
        _forget_old(pump.ended_s)
        pump.ended_s[request] = time.monotonic()

    async def reserve(
        self, tenant: str, *, request: str, tokens: int, deadline_s: float
    ) -> Standings:
        """Reserve a request's cost until it is settled, or its deadline is well past.

        Raises TooManyRequests, and BrokerUnavailable where the accounts cannot be reached.
        """
        if self._limits_of(tenant).none:
            return Standings()
        try:
            exceeded, standings = await self._asked(tenant, request, tokens, deadline_s)
            if exceeded is not None and exceeded.dimension == "concurrent":
                # Who asks one after another is told of an end a little before we are.
                await self._looked(tenant, self._pump(tenant))
                exceeded, standings = await self._asked(tenant, request, tokens, deadline_s)
        except asyncio.CancelledError:
            self.settle(tenant, request=request, tokens=None)
            raise
        except (BrokerAway, BrokerRefused) as error:
            self.away = True
            self._settle(tenant, _Settle(request, None))  # it may have been reserved
            if not self._open_when_away:
                self.away_refused += 1
                raise BrokerUnavailable("The limits cannot be checked now.") from error
            self.unlimited_passed += 1
            return Standings()
        if exceeded is not None:
            raise _refusal(exceeded)
        return standings

    async def _asked(
        self, tenant: str, request: str | None, tokens: int, deadline_s: float
    ) -> tuple[Exceeded | None, Standings]:
        if not self._bus.connected:
            raise BrokerAway("not connected")
        answer: _Answer = asyncio.get_running_loop().create_future()
        pump = self._pump(tenant)
        pump.asks.append(_Ask(request, tokens, deadline_s + MARGIN_S, answer))
        self._run(tenant, pump)
        return await answer

    def settle(self, tenant: str, *, request: str, tokens: int | None) -> None:
        """Charge what a request has used, soon; None for one that never ran. Twice is harmless."""
        pump = self._pumps.get(tenant)
        if self._limits_of(tenant).none and (pump is None or not pump.known_open):
            return  # nor had it limits when those were reserved that are open here
        self._settle(tenant, _Settle(request, tokens))

    def _settle(self, tenant: str, settle: _Settle) -> None:
        pump = self._pump(tenant)
        if len(pump.settles) < SETTLES_MAX:  # more expire by themselves
            pump.settles.append(settle)
        self._settle_soon(tenant, pump)

    def _settle_soon(self, tenant: str, pump: _Pump) -> None:
        if not pump.running and pump.settling is None:
            loop = asyncio.get_running_loop()
            pump.settling = loop.call_later(SETTLE_S, self._run, tenant, pump)

    async def written(self) -> None:
        """Return once all that was settled here is written, or the broker is away."""
        while self._bus.connected:
            for tenant, pump in self._pumps.items():
                if pump.settles:
                    self._run(tenant, pump)
            if not self._tasks:
                return
            await asyncio.wait(self._tasks)

    async def standings(self, tenant: str) -> Standings:
        """Return a tenant's buckets now. Raises BrokerAway and BrokerRefused."""
        limits = self._limits_of(tenant)
        if limits.none:
            return Standings()
        pump = self._pumps.get(tenant)
        if pump is None or pump.known is None or self._clock() - pump.known_s > FRESH_S:
            stored = await versioned.read(self._bus, subjects.LIMITS, subjects.escape(tenant))
        else:
            stored = pump.known
        account = _account(stored)
        deciding.advance(account, limits, now_s=self._clock())
        return standings_of(account, limits)

    def _pump(self, tenant: str) -> _Pump:
        pump = self._pumps.pop(tenant, None)
        if pump is None:
            pump = _Pump()
            if len(self._pumps) >= PUMPS_MAX:
                self._forget_oldest_idle()
        self._pumps[tenant] = pump  # the last used stands last
        return pump

    def _forget_oldest_idle(self) -> None:
        idle = next(
            (n for n, pump in self._pumps.items() if not (pump.running or pump.settles)), None
        )
        if idle is not None:
            del self._pumps[idle]

    def _run(self, tenant: str, pump: _Pump) -> None:
        if pump.settling is not None:
            pump.settling.cancel()
            pump.settling = None
        if not pump.running:
            pump.running = True
            task = asyncio.create_task(self._drain(tenant, pump), name=f"limits {tenant}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _drain(self, tenant: str, pump: _Pump) -> None:
        """Serve what waits until no reservation does; the outermost frame of a pump's task."""
        asks: list[_Ask] = []
        due = True
        try:
            while due:
                asks, pump.asks = pump.asks[:BATCH_MAX], pump.asks[BATCH_MAX:]
                settles, pump.settles = pump.settles[:BATCH_MAX], pump.settles[BATCH_MAX:]
                try:
                    await self._serve(tenant, pump, asks, settles)
                except (BrokerAway, BrokerRefused) as error:
                    pump.known = None
                    log.info("the limits of a tenant cannot be reached: %s", error)
                    _fail(asks, error)
                    pump.settles = settles + pump.settles
                    await asyncio.sleep(RETRY_S)
                due = bool(pump.asks)
        except Exception as error:
            log.exception("the limits of a tenant failed here")
            _fail([*asks, *pump.asks], BrokerAway(str(error)))
            pump.asks = []
        finally:
            pump.running = False
            if pump.settles:
                self._settle_soon(tenant, pump)

    async def _serve(
        self, tenant: str, pump: _Pump, asks: list[_Ask], settles: list[_Settle]
    ) -> None:
        """Decide a batch and write what it changed. Raises BrokerAway and BrokerRefused."""
        key = subjects.escape(tenant)
        for _ in range(RETRIES_MAX):
            fresh = pump.known is None
            stored = pump.known
            if stored is None:
                stored = await versioned.read(self._bus, subjects.LIMITS, key)
            account = _account(stored)
            changed, doubtful, outcomes = self._decide(tenant, pump, account, asks, settles)
            if doubtful and not fresh:
                pump.known = None
                continue
            if changed or self.away:
                data = _encode(account)
                try:
                    revision = await versioned.write(
                        self._bus, subjects.LIMITS, key, data, revision=stored.revision
                    )
                except Changed:
                    pump.known = None
                    if fresh:  # another node writes as often as we do: not in step with it
                        await asyncio.sleep(secrets.randbelow(2000) / 1e6)
                    continue
                stored = Versioned(revision, data)
                self.away = False
            pump.known, pump.known_s = stored, self._clock()
            pump.known_open = len(account.open)
            for request in [each for each in pump.ended_s if each not in account.open]:
                del pump.ended_s[request]
            # What is left is the same for all who were decided together.
            standings = standings_of(account, self._limits_of(tenant)) if asks else Standings()
            for ask, outcome in zip(asks, outcomes, strict=True):
                if not ask.answer.done():
                    ask.answer.set_result((outcome, standings))
            return
        raise BrokerAway(f"other nodes were faster {RETRIES_MAX} times")

    def _decide(
        self,
        tenant: str,
        pump: _Pump,
        account: Account,
        asks: list[_Ask],
        settles: list[_Settle],
    ) -> tuple[bool, bool, list[Exceeded | None]]:
        """Apply a batch to an account; return whether it changed, whether what other nodes wrote
        meanwhile may change the outcome, and the asks' outcomes."""
        limits, now_s = self._limits_of(tenant), self._clock()
        deciding.advance(account, limits, now_s=now_s)
        changed = doubtful = False
        if now_s - pump.swept_s > SWEEP_S:
            pump.swept_s = now_s
            changed = deciding.forget_expired(account, now_s=now_s)
        for settle in settles:
            settled = deciding.settle(account, request=settle.request, tokens=settle.tokens)
            changed |= settled
            doubtful |= not settled  # another node may have reserved it
        outcomes: list[Exceeded | None] = []
        for ask in asks:
            if ask.answer.cancelled():  # and its settlement may have come before it
                outcomes.append(None)
                continue
            exceeded = _reserved(account, limits, ask)
            changed |= exceeded is None and ask.request is not None
            doubtful |= exceeded is not None  # another node may have given something back
            outcomes.append(exceeded)
        return changed, doubtful, outcomes


def _reserved(account: Account, limits: Limits, ask: _Ask) -> Exceeded | None:
    if ask.request is None:
        return deciding.exceeds(account, limits, tokens=0)
    return deciding.reserve(
        account, limits, request=ask.request, tokens=ask.tokens, expires_s=ask.expires_s
    )


def _account(stored: Versioned) -> Account:
    if stored.data is None:
        return Account()
    try:
        return _decode(stored.data)
    except msgspec.MsgspecError:
        log.exception("an account that cannot be read begins anew")
        return Account()


def _forget_old(ended_s: dict[str, float]) -> None:
    """Wait no longer for settlements that nobody has written: their node may have died."""
    before_s = time.monotonic() - SETTLED_S
    while ended_s and (oldest := next(iter(ended_s.items())))[1] < before_s:
        del ended_s[oldest[0]]


def _fail(asks: list[_Ask], error: Exception) -> None:
    for ask in asks:
        if not ask.answer.done():
            ask.answer.set_exception(error)

"""The simulated engine: real queueing, batching and memory, invented text; nothing to download.

Rule: this file only carries; `workers.sim` decides. The event loop calls `_turn` when there is
something to do and not otherwise; each generation's own task hands its pieces on, so a slow or
failing `emit` hurts nobody else.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from schemas.model import ModelCard
from schemas.wire import Sampling
from workers.engine import (
    Emit,
    EngineDied,
    EngineLoad,
    EngineRefused,
    Finish,
    Work,
)
from workers.sim.batch import Batch, Generation
from workers.sim.ledger import Ledger
from workers.sim.options import BadOption, size_of, time_model_of
from workers.sim.script import Script, script_of
from workers.sim.vocabulary import tokenizer_files, vocabulary

__all__ = ["BadOption", "SimulatedEngine", "tokenizer_files"]

NAME: Final = "sim"
EXIT_STATUS: Final = 70

TICK_S: Final = 0.001
"""Tokens due within a millisecond share a turn: a finer timer would cost more than the tokens."""


class SimulatedEngine:
    """An `Engine` that computes nothing.

    `engine_args` are vLLM's names, `sim` the time model's (see `workers.sim.options`). Raises
    BadOption for a name or a value that it cannot take.
    """

    def __init__(
        self,
        *,
        name: str = NAME,
        engine_args: Mapping[str, Any] | None = None,
        sim: Mapping[str, Any] | None = None,
    ) -> None:
        self._name = name
        self._size = size_of(engine_args or {})
        self._time_model = time_model_of(sim or {})
        self._vocabulary = vocabulary()
        self._batch = Batch(self._size, self._time_model, self._vocabulary)
        self._ledger = Ledger()
        self._waiters: dict[Generation, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # while the engine runs
        self._alarm: asyncio.Handle | None = None
        self._soon: asyncio.Handle | None = None
        self._fault: Exception | None = None

    @property
    def slots(self) -> int:
        """How many requests run at once; each choice of a request counts as one."""
        return self._size.slots

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._loop is not None

    @property
    def preemptions(self) -> int:
        """How often a running request had to give up its KV blocks."""
        return self._batch.preemptions

    def ledger(self) -> dict[str, dict[str, int]]:
        """Return starts, aborts and tokens of the last 10,000 requests, by request id."""
        return self._ledger.snapshot()

    async def start(self) -> ModelCard:
        """Begin to run, after the time that the time model has for it."""
        await asyncio.sleep(self._time_model.startup_s)
        self._loop = asyncio.get_running_loop()
        return self.card()

    def card(self) -> ModelCard:
        """Return the model's card; an engine need not run for it."""
        return ModelCard(
            name=self._name,
            created_s=int(time.time()),
            max_model_len=self._size.model_len,
            files={},
            simulated=True,
        )

    async def generate(self, work: Work, emit: Emit) -> Finish:
        """Run one request to its end. Raises EngineRefused, EngineFailed or EngineDied."""
        script = self._check(work)
        if self._loop is None:
            raise self._died()
        entry = self._ledger.start(work.request)
        generation = self._batch.add(work, script, entry)
        self._wake()
        try:
            await self._relay(generation, emit)
        finally:
            self._waiters.pop(generation, None)
            if not generation.done:
                entry.aborts += 1
                self._batch.abort(generation)
                self._wake()
        return Finish(generation.reasons, generation.usage)

    def load(self) -> EngineLoad:
        """Return the present load; a request's choices count one by one, as in vLLM."""
        return EngineLoad(self._batch.running, self._batch.waiting, self._batch.kv_used)

    async def stop(self) -> None:
        """End all generations with EngineDied."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._end(None)

    def _check(self, work: Work) -> Script | None:
        longest = self._size.model_len - 1
        if not work.prompt:
            raise EngineRefused("the prompt is empty")
        if len(work.prompt) > longest:
            raise EngineRefused(
                f"the prompt has {len(work.prompt)} tokens, but at most {longest} fit"
            )
        if min(work.prompt) < 0 or max(work.prompt) >= self._vocabulary.size:
            raise EngineRefused(f"a prompt token is not in 0 to {self._vocabulary.size - 1}")
        told = work.sim is not None and work.sim.pieces is not None
        _check_sampling(work.sampling, told=told)
        if work.made and work.sampling.n > 1:
            raise EngineRefused("several choices cannot be gone on with")
        return None if work.sim is None else script_of(work.sim)

    async def _relay(self, generation: Generation, emit: Emit) -> None:
        """Hand pieces on until there are no more; several steps' at once to a slow `emit`."""
        while True:
            pieces = generation.pieces
            if pieces:
                generation.pieces = []
                await emit(pieces)
                continue
            if generation.done:
                break
            if self._loop is None:
                raise self._died()
            waiter = self._waiters[generation] = self._loop.create_future()
            await waiter
        if generation.error is not None:
            raise generation.error

    def _turn(self) -> None:
        """Do what is due, hand it on, and come again when there is more."""
        loop = self._loop
        if loop is None:
            return
        self._alarm = None
        try:
            again_s = self._batch.advance(loop.time())
        except Exception as fault:
            self._end(fault)
            return
        if self._batch.exit_due:
            os._exit(EXIT_STATUS)
        self._hand_on(self._batch.news)
        self._batch.news.clear()
        if again_s is None:
            return
        now_s = loop.time()
        if again_s <= now_s:
            # Behind all that is ready: those who wait for this turn's pieces, and everybody else.
            self._soon = self._alarm = loop.call_soon(self._turn)
        else:
            self._alarm = loop.call_at(max(again_s, now_s + TICK_S), self._turn)

    def _hand_on(self, news: list[Generation]) -> None:
        waiters = self._waiters
        for generation in news:
            waiter = waiters.pop(generation, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _wake(self) -> None:
        """Take a turn soon: something was added or aborted."""
        if self._loop is None or (self._alarm is not None and self._alarm is self._soon):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._soon = self._alarm = self._loop.call_soon(self._turn)

    def _end(self, fault: Exception | None) -> None:
        self._loop = None
        self._fault = fault
        self._hand_on(list(self._waiters))

    def _died(self) -> EngineDied:
        died = EngineDied("the simulated engine does not run")
        died.__cause__ = self._fault
        return died


def _check_sampling(sampling: Sampling, *, told: bool) -> None:
    """Refuse what cannot be had; the form of a text that it was told is the teller's affair."""
    for name, value in (("n", sampling.n), ("max_tokens", sampling.max_tokens)):
        if value < 1:
            raise EngineRefused(f"{name} must be at least 1")
    if sampling.logprobs is not None and sampling.logprobs < 0:
        raise EngineRefused("logprobs must be 0 or more")
    if sampling.structured and not told:
        raise EngineRefused("the simulated engine cannot do structured")
    for name in ("bad_words", "allowed_token_ids"):
        if getattr(sampling, name):
            raise EngineRefused(f"the simulated engine cannot do {name}")

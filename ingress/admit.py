"""Takes a request to its acceptance: the one function behind HTTP, WebSocket and `ingress.admit`.

It composes the stations in their order; each step is one of the request's states.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace import topology
from headrace.bus import Bus
from ingress.able import check_able
from ingress.auth import Caller, Gate
from ingress.catalogue import Catalogue, Model
from ingress.cost import Cost, cost_of
from ingress.dispatch import dispatch
from ingress.envelope import envelope_of
from schemas.errors import BrokerUnavailable, Draining, InvalidRequest
from schemas.life import State, step
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from schemas.prefix import partition_of, prefix_key
from schemas.subjects import ReplySubject, RequestSubject

DEADLINE_S: Final = 600.0
INLINE_BYTES_MAX: Final = 4096
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

Ask = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from and its reply goes: caller, id, streamer, deadline (epoch s)."""

    caller: Caller
    request: str
    streamer: str
    deadline_s: float


@dataclass(slots=True)
class Counts:
    """What this ingress has done; read by /metrics."""

    received: int = 0
    accepted: int = 0
    refused: int = 0
    inflight: int = 0


class Ingress:
    """Admits requests; one per process."""

    def __init__(self, bus: Bus, *, gate: Gate, catalogue: Catalogue, threads: Executor) -> None:
        self.bus = bus
        self.gate = gate
        self.catalogue = catalogue
        self.counts = Counts()
        self.draining = False
        self._threads = threads

    async def admit(self, origin: Origin, ask: Ask, *, body_bytes: int) -> None:
        """Put an authenticated request into the queue. Raises a Refusal.

        Whoever reads the reply must expect it before the call. `body_bytes` is the size of what
        `ask` was read from.
        """
        state = step(State.RECEIVED, State.AUTHENTICATED)
        if self.draining:
            raise Draining("This node is stopping.")
        model = self.catalogue.find(ask.model)
        check_able(ask, model.card)
        if not self.bus.connected:
            raise BrokerUnavailable("The queue cannot be reached.")
        tokens = await self._tokens(model, ask, body_bytes)
        cost = _cost(model, ask, len(tokens))
        state = step(state, State.COSTED)
        state = step(state, State.RESERVED)
        echo = model.prompter.echo(ask, tokens) if isinstance(ask, CompletionRequest) else ""
        reply = str(ReplySubject(origin.streamer, origin.caller.tenant, origin.request))
        envelope = envelope_of(
            ask,
            cost,
            tokens,
            card=model.card,
            echo=echo,
            request=origin.request,
            tenant=origin.caller.tenant,
            reply=reply,
            deadline_s=origin.deadline_s,
        )
        state = step(state, State.QUEUED)
        await dispatch(self.bus, _subject(origin, model, ask, tokens), envelope)
        step(state, State.PUBLISHED)

    async def _tokens(self, model: Model, ask: Ask, body_bytes: int) -> list[int]:
        """Render and tokenise, in a thread where that takes long: the others must not wait.

        A short prompt takes 0.1 ms, and going to a thread and back longer.
        """
        prompter, tokens_max = model.prompter, model.card.max_model_len
        if isinstance(ask, ChatRequest):
            work = partial(prompter.of_chat, ask, tokens_max=tokens_max)
        elif (tokens := ask.tokens) is not None:
            work = partial(prompter.tokens, tokens)
        else:
            special = ask.add_special_tokens is not False
            work = partial(prompter.text, ask.text, tokens_max=tokens_max, special=special)
        if body_bytes <= INLINE_BYTES_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def parse(body: bytes, *, chat: bool, streamed: bool = False) -> Ask:
    """Read and check a request's body. Raises InvalidRequest.

    `streamed` says that the answer is a stream whatever the body says.
    """
    return (parse_chat if chat else parse_completion)(body, streamed=streamed)


def deadline_of(timeout: str | None) -> float:
    """Return the deadline (seconds since the epoch) that `x-request-timeout` asks for.

    Decimal seconds, above 0 and at most 840. Raises InvalidRequest.
    """
    seconds = DEADLINE_S
    if timeout is not None:
        if not _DECIMAL.fullmatch(timeout) or not 0 < float(timeout) <= topology.DEADLINE_S_MAX:
            raise InvalidRequest(
                f"'x-request-timeout' is seconds, above 0, at most {topology.DEADLINE_S_MAX}.",
                param="x-request-timeout",
            )
        seconds = float(timeout)
    return time.time() + seconds


def _cost(model: Model, ask: Ask, prompt_tokens: int) -> Cost:
    return cost_of(
        prompt_tokens=prompt_tokens,
        asked_tokens=ask.output_tokens,
        choices=ask.n or 1,
        max_model_len=model.card.max_model_len,
        param="messages" if isinstance(ask, ChatRequest) else "prompt",
    )


def _subject(origin: Origin, model: Model, ask: Ask, tokens: Sequence[int]) -> RequestSubject:
    tenant = origin.caller.tenant
    key = prefix_key(
        model=model.card.name, adapter=None, tenant=tenant, session=ask.session, tokens=tokens
    )
    partition = partition_of(key, partitions=model.card.partitions)
    return RequestSubject("online", model.card.name, partition, tenant, origin.request)

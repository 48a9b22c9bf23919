"""Takes a request to its acceptance: the one function behind HTTP, WebSocket and `ingress.admit`.

It composes the stations in their order; each step is one of the request's states.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.bus import Bus
from headrace.workforce import Workforce, no_workers
from ingress.able import check_able
from ingress.auth import Caller, Gate
from ingress.catalogue import Catalogue, Model
from ingress.cost import Cost, cost_of
from ingress.dispatch import dispatch
from ingress.envelope import Ours, envelope_of
from ingress.inspection import Inspection
from ingress.limits import Standings
from ingress.line import Line
from ingress.waiting import Left
from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    Draining,
    QueueFull,
    QueueTimeout,
)
from schemas.life import State, step
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from schemas.prefix import partition_of, prefix_key
from schemas.subjects import ReplySubject, RequestSubject
from schemas.tenant import Policy, lane_of
from schemas.wire import Envelope

INLINE_BYTES_MAX: Final = 4096

Ask = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from and its reply goes: caller, id, streamer, deadline (epoch s).

    `keep_answer`: the finished answer is kept for 24 hours. `left` returns when the client leaves.
    """

    caller: Caller
    request: str
    streamer: str
    deadline_s: float
    keep_answer: bool = False
    left: Left | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is queued, and what its tenant has left."""

    standings: Standings
    envelope: Envelope


@dataclass(slots=True)
class Counts:
    """What this ingress has done; read by /metrics."""

    received: int = 0
    accepted: int = 0
    refused: int = 0
    inflight: int = 0


class Ingress:
    """Admits requests; one per process."""

    def __init__(
        self,
        bus: Bus,
        *,
        gate: Gate,
        catalogue: Catalogue,
        workforce: Workforce,
        line: Line,
        threads: Executor,
        inspection: Inspection | None = None,
    ) -> None:
        self.bus = bus
        self.inspection = inspection
        self.line = line
        self.workforce = workforce
        self.gate = gate
        self.catalogue = catalogue
        self.counts = Counts()
        self.draining = False
        self._threads = threads

    async def admit(
        self, origin: Origin, ask: Ask, *, body_bytes: int, response: bytes | None = None
    ) -> Admitted:
        """Put an authenticated request into the queue. Raises a Refusal.

        Whoever reads the reply must expect it before the call. `body_bytes` is the size of what
        `ask` was read from. `response` makes the answer a Responses object: the members of it that
        repeat the request, as JSON.
        """
        state = step(State.RECEIVED, State.AUTHENTICATED)
        if self.draining:
            raise Draining("This node is stopping.")
        policy = self.gate.policy(origin.caller)
        model = self.catalogue.find(ask.model, policy)
        check_able(ask, model.card)
        if not self.bus.ready:
            raise BrokerUnavailable("The queue cannot be reached.")
        with self._staffed(ask.model):
            await self.line.check(
                tenant=origin.caller.tenant,
                request=origin.request,
                model=ask.model,
                policy=policy,
                deadline_s=origin.deadline_s,
            )
        tokens, cost = await self.costed(model, ask, policy, body_bytes=body_bytes)
        state = step(state, State.COSTED)
        if self.inspection is not None:
            await self.inspection.look(
                *(origin.request, origin.caller.tenant, policy, ask, model), body_bytes=body_bytes
            )
            self.gate.check(origin.caller)  # which may have taken long
        ours = _ours(origin, policy, response)
        echo = model.prompter.echo(ask, tokens) if isinstance(ask, CompletionRequest) else ""
        envelope = envelope_of(ours, ask, cost, tokens, card=model.card, echo=echo)
        subject = _subject(origin, model, ask, tokens, policy)
        turn = self.line.turn(
            subject,
            cost=cost,
            policy=policy,
            deadline_s=origin.deadline_s,
            key=origin.caller.key,
            left=origin.left,
        )
        with self._staffed(ask.model):
            async with turn as standings:
                state = step(state, State.RESERVED)
                state = step(state, State.QUEUED)
                await dispatch(self.bus, subject, envelope)
        step(state, State.PUBLISHED)
        return Admitted(standings, envelope)

    @contextmanager
    def _staffed(self, model: str) -> Iterator[None]:
        """Raise NoWorkers for what would end otherwise, if a worker served the model."""
        try:
            yield
        except (QueueFull, QueueTimeout, DeadlineExceeded) as refusal:
            if self.workforce.serves(model):
                raise
            raise no_workers(model) from refusal

    async def costed(
        self, model: Model, ask: Ask, policy: Policy, *, body_bytes: int
    ) -> tuple[list[int], Cost]:
        """Return a request's prompt and what it may use. Raises InvalidRequest; arguments as for
        `admit`."""
        tokens = await self._tokens(model, ask, body_bytes)
        return tokens, _cost(model, ask, len(tokens), policy)

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


def _cost(model: Model, ask: Ask, prompt_tokens: int, policy: Policy) -> Cost:
    return cost_of(
        prompt_tokens=prompt_tokens,
        asked_tokens=ask.output_tokens,
        choices=ask.n or 1,
        max_model_len=model.card.max_model_len,
        param="messages" if isinstance(ask, ChatRequest) else "prompt",
        input_max=policy.max_input_tokens,
        output_max=policy.max_output_tokens,
        output_param=_output_param(ask),
    )


def _output_param(ask: Ask) -> str | None:
    """Return the field that bounds the answer, None where the client named none."""
    if isinstance(ask, ChatRequest) and ask.max_completion_tokens is not None:
        return "max_completion_tokens"
    return None if ask.max_tokens is None else "max_tokens"


def _subject(
    origin: Origin, model: Model, ask: Ask, tokens: Sequence[int], policy: Policy
) -> RequestSubject:
    tenant = origin.caller.tenant
    key = prefix_key(
        model=model.card.name,
        adapter=None,
        tenant=None if policy.share_prefixes else tenant,
        session=ask.session,
        tokens=tokens,
    )
    partition = partition_of(key, partitions=model.card.partitions)
    lane = lane_of(policy.priority_class)
    return RequestSubject(lane, model.card.name, partition, tenant, origin.request)


def _ours(origin: Origin, policy: Policy, response: bytes | None) -> Ours:
    tenant = origin.caller.tenant
    return Ours(
        request=origin.request,
        tenant=tenant,
        reply=str(ReplySubject(origin.streamer, tenant, origin.request)),
        deadline_s=origin.deadline_s,
        cache_salt=None if policy.share_prefixes else tenant,
        keep_answer=origin.keep_answer,
        key=origin.caller.key,
        response=response,
        moderated=policy.moderation,
    )

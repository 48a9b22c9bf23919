"""The API's routes: each composes the stations in their order."""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.bus import Bus
from ingress.auth import Caller, Gate
from ingress.catalogue import Catalogue, Model
from ingress.cost import Cost, cost_of
from ingress.dispatch import dispatch
from ingress.handoff import Answer, Handoff
from schemas.errors import (
    BrokerUnavailable,
    Draining,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Refusal,
    RequestTooLarge,
)
from schemas.life import State, step
from schemas.openai import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from schemas.prefix import partition_of, prefix_key
from schemas.subjects import ReplySubject, RequestSubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape, pack_tokens

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
DEADLINE_S: Final = 600.0


@dataclass(slots=True)
class Counts:
    """What this ingress has done; read by /metrics."""

    received: int = 0
    accepted: int = 0
    refused: int = 0
    inflight: int = 0


class Ingress:
    """What the routes work with: one per process."""

    def __init__(
        self,
        bus: Bus,
        *,
        gate: Gate,
        catalogue: Catalogue,
        handoff: Handoff,
        threads: Executor,
    ) -> None:
        self.bus = bus
        self.gate = gate
        self.catalogue = catalogue
        self.counts = Counts()
        self.draining = False
        self._handoff = handoff
        self._threads = threads

    async def admit(
        self, caller: Caller, ask: ChatRequest | CompletionRequest, request: str
    ) -> Answer:
        """Take an authenticated request to its acceptance; return its client's answer.

        Raises a Refusal.
        """
        state = step(State.RECEIVED, State.AUTHENTICATED)
        if self.draining:
            raise Draining("This node is stopping.")
        model = self.catalogue.find(ask.model)
        if ask.sim is not None and not model.card.simulated:
            raise InvalidRequest("'sim' is for the simulated engine only.", param="sim")
        if not self.bus.connected:
            raise BrokerUnavailable("The queue cannot be reached.")
        tokens = await self._tokens(model, ask)
        cost = _cost(model, ask, len(tokens))
        state = step(state, State.COSTED)
        state = step(state, State.RESERVED)
        deadline_s = time.time() + DEADLINE_S
        expected = self._handoff.expect(
            tenant=caller.tenant, request=request, deadline_s=deadline_s
        )
        try:
            state = step(state, State.QUEUED)
            envelope = _envelope(
                ask, cost, tokens, caller, request, str(expected.streamer), deadline_s
            )
            await dispatch(self.bus, _subject(model, ask, tokens, caller, request), envelope)
        except BaseException:
            expected.drop()
            raise
        step(state, State.PUBLISHED)
        return expected.answer(stream=bool(ask.stream), headers={"x-request-id": request})

    async def _tokens(self, model: Model, ask: ChatRequest | CompletionRequest) -> list[int]:
        """Render and tokenise in a thread: a long prompt must not hold the others up."""
        loop = asyncio.get_running_loop()
        if isinstance(ask, ChatRequest):
            return await loop.run_in_executor(
                self._threads, model.prompter.chat, ask.messages, ask.tools
            )
        if ask.tokens is not None:
            return model.prompter.tokens(ask.tokens)
        return await loop.run_in_executor(self._threads, model.prompter.text, ask.text)


def _cost(model: Model, ask: ChatRequest | CompletionRequest, prompt_tokens: int) -> Cost:
    return cost_of(
        prompt_tokens=prompt_tokens,
        asked_tokens=ask.output_tokens,
        choices=ask.n or 1,
        max_model_len=model.card.max_model_len,
        param="messages" if isinstance(ask, ChatRequest) else "prompt",
    )


def _subject(
    model: Model,
    ask: ChatRequest | CompletionRequest,
    tokens: list[int],
    caller: Caller,
    request: str,
) -> RequestSubject:
    key = prefix_key(
        model=model.card.name,
        adapter=None,
        tenant=caller.tenant,
        session=ask.session,
        tokens=tokens,
    )
    partition = partition_of(key, partitions=model.card.partitions)
    return RequestSubject("online", model.card.name, partition, caller.tenant, request)


def _envelope(
    ask: ChatRequest | CompletionRequest,
    cost: Cost,
    tokens: list[int],
    caller: Caller,
    request: str,
    streamer: str,
    deadline_s: float,
) -> Envelope:
    options = ask.stream_options
    return Envelope(
        request=request,
        tenant=caller.tenant,
        model=ask.model,
        reply=str(ReplySubject(streamer, caller.tenant, request)),
        prompt=pack_tokens(tokens),
        sampling=_sampling(ask, cost),
        shape=Shape(
            endpoint="chat" if isinstance(ask, ChatRequest) else "completion",
            model=ask.model,
            created_s=int(time.time()),
            include_usage=bool(options and options.include_usage),
            choices=cost.choices,
            logprobs=ask.alternatives is not None,
        ),
        deadline_s=deadline_s,
        cache_salt=caller.tenant,
        sim=ask.sim,
    )


def _sampling(ask: ChatRequest | CompletionRequest, cost: Cost) -> Sampling:
    bias = ask.logit_bias
    return Sampling(
        max_tokens=cost.output_tokens,
        temperature=1.0 if ask.temperature is None else ask.temperature,
        top_p=1.0 if ask.top_p is None else ask.top_p,
        seed=ask.seed,
        stop=ask.stops,
        n=cost.choices,
        presence_penalty=ask.presence_penalty or 0.0,
        frequency_penalty=ask.frequency_penalty or 0.0,
        logit_bias=None if bias is None else {int(token): by for token, by in bias.items()},
        logprobs=ask.alternatives,
        ignore_eos=bool(ask.ignore_eos),
    )


class Generate:
    """`POST` of one endpoint, as an ASGI application."""

    def __init__(self, ingress: Ingress, *, chat: bool) -> None:
        self._ingress = ingress
        self._parse = parse_chat if chat else parse_completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._ingress.counts
        request = new_request_id()
        counts.received += 1
        counts.inflight += 1
        try:
            caller = self._ingress.gate.identify(scope["headers"])
            body = await read_body(Request(scope, receive))
            answer = await self._ingress.admit(caller, self._parse(body), request)
            counts.accepted += 1
        except Refusal as refusal:
            counts.refused += 1
            answer = refused(refusal, request)
        finally:
            counts.inflight -= 1
        await answer(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """Return the body. Raises RequestTooLarge over the limit, as soon as it is known."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        raise _too_large()
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_BYTES_MAX:
                raise _too_large()
            chunks.append(chunk)
    except ClientDisconnect:
        raise InvalidRequest("The client left before its body was whole.") from None
    return b"".join(chunks)


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"The body is over the limit of {BODY_BYTES_MAX} bytes.")


def refused(refusal: Refusal, request: str | None = None) -> Response:
    """Return the answer that a refusal gets."""
    headers = {"x-request-id": request or new_request_id()}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return as_json(refusal.body(), status=refusal.status, headers=headers)


def as_json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def models(ingress: Ingress) -> Any:
    """Return the handler of `GET /v1/models`."""

    async def handle(request: Request) -> Response:
        ingress.gate.identify(request.scope["headers"])
        cards = [
            {
                "id": card.name,
                "object": "model",
                "created": card.created_s,
                "owned_by": "headrace",
                "max_model_len": card.max_model_len,
            }
            for card in ingress.catalogue.cards()
        ]
        return as_json(
            {"object": "list", "data": cards}, headers={"x-request-id": new_request_id()}
        )

    return handle


async def on_refusal(_request: Request, error: Exception) -> Response:
    """Answer a Refusal that a handler raised."""
    assert isinstance(error, Refusal)
    return refused(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses, in the API's own shape."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        answer = refused(MethodNotAllowed(f"{what} is not allowed."))
    elif error.status_code == 404:
        answer = refused(NotFound(f"{what} does not exist."))
    else:
        answer = refused(InvalidRequest(error.detail))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def on_fault(_request: Request, _error: Exception) -> Response:
    """Answer our own fault; the server's log says what it was."""
    return refused(InternalError("The server failed; the fault is ours."))

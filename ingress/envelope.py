"""The envelope of an admitted request: what the engine and the streamer need of it, and no more.

Rule: tenant, reply, cache salt and shape are ours; nothing in a body can set them.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ingress.cost import Cost
from schemas.errors import InvalidRequest
from schemas.model import ModelCard
from schemas.openai import ChatRequest, CompletionRequest, tools_plain
from schemas.tools import NamedTool
from schemas.wire import Envelope, Parsing, Sampling, Shape, pack_tokens

Ask = ChatRequest | CompletionRequest


class Ours(NamedTuple):
    """What we say of a request, whatever its body says; `deadline_s` is since the epoch, `response`
    what a Responses object repeats of its request, `moderated` whether its answer is looked at."""

    request: str
    tenant: str
    reply: str
    deadline_s: float
    cache_salt: str | None
    keep_answer: bool
    key: str | None
    response: bytes | None = None
    moderated: bool = True


def envelope_of(
    ours: Ours, ask: Ask, cost: Cost, tokens: Sequence[int], *, card: ModelCard, echo: str
) -> Envelope:
    """Return a request's envelope; `echo` stands before the text of each choice. Raises
    InvalidRequest."""
    options = ask.stream_options
    return Envelope(
        request=ours.request,
        tenant=ours.tenant,
        model=ask.model,
        reply=ours.reply,
        prompt=pack_tokens(tokens),
        sampling=sampling_of(ask, cost),
        shape=Shape(
            endpoint=_endpoint(ask, ours.response),
            model=ask.model,
            created_s=int(time.time()),
            include_usage=bool(options and options.include_usage),
            choices=cost.choices,
            logprobs=ask.alternatives is not None,
            keep=ask.keep,
            event_ids=not (options and options.include_event_ids is False),
            response=ours.response or b"",
            echo=echo,
        ),
        deadline_s=ours.deadline_s,
        cache_salt=ours.cache_salt,
        sim=ask.sim,
        keep_answer=ours.keep_answer,
        key=ours.key,
        priority=ask.priority or 0,
        parsing=parsing_of(ask, card),
        moderated=ours.moderated,
    )


def _endpoint(ask: Ask, response: bytes | None) -> str:
    if response is not None:
        return "response"
    return "chat" if isinstance(ask, ChatRequest) else "completion"


def sampling_of(ask: Ask, cost: Cost) -> Sampling:
    """Return how tokens are to be chosen. Raises InvalidRequest."""
    if ask.min_tokens is not None and ask.min_tokens > cost.output_tokens:
        raise InvalidRequest(
            f"'min_tokens' is over the {cost.output_tokens} tokens that there may be.",
            param="min_tokens",
        )
    bias = ask.logit_bias
    return Sampling(
        max_tokens=cost.output_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        seed=ask.seed,
        stop=ask.stops,
        n=cost.choices,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        logit_bias=None if bias is None else {int(token): by for token, by in bias.items()},
        logprobs=ask.alternatives,
        ignore_eos=bool(ask.ignore_eos),
        top_k=ask.top_k,
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
        min_tokens=ask.min_tokens or 0,
        stop_token_ids=tuple(ask.stop_token_ids or ()),
        include_stop_str_in_output=bool(ask.include_stop_str_in_output),
        skip_special_tokens=ask.skip_special_tokens is not False,
        spaces_between_special_tokens=ask.spaces_between_special_tokens is not False,
        bad_words=tuple(ask.bad_words or ()),
        allowed_token_ids=tuple(ask.allowed_token_ids or ()),
        structured=ask.structured,
    )


def parsing_of(ask: Ask, card: ModelCard) -> Parsing | None:
    """Return what the worker's parsers must know; None where nothing is parsed."""
    if not isinstance(ask, ChatRequest) or not card.parses:
        return None
    choice = ask.choice
    tools = tools_plain(ask.tools)
    variables = ask.variables
    return Parsing(
        tools=b"" if tools is None else msgspec.json.encode(tools),
        choice="function" if isinstance(choice, NamedTool) else choice,
        function=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=ask.parallel_tool_calls is not False,
        reasoning=ask.include_reasoning is not False,
        template=msgspec.json.encode(variables) if variables else b"",
    )

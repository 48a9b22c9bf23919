"""What clients get, as types: for the API's description, and for tests that hold answers to them.

The streamer writes these objects by hand, for speed (`streamer.chunks`, `streamer.collect`).
"""

from typing import Literal

import msgspec


class FoundFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A called function; `arguments` is JSON text, in a stream a part of it."""

    name: str | None = None
    arguments: str = ""


class FoundCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call; in a stream, id, type and name come with the first part of each index."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FoundFunction


class Likely(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chosen token, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Likely]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log probabilities of a chat's answer, token by token."""

    content: list[ChosenToken]


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log probabilities of a completion's text; offsets are in characters."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the prompt's tokens were in a cache."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the completion's tokens were reasoning."""

    reasoning_tokens: int


class UsedTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request used, in tokens; details of the completion where the model's workers have a
    reasoning parser."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer; `reasoning` where the model's workers have a reasoning parser."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    tool_calls: list[FoundCall] | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsedTokens


class Delta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an event adds to an answer; the role comes with the first."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[FoundCall] | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an event adds to one of the answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event of a streamed answer; the usage comes last, with no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsedTokens | None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the completions, in a stream a part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsedTokens | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A served model; `max_model_len` is its context, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a request was refused or failed; `param` names the field that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every error, before, during or after a stream."""

    error: ErrorBody


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a request that was to be cancelled."""

    id: str
    status: str

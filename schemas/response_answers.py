"""What clients of /v1/responses get, as types: for the API's description, and for tests that hold
answers to them. `schemas.response_events` writes these objects.
"""

from typing import Any, Literal

import msgspec


class FailedResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a response failed; `type` is our code, `code` one of OpenAI's."""

    code: str
    message: str
    type: str


class CachedInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the input's tokens were in a cache."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the output's tokens were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response used, in tokens."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: ReasoningOutput
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A response; what its request did not say is null, or OpenAI's default."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: FailedResponse | None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a response's stream; its type says which members follow."""

    type: str
    sequence_number: int


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

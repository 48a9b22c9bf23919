"""What clients of `/v1/responses` get, as types: for the API's description, and for tests.

`schemas.response_events` writes these objects.
"""

from typing import Any, Literal

import msgspec

from schemas.answers import ChosenToken

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of an answer."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChosenToken]


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """What a model thought."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What a model thought before it answered."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A called function; `arguments` is JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the input's tokens were in a cache, or written to one for a price: none are."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the output's tokens were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response used, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a response failed; `type` is the code of every other endpoint."""

    code: Literal["server_error", "invalid_prompt"]
    message: str
    type: str | None


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A response as it stands; the other members repeat its request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
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
    """One event of a streamed response; its other members are those of OpenAI's type."""

    type: str
    sequence_number: int


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a response was made from; its other members are those of its type."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: ItemStatus


class InputItems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A response that is not any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens a response's prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int

"""What clients send to `/v1/responses`, decoded and checked in one go; underneath it is a chat.

Rules as in `openai`: unknown fields have no effect, known ones of a wrong type are refused with
their names, and so are those that cannot be served: OpenAI's own tools, files and images,
conversations, prompt templates. Sources: OpenAI's API reference and the types of its SDK.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest
from schemas.extras import Extras, Tokens
from schemas.fields import AS_IN_A_CHAT
from schemas.openai import (
    CacheRetention,
    ChatRequest,
    Temperature,
    TopP,
    decode_body,
    parse_chat,
)
from schemas.refused import check_response
from schemas.response_items import Item, items_of, messages_of

LOGPROBS: Final = "message.output_text.logprobs"

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
Summary = Literal["auto", "concise", "detailed"]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataText = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataText], Meta(max_length=16)]

_PARAMS: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""How a response calls what a chat calls otherwise."""
_RESPONSE_ID: Final = re.compile(r"resp_[0-9a-f]{32}")


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How long a model thinks; summaries are made by no model here."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent. `include_event_ids` is ours."""

    include_obfuscation: bool | None = None
    include_event_ids: bool | None = None


class ResponseRequest(Extras, frozen=True, kw_only=True):
    """`POST /v1/responses`, or a `response.create` on a socket."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    generate: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: Tokens | None = None
    max_tool_calls: Tokens | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    personality: Annotated[str, Meta(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: CacheRetention | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    temperature: Temperature | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_p: TopP | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    # vLLM's, of chats
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    # Refused wherever they ask for something: see schemas.refused
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    echo: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    prompt: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None

    @property
    def stored(self) -> bool:
        """Whether the response can be retrieved, and be another's previous one."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """Whether the answer's tokens are shown with their log probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def items(self, request: str) -> list[Item]:
        """Return the input as items. Raises InvalidRequest naming the item."""
        return items_of(self.input, request=request)


_decoder = msgspec.json.Decoder(ResponseRequest)


def parse_response(body: bytes, *, streamed: bool = False) -> ResponseRequest:
    """Read and check a request. Raises InvalidRequest naming the field.

    `streamed` says that the answer is a stream whatever the body says: it came over a socket.
    """
    request = decode_body(_decoder, body)
    check_response(request)
    options = request.stream_options
    if options is not None and not (request.stream or streamed):
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise InvalidRequest("Obfuscation is not served.", param="stream_options")
    if request.background and not request.stored:
        raise InvalidRequest("'background' needs 'store' to be true.", param="background")
    if request.generate is False and not streamed:
        raise InvalidRequest("'generate' can be false on a socket only.", param="generate")
    if request.truncation == "auto":
        raise InvalidRequest("Only 'disabled' truncation is served.", param="truncation")
    if "reasoning.encrypted_content" in (request.include or ()):
        raise InvalidRequest("Encrypted reasoning is not served.", param="include")
    _check_reasoning(request.reasoning)
    for number, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools[{number}]")
    if request.input in (None, []) and request.previous_response_id is None:
        raise InvalidRequest("'input' is missing.", param="input")
    return request


def _check_reasoning(reasoning: ReasoningOptions | None) -> None:
    if reasoning is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) in ("concise", "detailed"):
            what = "Summaries of reasoning are not served."
            raise InvalidRequest(what, param=f"reasoning.{name}")


def _check_tool(tool: Mapping[str, Any], param: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        what = f"Tools of type '{str(kind)[:40]}' are not served: only functions are."
        raise InvalidRequest(what, param=f"{param}.type")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest("A function has a name.", param=f"{param}.name")


def as_chat(request: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the chat request that a response is underneath, with all items that it is made from.

    Raises InvalidRequest, in a response's own words.
    """
    with_own_names = {
        "model": request.model,
        "messages": messages_of(items, instructions=request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": request.logprobs or None,
        "top_logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        "tools": [_chat_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": _chat_tool_choice(request.tool_choice, tools=bool(request.tools)),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _chat_format(request.text),
        "verbosity": request.text and request.text.verbosity,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "user": request.user,
        "prompt_cache_key": request.prompt_cache_key,
    } | {name: getattr(request, name) for name in AS_IN_A_CHAT}
    if request.background:
        with_own_names["on_disconnect"] = "continue"
    options = request.stream_options
    if options is not None and options.include_event_ids is not None:
        with_own_names["stream_options"] = {"include_event_ids": options.include_event_ids}
    given = {name: value for name, value in with_own_names.items() if value is not None}
    if not given["messages"]:
        raise InvalidRequest("'input' is empty.", param="input")
    try:
        return parse_chat(msgspec.json.encode(given), streamed=True)
    except InvalidRequest as refusal:
        raise own_words(refusal) from None


def own_words(refusal: InvalidRequest) -> InvalidRequest:
    """Return a refusal of a chat as one of a response: the fields have other names."""
    head, dot, rest = (refusal.param or "").partition(".")
    name, bracket, index = head.partition("[")
    own = _PARAMS.get(name, name) + bracket + index + dot + rest
    own = own.replace("].function", "]").replace("text.format.json_schema", "text.format")
    message = refusal.message.replace(f"'{refusal.param}'", f"'{own}'") if own else refusal.message
    return type(refusal)(message, param=own or None)


def _chat_tool(tool: Mapping[str, Any]) -> Item:
    members = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in members if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | Mapping[str, Any] | None, *, tools: bool) -> Any:
    match choice:
        case "auto" if not tools:  # what the object of every response says; a chat refuses it
            return None
        case None | "auto" | "none" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequest(
        "'tool_choice' is 'auto', 'none', 'required' or a function.", param="tool_choice"
    )


def _chat_format(text: TextOptions | None) -> Item | None:
    if text is None or text.format is None:
        return None
    kind = text.format.get("type")
    if kind == "json_schema":
        rest = {name: value for name, value in text.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": rest}
    return text.format


def response_id(request: str) -> str:
    """Return the API's id of a request's response."""
    return f"resp_{request.removeprefix('req_')}"


def request_of(response: str) -> str | None:
    """Return the request whose response has this id, None for what is no such id."""
    if not _RESPONSE_ID.fullmatch(response):
        return None
    return f"req_{response.removeprefix('resp_')}"


def repeated(request: ResponseRequest) -> bytes:
    """Return the members of a response object that repeat its request, as a JSON object."""
    reasoning = request.reasoning or ReasoningOptions()
    text = request.text or TextOptions()
    return msgspec.json.encode(
        {
            "background": bool(request.background),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.stored,
            "temperature": request.temperature,
            "text": {
                "format": text.format or {"type": "text"},
                "verbosity": text.verbosity or "medium",
            },
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
    )

"""What clients send: OpenAI's chat completions and completions, decoded and checked in one go.

Unknown fields have no effect. A known field of a wrong type or out of its range is refused with its
name; `null` stands for the default. Fields that cannot be served are refused, never ignored
(`schemas.refused`); docs/api.md lists all of them.
"""

import re
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from schemas.conversation import ChatMessage as ChatMessage
from schemas.conversation import ContentPart as ContentPart
from schemas.conversation import check_messages
from schemas.depth import check_depth
from schemas.errors import InvalidRequest
from schemas.extras import Extras, TokenId, Tokens
from schemas.refused import check_chat, check_completion
from schemas.sizes import check_sizes
from schemas.structure import ResponseFormat, structured_of
from schemas.tools import NamedTool, Tool, ToolChoice, Tools, check_tools
from schemas.wire import Structured

METADATA_MAX: Final = 16

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=METADATA_MAX),
]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent. `include_event_ids` is ours: some clients take `data:` lines only."""

    include_usage: bool | None = None
    include_event_ids: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Extras, frozen=True, kw_only=True):
    """The further fields that chats and completions share."""

    model: str
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    response_format: ResponseFormat | None = None

    @property
    def keep(self) -> bool:
        """Whether the request runs on when its last reader leaves."""
        return self.on_disconnect == "continue"

    @property
    def session(self) -> str | None:
        """The session that keys the prompt's partition, if one is named."""
        return self.session_id or self.prompt_cache_key

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple whatever the client's form."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def structured(self) -> Structured | None:
        """The form that the answer must have. Raises InvalidRequest where two are asked for."""
        return structured_of(self.response_format, self.structured_outputs)


class ChatRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: CacheRetention | None = None
    # vLLM's
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

    @property
    def output_tokens(self) -> int | None:
        """The client's bound on the answer; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens to report beside each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """Whether a tool may, must, or must not be called; with tools the default is `auto`."""
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def prompts_answer(self) -> bool:
        """Whether the template is to end with the beginning of an answer."""
        return self.add_generation_prompt is not False

    @property
    def variables(self) -> dict[str, Any]:
        """The chat template's further variables, as vLLM gives them."""
        given = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            given["documents"] = self.documents
        if self.verbosity is not None:
            given.setdefault("verbosity", self.verbosity)
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
            given.setdefault("enable_thinking", self.reasoning_effort != "none")
        return given


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    prompt_embeds: Any = None  # refused

    @property
    def output_tokens(self) -> int | None:
        """The client's bound on the answer; OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def tokens(self) -> list[int] | None:
        """The prompt, where it is given as token ids; None where it is text."""
        if isinstance(self.prompt, str):
            return None
        first = self.prompt[0] if len(self.prompt) == 1 else None
        prompt = first if isinstance(first, list) else self.prompt
        # There may be millions: nothing here may look at each of them in Python.
        only_ids = set(map(type, prompt)) <= {int}
        return cast("list[int]", prompt) if only_ids else None

    @property
    def text(self) -> str:
        """The prompt, where it is given as text."""
        first = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        return first if isinstance(first, str) else ""

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens to report beside each token; None for no log probabilities."""
        return self.logprobs


_Request = TypeVar("_Request", bound=msgspec.Struct)

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_PATH: Final = re.compile(r" - at `(?:key`? in `?)?\$\.?([^`]*)`$")
_INDEX: Final = re.compile(r"(\[[^\]]*\])+$")
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")


def parse_chat(body: bytes, *, streamed: bool = False) -> ChatRequest:
    """Read and check a chat request. Raises InvalidRequest naming the field.

    `streamed` says that the answer is a stream whatever the body says.
    """
    request = decode_body(_chat, body)
    check_shared(request, streamed=streamed)
    check_chat_request(request)
    return request


def parse_completion(body: bytes, *, streamed: bool = False) -> CompletionRequest:
    """Read and check a completion request; arguments and errors as `parse_chat`."""
    request = decode_body(_completion, body)
    check_shared(request, streamed=streamed)
    check_completion(request)
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "Log probabilities of an echoed prompt are not served.", param="logprobs"
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("'best_of' other than 'n' is not served.", param="best_of")
    if not request.prompt:
        raise InvalidRequest("'prompt' is empty.", param="prompt")
    if isinstance(request.prompt, list) and request.tokens is None and len(request.prompt) > 1:
        raise InvalidRequest("One prompt per request is served.", param="prompt")
    return request


def check_chat_request(request: ChatRequest) -> None:
    """Check what the types of a chat request cannot say. Raises InvalidRequest."""
    check_chat(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    check_messages(request.messages)
    check_tools(request.tools, request.tool_choice)
    if request.structured is not None and request.choice not in ("none", "auto"):
        raise InvalidRequest(
            "A forced tool call has the form of its arguments: no other can be asked for.",
            param="tool_choice",
        )
    if request.continue_final_message and request.prompts_answer:
        raise InvalidRequest(
            "'continue_final_message' needs 'add_generation_prompt' to be false.",
            param="continue_final_message",
        )


def decode_body(decoder: "msgspec.json.Decoder[_Request]", body: bytes) -> _Request:
    """Read a request's body. Raises InvalidRequest or RequestTooLarge naming the field."""
    try:
        check_depth(body)
        check_sizes(body)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        parts = [path[1]] if path and path[1] else []
        if missing := _MISSING.search(text):
            parts.append(missing[1])
        # A bad member of a list is reported as the list: "stop", not "stop[0]".
        param = _INDEX.sub("", ".".join(parts)) or None
        said = _PATH.sub("", text)
        raise InvalidRequest(
            f"Invalid value for '{param}': {said}." if param else f"{said}.", param=param
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


def check_shared(request: Generation, *, streamed: bool) -> None:
    """Check what the types of the shared fields cannot say. Raises InvalidRequest."""
    if request.stream_options is not None and not (request.stream or streamed):
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise InvalidRequest("Obfuscation is not served.", param="stream_options")
    if not request.model:
        raise InvalidRequest("'model' is empty.", param="model")
    for token in request.logit_bias or ():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise InvalidRequest("'logit_bias' maps token ids to numbers.", param="logit_bias")
    _ = request.structured  # raises where it makes no sense


def tools_plain(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as chat templates are given them."""
    return [tool.plain() for tool in tools] if tools else None

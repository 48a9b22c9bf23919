"""What clients send: OpenAI's chat completions and completions, decoded and checked in one go.

Unknown fields have no effect. A known field of a wrong type or out of OpenAI's range is refused
with its name; `null` stands for the default. Fields that no engine here can serve yet are refused,
never ignored.
"""

import re
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest
from schemas.wire import SimHook

_INT64_MAX: Final = 2**63 - 1
STOPS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 1024

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=_INT64_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=_INT64_MAX)]
Choices = Annotated[int, Meta(ge=1, le=128)]
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent. `include_event_ids` is ours: some clients take `data:` lines only."""

    include_usage: bool | None = None
    include_event_ids: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints share."""

    model: str
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    n: Choices | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    sim: SimHook | None = None

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


class ChatRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int | None:
        """The client's bound on the answer; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens to report beside each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None

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
    _check_shared(request, streamed=streamed)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    for number, message in enumerate(request.messages):
        for part in message.content if isinstance(message.content, list) else ():
            if part.type not in ("text", "refusal"):
                raise InvalidRequest(
                    f"Content of type '{part.type[:40]}' cannot be served: only text can.",
                    param=f"messages[{number}].content",
                )
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise InvalidRequest("Only the 'text' response format is served.", param="response_format")
    return request


def parse_completion(body: bytes, *, streamed: bool = False) -> CompletionRequest:
    """Read and check a completion request; arguments and errors as `parse_chat`."""
    request = decode_body(_completion, body)
    _check_shared(request, streamed=streamed)
    if request.echo:
        raise InvalidRequest("'echo' is not served.", param="echo")
    if request.suffix:
        raise InvalidRequest("'suffix' is not served.", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("'best_of' other than 'n' is not served.", param="best_of")
    if not request.prompt:
        raise InvalidRequest("'prompt' is empty.", param="prompt")
    if isinstance(request.prompt, list) and request.tokens is None and len(request.prompt) > 1:
        raise InvalidRequest("One prompt per request is served.", param="prompt")
    return request


def decode_body(decoder: "msgspec.json.Decoder[_Request]", body: bytes) -> _Request:
    """Read a request's body. Raises InvalidRequest naming the field."""
    try:
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
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _check_shared(request: Generation, *, streamed: bool) -> None:
    if request.stream_options is not None and not (request.stream or streamed):
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if not request.model:
        raise InvalidRequest("'model' is empty.", param="model")
    for token in request.logit_bias or ():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise InvalidRequest("'logit_bias' maps token ids to numbers.", param="logit_bias")

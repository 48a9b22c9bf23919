"""Tool calls and reasoning in what a model says, found by vLLM's own parsers.

Rule: nothing here imports vllm; its classes are handed in. Parsers are asked step by step, and what
is not streamed is the same pieces joined: both modes say the same. They keep state, one per choice,
which is lost with the worker (`workers.course`). What a parser held back for the beginning of a
call is said at the end, where none came of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from schemas.wire import Parsing, Piece, Sampling
from workers.engine import EngineFailed

FRONTEND_ARGS: Final = ("tool_call_parser", "enable_auto_tool_choice", "tool_strict_level")
"""Arguments of vLLM's own server that we take beside the engine's."""


class Kinds(NamedTuple):
    """vLLM's classes: of a chat request, and of its constraint on the answer's form."""

    request: Any
    structured: Any


class Parsers:
    """Makes the parsers of each chat."""

    def __init__(self, parser: Any, kinds: Kinds, *, tokenizer: Any, model_config: Any) -> None:
        """`parser` is the class that vLLM's ParserManager composed."""
        self._parser = parser
        self._kinds = kinds
        self._tokenizer = tokenizer
        self._model_config = model_config

    def begin(self, parsing: Parsing, sampling: Sampling, prompt: Sequence[int]) -> "ParsedChat":
        """Return the parsers of one chat. Raises what vLLM raises where the tools make no sense."""
        request = self._kinds.request(**_fields(parsing, sampling, self._kinds))
        given = request.build_chat_params(None, "auto").chat_template_kwargs

        def parser() -> Any:
            return self._parser(
                self._tokenizer,
                request.tools,
                chat_template_kwargs=given,
                model_config=self._model_config,
            )

        if request.tool_choice != "none" or parser().reasoning_parser is not None:
            request = parser().adjust_request(request=request)
        return ParsedChat(request, parser, given, parsing, prompt, choices=sampling.n)


class _Said:
    """What one choice has said so far."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser
        self.called = False
        self.reasoning_tokens = 0
        self.shown = 0
        """Characters of `content` and of what the model thought that were found."""
        self.content: list[str] = []
        self.texts: list[str] = []
        self.tokens: list[int] = []


class ParsedChat:
    """One chat: what the parsers want of the engine, and what they find in its steps."""

    def __init__(
        self,
        request: Any,
        parser: Callable[[], Any],
        template: Mapping[str, Any],
        parsing: Parsing,
        prompt: Sequence[int],
        *,
        choices: int,
    ) -> None:
        """`parser` makes one, of no state yet."""
        self._request = request
        self._parser = parser
        self._template = template
        self._parsing = parsing
        self._prompt = list(prompt)
        self._choices = [_Said(parser()) for _ in range(choices)]

    @property
    def structured(self) -> Any:
        """The form of the answer: that of the forced tool call, or the client's."""
        return self._request.extract_structured_outputs()

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are left out of the text; some parsers need them."""
        return bool(self._request.skip_special_tokens)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Further arguments of the engine's `generate`: where reasoning has no form to keep."""
        first = self._choices[0].parser
        if first.reasoning_parser is None:
            return {}
        return {
            "reasoning_ended": self._request.resolve_reasoning_ended(first, self._prompt),
            "reasoning_parser_kwargs": {"chat_template_kwargs": dict(self._template)},
        }

    def read(self, piece: Piece, *, ends: bool) -> Piece:
        """Return a step's piece with its text told apart. Raises EngineFailed."""
        choice = self._choices[piece.choice]
        choice.tokens += piece.tokens
        choice.texts.append(piece.text)
        try:
            said = choice.parser.parse_delta(
                delta_text=piece.text,
                delta_token_ids=list(piece.tokens),
                request=self._request,
                prompt_token_ids=self._prompt,
                finished=ends,
            )
            if ends:
                # By another, which has seen no steps: how tokens fell into these would count.
                choice.reasoning_tokens = self._parser().count_reasoning_tokens(choice.tokens)
        except Exception as error:  # a parser is not ours, and may raise anything
            # Its kind alone: the words may repeat what the model said, and nobody has looked at it.
            raise EngineFailed(f"the model's parser failed: {type(error).__name__}") from error
        delta = {} if said is None else self._delta(choice, said)
        text = (said.content if said is not None else None) or ""
        choice.content.append(text)
        choice.shown += len(text) + len(delta.get("reasoning", ""))
        if ends:
            text += self._held_back(choice)
        logprobs = piece.logprobs if self._parsing.reasoning else None
        return piece._replace(text=text, logprobs=logprobs, delta=delta or None)

    def _delta(self, choice: _Said, said: Any) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta["reasoning"] = said.reasoning
        if calls := self._calls(said):
            choice.called = True
            delta["tool_calls"] = calls
        return delta

    def _calls(self, said: Any) -> list[dict[str, Any]]:
        return [
            call.model_dump(exclude_none=True)
            for call in said.tool_calls
            if self._parsing.parallel or call.index == 0
        ]

    def _held_back(self, choice: _Said) -> str:
        """Return what is content to the parser that reads an answer as a whole, and was held back
        by the one that reads steps, since it might have become a call."""
        text = "".join(choice.texts)
        if choice.called or self._parsing.choice != "auto" or choice.shown == len(text):
            return ""
        parser = self._parser()
        try:
            parser.set_prompt_token_ids(self._prompt)
            _, content, calls = parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=choice.tokens
            )
        except Exception:  # as above; nothing is lost that the steps have shown
            return ""
        shown = "".join(choice.content)
        if calls or not content or not content.startswith(shown):
            return ""
        return str(content[len(shown) :])

    def reason(self, choice: int, reason: str) -> str:
        """Return why a choice ended, as the API says it: a named call ends with `stop`."""
        called = self._choices[choice].called and self._parsing.choice != "function"
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens were reasoning; None where no parser tells it apart."""
        if self._choices[0].parser.reasoning_parser is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices)


def _fields(parsing: Parsing, sampling: Sampling, kinds: Kinds) -> dict[str, Any]:
    """Return the members of vLLM's request that a parser looks at."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}],
        "tool_choice": parsing.choice,
        "parallel_tool_calls": parsing.parallel,
        "include_reasoning": parsing.reasoning,
        "skip_special_tokens": sampling.skip_special_tokens,
        "structured_outputs": structured_params(sampling, kinds.structured),
        "stream": True,
        "n": sampling.n,
    }
    if parsing.tools:
        fields["tools"] = msgspec.json.decode(parsing.tools)
    if parsing.choice == "function":
        fields["tool_choice"] = {"type": "function", "function": {"name": parsing.function}}
    if parsing.template:
        fields["chat_template_kwargs"] = msgspec.json.decode(parsing.template)
    return fields


def structured_params(sampling: Sampling, kind: Any) -> Any:
    """Return the answer's form as vLLM's `kind`, None for any form."""
    asked = sampling.structured
    if asked is None:
        return None
    given = {
        "json": asked.json,
        "json_object": asked.json_object or None,
        "regex": asked.regex,
        "choice": list(asked.choice) or None,
        "grammar": asked.grammar,
        "structural_tag": asked.structural_tag,
        "whitespace_pattern": asked.whitespace_pattern,
        "disable_any_whitespace": asked.disable_any_whitespace or None,
        "disable_additional_properties": asked.disable_additional_properties or None,
    }
    return kind(**{name: value for name, value in given.items() if value is not None})

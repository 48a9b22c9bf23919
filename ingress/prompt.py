"""From messages to token ids, as the model's own tokenizer and chat template say.

Rule: the rendered prompt is canonical. Content as a part or as a string, and any order of keys in
the JSON, give the same token ids. No torch: the files come from the broker, `tokenizers` (Rust)
does the work. Of its functions only those on batches let other threads run meanwhile: `encode`
would stop a node for 10 s over 5 MB.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from ingress.template import ChatTemplates
from ingress.turns import Ending, cut_open, open_end, plain_turns
from schemas.errors import ContextLengthExceeded, InvalidRequest
from schemas.openai import ChatMessage, ChatRequest, CompletionRequest, tools_plain

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
FIRST_LOOK_CHARACTERS: Final = 256 * 1024
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class UnusableFiles(Exception):
    """The tokenizer files of a model cannot be used."""


class Prompter:
    """Renders and tokenises prompts for one model. Its methods are slow: call them in a thread."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` are the model's tokenizer files by name. Raises UnusableFiles."""
        try:
            self._tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
            config: dict[str, Any] = json.loads(files.get(CONFIG, b"{}"))
            special = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name)}
            self._templates = _templates(files, config)
        # `tokenizers` raises plain Exception, and a config may hold anything in place of anything.
        except Exception as error:
            raise UnusableFiles(f"{type(error).__name__}: {error}") from error
        self._special = special

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        tokens_max: int | None = None,
        ending: Ending = Ending.ANSWER,
        variables: Mapping[str, Any] | None = None,
        special: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequest.

        With far more than `tokens_max` of them, ContextLengthExceeded. `variables` are the
        template's further ones; `special` adds what a plain prompt is begun with.
        """
        template = self._templates.of(tools=bool(tools))
        if template is None:
            raise InvalidRequest("This model has no chat template.", param="messages")
        if tokens_max is not None and len(messages) > tokens_max:  # rendering takes 40 µs of each
            raise ContextLengthExceeded(
                f"This model's maximum context length is {tokens_max} tokens; there are"
                f" {len(messages)} messages.",
                param="messages",
            )
        turns = plain_turns(
            messages, parts=template.wants_parts, developers=template.knows_developers
        )
        if ending is Ending.OPEN:
            open_end(turns)
        # What is not given is none, and not undefined, as Hugging Face has it.
        known = {"documents": None, **self._special, **(variables or {})}
        known |= {"messages": turns, "tools": tools or None}
        known["add_generation_prompt"] = ending is Ending.ANSWER
        try:
            text = template.render(known)
        except Exception as error:  # a template is a program, and not ours: it may raise anything
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        if ending is Ending.OPEN:
            text = cut_open(text)
        self._check_size(text, tokens_max, param="messages")
        return self._encode(text, special=special)

    def of_chat(self, ask: ChatRequest, *, tokens_max: int | None = None) -> list[int]:
        """Return the token ids of a chat request; raises as `chat`."""
        ending = Ending.ANSWER if ask.prompts_answer else Ending.NONE
        return self.chat(
            ask.messages,
            tools_plain(ask.tools),
            tokens_max=tokens_max,
            ending=Ending.OPEN if ask.continue_final_message else ending,
            variables=ask.variables,
            special=bool(ask.add_special_tokens),
        )

    def text(self, text: str, *, tokens_max: int | None = None, special: bool = True) -> list[int]:
        """Return the token ids of a plain prompt, with what the model wants before it.

        With far more than `tokens_max` of them, raises ContextLengthExceeded. `special` False
        leaves out what the model wants before it.
        """
        self._check_size(text, tokens_max, param="prompt")
        return self._encode(text, special=special)

    def echo(self, ask: CompletionRequest, tokens: Sequence[int]) -> str:
        """Return what stands before the answer: the prompt's text, where it is asked for."""
        if not ask.echo:
            return ""
        return ask.text if ask.tokens is None else self.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special ones left out."""
        return str(self._tokenizer.decode(list(tokens)))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def _check_size(self, text: str, tokens_max: int | None, *, param: str) -> None:
        """Refuse a text that is far too long without making all of its tokens.

        Making a million Python numbers, and freeing as many strings, stops all threads. A text has
        about as many tokens as its beginnings, each twice as long as the one before, and more.
        """
        size = FIRST_LOOK_CHARACTERS
        while tokens_max is not None and size < len(text):
            [encoding] = self._tokenizer.encode_batch_fast([text[:size]], add_special_tokens=False)
            if len(encoding) > 2 * tokens_max:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {tokens_max} tokens; the first {size}"
                    f" of the prompt's {len(text)} characters have {len(encoding)}.",
                    param=param,
                )
            size *= 2

    def tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt that is given as token ids. Raises InvalidRequest for unknown ones."""
        size = self._tokenizer.get_vocab_size()
        if tokens and max(tokens) >= size:
            raise InvalidRequest(f"This model's token ids are below {size}.", param="prompt")
        return list(tokens)


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> ChatTemplates:
    return ChatTemplates(
        files[TEMPLATE].decode() if TEMPLATE in files else config.get("chat_template")
    )


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)

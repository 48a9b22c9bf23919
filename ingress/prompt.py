"""From messages to token ids, as the model's own tokenizer and chat template say.

Rule: the rendered prompt is canonical. Content as parts or as a string, and any order of keys in
the JSON, give the same token ids. No torch: the files come from the broker, `tokenizers` (Rust)
does the work and lets other threads run meanwhile.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from schemas.errors import InvalidRequest
from schemas.openai import ChatMessage

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
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
            self._template = _template(files, config)
        # `tokenizers` raises plain Exception, and a config may hold anything in place of anything.
        except Exception as error:
            raise UnusableFiles(f"{type(error).__name__}: {error}") from error
        self._special = special

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("This model has no chat template.", param="messages")
        try:
            text = self._template.render(
                messages=[_plain(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                **self._special,
            )
        except Exception as error:  # a template is a program, and not ours: it may raise anything
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt, with what the model wants before it."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt that is given as token ids. Raises InvalidRequest for unknown ones."""
        size = self._tokenizer.get_vocab_size()
        if tokens and max(tokens) >= size:
            raise InvalidRequest(f"This model's token ids are below {size}.", param="prompt")
        return list(tokens)


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> jinja2.Template | None:
    source = files[TEMPLATE].decode() if TEMPLATE in files else config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one serves chats
        named = {template["name"]: template["template"] for template in source}
        source = named.get("default")
    if source is None:
        return None
    # The environment that Hugging Face's templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it: content one string, absent members absent."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)

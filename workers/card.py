"""What a model's card is made of, read without vLLM or torch, so that it needs no worker.

The engine's own figures win once a worker is up; these are the ones it would derive.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)

_LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""The names that families of models give their context length, as vLLM knows them."""

_LENGTH_IF_UNKNOWN: Final = 2048  # vLLM's

_SCALED_ALREADY: Final = ("su", "longrope", "llama3", "yarn", "deepseek_yarn")
"""Rotary scalings after which the stated length needs no factor."""


class NoModel(Exception):
    """There is no model of this name, or it lacks the files that a card is made of."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tokenizer's files by name, and the longest prompt and answer together, in tokens."""

    files: dict[str, bytes]
    max_model_len: int


class ParserNames(NamedTuple):
    """vLLM's parsers of tool calls and of reasoning, by name."""

    tools: str | None
    reasoning: str | None


def parser_names(engine_args: Mapping[str, Any]) -> ParserNames:
    """Return the parsers that the arguments name, in vLLM's words.

    A named parser of tools is used, unless `enable_auto_tool_choice` is false.
    """
    args = {name.replace("-", "_"): value for name, value in engine_args.items()}
    tools, reasoning = args.get("tool_call_parser"), args.get("reasoning_parser")
    if args.get("enable_auto_tool_choice") is False:
        tools = None
    return ParserNames(str(tools) if tools else None, str(reasoning) if reasoning else None)


def served_name(model: str, engine_args: Mapping[str, Any]) -> str:
    """Return the name clients use: vLLM's argument for it, a folder's own name, or `model`."""
    given = engine_args.get("served_model_name")
    if given:
        return str(given if isinstance(given, str) else given[0])
    return Path(model).resolve().name if os.path.isdir(model) else model


def read_model_files(model: str, engine_args: Mapping[str, Any] | None = None) -> ModelFiles:
    """Read a model's folder, or fetch the few files needed from a hub. Blocks on a hub's network.

    vLLM's arguments `tokenizer`, `revision` and `max_model_len` are heeded. Raises NoModel.
    """
    args = engine_args or {}
    folder = _folder(model, args.get("revision"))
    tokenizer = args.get("tokenizer")
    beside = _folder(str(tokenizer), args.get("tokenizer_revision")) if tokenizer else folder
    files = {
        name: path.read_bytes() for name in TOKENIZER_FILES if (path := beside / name).is_file()
    }
    if "tokenizer.json" not in files:
        raise NoModel(f"{tokenizer or model} has no tokenizer.json")
    config = _object(folder / "config.json")
    length = args.get("max_model_len")
    if isinstance(length, int) and length > 0:
        return ModelFiles(files, length)
    return ModelFiles(files, _derived_length(config, _object(beside / "tokenizer_config.json")))


def _folder(model: str, revision: str | None) -> Path:
    if os.path.isdir(model):
        return Path(model)
    # A dependency of `tokenizers`; it takes a while to import and only hub names need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=["config.json", *TOKENIZER_FILES]
            )
        )
    except (OSError, ValueError) as error:
        raise NoModel(f"{model} is no folder here, and no hub gave it: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one. Raises NoModel."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise NoModel(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise NoModel(f"{path} holds no object")
    return content


def _derived_length(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> int:
    """Return the context length, in tokens, that vLLM would derive (`_get_and_verify_max_len`)."""
    text = config.get("text_config") or config
    lengths = [text[name] for name in _LENGTHS if isinstance(text.get(name), int)]
    length: float = text.get("model_max_length") or min(lengths, default=_LENGTH_IF_UNKNOWN)
    length = min(length, tokenizer_config.get("model_max_length") or length)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        return int(text.get("original_max_position_embeddings", length))
    if kind not in _SCALED_ALREADY and "gemma3" not in str(config.get("model_type")):
        length *= rope.get("factor") or 1
    return int(length)

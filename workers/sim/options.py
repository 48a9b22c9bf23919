"""The simulated engine's options: vLLM's names for its size, our own for its time model.

Rule: a name that is not known, or a value that makes no sense, is an error at start that names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from workers.sim.clock import TimeModel

KV_TOKENS: Final = 1 << 20


T = TypeVar("T", bound=msgspec.Struct)


class BadOption(ValueError):
    """An option of the engine is unknown or has a value that it cannot take."""


class _EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True


class _SimArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step_us: float = 0.0
    prefill_us_per_token: float = 0.0
    decode_us_per_seq: float = 0.0
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much the engine holds at once."""

    slots: int
    step_tokens: int
    model_len: int
    block_size: int
    blocks: int
    prefix_caching: bool


def size_of(engine_args: Mapping[str, Any]) -> Size:
    """Read vLLM's engine arguments. Raises BadOption.

    `max_model_len` is 32768 unless given, or what the KV cache holds where that is less.
    """
    args = _convert(engine_args, _EngineArgs, what="engine argument")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        _at_least_one(name, getattr(args, name))
    blocks = args.num_gpu_blocks_override
    if blocks is None:
        blocks = max(1, KV_TOKENS // args.block_size)
    _at_least_one("num_gpu_blocks_override", blocks)
    kv_tokens = blocks * args.block_size
    model_len = min(32768, kv_tokens) if args.max_model_len is None else args.max_model_len
    _at_least_one("max_model_len", model_len)
    if model_len > kv_tokens:
        raise BadOption(
            f"max_model_len {model_len} is more than the {kv_tokens} tokens that the KV cache holds"
        )
    return Size(
        slots=args.max_num_seqs,
        step_tokens=args.max_num_batched_tokens,
        model_len=model_len,
        block_size=args.block_size,
        blocks=blocks,
        prefix_caching=args.enable_prefix_caching,
    )


def time_model_of(sim: Mapping[str, Any]) -> TimeModel:
    """Read the time model's options. Raises BadOption."""
    args = _convert(sim, _SimArgs, what="option of --sim")
    for name in _SimArgs.__struct_fields__:
        value = getattr(args, name)
        if not 0 <= value < float("inf"):
            raise BadOption(f"{name} must be 0 or more, and finite")
    return TimeModel(**msgspec.structs.asdict(args))


def _convert(raw: Mapping[str, Any], kind: type[T], *, what: str) -> T:
    for name in raw:
        if name not in kind.__struct_fields__:
            known = ", ".join(kind.__struct_fields__)
            raise BadOption(f"the simulated engine has no {what} {name!r}; it has {known}")
    try:
        return msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        raise BadOption(f"{what}: {error}") from None


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise BadOption(f"{name} must be at least 1")

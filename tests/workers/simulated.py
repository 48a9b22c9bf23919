"""How tests ask a simulated engine, without a worker around it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer

from schemas.wire import Piece, Sampling, SimHook
from workers.engine import EngineLoad, Finish, Work
from workers.engine_sim import SimulatedEngine, tokenizer_files

T = TypeVar("T")

PROMPT = list(range(10, 50))
IDLE = EngineLoad(running=0, waiting=0, kv_used=0.0)
TOKENIZER = Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())


class Heard:
    """What `emit` was given."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.calls = 0
        self.any = asyncio.Event()

    async def __call__(self, pieces: Sequence[Piece]) -> None:
        self.pieces += pieces
        self.calls += 1
        self.any.set()

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)


def work(
    *,
    request: str = "r",
    prompt: Sequence[int] = PROMPT,
    cache_salt: str | None = None,
    sim: SimHook | None = None,
    **sampling: Any,
) -> Work:
    return Work(
        request,
        prompt,
        Sampling(**{"max_tokens": 1000} | sampling),
        cache_salt=cache_salt,
        sim=sim,
    )


def with_engine(scene: Callable[[SimulatedEngine], Awaitable[T]], **engine_args: Any) -> T:
    async def main() -> T:
        engine = SimulatedEngine(engine_args=engine_args)
        await engine.start()
        try:
            return await scene(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


async def turns(count: int) -> None:
    """Let the event loop turn, and nothing else."""
    for _ in range(count):
        await asyncio.sleep(0)


def once(asked: Work, **engine_args: Any) -> tuple[Heard, Finish]:
    async def scene(engine: SimulatedEngine) -> tuple[Heard, Finish]:
        heard = Heard()
        return heard, await engine.generate(asked, heard)

    return with_engine(scene, **engine_args)

"""The simulated engine alone: `python -m bench.engine`, a plan on stdin, the outcome on stdout.

What it costs here is what a worker's process spends on making tokens rather than on relaying them.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil
import uvloop

from bench.plan import EnginePlan, Outcome
from schemas.wire import Piece, Sampling, SimHook
from workers.engine import Work
from workers.engine_sim import SimulatedEngine


async def _run(plan: EnginePlan) -> Outcome:
    engine = SimulatedEngine(sim=plan.sim)
    await engine.start()
    made = [0] * len(plan.hooks)

    async def generate(place: int, hook: SimHook | None) -> None:
        async def emit(pieces: Sequence[Piece]) -> None:
            made[place] += len(pieces)

        sampling = Sampling(max_tokens=plan.tokens, ignore_eos=True)
        await engine.generate(Work(str(place), plan.prompt, sampling, sim=hook), emit)

    async with asyncio.TaskGroup() as group:
        for place, raw in enumerate(plan.hooks):
            hook = None if raw is None else msgspec.convert(raw, SimHook)
            group.create_task(generate(place, hook))
        while min(made) < plan.warm:  # noqa: ASYNC110 - an event would be work in emit
            await asyncio.sleep(0.02)
        process = psutil.Process()
        before, before_s, begin_s = sum(made), process.cpu_times(), time.perf_counter()
        await asyncio.sleep(plan.window_s)
        after, after_s = sum(made), process.cpu_times()
        wall_s = time.perf_counter() - begin_s
    spent_s = after_s.user + after_s.system - before_s.user - before_s.system
    return Outcome(units=after - before, cpu_s={"engine": spent_s}, wall_s=wall_s)


def main() -> None:
    """Read a plan, run it, write the outcome."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=EnginePlan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_run(plan))))


if __name__ == "__main__":
    main()

"""Running a coroutine as far as it goes without waiting."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from streamer.eager import start


def test_work_that_does_not_wait_is_done_at_once() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    assert start(work()) is None
    assert done == [1]


def test_work_that_waits_is_handed_over_and_not_begun_again() -> None:
    async def main() -> list[str]:
        gate = asyncio.Event()
        steps = []

        async def work() -> None:
            steps.append("begun")
            await gate.wait()
            await asyncio.sleep(0)
            await gate.wait()
            steps.append("done")

        rest = start(work())
        assert rest is not None
        assert steps == ["begun"]
        gate.set()
        await rest
        return steps

    assert asyncio.run(main()) == ["begun", "done"]


def test_what_the_work_waited_for_may_be_there_before_the_rest_is_awaited() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        found = []

        async def work() -> None:
            found.append(await future)

        rest = start(work())
        future.set_result("there")
        await asyncio.sleep(0)
        assert rest is not None
        await rest
        return found[0]

    assert asyncio.run(main()) == "there"


def _failing(at_once: bool) -> Coroutine[Any, Any, None]:
    async def work() -> None:
        if not at_once:
            await asyncio.sleep(0)
        raise OSError("gone")

    return work()


def test_an_error_comes_out_where_it_happens() -> None:
    with pytest.raises(OSError, match="gone"):
        start(_failing(at_once=True))

    async def main() -> None:
        rest = start(_failing(at_once=False))
        assert rest is not None
        with pytest.raises(OSError, match="gone"):
            await rest

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_it_awaits_the_rest_cancels_the_work() -> None:
    async def main() -> list[str]:
        heard = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard.append("cancelled")
                raise

        rest = start(work())
        assert rest is not None

        async def waiting() -> None:
            await rest

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return heard

    assert asyncio.run(main()) == ["cancelled"]

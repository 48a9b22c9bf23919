"""How a node lives: one event loop, one stop, and named tasks whose death ends the node."""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import uvloop

log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

Main = Callable[[asyncio.Event], Awaitable[None]]


def settle_memory() -> None:
    """Spare the garbage collector what a node keeps for good; call once it is ready.

    What requests leave behind is freed by reference counts; the collector's frequent looks at all
    of it would cost 5 % of a streamer's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class TaskEnded(Exception):
    """A task that should last as long as the node has returned."""


class Tasks:
    """The long tasks of a node. One that ends or raises ends the node."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run `work` as a task of this name until the node ends."""
        task = self._group.create_task(_lasting(name, work), name=name)
        # A task that is cancelled before its first step never gets to await `work`.
        task.add_done_callback(lambda _: work.close())
        self._tasks.append(task)
        return task

    def cancel(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()


async def _lasting(name: str, work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Exception:
        log.exception("task %s failed", name)
        raise
    raise TaskEnded(name)


@asynccontextmanager
async def running_tasks() -> AsyncIterator[Tasks]:
    """Give a node its tasks; they are cancelled and awaited when the block ends.

    A task's death cancels the block and leaves as an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        try:
            yield tasks
        finally:
            tasks.cancel()


def run(main: Main, *, at_once: Callable[[], None] | None = None) -> int:
    """Run a node and return its exit status: 0, or 1 when `main` raised.

    `main` is given an event that the first SIGINT or SIGTERM sets. A second signal ends the
    process at once, after `at_once` (which must neither wait nor raise).
    """
    try:
        uvloop.run(_run(main, at_once))
    except Exception as error:
        # The outermost frame. Tasks have logged their own failure already.
        log.critical("ends: %s", _reason(error), exc_info=not isinstance(error, ExceptionGroup))
        return 1
    return 0


async def _run(main: Main, at_once: Callable[[], None] | None) -> None:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            if at_once is not None:
                at_once()
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    await main(stop)


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"


class _OneLine(logging.Formatter):
    """A record is one line whatever it holds, so that the processes' logs can share a pipe."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\\n")


def log_to_stdout(name: str, level: int = logging.INFO) -> None:
    """Log to stdout, one line a record: UTC time, level, the process's name, logger, message."""
    handler = logging.StreamHandler(sys.stdout)
    process = name.replace("%", "%%")
    handler.setFormatter(
        _OneLine(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s",
            "%Y-%m-%dT%H:%M:%S",
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)

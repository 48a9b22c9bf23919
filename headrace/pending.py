"""What hangs on a connection to the broker: questions that wait for their answers, and work that
waits for its return. Rule: a question does not outlive its connection, work is tried until done.
"""

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from headrace.messages import BrokerAway, BrokerRefused, Message

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]

RETRY_S: Final = 0.25
TRIES_S_MAX: Final = 60.0
OWED_MAX: Final = 10_000


class Answers:
    """The answers that somebody waits for, by the last token of their subject."""

    def __init__(self) -> None:
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[Message]] = {}

    def expect(self) -> tuple[str, "asyncio.Future[Message]"]:
        """Return a fresh token and the future of its answer, which is forgotten once done."""
        token = f"{next(self._tokens):x}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        answer.add_done_callback(functools.partial(self._forget, token))
        return token, answer

    def _forget(self, token: str, _answer: "asyncio.Future[Message]") -> None:
        self._waiting.pop(token, None)

    def take(self, message: Message) -> None:
        """Hand an answer to the one who asked, if it still waits."""
        answer = self._waiting.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, reason: str) -> None:
        """Fail all with BrokerAway."""
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(BrokerAway(reason))


class Errands:
    """Work in tasks that nobody awaits."""

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self._after_return: list[Work] = []
        self._owed: deque[Work] = deque(maxlen=OWED_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._returns = 0

    def after_return(self, work: Work) -> None:
        """Have `work` done after each return of the broker."""
        self._after_return.append(work)

    def owe(self, work: Work) -> None:
        """Have `work`, which the broker did not take, done once: soon, or after its return."""
        self._owed.append(work)
        if self._connected():
            self.spawn(self._until_done(self._pay, self._returns), name="owed")

    async def _pay(self) -> None:
        while self._owed:
            work = self._owed.popleft()
            try:
                await work()
            except (BrokerAway, BrokerRefused):
                self._owed.append(work)
                raise

    def returned(self) -> None:
        """Do what waits for the broker's return."""
        self._returns += 1
        for work in (*self._after_return, self._pay):
            self.spawn(self._until_done(work, self._returns), name="after the broker's return")

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Do `work` in a task of its own; what it raises is logged."""
        task = asyncio.create_task(_logged(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_done(self, work: Work, returns: int) -> None:
        """Try again while this connection lasts: a server takes connections some time before it
        has read its streams, and a cluster before it has leaders."""
        give_up_s = asyncio.get_running_loop().time() + TRIES_S_MAX
        while self._connected() and returns == self._returns:
            try:
                await work()
                return
            except (BrokerAway, BrokerRefused):
                if asyncio.get_running_loop().time() > give_up_s:
                    raise
            await asyncio.sleep(RETRY_S)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """The outermost frame of a task that nobody awaits."""
    try:
        await work
    except (BrokerAway, BrokerRefused) as error:
        log.warning("%s", error)
    except Exception:
        log.exception("a task failed")

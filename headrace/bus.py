"""The one door to NATS. Rule: a publish that the broker cannot take now fails at once.

nats-py buffers publishes while it is disconnected and gives up after 60 reconnects; here neither
happens: publishing raises BrokerAway, and reconnecting goes on for ever (`headrace/client.py`).
What nats-py has no call for (priority groups, batched direct gets, stream settings of 2.12) goes
through JetStream's documented JSON API.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
import nats
import nats.errors
import nats.micro
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.errors import APIError, NotFoundError, ObjectNotFoundError

from headrace.client import RECONNECT_WAIT_S, PatientClient, access
from headrace.messages import (
    Answerer,
    BrokerAway,
    BrokerRefused,
    BusSettings,
    Handler,
    Message,
    Stored,
    Taking,
    raise_no_responders,
    read_ack,
    stored,
)
from headrace.pending import Answers, Errands, Work

__all__ = [
    "API_TIMEOUT_S",
    "BrokerAway",
    "BrokerRefused",
    "Bus",
    "BusSettings",
    "Message",
    "Stored",
    "Subscription",
    "connect",
    "connection",
    "raise_no_responders",
    "stored",
]

log = logging.getLogger(__name__)

API_TIMEOUT_S: Final = 5.0
PING_INTERVAL_S: Final = 2
"""A broker that is frozen is noticed with the third ping that it does not answer."""
CONNECT_TIMEOUT_S: Final = 2
WHYS_MAX: Final = 8
SERVICE_VERSION: Final = "1.0.0"
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024


class Subscription:
    """Interest in a subject."""

    def __init__(self, inner: NatsSubscription) -> None:
        self._inner = inner

    async def drain(self) -> None:
        """Stop interest, after handling what the broker has already sent."""
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
            await self._inner.drain()  # type: ignore[no-untyped-call]

    async def unsubscribe(self) -> None:
        """Stop interest; what is on its way is dropped."""
        with contextlib.suppress(nats.errors.Error):
            await self._inner.unsubscribe()


class Bus:
    """A connection to NATS; made by `connect`."""

    def __init__(self, client: PatientClient, *, quiet: bool) -> None:
        self._client = client
        self._js = client.jetstream()
        self._inbox = client.new_inbox()
        self._answers = Answers()
        self.errands = Errands(lambda: self.connected)
        self._news = logging.DEBUG if quiet else logging.WARNING
        self._up = True
        self._closing = False
        self.returned_s = -math.inf
        self.fault: str | None = None

    async def open(self) -> None:
        """Subscribe to the inbox that all answers come to."""
        await self.listen(f"{self._inbox}.*", self._answers.take)

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now, as far as we know."""
        return self._up and bool(self._client.is_connected)

    @property
    def ready(self) -> bool:
        """Whether the broker can be reached and its streams can be used, as far as we know.

        `headrace/upkeep.py` looks after them and names their `fault`.
        """
        return self.connected and self.fault is None

    @property
    def payload_bytes_max(self) -> int:
        """The largest message that the broker takes."""
        return int(self._client.max_payload)

    def on_reconnect(self, work: Work) -> None:
        """Have `work` done after each reconnect, in a task of its own; while the broker is away or
        refuses it is tried again."""
        self.errands.after_return(work)

    def broken(self) -> "asyncio.Future[Message]":
        """Return a future that fails with BrokerAway when this connection breaks; who needs it no
        more cancels it."""
        return self._answers.expect()[1]

    def new_inbox(self) -> str:
        """Return a fresh subject for answers; subjects below it are free too."""
        return str(self._client.new_inbox())

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Publish without asking for an acknowledgement. Raises BrokerAway."""
        self._check_connected()
        try:
            await self._client.publish(subject, data, reply=reply)
        except (nats.errors.Error, OSError) as error:
            raise BrokerAway(str(error)) from error

    async def store(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = API_TIMEOUT_S,
    ) -> Stored:
        """Publish to a stream and wait for its acknowledgement.

        Raises BrokerAway when none came (the message may be stored all the same) and BrokerRefused
        when the stream said no.
        """
        answer = await self._ask(subject, data, headers=headers, timeout_s=timeout_s)
        return read_ack(answer)

    async def store_soon(self, subject: str, data: bytes) -> "asyncio.Future[Message]":
        """Publish to a stream; the future holds its answer, for `stored` to read.

        Raises BrokerAway if the publish itself could not be made. The future fails with BrokerAway
        when the connection breaks before the answer.
        """
        return await self._send(subject, data, headers=None)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Ask a service and return its first answer. Raises BrokerAway when none comes."""
        return (await self._ask(subject, data, headers=None, timeout_s=timeout_s)).data

    async def api(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = API_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Call JetStream's JSON API, `$JS.API.<verb>`. Raises BrokerAway and BrokerRefused."""
        data = b"" if body is None else msgspec.json.encode(body)
        answer = await self._ask(f"$JS.API.{verb}", data, headers=None, timeout_s=timeout_s)
        result: dict[str, Any] = msgspec.json.decode(answer.data)
        if error := result.get("error"):
            raise BrokerRefused(
                error.get("description", ""),
                code=error.get("err_code", 0),
                status=error.get("code", 0),
            )
        return result

    async def purge(self, stream: str, subject_filter: str) -> int:
        """Delete a stream's messages under a filter; return how many. Raises as `api`."""
        answer = await self.api(f"STREAM.PURGE.{stream}", {"filter": subject_filter})
        return int(answer["purged"])

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Have `handler` called for each message, one at a time. Raises BrokerAway."""
        return Subscription(await self._subscribe(subject, handler, queue=queue))

    async def _subscribe(self, subject: str, handler: Handler, *, queue: str) -> NatsSubscription:
        try:
            return await self._client.subscribe(subject, queue=queue, cb=handler)
        except nats.errors.Error as error:
            raise BrokerAway(str(error)) from error

    async def listen(self, subject: str, take: Callable[[Message], None]) -> None:
        """Have `take` called for each message by the connection's reader itself.

        For a stream of tokens: nats-py's queue and task between its reader and a handler cost a
        twentieth of a token's whole way. `take` must not block; what it raises is logged. Raises
        BrokerAway.
        """

        async def never(_: Message) -> None:
            raise AssertionError("the queue hands nothing on")

        subscription = await self._subscribe(subject, never, queue="")
        subscription._pending_queue = Taking(subscription, take)

    async def add_service(
        self, name: str, description: str, endpoints: Mapping[str, Answerer]
    ) -> None:
        """Offer a NATS micro service whose endpoints are the subjects `<name>.<endpoint>`.

        `nats micro` lists it; its instances share the questions as one queue group, and each
        question is answered in a task of its own. Raises BrokerAway.
        """
        try:
            service = await nats.micro.add_service(
                self._client, name=name, version=SERVICE_VERSION, description=description
            )
            group = service.add_group(name=name)
            for endpoint, answer in endpoints.items():
                await group.add_endpoint(name=endpoint, handler=self._answering(answer))
        except nats.errors.Error as error:
            raise BrokerAway(str(error)) from error

    def _answering(self, answer: Answerer) -> Callable[[Any], Awaitable[None]]:
        async def reply(request: Any) -> None:
            await request.respond(await answer(request.data))

        async def handle(request: Any) -> None:
            self.errands.spawn(reply(request), name="service")

        return handle

    async def put_blob(self, bucket: str, name: str, content: bytes) -> None:
        """Store a file. Raises BrokerAway and BrokerRefused."""
        self._check_connected()
        with _translated():
            store = await self._js.object_store(bucket)
            await store.put(name, content)

    async def get_blob(self, bucket: str, name: str, *, timeout_s: float = 10.0) -> bytes | None:
        """Return a file's content, None if there is none. Raises BrokerAway and BrokerRefused."""
        self._check_connected()
        with _translated():
            # nats-py waits for ever for chunks that another's put of the file has just replaced.
            async with asyncio.timeout(timeout_s):
                store = await self._js.object_store(bucket)
                try:
                    return (await store.get(name)).data
                except (ObjectNotFoundError, NotFoundError):
                    return None

    async def close(self) -> None:
        """Send what is pending and disconnect."""
        self._closing = True
        with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
            if self.connected:
                await self._client.flush(timeout=1)
        try:
            await self._client.close()
        except OSError:
            pass  # what was pending for a broker that is away
        except asyncio.CancelledError:
            # nats-py lets out that of its own reading task, which it cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    def _check_connected(self) -> None:
        if not self.connected:
            raise BrokerAway("not connected")

    async def _ask(
        self, subject: str, data: bytes, *, headers: dict[str, str] | None, timeout_s: float
    ) -> Message:
        answer = await self._send(subject, data, headers=headers)
        try:
            async with asyncio.timeout(timeout_s):
                message = await answer
        except TimeoutError:
            raise BrokerAway(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            answer.cancel()
        raise_no_responders(message)
        return message

    async def _send(
        self, subject: str, data: bytes, *, headers: dict[str, str] | None
    ) -> "asyncio.Future[Message]":
        self._check_connected()
        token, answer = self._answers.expect()
        try:
            await self._client.publish(
                subject, data, reply=f"{self._inbox}.{token}", headers=headers
            )
        except (nats.errors.Error, OSError) as error:
            answer.cancel()
            raise BrokerAway(str(error)) from error
        return answer

    async def lost(self) -> None:
        """Fail what waits for an answer: it was asked on a connection that is gone."""
        if self._up and not self._closing:
            log.log(self._news, "the broker is away")
        self._up = False
        self._client.forget_unsent()
        self._answers.fail("the connection broke")

    async def found(self) -> None:
        """Tell those who asked that the broker is back."""
        log.log(self._news, "the broker is back")
        self._up = True
        self.returned_s = time.monotonic()
        self.errands.returned()  # tasks: nats-py awaits this callback before it reads on


async def connect(
    settings: BusSettings, *, name: str, timeout_s: float | None = None, quiet: bool = False
) -> Bus:
    """Connect, trying until the broker is there or `timeout_s` has passed (then BrokerAway).

    `quiet`: another connection of the same process says when the broker goes and comes.
    """
    client = PatientClient()
    bus: Bus | None = None

    async def lost() -> None:
        if bus is not None:
            await bus.lost()

    async def found() -> None:
        if bus is not None:
            await bus.found()

    whys: list[str] = []

    async def failed(error: Exception) -> None:
        why = str(error) or type(error).__name__
        loud = bus is None and timeout_s is None and not quiet and why not in whys
        log.log(logging.WARNING if loud else logging.DEBUG, "no connection to the broker: %s", why)
        whys[:] = [*(before for before in whys if before != why), why][-WHYS_MAX:]

    try:
        options = access(settings)
        async with asyncio.timeout(timeout_s):
            await client.connect(
                name=name,
                error_cb=failed,
                disconnected_cb=lost,
                reconnected_cb=found,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type] # seconds
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES_MAX,
                **options,
            )
    except TimeoutError:
        raise BrokerAway(f"it did not answer{f': {whys[-1]}' if whys else ''}") from None
    except (nats.errors.Error, OSError, ValueError) as error:
        raise BrokerAway(str(error) or type(error).__name__) from error
    bus = Bus(client, quiet=quiet)
    await bus.open()
    return bus


@contextlib.asynccontextmanager
async def connection(
    settings: BusSettings, *, name: str, timeout_s: float | None = None
) -> AsyncIterator[Bus]:
    """Connect for the length of a block; raises as `connect`."""
    bus = await connect(settings, name=name, timeout_s=timeout_s)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.contextmanager
def _translated() -> Any:
    try:
        yield
    except APIError as error:
        raise BrokerRefused(
            error.description or str(error), code=error.err_code or 0, status=error.code or 0
        ) from error
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise BrokerAway(str(error) or type(error).__name__) from error

"""A queue for tests: requests put into it, and given out as to a worker that never answers; the
operators' commands, and what they make of it.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from typer.testing import CliRunner, Result

from headrace import cli, journal, topology
from headrace.bus import Bus, Message
from schemas import subjects
from schemas.subjects import Lane, RequestSubject, new_request_id
from schemas.wire import (
    Envelope,
    Frame,
    Sampling,
    Shape,
    SimHook,
    decode_frame,
    encode_envelope,
    pack_tokens,
)
from tests.broker import with_bus
from tests.waiting import until

NAK = b"-NAK"
PARTITIONS = 32
ODD_TENANT = "a/b c"
ODD_MODEL = "组织/模型.v1 ü"
_AT_ONCE = 500


def place(
    *, tenant: str = "t", model: str = "m", partition: int = 0, lane: Lane = "online"
) -> RequestSubject:
    """Return the subject of a new request."""
    return RequestSubject(lane, model, partition, tenant, new_request_id())


def envelope(subject: RequestSubject, *, prompt: Sequence[int] = (1, 2, 3)) -> Envelope:
    """Return what ingress would put under a subject."""
    return Envelope(
        request=subject.request,
        tenant=subject.tenant,
        model=subject.model,
        reply=str(subjects.ReplySubject("s", subject.tenant, subject.request)),
        prompt=pack_tokens(prompt),
        sampling=Sampling(max_tokens=1),
        shape=Shape("chat", subject.model, 5, False, 1, False),
        deadline_s=time.time() + 600,
    )


def simulated(sim: SimHook, *, max_tokens: int = 1, keep_answer: bool = False) -> Envelope:
    """Return a request to the simulated engine, which says what the hook has it say."""
    return msgspec.structs.replace(
        envelope(place(model="sim")),
        sim=sim,
        sampling=Sampling(max_tokens=max_tokens),
        keep_answer=keep_answer,
    )


async def put(bus: Bus, requests: Sequence[RequestSubject]) -> None:
    """Store requests in their order, as ingress does."""
    for start in range(0, len(requests), _AT_ONCE):
        chunk = requests[start : start + _AT_ONCE]
        data = [(str(subject), encode_envelope(envelope(subject))) for subject in chunk]
        await asyncio.gather(*[await bus.store_soon(*each) for each in data])


async def pull(
    bus: Bus, count: int, *, model: str = "m", partition: int = 0, lane: Lane = "online"
) -> list[Message]:
    """Be given `count` requests of one partition, by a pull such as workers send."""
    given: list[Message] = []

    async def take(message: Message) -> None:
        if message.subject.startswith("requests."):
            given.append(message)

    inbox = bus.new_inbox()
    await bus.subscribe(inbox, take)
    body = {
        "batch": count,
        "expires": 30 * topology.NANOSECONDS,
        "group": subjects.PULL_GROUP,
        "priority": 0,
    }
    consumer = subjects.consumer_name(lane, model, partition)
    await bus.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.REQUESTS.{consumer}", msgspec.json.encode(body), reply=inbox
    )
    await until(lambda: len(given) == count, within_s=30)
    return given


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *args]


def headrace(url: str, *args: str) -> Result:
    environ = {name: None for name in os.environ if name.startswith("HEADRACE")}
    return CliRunner().invoke(cli.main, [*args, "--nats-url", url], env=environ)


def asked(url: str, *args: str) -> Any:
    result = headrace(url, *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def stored(url: str, requests: list[RequestSubject]) -> list[RequestSubject]:
    with_bus(url, lambda bus: put(bus, requests))
    return requests


async def subjects_of(bus: Bus) -> dict[str, int]:
    info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": ">"})
    found: dict[str, int] = info["state"].get("subjects") or {}
    return found


async def frames_of(bus: Bus, subject: RequestSubject) -> list[tuple[int, Frame]]:
    entries = await journal.read(bus, "REPLIES", f"replies.*.*.{subject.request}")
    return [(entry.seq, decode_frame(entry.data)) for entry in entries]


def heard_during(url: str, act: Callable[[], object], *, count: int = 0) -> list[str]:
    """Return the subjects of the cancel signals that workers would have heard: `count` at least."""
    heard: list[str] = []

    async def listen(bus: Bus) -> None:
        async def take(message: Message) -> None:
            heard.append(message.subject)

        await bus.subscribe("cancels.>", take)
        await bus.api("INFO")  # the broker knows of it now
        await asyncio.to_thread(act)
        await until(lambda: len(heard) >= count)  # they came on another connection
        await bus.api("INFO")  # whatever was to come has come

    with_bus(url, listen)
    return heard

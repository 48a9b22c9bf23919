"""Streams, buckets and consumers as data, and how they are applied. Rule: applying twice changes
nothing, and applying never deletes.

Key-value buckets and the object store are streams in the layouts of NATS' ADR-8 and ADR-20.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas import subjects, tenant
from schemas.subjects import Lane

log = logging.getLogger(__name__)

NANOSECONDS: Final = 1_000_000_000
_GIB: Final = 1024**3

ACK_WAIT_S: Final = 3.0
REPLIES_MAX_AGE_S: Final = 900
DEADLINE_S_MAX: Final = tenant.DEADLINE_S_MAX
HEARTBEAT_S: Final = 1.0
ENTRY_TTL_S: Final = 4
MODEL_TTL_S: Final = 15
RESPONSE_TTL_S: Final = 24 * 3600
DEDUPE_WINDOW_S: Final = 120
RETRY_S: Final = 1.0

if REPLIES_MAX_AGE_S - 60 < DEADLINE_S_MAX:  # a generation must not outlive its own log
    raise RuntimeError("the longest deadline must end a minute before REPLIES forgets")

_STREAM_EXISTS: Final = 10058
_CHOICES: Final = frozenset({"num_replicas", "max_bytes", "max_msgs", "storage"})
"""What `Sizes` stand for in a stream's configuration."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What operators may choose: bytes of each stream, copies, and where replies are kept."""

    replicas: int = 1
    requests_bytes_max: int = 4 * _GIB
    requests_max: int = 1_000_000
    replies_bytes_max: int = 4 * _GIB
    replies_storage: str = "file"
    responses_bytes_max: int = _GIB


def streams(sizes: Sizes) -> list[dict[str, Any]]:
    """Return every stream's configuration, in JetStream's own words."""
    return [
        {
            "name": subjects.REQUESTS,
            "subjects": ["requests.>"],
            "retention": "workqueue",
            "storage": "file",
            "discard": "new",
            # One message per subject: an id stands in the queue once, whatever is retried.
            "max_msgs_per_subject": 1,
            "discard_new_per_subject": True,
            "max_msgs": sizes.requests_max,
            "max_bytes": sizes.requests_bytes_max,
            "allow_direct": True,
            "allow_msg_ttl": True,
            "duplicate_window": DEDUPE_WINDOW_S * NANOSECONDS,
            "num_replicas": sizes.replicas,
        },
        {
            "name": subjects.REPLIES,
            "subjects": ["replies.>"],
            "retention": "limits",
            "storage": sizes.replies_storage,
            "discard": "old",
            "max_age": REPLIES_MAX_AGE_S * NANOSECONDS,
            "max_bytes": sizes.replies_bytes_max,
            "allow_direct": True,
            "num_replicas": sizes.replicas,
        },
        {
            "name": subjects.DEADLETTERS,
            "subjects": ["deadletters.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": 7 * 24 * 3600 * NANOSECONDS,
            "max_bytes": _GIB,
            "allow_direct": True,
            "num_replicas": sizes.replicas,
        },
        _bucket(subjects.WORKERS, sizes, ttl_s=ENTRY_TTL_S, markers=True),
        _bucket(subjects.STREAMERS, sizes, ttl_s=ENTRY_TTL_S, markers=True),
        _bucket(subjects.MODELS, sizes, ttl_s=MODEL_TTL_S, markers=True),
        _bucket(subjects.SECRETS, sizes),
        _bucket(subjects.TENANTS, sizes),
        _bucket(subjects.LIMITS, sizes),
        # Kept answers and claims: where there are too many, the oldest go before their day is over.
        _bucket(subjects.RESPONSES, sizes, ttl_s=RESPONSE_TTL_S)
        | {"discard": "old", "max_bytes": sizes.responses_bytes_max},
        {
            "name": f"OBJ_{subjects.BLOBS}",
            "subjects": [f"$O.{subjects.BLOBS}.C.>", f"$O.{subjects.BLOBS}.M.>"],
            "storage": "file",
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "num_replicas": sizes.replicas,
        },
    ]


def names() -> list[str]:
    """Return the names of all streams."""
    return [config["name"] for config in streams(Sizes())]


def _bucket(name: str, sizes: Sizes, *, ttl_s: int = 0, markers: bool = False) -> dict[str, Any]:
    bucket: dict[str, Any] = {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_age": ttl_s * NANOSECONDS,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
        "num_replicas": sizes.replicas,
    }
    if markers:
        # An entry that expires leaves a marker, so that watchers are told.
        bucket |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": ttl_s * NANOSECONDS}
    return bucket


def consumer(lane: Lane, model: str, partition: int) -> dict[str, Any]:
    """Return the configuration of one partition's consumer, in JetStream's own words.

    Limitless deliveries: at `max_deliver` a work queue keeps a message for ever, so deaths are
    counted by us. As many copies as its stream has: no number is named.
    """
    return {
        "durable_name": subjects.consumer_name(lane, model, partition),
        "filter_subject": subjects.consumer_filter(lane, model, partition),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * NANOSECONDS),
        "max_deliver": -1,
        "max_waiting": 4096,
        "max_ack_pending": 10_000,
        "priority_groups": [subjects.PULL_GROUP],
        "priority_policy": "prioritized",
    }


async def apply(bus: Bus, sizes: Sizes | None = None, *, replicas: int | None = None) -> list[str]:
    """Create or update all streams and buckets; return their names.

    Without `sizes` those that are there keep what an operator may have chosen, less the number of
    copies where `replicas` names one. Raises BrokerAway, and BrokerRefused where an existing stream
    cannot be changed so.
    """
    kept = _CHOICES if sizes is None else frozenset()
    if replicas is not None:
        kept -= {"num_replicas"}
    for config in streams(sizes or Sizes(replicas=replicas or 1)):
        await _apply_stream(bus, config, kept)
    return names()


async def _apply_stream(bus: Bus, config: dict[str, Any], kept: frozenset[str]) -> None:
    name = config["name"]
    try:
        await bus.api(f"STREAM.CREATE.{name}", config)
    except BrokerRefused as error:
        if error.code != _STREAM_EXISTS:
            raise
        there = (await bus.api(f"STREAM.INFO.{name}"))["config"]
        own = {choice: there[choice] for choice in kept if choice in there}
        await bus.api(f"STREAM.UPDATE.{name}", config | own)


async def wait_applied(bus: Bus, stop: asyncio.Event) -> None:
    """Return once the streams are there, or when told to stop: tiers may start before them."""
    said = ""
    while not stop.is_set():
        try:
            await bus.api(f"STREAM.INFO.OBJ_{subjects.BLOBS}")  # the last one that is applied
            return
        except (BrokerAway, BrokerRefused) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for `headrace topology apply`: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await stop.wait()


async def apply_model(bus: Bus, model: str, *, partitions: int) -> None:
    """Create the consumers of a model's partitions, in every lane. Raises as `apply`."""
    for lane in subjects.LANES:
        for partition in range(partitions):
            await apply_consumer(bus, lane, model, partition)


async def apply_consumer(bus: Bus, lane: Lane, model: str, partition: int) -> dict[str, Any]:
    """Create or update one consumer; return what JetStream says of it. Raises as `apply`."""
    config = consumer(lane, model, partition)
    verb = (
        f"CONSUMER.CREATE.{subjects.REQUESTS}.{config['durable_name']}.{config['filter_subject']}"
    )
    return await bus.api(verb, {"stream_name": subjects.REQUESTS, "config": config})

"""Many streams at once over two workers, memory at rest, and what the broker shows."""

import asyncio

import psutil

from headrace.bus import Bus
from schemas.wire import Failed, Finished, Frame, Keepalive, Started, Tokens
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook, stream_raw
from tests.pipeline.conftest import System
from tests.queue import frames_of, place
from tests.sse import events_of
from tests.waiting import until, wait_for
from workers.history import read_history

STREAMS = 200
TOKENS = 200
ON_THE_WAY_MAX = 20
"""As many at once follow a redirect: who is not there after 5 s is not waited for."""
IDLE_BYTES_MAX = 250 * 1024 * 1024


def _memory(pid: int) -> int:
    """Return a process's bytes, its share of what is shared counted in part."""
    return int(psutil.Process(pid).memory_full_info().pss)


def test_gateway_and_one_worker_take_at_most_250_mb_at_rest(system: System) -> None:
    pids = (system.doors[0].process.pid, system.workers[0].process.pid)
    assert sum(_memory(pid) for pid in pids) <= IDLE_BYTES_MAX


def test_200_streams_of_200_tokens_bring_every_token_once_in_order(system: System) -> None:
    async def ask(number: int, on_the_way: asyncio.Semaphore) -> str:
        pieces = [f"<{number}.{k}>" for k in range(TOKENS)]
        body = chat(f"stream {number}", sim=hook(*pieces, itl_ms=5, ttft_ms=0))
        events = events_of(await stream_raw(system.url, body, on_the_way=on_the_way))
        assert [event.id for event in events] == [str(k) for k in range(TOKENS + 1)] + [None]
        chunks = [event.json for event in events[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    async def all_of_them() -> list[str]:
        on_the_way = asyncio.Semaphore(ON_THE_WAY_MAX)
        return await asyncio.gather(*(ask(number, on_the_way) for number in range(STREAMS)))

    def least() -> float:
        """Return how many tokens the worker made that made the fewest."""
        system.wait_at_rest(within_s=system.leaves_within_s)
        before = [worker.metrics()["headrace_worker_tokens_total"] for worker in system.workers]
        texts = asyncio.run(all_of_them())
        for number, text in enumerate(texts):
            assert text == "".join(f"<{number}.{k}>" for k in range(TOKENS))
        system.wait_at_rest()
        after = [worker.metrics()["headrace_worker_tokens_total"] for worker in system.workers]
        made = [now - then for now, then in zip(after, before, strict=True)]
        assert sum(made) == STREAMS * TOKENS
        return min(made)

    # Hashes say who owns what: of three workers one has fewer than 5 of 32 partitions once in some
    # 40 starts, and fewer than 3 once in thousands. While one stands still, others serve it.
    share = STREAMS * TOKENS / len(system.workers)
    assert any(least() >= share * 0.25 for _ in range(3)), "unevenly spread"


def test_one_prefix_goes_to_one_worker(system: System) -> None:
    def of_twenty() -> int:
        before = [worker.metrics()["headrace_worker_tokens_total"] for worker in system.workers]
        with system.client() as client:
            for _ in range(20):
                body = chat("The same prompt.", sim=hook("a"))
                assert client.post(CHAT, json=body).status_code == 200
        system.wait_at_rest()
        after = [worker.metrics()["headrace_worker_tokens_total"] for worker in system.workers]
        made = [now - then for now, then in zip(after, before, strict=True)]
        assert sum(made) == 20
        return int(max(made))

    system.wait_at_rest(within_s=system.leaves_within_s)
    # While its owner stands still, others serve it.
    assert max(of_twenty() for _ in range(3)) >= 19


def test_a_repeated_long_prefix_is_counted_as_cached(system: System) -> None:
    body = chat("A long story. " * 100, max_tokens=2)
    with system.client() as client:
        first, *others = (client.post(CHAT, json=body).json()["usage"] for _ in range(4))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # One of them may have gone elsewhere, while the first one's worker stood still.
    cached = max(other["prompt_tokens_details"]["cached_tokens"] for other in others)
    assert first["prompt_tokens"] - 16 <= cached < first["prompt_tokens"]


def test_the_queue_shows_what_runs_by_tenant_and_partition(system: System) -> None:
    body = chat("held", stream=True, sim=hook("a", ttft_ms=60_000))
    system.wait_at_rest(within_s=system.leaves_within_s)
    with system.client() as client, client.stream("POST", CHAT, json=body) as answer:
        request = answer.headers["x-request-id"]
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="a start")
        state = system.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})["state"]
        [(subject, count)] = state["subjects"].items()
        head, lane, model, partition, tenant, identity = subject.split(".")
        assert (head, lane, model, tenant, identity) == (
            "requests",
            "online",
            "sim",
            "default",
            request,
        )
        assert count == 1

        def counts() -> tuple[int, int]:
            consumer = system.api(f"CONSUMER.INFO.REQUESTS.online-sim-{partition}")
            return consumer["num_ack_pending"], consumer["num_pending"]

        # The one before it there may have yet to be acknowledged, which comes after its answer.
        wait_for(lambda: counts() == (1, 0), within_s=5, what=lambda: f"1 and 0, not {counts()}")
    system.wait_at_rest()


def test_replies_hold_the_whole_answer_with_one_terminal_frame(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(sim=hook("a", "b", "c")))
    request = answer.headers["x-request-id"]

    subject = place(tenant="default", model="sim")._replace(request=request)

    async def whole(bus: Bus) -> list[tuple[int, Frame]]:
        """Read the log until it has an end, of which the client may be told sooner."""

        async def ended() -> list[tuple[int, Frame]]:
            found = await frames_of(bus, subject)
            return found if any(isinstance(frame, Finished | Failed) for _, frame in found) else []

        return await until(ended)

    log = with_bus(system.nats_url, whole)
    # A step that takes long has the worker say that it lives.
    frames = [frame for _, frame in log if not isinstance(frame, Keepalive)]
    assert isinstance(frames[0], Started)
    assert isinstance(frames[-1], Finished)
    assert all(isinstance(frame, Tokens) for frame in frames[1:-1])
    assert len(frames) <= 5  # started, up to three steps, finished
    assert "".join(piece.text for piece in read_history(log).pieces) == "abc"

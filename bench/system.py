"""Starts and stops what is measured: nats-server with JetStream on file, a gateway, one worker.

Rule: every process is ours, by its pid, on free loopback ports, and is gone when the block ends.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.plan import Target
from headrace import registry, topology
from headrace.bus import Bus, BusSettings, connection
from schemas import subjects
from schemas.wire import Envelope, Sampling, Shape, encode_envelope, pack_tokens

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 20.0
STOP_S: Final = 15.0
PARTITIONS: Final = 32
_AT_ONCE: Final = 500


class NotStarted(Exception):
    """A process did not come up; the message holds the end of its log."""


@dataclass(frozen=True)
class System:
    """A running system. `worker` is None where there is none; where the tiers are apart, `gateway`
    is the ingress, and WebSockets end elsewhere."""

    nats_url: str
    port: int
    nats: int
    gateway: int
    worker: int | None
    socket_port: int
    worker_admin_port: int

    def target(self, path: str = "/v1/chat/completions") -> Target:
        """Return the gateway as a target, with all processes measured."""
        pids = {"gateway": self.gateway, "nats-server": self.nats}
        if self.worker is not None:
            pids["worker"] = self.worker
        return Target(self.port, path, pids)


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a temporary folder for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        yield Path(name)


@contextlib.contextmanager
def process(name: str, command: list[str], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the length of a block."""
    with (logs / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def ready(name: str, child: subprocess.Popen[bytes], url: str, logs: Path) -> None:
    """Wait until a URL answers 200. Raises NotStarted."""
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and child.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.05)
    raise NotStarted(f"{name}: {(logs / f'{name}.log').read_text()[-2000:]}")


@contextlib.contextmanager
def running(
    *,
    sim: dict[str, float] | None,
    waiting: str | None = None,
    config: str = "",
    engine_args: dict[str, int] | None = None,
    split: bool = False,
) -> Iterator[System]:
    """Run a system for the length of a block.

    `sim` is the worker's time model; with None there is no worker. `waiting` is a model whose card
    is published and that nobody serves: its requests wait. `config` is the gateway's headrace.toml.
    With `split` there are an ingress and a streamer in the gateway's place.
    """
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(folder())
        nats_port, monitor_port = free_port(), free_port()
        broker = logs / "nats.conf"
        broker.write_text(
            f'listen: "127.0.0.1:{nats_port}"\nhttp: "127.0.0.1:{monitor_port}"\n'
            f'max_payload: 8MB\njetstream {{ store_dir: "{logs}" }}\n'
        )
        nats = stack.enter_context(
            process("nats-server", [_nats_server(), "-c", str(broker)], logs)
        )
        ready("nats-server", nats, f"http://127.0.0.1:{monitor_port}/healthz", logs)
        url = f"nats://127.0.0.1:{nats_port}"
        asyncio.run(_prepare(url, waiting))
        worker, worker_admin_port = None, free_port()
        if sim is not None:
            engine = ["--sim", json.dumps(sim), "--engine-args", json.dumps(engine_args or {})]
            worker = _node(stack, logs, "worker", "workers", url, engine, worker_admin_port)
        port = socket_port = free_port()
        if split:
            socket_port = free_port()
            _node(stack, logs, "streamer", "streamer", url, ["--port", str(socket_port)])
        (logs / "headrace.toml").write_text(config)
        known = ["--port", str(port), "--config", str(logs / "headrace.toml")]
        door = "ingress" if split else "gateway"
        gateway = _node(stack, logs, door, door, url, known)
        if sim is not None and not config:
            _served(port, "sim")
        yield System(url, port, nats.pid, gateway, worker, socket_port, worker_admin_port)


def _nats_server() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise NotStarted("there is no nats-server beside this Python, nor on PATH")
    return found


def _node(
    stack: contextlib.ExitStack,
    logs: Path,
    name: str,
    module: str,
    url: str,
    more: list[str],
    admin_port: int | None = None,
) -> int:
    admin_port = admin_port or free_port()
    command = [sys.executable, "-m", module, "--nats-url", url, "--name", name]
    command += ["--admin-port", str(admin_port), *more]
    child = stack.enter_context(process(name, command, logs))
    ready(name, child, f"http://127.0.0.1:{admin_port}/readyz", logs)
    return child.pid


async def _prepare(url: str, waiting: str | None) -> None:
    async with connection(BusSettings(url), name="bench", timeout_s=START_S) as bus:
        await topology.apply(bus)
        if waiting is not None:
            await _publish_card(bus, waiting)


async def _publish_card(bus: Bus, model: str) -> None:
    from workers.engine_sim import SimulatedEngine, tokenizer_files

    await registry.publish_card(bus, SimulatedEngine(name=model).card(), tokenizer_files())


def publish_card(url: str, model: str) -> None:
    """Publish the card of a model that nobody serves; it lives for some seconds."""

    async def publish() -> None:
        async with connection(BusSettings(url), name="bench", timeout_s=START_S) as bus:
            await _publish_card(bus, model)

    asyncio.run(publish())


def fill_queue(url: str, model: str, *, requests: int, tenants: int) -> None:
    """Queue requests of many tenants in all partitions of a model."""

    async def fill() -> None:
        async with connection(BusSettings(url), name="bench", timeout_s=START_S) as bus:
            await topology.apply_model(bus, model, partitions=PARTITIONS)
            for start in range(0, requests, _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, requests))
                queued = [
                    _queued(model, number, tenant=f"t{number % tenants}") for number in numbers
                ]
                await asyncio.gather(*[await bus.store_soon(*each) for each in queued])

    asyncio.run(fill())


def _queued(model: str, number: int, *, tenant: str) -> tuple[str, bytes]:
    request = subjects.new_request_id()
    envelope = Envelope(
        request=request,
        tenant=tenant,
        model=model,
        reply=str(subjects.ReplySubject("bench", tenant, request)),
        prompt=pack_tokens(range(64)),
        sampling=Sampling(max_tokens=16),
        shape=Shape("chat", model, 5, False, 1, False),
        deadline_s=time.time() + 600,
    )
    place = subjects.RequestSubject("online", model, number * 7 % PARTITIONS, tenant, request)
    return str(place), encode_envelope(envelope)


@dataclass(frozen=True)
class Cost:
    """What one run of a command took; `said` is its stdout."""

    took_s: float
    peak_bytes: int
    status: int
    said: str


def cost_of(arguments: list[str]) -> Cost:
    """Run an operators' command from its start to its end."""
    command = [sys.executable, "-m", "bench.command", sys.executable, "-m", "headrace.cli"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    cost = Cost(**json.loads(done.stdout))
    assert cost.status == 0, f"headrace {' '.join(arguments)} ended with {cost.status}"
    return cost


def _served(port: int, model: str) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            if any(card["id"] == model for card in json.load(answer)["data"]):
                return
        time.sleep(0.05)
    raise NotStarted(f"the gateway does not serve {model}")


def post(port: int, body: dict[str, Any]) -> bytes:
    """Send a chat request and return the whole answer's body."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


@contextlib.contextmanager
def reference(*, stream: bytes, answer: bytes) -> Iterator[Target]:
    """Run the reference for the length of a block, with the bytes that it sends."""
    with folder() as logs:
        (logs / "stream").write_bytes(stream)
        (logs / "answer").write_bytes(answer)
        port = free_port()
        files = [str(logs / "stream"), str(logs / "answer")]
        command = [sys.executable, "-m", "bench.reference", str(port), *files]
        with process("reference", command, logs) as child:
            _listening(child, port, logs)
            yield Target(port, "/", {"reference": child.pid})


def _listening(child: subprocess.Popen[bytes], port: int, logs: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise NotStarted(f"reference: {(logs / 'reference.log').read_text()[-2000:]}")

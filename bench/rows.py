"""What is measured. Each row runs a system of its own, and the reference beside it.

Rule: CPU per unit comes from the processes' own accounting over the window that the client counted
in; each measure is taken `REPEATS` times and the median stands.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec
import psutil

from bench import system
from bench.load import bodies, chat, engine_alone, load, prompt_of, prompt_tokens
from bench.plan import EnginePlan, Outcome, Plan, Target

REPEATS: Final = 3
STREAMS: Final = 256
ITL_MS: Final = 20.0
WARM: Final = 30
WINDOW_S: Final = 2.5
TOKENS: Final = 190
IN_FLIGHT: Final = 32
STEP: Final = {"step_us": ITL_MS * 1000}
INSTANT: Final[dict[str, float]] = {}
OPEN: Final = 1000
QUEUED: Final = 10_000
TENANTS: Final = 20
MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class Line:
    """One measured figure; `budget` None is for information."""

    row: str
    what: str
    unit: str
    measured: float
    reference: float | None = None
    budget: float | None = None
    note: str = ""

    @property
    def over(self) -> bool:
        """Whether the budget is exceeded."""
        return self.budget is not None and self.measured > self.budget


Row = Callable[[], Iterator[Line]]


def _us(outcomes: list[Outcome], process: str) -> float:
    """Return the median CPU per unit, in microseconds."""
    return median(1e6 * outcome.cpu_s[process] / outcome.units for outcome in outcomes)


def _foreign(*runs: list[Outcome]) -> str:
    cores = max(outcome.foreign_cores for run in runs for outcome in run)
    return f"others used {cores:.2f} cores" if cores > 0.1 else ""


# Paced streams


def in_step() -> Iterator[Line]:
    """256 streams, all tokens of a step at once."""
    return _paced("in step", "/in-step", [None] * STREAMS, streamer=20, path_us=37)


def own_clock() -> Iterator[Line]:
    """256 streams, each on its own clock."""
    return _paced("own clock", "/own-clock", _clocks(STREAMS), streamer=28, path_us=52)


def _clocks(count: int) -> list[dict[str, float] | None]:
    """Return hooks whose first tokens are spread over one interval."""
    return [
        {"ttft_ms": 300 + ITL_MS * (index * 97 % count) / count, "itl_ms": ITL_MS}
        for index in range(count)
    ]


def _flow(target: Target, hooks: list[dict[str, float] | None]) -> Plan:
    requests = [
        json.dumps(
            chat(f"Tell me about river {index}.", tokens=TOKENS)
            | ({} if hook is None else {"sim": hook})
        )
        for index, hook in enumerate(hooks)
    ]
    return Plan(
        kind="paced",
        targets=[target],
        bodies=requests,
        events=TOKENS + 2,
        warm=WARM,
        window_s=WINDOW_S,
    )


def _captured(port: int, tokens: int = TOKENS) -> bytes:
    """Return the bytes of one whole stream, without pacing."""
    request = chat("Tell me about river 7.", tokens=tokens, sim={"itl_ms": 0})
    return system.post(port, request)


def _paced(
    row: str, path: str, hooks: list[dict[str, float] | None], *, streamer: float, path_us: float
) -> Iterator[Line]:
    ours, bare, alone = [], [], []
    plan = EnginePlan(STEP, list(prompt_tokens()), hooks, TOKENS, WARM, WINDOW_S)
    with system.running(sim=STEP) as running:
        stream = _captured(running.port)
        with system.reference(stream=stream, answer=b"{}") as reference:
            target = Target(reference.port, path, reference.pids)
            for _ in range(REPEATS):
                ours.append(load(_flow(running.target(), hooks)))
                bare.append(load(_flow(target, hooks)))
                alone.append(engine_alone(plan))
    reference_us = _us(bare, "reference")
    gateway_us, nats_us = _us(ours, "gateway"), _us(ours, "nats-server")
    worker_us, engine_us = _us(ours, "worker"), _us(alone, "engine")
    relay_us = worker_us - engine_us
    note = _foreign(ours, bare)
    per_token = "µs/token"
    yield Line(row, "streamer (gateway process)", per_token, gateway_us, reference_us, streamer)
    whole_us = gateway_us + nats_us + relay_us
    yield Line(row, "whole path beyond the engine", per_token, whole_us, reference_us, path_us)
    yield Line(row, "  worker's relay = worker − engine alone", per_token, relay_us)
    yield Line(row, "  worker process, engine in it", per_token, worker_us)
    yield Line(row, "  engine alone, emit that counts", per_token, engine_us)
    yield Line(row, "  nats-server", per_token, nats_us)
    yield Line(row, "  load client", per_token, _us(ours, "client"), _us(bare, "client"), note=note)


# Requests


def ingress() -> Iterator[Line]:
    """A request from its first byte to the head of its answer, which comes with the PubAck.

    The model has a card and no worker, and connections are open beforehand: nothing else happens.
    """
    for what, prompt, budget in (
        ("short", "Tell me about river {}.", 700.0),
        ("500-token chat", prompt_of(500), 1200.0),
    ):
        requests = bodies(800, prompt=prompt, model="waiting", tokens=16)
        plan = Plan(kind="accept", targets=[], bodies=requests, warm=200, in_flight=IN_FLIGHT)
        ours, bare = [], []
        with (
            system.running(sim=None, waiting="waiting") as running,
            system.reference(stream=b"", answer=b"{}") as reference,
        ):
            target = Target(reference.port, "/accept", reference.pids)
            for _ in range(REPEATS):
                system.publish_card(running.nats_url, "waiting")
                ours.append(load(_at(plan, running.target())))
                bare.append(load(_at(plan, target)))
        measured, expected = _us(ours, "gateway"), _us(bare, "reference")
        unit = "µs/request"
        note = _foreign(ours, bare)
        yield Line("ingress", f"{what}, auth … PubAck", unit, measured, expected, budget, note)
        yield Line("ingress", "  nats-server", unit, _us(ours, "nats-server"))


def _at(plan: Plan, target: Target) -> Plan:
    return msgspec.structs.replace(plan, targets=[target])


def unstreamed() -> Iterator[Line]:
    """A whole unstreamed request of one token: ingress and streamer, and the others' shares."""
    with system.running(sim=INSTANT) as running:
        answer = system.post(running.port, chat("River 7.", tokens=1, stream=False))
        for what, prompt in (
            ("short", "Tell me about river {}."),
            ("500-token chat", prompt_of(500)),
        ):
            requests = bodies(256, prompt=prompt, tokens=1, stream=False)
            plan = Plan(
                kind="closed",
                targets=[],
                bodies=requests,
                warm=200,
                window_s=2.0,
                in_flight=IN_FLIGHT,
            )
            ours, bare = [], []
            with system.reference(stream=b"", answer=answer) as reference:
                target = Target(reference.port, "/object", reference.pids)
                for _ in range(REPEATS):
                    ours.append(load(_at(plan, running.target())))
                    bare.append(load(_at(plan, target)))
            unit = "µs/request"
            note = _foreign(ours, bare)
            what += ", gateway (ingress + streamer)"
            measured, expected = _us(ours, "gateway"), _us(bare, "reference")
            yield Line("unstreamed", what, unit, measured, expected, None, note)
            yield Line("unstreamed", "  worker, engine in it", unit, _us(ours, "worker"))
            yield Line("unstreamed", "  nats-server", unit, _us(ours, "nats-server"))


# Latency


def ttft() -> Iterator[Line]:
    """What the first token waits for beyond a bare server; sequential, sim without delay."""
    tokens = 4
    with system.running(sim=INSTANT) as running:
        stream = _captured(running.port, tokens)
        with system.reference(stream=stream, answer=b"{}") as reference:
            plan = Plan(
                kind="first",
                targets=[
                    running.target(),
                    Target(reference.port, "/at-once", reference.pids),
                ],
                bodies=bodies(270, tokens=tokens),
                events=tokens + 2,
                warm=20,
            )
            outcomes = [load(plan) for _ in range(REPEATS)]
    for name, times, budget in (
        ("p50", [outcome.p50_s for outcome in outcomes], 2.0),
        ("p99", [outcome.p99_s for outcome in outcomes], 6.0),
    ):
        ours, bare = (median(1e3 * by_target[place] for by_target in times) for place in (0, 1))
        note = f"{ours:.2f} ms in all; {_foreign(outcomes)}".rstrip("; ")
        yield Line("ttft", f"added TTFT, {name}", "ms", ours - bare, bare, budget, note)


def itl() -> Iterator[Line]:
    """How much later tokens come than from a bare server, at half of the paced rows' load."""
    ours, bare = [], []
    hooks = _clocks(STREAMS // 2)
    with (
        system.running(sim=STEP) as running,
        system.reference(stream=_captured(running.port), answer=b"{}") as reference,
    ):
        target = Target(reference.port, "/own-clock", reference.pids)
        for _ in range(REPEATS):
            ours.append(load(_flow(running.target(), hooks)))
            bare.append(load(_flow(target, hooks)))
    measured, expected = (median(1e3 * outcome.p99_s[0] for outcome in run) for run in (ours, bare))
    note = f"gap {measured:.2f} ms; {_foreign(ours, bare)}".rstrip("; ")
    yield Line("itl", "added ITL, p99", "ms", measured - expected, expected, 5.0, note)


# Memory


def memory() -> Iterator[Line]:
    """Resident memory: of both processes at rest, and of a stream that is open and quiet."""
    with system.running(sim=INSTANT) as running:
        system.post(running.port, chat("River 7.", tokens=16))
        assert running.worker is not None
        gateway, worker = (
            psutil.Process(pid).memory_info().rss / MIB for pid in (running.gateway, running.worker)
        )
        note = f"{gateway:.0f} + {worker:.0f}"
        yield Line("memory", "gateway + worker, idle", "MiB", gateway + worker, None, 238.0, note)
        requests = bodies(OPEN, tokens=100, sim={"ttft_ms": 0, "itl_ms": 600_000})
        plan = Plan(kind="hold", targets=[], bodies=requests)
        ours = load(_at(plan, running.target()))
        with system.reference(stream=_captured(running.port), answer=b"{}") as reference:
            bare = load(_at(plan, Target(reference.port, "/hold", reference.pids)))
    measured, expected = (
        outcome.memory_bytes[name] / outcome.units / 1024
        for outcome, name in ((ours, "gateway"), (bare, "reference"))
    )
    yield Line("memory", "per open stream, gateway", "KiB", measured, expected, 32.0)
    share = ours.memory_bytes["worker"] / ours.units / 1024
    yield Line("memory", "  per open stream, worker", "KiB", share)
    with system.running(sim=INSTANT) as running:
        held = load(_at(msgspec.structs.replace(plan, kind="sockets"), running.target()))
    measured = held.memory_bytes["gateway"] / held.units / 1024
    yield Line("memory", "per WebSocket with one stream, gateway", "KiB", measured, None, 32.0)


# Commands


def backlog() -> Iterator[Line]:
    """`headrace backlog --json` with a long queue, a process from its start to its end."""
    with system.running(sim=None, waiting="waiting") as running:
        system.fill_queue(running.nats_url, "waiting", requests=QUEUED, tenants=TENANTS)
        for what, more in (("--json", []), ("--by tenant --json", ["--by", "tenant"])):
            command = ["backlog", "--json", *more, "--nats-url", running.nats_url]
            costs = [system.cost_of(command) for _ in range(REPEATS)]
            for cost in costs:
                assert json.loads(cost.said)["total"]["waiting"] == QUEUED
            took_s = median(cost.took_s for cost in costs)
            peak = median(cost.peak_bytes for cost in costs) / 1e6
            note = f"{QUEUED} queued requests of {TENANTS} tenants"
            yield Line("backlog", what, "s", took_s, None, 2.0, note)
            yield Line("backlog", "  its peak of resident memory", "MB", peak, None, 100.0)


ROWS: Final[dict[str, Row]] = {
    "in-step": in_step,
    "own-clock": own_clock,
    "ingress": ingress,
    "unstreamed": unstreamed,
    "ttft": ttft,
    "itl": itl,
    "memory": memory,
    "backlog": backlog,
}

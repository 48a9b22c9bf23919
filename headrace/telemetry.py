"""What a node tells operators: whether it lives, whether it is ready, and its numbers.

Rule: the hot path only counts in plain attributes; they are read when somebody scrapes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

NodeState = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a node takes requests, and what else an operator should know about that."""

    state: NodeState
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that is read at the scrape: `headrace_<tier>_<name>`.

    With a `label`, `read` returns one number for each of the label's values.
    """

    name: str
    help: str
    read: Callable[[], float | Mapping[str, float]]
    kind: Literal["gauge", "counter"] = "gauge"
    label: str | None = None


class Readings(Collector):
    """A tier's numbers, as a collector for prometheus-client."""

    def __init__(self, tier: str, readings: Sequence[Reading]) -> None:
        self._tier = tier
        self._readings = tuple(readings)

    def collect(self) -> Iterable[Metric]:
        """Read every number once."""
        return [self._metric(reading) for reading in self._readings]

    def _metric(self, reading: Reading) -> Metric:
        family = CounterMetricFamily if reading.kind == "counter" else GaugeMetricFamily
        labels = [] if reading.label is None else [reading.label]
        metric: CounterMetricFamily | GaugeMetricFamily = family(
            f"headrace_{self._tier}_{reading.name}", reading.help, labels=labels
        )
        found = reading.read()
        if isinstance(found, Mapping):
            for value, number in found.items():
                metric.add_metric([value], number)
        else:
            metric.add_metric([], found)
        return metric


def registry_of(tier: str, readings: Sequence[Reading]) -> CollectorRegistry:
    """Return a registry with a tier's numbers and those of its process (CPU, memory, files)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Readings(tier, readings))
    return registry


def admin_routes(
    readiness: Callable[[], Readiness], registry: CollectorRegistry
) -> list[BaseRoute]:
    """Return the routes /healthz, /readyz and /metrics; none of them needs a key.

    /health is /healthz by vLLM's name for it, which clients ask before they begin.
    """

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        now = readiness()
        status = 200 if now.state == "ready" else 503
        return JSONResponse({"state": now.state, **now.detail}, status_code=status)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", healthz),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
    ]


def admin_app(
    readiness: Callable[[], Readiness],
    registry: CollectorRegistry,
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the app of a node's admin port, with further `routes` of the tier."""
    return Starlette(routes=[*admin_routes(readiness, registry), *routes])

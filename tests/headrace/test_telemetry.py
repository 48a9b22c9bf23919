"""Facts about a node's admin pages."""

from starlette.testclient import TestClient

from headrace.telemetry import Readiness, Reading, admin_app, registry_of


class Counts:
    def __init__(self) -> None:
        self.open = 0
        self.refused = {"queue_full": 2.0}


def test_ready_is_200_and_anything_else_503_with_the_state_and_the_detail() -> None:
    state = Readiness("starting")
    client = TestClient(admin_app(lambda: state, registry_of("gateway", [])))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"state": "starting"})
    state = Readiness("ready", {"workers": 0})
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"state": "ready", "workers": 0})
    state = Readiness("draining")
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/health").json() == {"status": "ok"}


def test_numbers_are_read_when_they_are_scraped() -> None:
    counts = Counts()
    registry = registry_of(
        "streamer",
        [
            Reading("replies_open", "Replies being relayed.", lambda: counts.open),
            Reading("refusals", "Refusals.", lambda: counts.refused, "counter", "code"),
        ],
    )
    client = TestClient(admin_app(lambda: Readiness("ready"), registry))
    counts.open = 3
    text = client.get("/metrics").text
    assert "\nheadrace_streamer_replies_open 3.0\n" in text
    assert '\nheadrace_streamer_refusals_total{code="queue_full"} 2.0\n' in text
    assert "process_cpu_seconds_total" in text

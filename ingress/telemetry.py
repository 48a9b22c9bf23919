"""The numbers of an ingress."""

from headrace.telemetry import Reading
from ingress.admit import Ingress


def readings(ingress: Ingress) -> list[Reading]:
    """Return what /metrics shows."""
    counts = ingress.counts
    return [
        Reading("requests_inflight", "Requests being admitted.", lambda: counts.inflight),
        Reading("requests_received", "Requests received.", lambda: counts.received, "counter"),
        Reading("requests_accepted", "Requests queued.", lambda: counts.accepted, "counter"),
        Reading("requests_refused", "Requests refused.", lambda: counts.refused, "counter"),
    ]

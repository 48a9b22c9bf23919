"""The numbers of an ingress."""

from headrace import moderation as moderators
from headrace.telemetry import Reading
from ingress.admit import Ingress


def readings(ingress: Ingress) -> list[Reading]:
    """Return what /metrics shows."""
    counts, line = ingress.counts, ingress.line
    moderation = None if ingress.inspection is None else ingress.inspection.moderation
    moderated = (
        [] if moderation is None else moderators.readings(moderation, "input", "Requests refused")
    )
    return [
        Reading("requests_inflight", "Requests being admitted.", lambda: counts.inflight),
        Reading("requests_received", "Requests received.", lambda: counts.received, "counter"),
        Reading("requests_accepted", "Requests queued.", lambda: counts.accepted, "counter"),
        Reading("requests_waiting", "Requests waiting for their turn.", lambda: line.room.depth),
        Reading(
            "model_requests_waiting",
            "The same by model.",
            line.room.depths_by_model,
            label="model",
        ),
        Reading(
            "class_requests_waiting",
            "The same by priority class.",
            line.room.depths_by_class,
            label="class",
        ),
        Reading("waiting_oldest_age_s", "Since when the oldest waits.", line.room.oldest_age_s),
        Reading("waiting_bytes", "What their prompts take.", lambda: line.room.prompt_bytes),
        Reading(
            "limits_away",
            "1 while tenants' limits cannot be checked.",
            lambda: line.reservations.away,
        ),
        Reading(
            "limits_away_refused",
            "Requests refused since their tenant's limits could not be checked.",
            lambda: line.reservations.away_refused,
            "counter",
        ),
        Reading(
            "unlimited_requests",
            "Requests let pass without a look at their tenant's limits.",
            lambda: line.reservations.unlimited_passed,
            "counter",
        ),
        Reading("requests_refused", "Requests refused.", lambda: counts.refused, "counter"),
        *moderated,
    ]

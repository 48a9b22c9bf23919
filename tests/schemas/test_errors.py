"""Refusals: code, status and shape as the design lists them."""

import pytest

from schemas import errors
from schemas.errors import Refusal, refusal_of

LISTED = [
    (errors.ModelNotFound, "model_not_found", 404),
    (errors.InvalidApiKey, "invalid_api_key", 401),
    (errors.QueueFull, "queue_full", 429),
    (errors.QueueTimeout, "queue_timeout", 429),
    (errors.NoWorkers, "no_workers", 503),
    (errors.BrokerUnavailable, "broker_unavailable", 503),
    (errors.Draining, "draining", 503),
    (errors.DeadlineExceeded, "deadline_exceeded", 504),
    (errors.EngineError, "engine_error", 500),
    (errors.RequestTooLarge, "request_too_large", 413),
    (errors.ContextLengthExceeded, "context_length_exceeded", 400),
    (errors.InvalidRequest, None, 400),
]


@pytest.mark.parametrize(("kind", "code", "status"), LISTED)
def test_a_refusal_has_the_code_and_status_of_the_design(
    kind: type[Refusal], code: str | None, status: int
) -> None:
    assert (kind.code, kind.status) == (code, status)


def _kinds(kind: type[Refusal]) -> list[type[Refusal]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _kinds(child))]


@pytest.mark.parametrize("kind", _kinds(Refusal))
def test_every_refusal_has_the_apis_shape(kind: type[Refusal]) -> None:
    body = kind("why", param="field").body()
    assert body == {
        "error": {"message": "why", "type": kind.type, "param": "field", "code": kind.code}
    }


@pytest.mark.parametrize("kind", _kinds(Refusal))
def test_429_and_503_alone_say_when_to_come_again(kind: type[Refusal]) -> None:
    assert kind.retryable == (kind.status in (429, 503))
    assert kind("why").retry_after_s == (1 if kind.retryable else None)


@pytest.mark.parametrize(("asked", "said"), [(None, 1), (0, 1), (-3, 1), (1, 1), (42, 42)])
def test_retry_after_is_at_least_a_second(asked: int | None, said: int) -> None:
    assert errors.QueueFull("why", retry_after_s=asked).retry_after_s == said


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in _kinds(Refusal) if kind.code is not None]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    "code",
    ["deadline_exceeded", "engine_error", "request_cancelled", "stream_interrupted", "worker_lost"],
)
def test_a_failed_frames_code_is_the_refusals(code: str) -> None:
    found = refusal_of(code, "why")
    assert (found.code, found.message) == (code, "why")


@pytest.mark.parametrize("code", ["", "unheard_of", "invalid_api_key"])
def test_a_failed_frames_unknown_code_is_an_engine_error(code: str) -> None:
    assert refusal_of(code, "why").code == "engine_error"

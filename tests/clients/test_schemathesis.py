"""Requests generated from our own description: no fault of ours, and every answer is as described.

Seeded and bounded, so that each run asks the same. Bodies are bounded too: what stops a worker on
purpose (`sim`) is left out, and answers are kept short.
"""

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from schemas.openapi import OPERATIONS, Operation
from tests.clients.asking import MODEL, PATIENCE_S, client, says

EXAMPLES = 25
CHECKS: Any = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
BOUNDS = {"ChatRequest": "max_tokens", "CompletionRequest": "max_tokens"}


@pytest.fixture(scope="session")
def described(url: str) -> Any:
    """What the system says of itself."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.fixture(scope="session")
def keyed(keyed_url: str) -> Any:
    """What a system with keys says of itself; that it tells everybody."""
    return schemathesis.openapi.from_url(f"{keyed_url}/openapi.json")


@pytest.fixture
def known(url: str) -> dict[str, str]:
    """Names in paths that exist, besides generated ones that do not."""
    with client(url) as sdk:
        response = sdk.responses.create(model=MODEL, input="a", background=True, extra_body=says())
    request = response.id.replace("resp_", "req_")
    return {"model": MODEL, "response": response.id, "request": request}


def tame(case: Any, known: dict[str, str]) -> None:
    """Have a generated request mean something, and end soon."""
    case.headers["x-request-timeout"] = str(PATIENCE_S)
    case.headers.pop("Idempotency-Key", None)
    place(case, known)
    if case.body is None or not isinstance(case.body, dict):
        return
    body = case.body
    for name in ("sim", "generate", "previous_response_id"):
        body.pop(name, None)
    if body.get("stream_options"):
        body["stream"] = True
    body |= {"model": MODEL, BOUNDS.get(type_of(case), "max_output_tokens"): 3}
    for message in body.get("messages", ()):
        message["content"] = message.get("content") or "a"
    if "messages" not in body:
        name = "prompt" if type_of(case) == "CompletionRequest" else "input"
        body[name] = body.get(name) or "a"


def place(case: Any, known: dict[str, str]) -> None:
    """Have a generated request be about something that exists."""
    case.path_parameters.update({name: known[name] for name in case.path_parameters})


def type_of(case: Any) -> str:
    """Return the name of the type of a request's body."""
    found = next(each for each in OPERATIONS if (each.method, each.path) == place_of(case))
    return str(found.asks.__name__)


def place_of(case: Any) -> tuple[str, str]:
    return case.operation.method.lower(), case.operation.path


NAMES: Any = {"ids": lambda each: f"{each.method} {each.path}"}


@pytest.mark.parametrize("each", OPERATIONS, **NAMES)
def test_what_is_described_is_served_and_answered_as_described(
    described: Any, known: dict[str, str], each: Operation
) -> None:
    assert 200 in answered(described, each, GenerationMode.POSITIVE, lambda case: tame(case, known))


@pytest.mark.parametrize("each", [each for each in OPERATIONS if each.parameters], **NAMES)
def test_what_is_not_described_is_answered_as_described(
    described: Any, known: dict[str, str], each: Operation
) -> None:
    statuses = answered(described, each, GenerationMode.NEGATIVE, lambda case: place(case, known))
    assert 400 in statuses
    assert statuses <= {200, 400, 404, 405}


def answered(
    described: Any, each: Operation, mode: GenerationMode, change: Callable[[Any], None]
) -> set[int]:
    """Ask what is generated after some change; return the statuses of the checked answers."""
    operation: Any = described[each.path][each.method]
    statuses: set[int] = set()

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        change(case)
        answer = case.call(timeout=PATIENCE_S)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    holds()
    return statuses


@pytest.mark.parametrize("each", OPERATIONS, **NAMES)
def test_nothing_that_is_described_is_answered_without_a_key(keyed: Any, each: Operation) -> None:
    operation = keyed[each.path][each.method]
    names = dict.fromkeys(("model", "request", "response"), "none")
    asked: Any = {}
    if each.asks is not None:
        asked = {"body": {"model": MODEL}, "media_type": "application/json"}
    case = operation.Case(path_parameters=names, **asked)
    answer = case.call(timeout=PATIENCE_S)
    assert answer.status_code == 401
    case.validate_response(answer, checks=CHECKS)

"""A client's own `x-request-id` stands in the log beside ours, and nowhere else."""

import secrets
from typing import Any

import httpx
import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat
from tests.pipeline.conftest import System, page

POSTS: dict[str, tuple[Any, int]] = {
    CHAT: (chat(max_tokens=1), 200),
    COMPLETIONS: ({"model": "none", "prompt": "x"}, 404),
    "/v1/responses": ({"model": "sim", "input": "x", "max_output_tokens": 1}, 200),
    "/v1/responses/input_tokens": ({"model": "sim", "input": "x"}, 200),
}


def pairs(system: System, own: str) -> list[str]:
    """Return the ids of ours that are logged beside a client's own."""
    end = f" has its client's own x-request-id {own}"
    lines = [line for each in system.front for line in each.process.said().splitlines()]
    return [line.removesuffix(end).split()[-1] for line in lines if line.endswith(end)]


def asked(system: System, path: str, body: Any, own: str, **headers: str) -> httpx.Response:
    with system.client() as client:
        return client.post(path, json=body, headers={"x-request-id": own} | headers)


@pytest.mark.parametrize("path", POSTS)
def test_a_post_is_named_by_us_and_logged_beside_what_its_client_calls_it(
    system: System, path: str
) -> None:
    body, status = POSTS[path]
    own = f"own-{secrets.token_hex(8)}"
    answer = asked(system, path, body, own)
    assert answer.status_code == status
    first = answer.history[0] if answer.history else answer  # ingress's, where tiers stand apart
    ours = first.headers["x-request-id"]
    assert ours.startswith("req_")
    assert pairs(system, own) == [ours]
    assert all(own not in page(f"{each.admin_url}/metrics") for each in system.nodes)


def test_a_cancellation_is_logged_beside_the_request_that_it_ends(system: System) -> None:
    ours = asked(system, CHAT, chat(max_tokens=1), "any").headers["x-request-id"]
    own = f"own-{secrets.token_hex(8)}"
    assert asked(system, f"/v1/requests/{ours}/cancel", {}, own).status_code == 200
    assert pairs(system, own) == [ours]


def test_who_is_given_the_answer_of_a_request_that_is_there_is_logged_beside_that(
    system: System,
) -> None:
    key = {"idempotency-key": secrets.token_hex(8)}
    body = chat(max_tokens=1)
    there = asked(system, CHAT, body, "any", **key).headers["x-request-id"]
    own = f"own-{secrets.token_hex(8)}"
    assert asked(system, CHAT, body, own, **key).headers["x-request-id"] == there
    assert pairs(system, own)[-1] == there

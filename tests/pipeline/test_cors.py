"""Pages of this machine may call a node without keys from another port."""

import httpx
import pytest

from schemas.subjects import new_request_id
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, refusal
from tests.pipeline.conftest import System

PAGE = {"origin": "http://127.0.0.1:3000"}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
def test_a_preflight_is_204(system: System, path: str) -> None:
    with system.client() as client:
        answer = client.options(path, headers=PAGE | ASKS)
    assert answer.status_code == 204
    assert answer.content == b""
    assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
    assert answer.headers["access-control-allow-headers"] == "content-type"


@pytest.mark.parametrize("headers", [{}, PAGE, ASKS, ASKS | {"origin": "https://evil.example"}])
def test_any_other_options_request_is_405(system: System, headers: dict[str, str]) -> None:
    with system.client() as client:
        answer = client.options(CHAT, headers=headers)
    assert answer.status_code == 405
    assert refusal(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_refusals_may_be_read_by_the_page(system: System, stream: bool) -> None:
    with system.client() as client:
        answers = [
            client.post(CHAT, json=chat(stream=stream, max_tokens=2), headers=PAGE),
            client.post(CHAT, json=chat(temperature=9), headers=PAGE),
            client.get("/v1/models", headers=PAGE),
            client.get("/v1/nothing", headers=PAGE),
        ]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 404]
    reply, *others = answers
    # A reply behind a redirect may be read by any page that has its ticket.
    anyones = "*" if system.mode == "split" else PAGE["origin"]
    assert reply.headers["access-control-allow-origin"] == anyones
    for answer in others:
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]


def test_an_answer_to_no_page_has_no_such_header(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(max_tokens=2), follow_redirects=False)
    assert answer.status_code == (303 if system.mode == "split" else 200)
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_may_read_a_stream_where_it_is_and_why_there_is_none(system: System) -> None:
    path = f"/v1/streams/{new_request_id()}"
    for node in (system.socket_end, system.doors[0]):
        with httpx.Client(base_url=node.url, timeout=30, follow_redirects=True) as client:
            asked = client.options(path, headers=PAGE | ASKS)
            answer = client.get(path, headers=PAGE)
        assert asked.status_code == 204
        assert answer.status_code == 404
        for each in answer.history:
            assert each.headers["access-control-allow-origin"] == PAGE["origin"]
        anyones = "*" if answer.history else PAGE["origin"]
        assert answer.headers["access-control-allow-origin"] == anyones

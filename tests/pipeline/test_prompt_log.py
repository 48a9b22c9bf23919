"""What of prompts stands in the logs of all processes: nothing, unless that is asked for."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, hook
from tests.pipeline.small import Small, small
from tests.talk import talking
from tests.waiting import wait_for

MARK = "quokka"
SECRETS = ("jane@example.com", "4111 1111 1111 1111", "sk-live-abcdefgh1234", "hr-Zm9vYmFyYmF6")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """Nothing is asked for, and everything logs at debug level."""
    toml = '[moderation]\npatterns = ["never-this"]'
    yield from small(tmp_path_factory.mktemp("quiet"), toml=toml, debug=True)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    toml = '[logging]\nredact = ["Project [A-Z]+"]\nprompt_characters = 120\n'
    toml += '[moderation]\ninput_patterns = ["never-this"]'
    yield from small(tmp_path_factory.mktemp("telling"), "--log-prompts", toml=toml)


def lines(house: Small) -> dict[str, dict[str, Any]]:
    """Return what was logged of prompts, by request."""
    found = {}
    for line in house.logs().splitlines():
        _, there, members = line.partition(" ingress.prompt_log: ")
        if there:
            entry = json.loads(members)
            assert entry["request"] not in found
            found[entry["request"]] = entry
    return found


MARKED = {"role": "user", "content": f"My secret is {MARK}."}
ASKED: dict[str, tuple[str, Any, int]] = {
    "whole": (CHAT, chat(MARK, max_tokens=2), 200),
    "completion": (COMPLETIONS, {"model": "sim", "prompt": MARK, "max_tokens": 2}, 200),
    "response": ("/v1/responses", {"model": "sim", "input": MARK, "sim": hook("a")}, 200),
    "unknown model": (CHAT, chat(MARK, model="none"), 404),
    "an odd role": (CHAT, {"model": "sim", "messages": [MARKED | {"role": MARK}]}, 400),
    "no text": (CHAT, {"model": "sim", "messages": [MARKED, {"role": "user"}]}, 400),
    "too long": (CHAT, chat(f"{MARK} " * 40_000), 400),
    "moderated": (CHAT, chat(f"never-this {MARK}"), 400),
    "the engine fails": (CHAT, chat(MARK, sim=hook("a", "b", fail_at=1)), 500),
    "the answer is moderated": (CHAT, chat(MARK, sim=hook("never-", f"this {MARK}")), 200),
    "not JSON": (CHAT, b'{"model": "sim", "messages": [quokka', 400),
    "a lone surrogate": (CHAT, b'{"model":"sim","prompt":"quokka \\ud800"}', 400),
    "a bad hook": (CHAT, chat(MARK, sim={"pieces": 5}), 400),
    "too late": (CHAT, chat(MARK, sim=hook("a", ttft_ms=30_000)), 504),
}


def test_of_no_prompt_anything_is_logged_at_any_level_unless_asked_for(quiet: Small) -> None:
    with quiet.client() as client:
        for name, (path, body, status) in ASKED.items():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            late = {"x-request-timeout": "0.2"} if name == "too late" else {}
            answer = client.post(path, content=content, headers=late)
            assert answer.status_code == status, (name, answer.text)
        with client.stream("POST", CHAT, json=chat(MARK, stream=True, sim=hook(MARK, MARK))) as it:
            assert MARK in it.read().decode()
        leaves = chat(MARK, stream=True, sim=hook(MARK, MARK, itl_ms=60_000))
        with client.stream("POST", CHAT, json=leaves) as answer:
            assert answer.status_code == 200

    async def sockets() -> None:
        async with talking(quiet.url, "/v1/chat/completions") as talk:
            heard = await talk.ask("a", chat(MARK, max_tokens=1))
            assert heard.done
            await talk.say(f'{{"id": "b", "body": {{"messages": "{MARK}"}}}}')
            await talk.say(f"{MARK} is no JSON")
            assert await talk.nameless_error()

    asyncio.run(sockets())
    logs = quiet.logs()
    assert " DEBUG " in logs
    assert MARK not in logs
    assert "never-this" not in logs


def test_with_log_prompts_there_is_one_redacted_line_of_each_request(telling: Small) -> None:
    text = f"Mail {SECRETS[0]}, pay {SECRETS[1]}, use {SECRETS[2]} or {SECRETS[3]}"
    with telling.client() as client:
        asked = [
            client.post(CHAT, json=chat(f"{text} for Project DELTA.", max_tokens=1)),
            client.post(COMPLETIONS, json={"model": "sim", "prompt": "x" * 200, "max_tokens": 1}),
            client.post(CHAT, json=chat(f"never-this {MARK}")),
        ]
    ids = [answer.headers["x-request-id"] for answer in asked]
    wait_for(lambda: set(ids) <= lines(telling).keys(), within_s=15, what="the lines")
    first, long, refused = (lines(telling)[request] for request in ids)
    mask = "[redacted]"
    assert first == {
        "request": ids[0],
        "tenant": "default",
        "model": "sim",
        "prompt": f"Mail {mask}, pay {mask}, use {mask} or {mask} for {mask}.",
        "characters": len(f"{text} for Project DELTA."),
        "truncated": False,
    }
    assert (long["prompt"], long["characters"], long["truncated"]) == ("x" * 120, 200, True)
    assert (refused["prompt"], refused["refused"]) == (None, "content_policy_violation")
    logs = telling.logs()
    assert not any(secret in logs for secret in (*SECRETS, "DELTA", MARK))

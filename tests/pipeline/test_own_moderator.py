"""A moderator of the operator's own over the whole path, and what becomes of its failures."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.asking import CHAT, chat, collect, hook, refusal, stream
from tests.pipeline.small import Small, small

TABLE = """
[moderation]
moderator = "tests.pipeline.own_moderator:make"
options = {word = "taboo"}
hold_back_characters = 12
check_every_characters = 6
timeout_s = 3
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    yield from small(tmp_path_factory.mktemp("own"), toml=TABLE)


def test_it_decides_what_is_asked_and_said(house: Small) -> None:
    with house.client() as client:
        refused = client.post(CHAT, json=chat("a taboo"))
        ended = stream(client, chat(sim=hook("what is ", "ta", "boo", *["!"] * 30)))
        whole = collect(client, chat(sim=hook("what is ", "fine")))
    assert refusal(refused)["code"] == "content_policy_violation"
    assert ended.text() == "what is "
    assert ended.reasons() == {0: "content_filter"}
    assert whole["choices"][0]["message"]["content"] == "what is fine"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["breaking", "hanging"])
def test_where_it_fails_nothing_passes_and_nothing_is_repeated(house: Small, word: str) -> None:
    said: dict[str, Any] = chat(sim=hook("so ", word, " news", *["!"] * 30))
    with house.client() as client:
        asked = client.post(CHAT, json=chat(f"{word} news"))
        answered = client.post(CHAT, json=said)
        streamed = stream(client, said)
    for answer in (asked, answered):
        assert answer.status_code == 503
        assert refusal(answer)["code"] == "moderation_unavailable"
        assert answer.headers["retry-after"] == "1"
        assert "news" not in answer.text
    assert streamed.chunks[-1]["error"]["code"] == "moderation_unavailable"
    assert b"news" not in streamed.raw
    assert "the moderator " in house.logs()
    assert "news" not in house.logs()

"""Which moderator the configuration names, and what becomes of one that fails."""

import asyncio
import gc
import logging
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace.moderation import (
    INLINE_CHARACTERS_MAX,
    THREADS_MAX,
    Asked,
    Moderation,
    ModerationSettings,
    ModeratorFailed,
    Said,
    moderation_of,
)
from headrace.settings import BadSetting, ConfigFile, load_config

OWN = """
import asyncio, time

class Own:
    def __init__(self, options):
        self.options = options
    async def check_input(self, asked):
        if "slow" in asked.texts:
            await asyncio.sleep(60)
        if "odd" in asked.texts:
            return "yes"
        if "broken" in asked.texts:
            raise OSError(asked.texts[0])
        return self.options["word"] in asked.texts
    def check_output(self, said):
        if "odd" in said.text:
            return 99
        at = said.text.find(self.options["word"])
        return None if at < 0 else at

def make(options):
    return Own(options)

def half(options):
    return object()
"""


def read(folder: Path, text: str) -> ConfigFile:
    file = folder / "headrace.toml"
    file.write_text(text)
    return load_config(file)


def asked(*texts: str) -> Asked:
    return Asked("t", "m", texts)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a moderator of the operator's own."""
    (tmp_path / "own_moderator.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_moderator", raising=False)

    def make(**more: Any) -> Moderation:
        settings = ModerationSettings(
            moderator="own_moderator:make", options={"word": "bad"}, **{"timeout_s": 60} | more
        )
        return moderation_of(settings)

    return make


def test_without_a_table_nothing_is_moderated(tmp_path: Path) -> None:
    assert read(tmp_path, "").content.moderation is None


def test_patterns_go_both_ways_or_one(tmp_path: Path) -> None:
    text = '[moderation]\npatterns = ["both"]\ninput_patterns = ["in"]\noutput_patterns = ["out"]'
    settings = read(tmp_path, text).content.moderation
    assert settings is not None
    found = moderation_of(settings)

    async def go() -> list[Any]:
        asks = [await found.refuses(asked("good", word)) for word in ("both", "in", "out")]
        said = [Said("t", "m", f"a {word}!", 0, True) for word in ("both", "in", "out")]
        return asks + [await found.cut(each) for each in said]

    assert asyncio.run(go()) == [True, True, False, 2, None, 2]
    assert (found.moderated, found.failed) == (4, 0)


@pytest.mark.parametrize(
    ("table", "requests", "answers"),
    [
        ('patterns = ["x"]', True, True),
        ('input_patterns = ["x"]', True, False),
        ('output_patterns = ["x"]', False, True),
        ('patterns = ["x"]\ninput = false', False, True),
        ('patterns = ["x"]\noutput = false', True, False),
        ('moderator = "m:f"', True, True),
        ('moderator = "m:f"\noutput = false', True, False),
    ],
)
def test_a_way_with_nothing_to_look_for_is_not_looked_at(
    tmp_path: Path, table: str, requests: bool, answers: bool
) -> None:
    settings = read(tmp_path, f"[moderation]\n{table}").content.moderation
    assert settings is not None
    assert (settings.looks_at_requests, settings.looks_at_answers) == (requests, answers)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('patterns = ["fine", "("]', r"the pattern '\(' is no regular expression"),
        ('patterns = ["x*"]', r"the pattern 'x\*' matches the empty text"),
        ("", "there are no patterns"),
        ('moderator = "words"', "'module:factory'"),
        ('moderator = "m:f"\npatterns = ["x"]', "patterns are for the moderator 'patterns'"),
        ('patterns = ["x"]\noptions = {a = 1}', "options are for a moderator of your own"),
        ('patterns = ["x"]\nhold_back = 3', "did you mean 'hold_back_characters'"),
        ('patterns = ["x"]\nhold_back_characters = 0', "hold_back_characters"),
        ('patterns = ["x"]\nwhen_failing = "ignore"', "when_failing"),
    ],
)
def test_a_wrong_table_is_an_error_at_start(tmp_path: Path, table: str, why: str) -> None:
    with pytest.raises(BadSetting, match=why) as raised:
        read(tmp_path, f"[moderation]\n{table}")
    assert "[moderation]" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:make", "No module named"),
        ("own_moderator:none", "has no attribute"),
        ("own_moderator:half", "has no check_input"),
    ],
)
def test_a_moderator_that_cannot_be_made_is_named(own: Any, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        moderation_of(ModerationSettings(moderator=name))
    assert name in str(raised.value)


def test_an_own_moderator_is_asked_by_coroutine_and_in_a_thread(own: Any) -> None:
    async def go() -> list[Any]:
        found = own()
        return [
            await found.refuses(asked("good")),
            await found.refuses(asked("good", "bad")),
            await found.cut(Said("t", "m", "all good", 0, False)),
            await found.cut(Said("t", "m", "so bad", 0, False)),
        ]

    assert asyncio.run(go()) == [False, True, None, 3]


@pytest.mark.parametrize(
    ("word", "timeout_s", "why"),
    [
        ("slow", 0.05, "took too long"),
        ("odd", 60, "something else"),
        ("broken", 60, "raised OSError"),
    ],
)
def test_a_failing_moderator_lets_nothing_pass_unless_that_is_wanted(
    own: Any, caplog: pytest.LogCaptureFixture, word: str, timeout_s: float, why: str
) -> None:
    caplog.set_level(logging.DEBUG)
    closed = own(timeout_s=timeout_s)
    with pytest.raises(ModeratorFailed, match=why) as raised:
        asyncio.run(closed.refuses(asked(word, "unrepeatable")))
    assert closed.failed == 1
    open_ = own(timeout_s=timeout_s, when_failing="admit")
    assert asyncio.run(open_.refuses(asked(word, "unrepeatable"))) is False
    assert (open_.failed, open_.moderated) == (1, 0)
    assert why in caplog.text
    assert word not in (caplog.text + str(raised.value)).replace(why, "")


def test_a_place_outside_of_the_text_is_a_failure(own: Any) -> None:
    with pytest.raises(ModeratorFailed, match="no place"):
        asyncio.run(own().cut(Said("t", "m", "odd", 0, False)))


class Hanging:
    """A moderator that does not answer before it is released."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def check_input(self, _asked: Asked) -> bool:
        return self._released.wait(60)

    def check_output(self, _said: Said) -> int | None:
        raise NotImplementedError


def test_moderators_that_hang_keep_nobody_else_from_a_thread() -> None:
    released = threading.Event()
    found = Moderation(ModerationSettings(moderator="m:f", timeout_s=0.05), Hanging(released))

    async def go() -> int:
        try:
            asking = [found.refuses(asked("good")) for _ in range(100)]
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(answer) for answer in answers} == {ModeratorFailed}
            async with asyncio.timeout(30):
                return await asyncio.to_thread(threading.get_ident)
        finally:
            released.set()

    assert asyncio.run(go()) != threading.get_ident()


class Text(str):
    """One that a weak reference can follow."""


def test_what_a_moderator_that_hangs_is_never_shown_is_not_kept() -> None:
    released = threading.Event()
    found = Moderation(ModerationSettings(moderator="m:f", timeout_s=0.05), Hanging(released))
    followed: list[weakref.ref[Text]] = []

    async def refuses() -> None:
        text = Text("good")
        followed.append(weakref.ref(text))
        with pytest.raises(ModeratorFailed):
            await found.refuses(asked(text))

    async def go() -> None:
        try:
            await asyncio.gather(*(refuses() for _ in range(10 * THREADS_MAX)))
            gc.collect()
            assert sum(text() is not None for text in followed) <= THREADS_MAX
        finally:
            released.set()

    asyncio.run(go())


def test_a_thread_that_a_moderator_gives_back_is_used_again() -> None:
    class Slow:
        def check_input(self, shown: Asked) -> bool:
            released.wait(60)
            return "bad" in shown.texts

        def check_output(self, _said: Said) -> int | None:
            raise NotImplementedError

    released = threading.Event()
    found = Moderation(ModerationSettings(moderator="m:f", timeout_s=60), Slow())

    async def go() -> None:
        asking = [asyncio.create_task(found.refuses(asked("bad"))) for _ in range(3 * THREADS_MAX)]
        for each in asking[::2]:
            await asyncio.sleep(0)
            each.cancel()
        released.set()
        assert all(await asyncio.gather(*asking[1::2]))

    asyncio.run(go())


def test_a_long_input_is_searched_beside_the_event_loop() -> None:
    found = moderation_of(ModerationSettings(patterns=("needle",)))

    async def go() -> tuple[bool, int]:
        turns = 0
        looking = asyncio.create_task(
            found.refuses(asked("hay " * INLINE_CHARACTERS_MAX * 50 + "needle"))
        )
        while not looking.done():
            turns += 1
            await asyncio.sleep(0)
        return looking.result(), turns

    refused, turns = asyncio.run(go())
    assert refused
    assert turns > 1

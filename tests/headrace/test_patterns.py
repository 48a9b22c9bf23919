"""Where patterns match, and what of a match can be relied on while a text still grows."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.patterns import BLOCK_CHARACTERS, compile_patterns, first_match, matches_anywhere


def first(source: str, text: str, *, start: int = 0, ended: bool = False) -> int | None:
    patterns = compile_patterns([source])
    return first_match(patterns, text, start=start, search_from=0, ended=ended, bound=6)


def test_a_match_at_the_end_of_what_is_known_is_not_believed_before_more_comes() -> None:
    assert first(r"\bend\b", "the end") is None
    assert first(r"\bend\b", "the ending") is None
    assert first(r"\bend\b", "the end.") == 4
    assert first(r"\bend\b", "the end", ended=True) == 4
    assert first("a+b", "xaab") is None  # nothing may follow, but that is not looked at
    assert first("a{6}", "xaaaaaa") == 1  # as long as the bound: it would go out


def test_what_is_out_already_is_no_match_and_hides_none() -> None:
    assert first("ab", "ab ab ", start=2) == 3
    assert first("b c", "ab cd", start=2) == 1
    assert first(r"(?=c)", "abcd", start=2) == 2


@pytest.mark.parametrize("source", ["a*", "", "(a|b?)", "^"])
def test_a_pattern_that_matches_everything_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="matches the empty text") as raised:
        compile_patterns(["fine", source])
    assert repr(source) in str(raised.value)


@pytest.mark.parametrize("source", ["(", "a{2,1}", "[z-a]", "(?P<x>a)(?P<x>b)"])
def test_a_pattern_that_is_none_is_named(source: str) -> None:
    with pytest.raises(ValueError, match="no regular expression") as raised:
        compile_patterns(["fine", source])
    assert repr(source) in str(raised.value)


@given(st.integers(0, 3), st.integers(-9, 9), st.sampled_from([r"\bsecret\b", "secret", "s(?=e)"]))
def test_a_match_is_found_wherever_blocks_end(block: int, offset: int, source: str) -> None:
    before = max(0, block * BLOCK_CHARACTERS + offset)
    text = "x" * before + " secret " + "y" * (4 * BLOCK_CHARACTERS - before)
    assert matches_anywhere(compile_patterns([source]), text, bound=16)
    near = text.replace("secret", "sacred")
    assert not matches_anywhere(compile_patterns([source]), near, bound=16)


def test_a_blocks_end_is_not_taken_for_the_texts() -> None:
    text = "x" * (BLOCK_CHARACTERS - 4) + " end" + "less" * 10
    assert not matches_anywhere(compile_patterns([r"\bend\b", "end$"]), text, bound=16)
    assert re.search(r"\bend\b", text[:BLOCK_CHARACTERS])

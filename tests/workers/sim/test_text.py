from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.sim.text import Assembler

STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=3)


def cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(place % (len(content) + 1) for place in places)})
    return [content[start:end] for start, end in pairwise(edges)] or [b""]


def assemble(parts: list[bytes], stops: list[str]) -> tuple[str, bool]:
    assembler = Assembler(stops)
    sent = ""
    for index, part in enumerate(parts):
        sent += assembler.push(part, last=index == len(parts) - 1)
        if assembler.stopped:
            break
    return sent, assembler.stopped


@given(st.binary(max_size=40), st.lists(st.integers(0, 99), max_size=8))
def test_any_cut_of_any_bytes_gives_the_text_of_the_whole(
    content: bytes, places: list[int]
) -> None:
    assert assemble(cut(content, places), [])[0] == content.decode(errors="replace")


@given(st.text(alphabet="abé🙂", max_size=30), STOPS, st.lists(st.integers(0, 199), max_size=8))
def test_no_stop_string_is_sent_and_a_near_miss_arrives_whole(
    text: str, stops: list[str], places: list[int]
) -> None:
    sent, stopped = assemble(cut(text.encode(), places), stops)
    assert not any(stop in sent for stop in stops)
    if stopped:
        assert any(text.startswith(sent + stop) for stop in stops)
    else:
        assert sent == text
        assert not any(stop in text for stop in stops)


@given(st.text(alphabet="abé🙂", max_size=30), STOPS, st.lists(st.integers(0, 199), max_size=8))
def test_where_a_text_stops_does_not_depend_on_its_tokens(
    text: str, stops: list[str], places: list[int]
) -> None:
    assert assemble(cut(text.encode(), places), stops) == assemble(
        [character.encode() for character in text] or [b""], stops
    )


def test_an_emoji_in_two_pieces_is_nothing_and_then_the_emoji() -> None:
    assembler = Assembler()
    assert assembler.push(b"\xf0\x9f") == ""
    assert assembler.push(b"\x99\x82") == "🙂"


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    assembler = Assembler(["stop"])
    assert assembler.push(b"a\xf0\x9f") == "a"
    assert assembler.push(b"\x99", last=True) == "\ufffd"


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    assembler = Assembler(["</s>", "<|"])
    assert assembler.push(b"x <") == "x "
    assert assembler.push(b"/") == ""
    assert assembler.push(b"b> </") == "</b> "
    assert assembler.push(b"s> more") == ""
    assert assembler.stopped

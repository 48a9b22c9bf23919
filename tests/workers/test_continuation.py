"""The text of a generation that goes on where another left it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.continuation import Continuation

PROMPT = [ord(c) for c in "ask: "]


def decode(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def whole(text: bytes, made: int, *, emitted: str, stops: Sequence[str] = ()) -> tuple[str, bool]:
    """Return what a continuation after `made` bytes sends of `text`, byte by byte."""
    on = Continuation(decode, prompt=PROMPT, made=text[:made], emitted=emitted, stops=stops)
    sent = [on.push(())]
    for index in range(made, len(text)):
        if on.stopped:
            break
        sent.append(on.push([text[index]], last=index == len(text) - 1))
    return "".join(sent), on.stopped


def test_a_character_in_two_halves_arrives_once() -> None:
    emoji = "😀!".encode()
    for made in range(1, 4):
        assert whole(emoji, made, emitted="") == ("😀!", False)


def test_a_stop_string_over_the_joint_never_leaks() -> None:
    assert whole(b"abSTOPcd", 4, emitted="ab", stops=["STOP"]) == ("", True)
    assert whole(b"abSTxOPcd", 4, emitted="ab", stops=["STOP"]) == ("STxOPcd", False)


def test_a_stop_string_that_was_whole_before_stops_at_once() -> None:
    on = Continuation(decode, prompt=PROMPT, made=b"abSTOP", emitted="ab", stops=["STOP"])
    assert on.push(()) == ""
    assert on.stopped


def test_what_was_held_back_is_given_up_at_the_end() -> None:
    on = Continuation(decode, prompt=PROMPT, made=b"abST", emitted="ab", stops=["STOP"])
    assert on.push(()) == ""
    assert on.push(b"O", last=True) == "STO"


@given(st.text(max_size=30), st.data())
def test_the_joined_text_is_that_of_one_generation(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    made = data.draw(st.integers(0, len(raw)))
    emitted = raw[:made].decode(errors="ignore")
    sent, stopped = whole(raw, made, emitted=emitted)
    if made < len(raw):
        assert emitted + sent == text
    assert not stopped

"""Frames and envelopes: they round-trip, and their bytes are those of the specification."""

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.wire import (
    BadEnvelope,
    BadFrame,
    Envelope,
    Failed,
    Finished,
    Frame,
    HexPiece,
    Keepalive,
    Parsing,
    Piece,
    Sampling,
    Shape,
    SimHook,
    Started,
    Structured,
    TokenLogprob,
    Tokens,
    ToolCall,
    TopToken,
    Usage,
    decode_envelope,
    decode_frame,
    encode_envelope,
    encode_frame,
    pack_tokens,
    span,
    unpack_tokens,
)

COUNTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False)
TOPS = st.builds(TopToken, TEXTS, LOGPROBS)
TOKEN_LOGPROBS = st.builds(TokenLogprob, TEXTS, LOGPROBS, st.lists(TOPS, max_size=3).map(tuple))
DELTAS = st.dictionaries(TEXTS, TEXTS | COUNTS | st.none(), max_size=3)
PIECES = st.lists(
    st.builds(
        Piece,
        st.integers(0, 127),
        TEXTS,
        st.lists(IDS, min_size=1, max_size=4).map(tuple),
        st.none() | st.lists(TOKEN_LOGPROBS, max_size=2).map(tuple),
        st.none() | DELTAS,
    ),
    max_size=4,
).map(tuple)
SHAPES = st.builds(
    Shape,
    st.sampled_from(["chat", "completion", "response"]),
    TEXTS,
    COUNTS,
    st.booleans(),
    COUNTS,
    st.booleans(),
    response=st.binary(),
    echo=TEXTS,
)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, st.none() | COUNTS)
FRAMES = st.one_of(
    st.builds(Started, COUNTS, TEXTS, st.none() | COUNTS, SHAPES),
    st.builds(Tokens, COUNTS, COUNTS, PIECES),
    st.builds(
        Finished,
        COUNTS,
        COUNTS,
        PIECES,
        st.lists(TEXTS, max_size=3).map(tuple),
        USAGES,
        st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=2),
    ),
    st.builds(Failed, COUNTS, COUNTS, PIECES, TEXTS, TEXTS, USAGES),
    st.builds(Keepalive, COUNTS, st.integers(-1, 2**40)),
)

SHAPE = Shape("chat", "m", 5, True, 1, False)
# Written by hand from msgpack's specification: 9x array, ax string, c0 nil, c2 false, c3 true,
# c4 bin, ff -1, cb double, 8x map.
GOLDEN: dict[str, tuple[Frame, str]] = {
    "started": (
        Started(0, "w", 0, SHAPE),
        "97 01 00 00 a7 73746172746564 a1 77 00 9a a4 63686174 a1 6d 05 c3 01 c2 c2 c3 c400 a0",
    ),
    "started that has yet to read the log": (
        Started(0, "w", None, SHAPE),
        "97 01 00 00 a7 73746172746564 a1 77 c0 9a a4 63686174 a1 6d 05 c3 01 c2 c2 c3 c400 a0",
    ),
    "tokens": (
        Tokens(7, 3, (Piece(0, "hi", (258,)),)),
        "95 01 07 03 a6 746f6b656e73 91 95 00 a2 6869 91 cd0102 c0 c0",
    ),
    "tokens with log probabilities": (
        Tokens(7, 3, (Piece(1, "a", (1,), (TokenLogprob("a", -0.5, (TopToken("b", -2.0),)),)),)),
        "95 01 07 03 a6 746f6b656e73 91 95 01 a1 61 91 01"
        " 91 93 a1 61 cbbfe0000000000000 91 92 a1 62 cbc000000000000000 c0",
    ),
    "finished": (
        Finished(7, 4, (), ("stop",), Usage(9, 4, 0), {"total_ms": 1.5}),
        "98 01 07 04 a8 66696e6973686564 90 91 a4 73746f70 93 09 04 00"
        " 81 a8 746f74616c5f6d73 cb3ff8000000000000",
    ),
    "finished, with reasoning": (
        Finished(7, 4, (), ("stop",), Usage(9, 4, 0, 3), {}),
        "98 01 07 04 a8 66696e6973686564 90 91 a4 73746f70 94 09 04 00 03 80",
    ),
    "failed": (
        Failed(7, 4, (), "c", "m", Usage(9, 4, 0)),
        "98 01 07 04 a6 6661696c6564 90 a1 63 a1 6d 93 09 04 00",
    ),
    "keepalive": (Keepalive(7, -1), "94 01 07 ff a9 6b656570616c697665"),
}


@given(FRAMES)
def test_every_frame_round_trips(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@pytest.mark.parametrize("kind", GOLDEN)
def test_a_frame_has_the_bytes_of_the_specification(kind: str) -> None:
    frame, golden = GOLDEN[kind]
    raw = bytes.fromhex(golden)
    assert encode_frame(frame) == raw
    assert decode_frame(raw) == frame


@pytest.mark.parametrize("members", ["96", "97", "98"])
def test_a_shape_of_fewer_members_has_the_defaults_of_the_rest(members: str) -> None:
    more = {"96": "", "97": "c2", "98": "c2 c3"}[members]
    golden = f"97 01 00 00 a7 73746172746564 a1 77 00 {members} a4 63686174 a1 6d 05 c3 01 c2"
    assert decode_frame(bytes.fromhex(golden + more)) == Started(0, "w", 0, SHAPE)


@pytest.mark.parametrize("kind", GOLDEN)
def test_a_frame_of_another_version_is_bad(kind: str) -> None:
    raw = bytearray.fromhex(GOLDEN[kind][1])
    raw[1] = 2
    with pytest.raises(BadFrame):
        decode_frame(bytes(raw))


@pytest.mark.parametrize("kind", GOLDEN)
def test_a_frame_cut_anywhere_is_bad(kind: str) -> None:
    raw = bytes.fromhex(GOLDEN[kind][1])
    for end in range(len(raw)):
        with pytest.raises(BadFrame):
            decode_frame(raw[:end])


@given(st.binary())
def test_no_bytes_raise_anything_but_bad_frame(raw: bytes) -> None:
    try:
        decode_frame(raw)
    except BadFrame as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "value",
    [
        [1, 7, 3, "tokens"],
        [1, 7, 3, "other", []],
        [1, 7, 3, "tokens", [[0, "a", [1]]]],
        [1, 7, 3, "finished", [], ["stop"], [1], {}],
        [1, 7, 0, "started", "w", 0, ["chat"]],
        {"version": 1},
        5,
        None,
    ],
)
def test_a_frame_of_another_form_is_bad(value: object) -> None:
    with pytest.raises(BadFrame):
        decode_frame(msgpack.packb(value))


def test_a_shape_from_before_keep_is_one_that_does_not_keep() -> None:
    old = bytes.fromhex("97010000a773746172746564a1770096a463686174a16d05c301c2")
    assert decode_frame(old) == Started(0, "w", 0, SHAPE)


def test_a_shape_from_before_responses_is_one_of_none() -> None:
    old = bytes.fromhex("97010000a773746172746564a1770098a463686174a16d05c301c2c2c3")
    assert decode_frame(old) == Started(0, "w", 0, SHAPE)


def test_span_counts_tokens_not_pieces() -> None:
    assert span(()) == 0
    assert span((Piece(0, "a", (1,)), Piece(1, "", (2, 3, 4)))) == 4


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_round_trip_as_32_bit_words(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed) == tokens


def test_token_ids_are_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes.fromhex("01000000 04030201")


ENVELOPE = Envelope(
    request="r",
    tenant="t",
    model="m",
    reply="replies.s.t.r",
    prompt=pack_tokens([1]),
    sampling=Sampling(max_tokens=2),
    shape=SHAPE,
    deadline_s=1.5,
)
ENVELOPE_BYTES = bytes.fromhex(
    "de0008"
    " a7 72657175657374 a1 72"  # request
    " a6 74656e616e74 a1 74"  # tenant
    " a5 6d6f64656c a1 6d"  # model
    " a5 7265706c79 ad 7265706c6965732e732e742e72"  # reply
    " a6 70726f6d7074 c404 01000000"  # prompt, a bin
    " a8 73616d706c696e67 de0001 aa 6d61785f746f6b656e73 02"  # sampling: max_tokens
    " a5 7368617065 9a a4 63686174 a1 6d 05 c3 01 c2 c2 c3 c400 a0"  # shape
    " aa 646561646c696e655f73 cb3ff8000000000000"  # deadline_s
)


def test_an_envelope_has_the_bytes_of_the_specification() -> None:
    assert msgpack.unpackb(ENVELOPE_BYTES) == msgpack.unpackb(encode_envelope(ENVELOPE))
    assert encode_envelope(ENVELOPE) == ENVELOPE_BYTES
    assert decode_envelope(ENVELOPE_BYTES) == ENVELOPE
    assert decode_envelope(ENVELOPE_BYTES).tokens == [1]


def test_an_envelope_from_before_keep_is_read() -> None:
    shape = bytes.fromhex("9aa463686174a16d05c301c2c2c3c400a0")
    before = bytes.fromhex("96a463686174a16d05c301c2")
    assert shape in ENVELOPE_BYTES
    assert decode_envelope(ENVELOPE_BYTES.replace(shape, before)) == ENVELOPE


def test_an_envelope_from_before_it_had_more_fields_is_read() -> None:
    assert ENVELOPE_BYTES.startswith(b"\xde\x00\x08")
    assert decode_envelope(b"\x88" + ENVELOPE_BYTES[3:]) == ENVELOPE


def test_an_envelope_from_before_sampling_had_more_fields_is_read() -> None:
    sampling, before = bytes.fromhex("de0001aa6d61785f"), bytes.fromhex("81aa6d61785f")
    assert sampling in ENVELOPE_BYTES
    assert decode_envelope(ENVELOPE_BYTES.replace(sampling, before)) == ENVELOPE


def test_a_whole_envelope_round_trips() -> None:
    hook = SimHook(
        ttft_ms=1.5,
        pieces=("a", HexPiece("f0")),
        fail_at=0,
        tool_calls=(ToolCall("f", ("{", "}")),),
        logprobs=(-1.0, "-inf"),
    )
    structured = Structured(choice=("a", "b"), disable_any_whitespace=True)
    sampling = Sampling(
        max_tokens=1,
        seed=-(2**63),
        stop=("a", "b"),
        logit_bias={5: -100.0},
        n=3,
        stop_token_ids=(2, 3),
        structured=structured,
    )
    parsing = Parsing(b"[{}]", "function", "f", parallel=False, template=b"{}")
    whole = msgspec.structs.replace(
        ENVELOPE,
        sim=hook,
        sampling=sampling,
        cache_salt="t",
        priority=3,
        parsing=parsing,
        moderated=False,
    )
    assert decode_envelope(encode_envelope(whole)) == whole


def test_an_envelope_of_another_version_is_bad() -> None:
    with pytest.raises(BadEnvelope, match="2"):
        decode_envelope(encode_envelope(msgspec.structs.replace(ENVELOPE, version=2)))


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\xc1", b"\x93\x01\x02\x03", ENVELOPE_BYTES[:-1]])
def test_other_bytes_are_no_envelope(raw: bytes) -> None:
    with pytest.raises(BadEnvelope):
        decode_envelope(raw)


def test_an_envelope_says_whether_its_answer_is_kept_and_an_older_one_is_not_kept() -> None:
    keeping = msgspec.structs.replace(ENVELOPE, keep_answer=True)
    assert decode_envelope(encode_envelope(keeping)) == keeping
    assert decode_envelope(ENVELOPE_BYTES).keep_answer is False

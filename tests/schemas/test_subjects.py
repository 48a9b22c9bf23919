"""Names on the broker: reversible, valid as tokens, and never overlapping."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects
from schemas.subjects import LANES, ReplySubject, RequestSubject

NAMES = st.text(min_size=1).filter(
    lambda text: not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)
)
TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
REQUEST = "req_" + "0123456789abcdef" * 2


def matches(pattern: str, subject: str) -> bool:
    """NATS' own rule: `*` is one token, `>` the rest, at least one."""
    want, have = pattern.split("."), subject.split(".")
    if want[-1] == ">":
        return len(have) >= len(want) and matches(
            ".".join(want[:-1]) or ".", ".".join(have[: len(want) - 1]) or "."
        )
    return len(want) == len(have) and all(w in ("*", h) for w, h in zip(want, have, strict=True))


@given(NAMES)
def test_escaping_is_reversible_for_any_name(name: str) -> None:
    assert subjects.unescape(subjects.escape(name)) == name


@given(NAMES)
def test_an_escaped_name_is_one_subject_token(name: str) -> None:
    assert TOKEN.fullmatch(subjects.escape(name))


@given(NAMES, NAMES)
def test_two_names_never_share_a_token(one: str, other: str) -> None:
    assert (subjects.escape(one) == subjects.escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("meta-llama/Llama-3.1_8B", "meta-llama=2FLlama-3=2E1_8B"),
        ("a=b", "a=3Db"),
        ("é", "=C3=A9"),
        ("* >", "=2A=20=3E"),
        ("plain-NAME_09", "plain-NAME_09"),
    ],
)
def test_a_name_is_escaped_byte_by_byte(name: str, token: str) -> None:
    assert subjects.escape(name) == token


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        subjects.escape("")


@pytest.mark.parametrize("token", ["", "=", "=G1", "a=4", "=+4", "=FF", "=C3", "=2f", "=41", "a.b"])
def test_a_foreign_token_is_a_value_error(token: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        subjects.unescape(token)


@given(st.sampled_from(LANES), NAMES, st.integers(0, 999), NAMES)
def test_a_request_subject_parses_back(
    lane: subjects.Lane, model: str, partition: int, tenant: str
) -> None:
    subject = RequestSubject(lane, model, partition, tenant, REQUEST)
    assert RequestSubject.parse(str(subject)) == subject
    assert len(str(subject).split(".")) == 6


@given(NAMES, NAMES)
def test_a_reply_subject_parses_back(streamer: str, tenant: str) -> None:
    subject = ReplySubject(streamer, tenant, REQUEST)
    assert ReplySubject.parse(str(subject)) == subject
    assert matches(subjects.replies_of(streamer), str(subject))


@pytest.mark.parametrize(
    "subject",
    [
        "requests.online.m.1.t",
        "requests.other.m.1.t.r",
        "replies.online.m.1.t.r",
        "requests.online.m.x.t.r",
        "",
    ],
)
def test_a_foreign_request_subject_is_a_value_error(subject: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RequestSubject.parse(subject)


@pytest.mark.parametrize("subject", ["requests.s.t.r", "replies.s.t", "replies.s.t.r.x", ""])
def test_a_foreign_reply_subject_is_a_value_error(subject: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ReplySubject.parse(subject)


def test_subjects_stand_as_the_design_spells_them() -> None:
    request = RequestSubject("online", "a/b", 7, "t.1", REQUEST)
    assert str(request) == f"requests.online.a=2Fb.7.t=2E1.{REQUEST}"
    assert str(ReplySubject("s", "t.1", REQUEST)) == f"replies.s.t=2E1.{REQUEST}"
    assert subjects.consumer_name("batch", "a/b", 7) == "batch-a=2Fb-7"
    assert subjects.consumer_filter("batch", "a/b", 7) == "requests.batch.a=2Fb.7.>"
    assert subjects.worker_holds("w.0") == "workers.w=2E0.holds"
    assert subjects.message_id(REQUEST, 2) == f"{REQUEST}/2"


PLACES = st.tuples(
    st.sampled_from(LANES), st.sampled_from(["m", "m-1", "m.1", "m/1", "1"]), st.integers(0, 40)
)


@given(PLACES, PLACES)
def test_consumer_filters_never_overlap(
    one: tuple[subjects.Lane, str, int], other: tuple[subjects.Lane, str, int]
) -> None:
    subject = str(RequestSubject(*one, "tenant", REQUEST))
    assert matches(subjects.consumer_filter(*other), subject) == (one == other)


@given(NAMES, NAMES)
def test_a_tenants_filter_finds_its_own_requests_only(tenant: str, other: str) -> None:
    subject = str(RequestSubject("online", "m", 3, tenant, REQUEST))
    assert matches(subjects.requests_of(tenant=tenant, request=REQUEST), subject)
    assert matches(subjects.requests_of(tenant=tenant), subject)
    assert matches(subjects.requests_of(), subject)
    assert matches(subjects.requests_of(tenant=other), subject) == (tenant == other)


@given(NAMES)
def test_a_cancel_signal_is_heard_by_all_workers(tenant: str) -> None:
    signal = subjects.cancel_signal(tenant, REQUEST)
    assert matches(subjects.CANCEL_SIGNALS, signal)
    assert signal.endswith(f".{REQUEST}")


def test_request_ids_are_fresh_and_known_by_their_form() -> None:
    ids = {subjects.new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(subjects.is_request_id(identity) for identity in ids)


@pytest.mark.parametrize("text", ["", "req_", REQUEST + "\n", REQUEST.upper(), REQUEST + "0", "*"])
def test_other_texts_are_no_request_ids(text: str) -> None:
    assert not subjects.is_request_id(text)


def test_a_cell_is_what_a_subject_says_beside_its_id() -> None:
    subject = str(RequestSubject("online", "org/m.1", 7, "a b", REQUEST))
    assert subjects.Cell.parse(subject) == ("online", "org=2Fm=2E1", "7", "a=20b")
    consumer = subjects.consumer_filter("batch", "m", 3)
    assert subjects.Cell.parse(consumer) == ("batch", "m", "3", "*")
    for foreign in ("requests", "requests.a.b.c.d", "requests.a.b.c.d.e.f"):
        assert subjects.Cell.parse(foreign) is None


def test_every_field_of_a_cell_finds_its_requests_and_no_others() -> None:
    subject = str(RequestSubject("online", "m", 7, "t", REQUEST))
    cell = subjects.Cell.parse(subject)
    assert cell is not None
    for field, token in cell._asdict().items():
        assert matches(subjects.requests_with(field, token), subject)
        assert not matches(subjects.requests_with(field, token + "x"), subject)
    assert matches(subjects.requests_of(model="m"), subject)
    assert not matches(subjects.requests_of(model="n"), subject)
    assert not matches(subjects.requests_of(model="t", tenant="m"), subject)


def test_a_reply_is_found_by_its_request_alone() -> None:
    reply = str(subjects.ReplySubject("s", "t", REQUEST))
    assert matches(subjects.replies_to(REQUEST), reply)
    assert not matches(subjects.replies_to(REQUEST + "x"), reply)

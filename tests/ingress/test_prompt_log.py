"""The line that is logged of a prompt: bounded, and without what looks like a secret."""

import json
import logging
import re
from datetime import date, time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.prompt_log import DEFAULTS, PromptLog, joined, redacted

MASK = "[redacted]"


def shown(text: str, *, characters_max: int = 1000) -> str:
    return redacted(text, DEFAULTS, characters_max=characters_max)


@pytest.mark.parametrize(
    "secret",
    [
        "jane.doe+news@mail.example.co.uk",
        "o'neil_1@example.com",
        "jané@exämple.de",
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "378282246310005",
        "Bearer abc.def-123_~+/==",
        "bearer  s3cr3t",
        "sk-proj-Abc123_xyz-789",
        "hr-Zm9vYmFyYmF6cXV4",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "eyJhbGciOiJkaXIifQ..aXY.Y2lwaGVydGV4dA.dGFn",
    ],
)
def test_secrets_are_replaced_whole(secret: str) -> None:
    assert shown(f"say {secret}, please") == f"say {MASK}, please"


@pytest.mark.parametrize("text", ["a@b", "in 2026, 12345 of 67890", "risk-free", "the task-list"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PATIENT-123456 4111 1111 1111 1111", f"PATIENT-{MASK}"),
        ("PATIENT-123456 4111-1111-1111-1111.", f"PATIENT-{MASK}."),
        ("12 34 56 78 4111111111111111 12/29", f"12 34 56 {MASK}/29"),
        ("2026-11-30 4111 1111 1111 1111", MASK),
        ("4111 1111 1111 1111 2026-11-30", f"{MASK} 2026-11-30"),
        ("2026-11-30 2026-12-01 2026-12-02", f"{MASK} 2026-12-02"),
    ],
)
def test_a_cards_digits_go_whatever_digits_stand_around_them(text: str, expected: str) -> None:
    assert shown(text) == expected


AROUND = st.text("02468aZ -,:", max_size=30)
SEPARATORS = st.sampled_from(["", " ", "-"])
NUMBERS = st.lists(st.tuples(st.sampled_from("3579"), SEPARATORS), min_size=13, max_size=19)


@given(AROUND, NUMBERS, AROUND)
def test_no_digit_of_a_number_of_13_to_19_digits_stays(
    before: str, number: list[tuple[str, str]], after: str
) -> None:
    digits = "".join(digit + separator for digit, separator in number).rstrip(" -")
    for edge in " ", "-", "x":
        found = shown(f"{before}{edge}{digits}{edge}{after}")
        assert MASK in found
        assert not set(found) & set("3579")


@given(st.lists(st.lists(st.text("0123456789", min_size=1, max_size=4), min_size=1, max_size=3)))
def test_numbers_of_up_to_12_digits_stay(numbers: list[list[str]]) -> None:
    for separator in " ", "-", "":
        text = ", ".join(separator.join(groups) for groups in numbers)
        assert shown(text) == text


@given(st.dates(), st.times(), st.integers(0, 99_999))
def test_a_date_and_a_short_number_stay(day: date, at: time, count: int) -> None:
    text = f"{count} on {day.isoformat()}, {at:%H:%M} of {day:%d-%m-%Y}"
    assert shown(text) == text


@given(st.integers(0, 60), st.integers(1, 60))
def test_no_part_of_a_secret_stands_at_the_cut(before: int, characters_max: int) -> None:
    secret = "sk-ABCDEFGHIJKLMNOPQRSTUVWX"
    found = shown("x" * before + " " + secret + " yz", characters_max=characters_max)
    assert not re.search("[A-Z]", found)
    assert found.replace(MASK, "") in "x" * before + " " + " yz"
    assert (MASK in found) == (before + 1 < characters_max)


def test_overlapping_secrets_are_one() -> None:
    patterns = (re.compile("abc"), re.compile("bcd"), re.compile("cde"))
    assert redacted("-abcde-abc", patterns, characters_max=99) == f"-{MASK}-{MASK}"


def test_only_the_beginning_of_texts_is_joined() -> None:
    assert joined(["ab", "cd", "ef"], 4) == "ab\nc"
    assert joined(["ab", "cd"], 99) == "ab\ncd"
    assert joined([], 9) == ""


def test_of_a_token_that_is_longer_than_what_is_looked_at_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    token = "eyJhbGciOiJIUzI1NiJ9." + "A" * 9000 + ".c2lnbmF0dXJl"
    prompts = PromptLog(redact=[], characters_max=30)
    prompts.write(request="req_1", tenant="t", model="m", texts=[f"say {token}"])
    assert line(caplog)["prompt"] == f"say {MASK}"


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    assert record.getMessage().isascii()
    found: dict[str, Any] = json.loads(record.getMessage())
    return found


def test_a_line_is_json_with_request_tenant_and_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = PromptLog(redact=[re.compile("Project X")], characters_max=30)
    texts = ["Be brief.", "Mail j@x.org about Project X\x1b[31m today"]
    prompts.write(request="req_1", tenant="té\nnant", model="m", texts=texts)
    assert line(caplog) == {
        "request": "req_1",
        "tenant": "té\nnant",
        "model": "m",
        "prompt": f"Be brief.\nMail {MASK} about {MASK}",
        "characters": 49,
        "truncated": True,
    }


def test_of_a_refused_prompt_nothing_is_logged_but_that(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = PromptLog(redact=[], characters_max=30)
    prompts.refused(request="req_1", tenant="t", model="m", code="content_policy_violation")
    assert line(caplog) == {
        "request": "req_1",
        "tenant": "t",
        "model": "m",
        "prompt": None,
        "refused": "content_policy_violation",
    }

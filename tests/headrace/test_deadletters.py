"""`headrace deadletters`: on a real nats-server, with nothing else of ours running."""

import json
import os
import pty
import subprocess
import time
from typing import Any

import msgspec
import pytest

from headrace import operate
from headrace.bus import Bus
from headrace.deadletters import place_of
from schemas import subjects
from schemas.deadletter import DeadLetter, PastAttempt, encode_letter
from schemas.subjects import RequestSubject
from schemas.wire import Envelope, decode_envelope, encode_envelope
from tests.broker import with_bus
from tests.queue import (
    ODD_MODEL,
    ODD_TENANT,
    asked,
    command,
    envelope,
    headrace,
    place,
    pull,
    subjects_of,
)
from tests.servers import ROOT, free_port

PROMPT = (7001, 7002, 7003)


def letter(subject: RequestSubject, **more: Any) -> DeadLetter:
    """Return what a worker would have written of a request under a subject."""
    facts: dict[str, Any] = {
        "request": subject.request,
        "tenant": subject.tenant,
        "model": subject.model,
        "reason": "3 workers died while they ran it",
        "died_s": time.time(),
        "tokens": 4,
        "envelope": encode_envelope(envelope(subject, prompt=PROMPT)),
        "place": str(subject),
        "history": tuple(
            PastAttempt(worker=f"w{n}", started_s=1e9 + n, heard_s=1e9 + n + 0.5, tokens=n,
                        ended="died")
            for n in (1, 2, 3)
        ),
    }  # fmt: skip
    return DeadLetter(**facts | more)


def buried(url: str, *letters: DeadLetter) -> None:
    async def store(bus: Bus) -> None:
        for each in letters:
            subject = subjects.deadletters_of(model=each.model, tenant=each.tenant)
            await bus.store(subject, encode_letter(each))

    with_bus(url, store)


def listed(url: str, *args: str) -> list[str]:
    return [row["id"] for row in asked(url, "deadletters", "list", *args)["rows"]]


def waiting(url: str) -> list[Envelope]:
    """Return the queued requests, each as the worker that pulls it would see it."""
    held = with_bus(url, subjects_of)
    found = []
    for subject in held:
        parsed = RequestSubject.parse(subject)
        [given] = with_bus(
            url, lambda bus, at=parsed: pull(bus, 1, model=at.model, partition=at.partition)
        )
        assert given.subject == subject
        found.append(decode_envelope(given.data))
    return found


def test_without_dead_letters_the_list_is_empty(url: str) -> None:
    assert asked(url, "deadletters", "list") == {"rows": []}
    result = headrace(url, "deadletters", "list")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)


def test_a_row_says_who_and_when_and_why_and_never_what_was_asked(url: str) -> None:
    subject = place(tenant=ODD_TENANT, model=ODD_MODEL, partition=1)
    before_s = time.time()
    buried(url, letter(subject))
    [row] = asked(url, "deadletters", "list")["rows"]
    assert row["id"] == subject.request
    assert (row["tenant"], row["model"]) == (ODD_TENANT, ODD_MODEL)
    assert (row["reason"], row["tokens"], row["attempts"]) == (
        "3 workers died while they ran it",
        4,
        3,
    )
    assert row["died_at"].endswith("+00:00")
    assert 0 <= row["age_s"] <= time.time() - before_s + 1
    shown = headrace(url, "deadletters", "list").stdout
    assert all(text in shown for text in (subject.request, ODD_TENANT, ODD_MODEL, row["reason"]))
    assert "7001" not in shown


def test_filters_choose_by_tenant_by_model_and_by_both(url: str) -> None:
    at = [
        place(tenant=tenant, model=model)
        for tenant in ("a", ODD_TENANT)
        for model in ("m", ODD_MODEL)
    ]
    buried(url, *[letter(subject) for subject in at])
    ids = [subject.request for subject in at]
    assert listed(url) == ids
    assert listed(url, "--tenant", "a") == ids[:2]
    assert listed(url, "--model", ODD_MODEL) == ids[1::2]
    assert listed(url, "--tenant", ODD_TENANT, "--model", ODD_MODEL) == ids[3:]
    assert listed(url, "--tenant", "nobody") == []


def test_show_says_how_each_attempt_ended_and_the_prompt_only_if_asked(url: str) -> None:
    subject = place()
    buried(url, letter(subject))
    found = asked(url, "deadletters", "show", subject.request)
    assert found["attempts"][1] == {
        "worker": "w2",
        "started_at": "2001-09-09T01:46:42.000+00:00",
        "ran_s": 0.5,
        "tokens": 2,
        "ended": "died",
    }
    assert (found["prompt_tokens"], found["sampling"]) == (3, {"max_tokens": 1})
    assert (found["shape"]["endpoint"], found["shape"]["model"]) == ("chat", "m")
    assert "prompt" not in found
    plain = headrace(url, "deadletters", "show", subject.request)
    assert plain.exit_code == 0
    assert "7001" not in plain.stdout
    assert "w2" in plain.stdout
    asked_for = asked(url, "deadletters", "show", subject.request, "--prompt")
    assert asked_for["prompt"] == list(PROMPT)


def test_an_id_that_is_no_dead_letter_is_exit_status_1(url: str) -> None:
    buried(url, letter(place()))
    for what in ("show", "requeue", "drop"):
        for request_id in ("req_" + 32 * "0", "*", ">", "ü", ""):
            result = headrace(url, "deadletters", what, request_id)
            assert (result.exit_code, result.stdout) == (1, ""), (what, request_id)
            assert result.stderr.startswith("headrace: ")
    assert len(listed(url)) == 1


def test_drop_forgets_one_and_leaves_the_others(url: str) -> None:
    gone, stays = place(), place()
    buried(url, letter(gone), letter(stays), letter(gone))
    assert asked(url, "deadletters", "drop", gone.request) == {"dropped": 2}
    assert listed(url) == [stays.request]
    assert headrace(url, "deadletters", "drop", gone.request).exit_code == 1
    assert with_bus(url, subjects_of) == {}


def test_a_requeued_request_is_a_new_one_at_its_old_place_and_its_letter_goes(url: str) -> None:
    subject = place(tenant=ODD_TENANT, partition=7)
    old = letter(subject)
    buried(url, old)
    before_s = time.time()
    [row] = asked(url, "deadletters", "requeue", subject.request, "--timeout-s", "90.5")["rows"]
    assert row["id"] == subject.request
    assert subjects.is_request_id(row["request"])
    assert listed(url) == []
    fresh = subject._replace(request=row["request"])
    assert with_bus(url, subjects_of) == {str(fresh): 1}
    [found] = waiting(url)
    was = decode_envelope(old.envelope)
    assert before_s + 90.5 <= found.deadline_s <= time.time() + 90.5
    assert found.reply == f"replies.operator.a=2Fb=20c.{row['request']}"
    assert found.shape == was.shape._replace(created_s=found.shape.created_s, keep=True)
    assert found.shape.created_s >= int(before_s)
    assert found.keep_answer
    same = {"request": "", "reply": "", "deadline_s": 0.0, "shape": was.shape, "keep_answer": False}
    assert msgspec.structs.replace(found, **same) == msgspec.structs.replace(was, **same)


def test_a_requeued_request_leaves_the_queue_at_its_new_deadline(url: str) -> None:
    subject = place()
    buried(url, letter(subject))
    asked(url, "deadletters", "requeue", subject.request, "--timeout-s", "840")
    [queued] = with_bus(url, subjects_of)
    found = asked(url, "peek", RequestSubject.parse(queued).request)
    assert found["state"] == "waiting"
    assert 800 < found["expires_in_s"] <= 840


def test_a_letter_of_an_older_worker_goes_where_its_prefix_belongs(url: str) -> None:
    subject = place()
    buried(url, letter(subject, place="", history=()))
    [row] = asked(url, "deadletters", "requeue", subject.request)["rows"]
    assert asked(url, "deadletters", "list") == {"rows": []}
    [found] = waiting(url)
    assert found.request == row["request"]
    assert list(with_bus(url, subjects_of)) == [str(place_of("", found))]


def test_a_letter_without_its_request_can_be_dropped_but_not_requeued(url: str) -> None:
    subject = place()
    buried(url, letter(subject, envelope=b""))
    found = asked(url, "deadletters", "show", subject.request)
    assert (found["reason"], found["prompt_tokens"]) == ("3 workers died while they ran it", None)
    assert headrace(url, "deadletters", "requeue", subject.request).exit_code == 1
    assert listed(url) == [subject.request]
    assert asked(url, "deadletters", "drop", subject.request) == {"dropped": 1}


def test_bytes_that_are_no_letter_are_listed_and_can_be_dropped(url: str) -> None:
    with_bus(url, lambda bus: bus.store("deadletters.m.t", b"what"))
    assert listed(url) == ["(unreadable)"]
    assert headrace(url, "deadletters", "requeue", "--all", "--yes").exit_code == 1
    assert asked(url, "deadletters", "drop", "(unreadable)") == {"dropped": 1}
    assert listed(url) == []


def test_of_two_who_requeue_one_letter_one_succeeds(url: str) -> None:
    subject = place()
    buried(url, letter(subject))
    assert headrace(url, "deadletters", "requeue", subject.request).exit_code == 0
    buried(url, letter(subject))  # as the second one had read it before the first was done
    result = headrace(url, "deadletters", "requeue", subject.request)
    assert (result.exit_code, "two minutes" in result.stderr) == (1, True)
    assert len(with_bus(url, subjects_of)) == 1


def test_a_queue_that_is_full_leaves_the_letter(url: str) -> None:
    subject = place()
    buried(url, letter(subject))

    async def close(bus: Bus) -> None:
        config = (await bus.api("STREAM.INFO.REQUESTS"))["config"]
        await bus.api("STREAM.UPDATE.REQUESTS", config | {"max_bytes": 1})

    with_bus(url, close)
    result = headrace(url, "deadletters", "requeue", subject.request)
    assert (result.exit_code, "the broker refused" in result.stderr) == (1, True)
    assert listed(url) == [subject.request]


def test_a_queue_that_becomes_full_hides_no_id_of_what_went_into_it(url: str) -> None:
    old, new = place(), place()
    buried(url, letter(old), letter(new))

    async def narrow(bus: Bus) -> None:
        config = (await bus.api("STREAM.INFO.REQUESTS"))["config"]
        await bus.api("STREAM.UPDATE.REQUESTS", config | {"max_msgs": 1})

    with_bus(url, narrow)
    result = headrace(url, "deadletters", "requeue", "--all", "--yes", "--json")
    assert (result.exit_code, "the broker refused" in result.stderr) == (1, True)
    [row] = json.loads(result.stdout)["rows"]
    assert row["id"] == new.request
    assert [each.request for each in waiting(url)] == [row["request"]]
    assert listed(url) == [old.request]


@pytest.mark.parametrize("what", ["requeue", "drop"])
def test_all_of_a_tenant_go_and_the_others_stay(url: str, what: str) -> None:
    theirs = [place(tenant="a", partition=number % 32) for number in range(120)]
    other = place(tenant="b")
    buried(url, *[letter(subject) for subject in theirs], letter(other))
    told = asked(url, "deadletters", what, "--all", "--tenant", "a", "--yes")
    assert listed(url) == [other.request]
    queued = with_bus(url, subjects_of)
    if what == "drop":
        assert (told, queued) == ({"dropped": 120}, {})
        return
    assert [row["id"] for row in told["rows"]] == [subject.request for subject in theirs]
    fresh = {row["request"] for row in told["rows"]}
    assert {RequestSubject.parse(subject).request for subject in queued} == fresh
    assert len(fresh) == 120


def test_all_without_a_terminal_needs_yes(url: str) -> None:
    buried(url, letter(place()))
    for what in ("requeue", "drop"):
        result = headrace(url, "deadletters", what, "--all")
        assert (result.exit_code, "--yes" in result.stderr) == (1, True)
    assert len(listed(url)) == 1


@pytest.mark.parametrize(("answer", "status", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 1)])
def test_all_on_a_terminal_asks(url: str, answer: bytes, status: int, left: int) -> None:
    buried(url, letter(place()))
    terminal, end = pty.openpty()
    try:
        os.write(terminal, answer)
        asking = subprocess.run(
            command("deadletters", "drop", "--all", "--nats-url", url),
            stdin=end,
            capture_output=True,
            cwd=ROOT,
            timeout=120,
        )
    finally:
        os.close(terminal)
        os.close(end)
    assert asking.returncode == status, asking.stderr
    assert b"Drop 1 dead letter?" in asking.stderr
    assert len(listed(url)) == left


WRONG = [
    ("drop",),
    ("requeue",),
    ("drop", "req_1", "--all"),
    ("requeue", "req_1", "--tenant", "a"),
    ("drop", "--all", "--tenant", "", "--yes"),
    ("list", "--model", ""),
    ("requeue", "--all", "--yes", "--timeout-s", "0"),
    ("requeue", "--all", "--yes", "--timeout-s", "841"),
    ("requeue", "--all", "--yes", "--timeout-s", "nan"),
]


def test_a_wrong_command_line_is_exit_status_2_and_changes_nothing(url: str) -> None:
    buried(url, letter(place()))
    for args in WRONG:
        assert headrace(url, "deadletters", *args).exit_code == 2, args
    assert len(listed(url)) == 1


def test_without_a_broker_it_is_exit_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "CONNECT_TIMEOUT_S", 0.3)
    nowhere = f"nats://127.0.0.1:{free_port()}"
    for args in (("list",), ("show", "req_1"), ("requeue", "req_1"), ("drop", "req_1")):
        result = headrace(nowhere, "deadletters", *args)
        assert (result.exit_code, result.stdout) == (2, "")


def test_the_list_as_json_is_one_line(url: str) -> None:
    buried(url, letter(place()), letter(place()))
    [line] = headrace(url, "deadletters", "list", "--json").stdout.splitlines()
    assert len(json.loads(line)["rows"]) == 2

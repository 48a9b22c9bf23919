"""From messages to token ids: the rendered prompt is canonical."""

import json
import threading
import time
from typing import Any

import msgspec
import pytest

from ingress.prompt import Prompter, UnusableFiles
from schemas.errors import ContextLengthExceeded, InvalidRequest
from schemas.openai import ChatMessage
from workers.sim.vocabulary import tokenizer_files

FILES = tokenizer_files()
PROMPTER = Prompter(FILES)


def messages(*turns: dict[str, Any]) -> list[ChatMessage]:
    return msgspec.convert(list(turns), list[ChatMessage])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def templated(template: Any) -> Prompter:
    """Return a prompter with a template of our own."""
    config = {"chat_template": template, "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    return Prompter({"tokenizer.json": FILES["tokenizer.json"]} | _config(config))


def _config(config: dict[str, Any]) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(config).encode()}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("text", ["Hello", "", "¿Qué?\n\n日本語 🙂", " lead and trail "])
def test_content_as_a_part_has_the_same_ids_as_a_string(text: str) -> None:
    turns = ({"role": "system", "content": "Be brief."}, user(text))
    assert PROMPTER.chat(messages(*turns[:1], user(parts(text))), None) == PROMPTER.chat(
        messages(*turns), None
    )


def test_two_turns_as_parts_have_the_same_ids() -> None:
    plain = messages(user("a"), {"role": "assistant", "content": "b"}, user("c"))
    split = messages(
        user(parts("a")), {"role": "assistant", "content": parts("b")}, user(parts("c"))
    )
    assert PROMPTER.chat(split, None) == PROMPTER.chat(plain, None)


def test_several_parts_are_lines_of_one_string() -> None:
    assert PROMPTER.chat(messages(user(parts("a", "b"))), None) == PROMPTER.chat(
        messages(user("a\nb")), None
    )


def test_different_messages_have_different_ids() -> None:
    said = [
        messages(user("a")),
        messages(user("b")),
        messages({"role": "system", "content": "a"}),
        messages(user("a"), user("a")),
    ]
    ids = [tuple(PROMPTER.chat(each, None)) for each in said]
    assert len(set(ids)) == len(ids)


def test_a_longer_conversation_begins_with_the_shorter_ones_ids() -> None:
    short = PROMPTER.chat(messages(user("Hello")), None)
    long = PROMPTER.chat(
        messages(user("Hello"), {"role": "assistant", "content": "Hi"}, user("More")), None
    )
    assert long[: len(short) - 1] == short[:-1]  # the last token may merge with what follows


def test_a_text_prompt_is_tokenised_as_it_is() -> None:
    ids = PROMPTER.text("Hello world")
    assert ids == PROMPTER.text("Hello world")
    assert 1 <= len(ids) <= 11
    assert PROMPTER.text("") == []


def test_given_token_ids_pass_and_unknown_ones_are_refused() -> None:
    assert PROMPTER.tokens([0, 5, 2047]) == [0, 5, 2047]
    with pytest.raises(InvalidRequest) as refused:
        PROMPTER.tokens([0, 2048])
    assert refused.value.param == "prompt"


def test_a_template_that_raises_is_the_clients_error() -> None:
    prompter = templated("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        prompter.chat(messages(user("x")), None)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[5].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] | int + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set x = messages.append(1) %}",
        "{{ range(10 ** 9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_that_fails_is_never_our_fault(template: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        templated(template).chat(messages(user("x")), None)
    assert refused.value.param == "messages"


def test_a_model_without_a_template_serves_no_chats() -> None:
    prompter = Prompter({"tokenizer.json": FILES["tokenizer.json"]})
    with pytest.raises(InvalidRequest, match="template"):
        prompter.chat(messages(user("x")), None)
    assert prompter.text("x")


def test_a_template_knows_the_special_tokens_tools_and_turns() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.name is defined %}({{ m.name }}){% endif %};{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ eos_token }}{{ add_generation_prompt }}"
    )
    prompter = templated(source)
    told = prompter.chat(messages(user("x"), user("y") | {"name": "Ann"}), [{"é": 1}])
    assert told == prompter.text('<b>user:x;user:y(Ann);[{"é": 1}]<e>True')


def test_a_template_of_its_own_file_wins() -> None:
    files = {"tokenizer.json": FILES["tokenizer.json"], "chat_template.jinja": b"from file"}
    prompter = Prompter(files | _config({"chat_template": "from config"}))
    assert prompter.chat(messages(user("x")), None) == prompter.text("from file")


def test_of_several_named_templates_the_default_one_serves() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    prompter = templated(named)
    assert prompter.chat(messages(user("x")), None) == prompter.text("d")


def test_the_content_is_no_template() -> None:
    prompter = templated("{{ messages[0].content }}")
    for text in ("{{ 1 + 1 }}", "{% raw %}", "{# x #}"):
        assert prompter.chat(messages(user(text)), None) == prompter.text(text)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b""},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": FILES["tokenizer.json"], "tokenizer_config.json": b"{"},
        {"tokenizer.json": FILES["tokenizer.json"], "chat_template.jinja": b"{% if %}"},
        {"tokenizer.json": FILES["tokenizer.json"], "chat_template.jinja": b"\xff"},
        {"tokenizer.json": FILES["tokenizer.json"], "tokenizer_config.json": b"[]"},
        {
            "tokenizer.json": FILES["tokenizer.json"],
            "tokenizer_config.json": b'{"chat_template": [{}]}',
        },
    ],
)
def test_files_that_cannot_be_used_say_so(files: dict[str, bytes]) -> None:
    with pytest.raises(UnusableFiles):
        Prompter(files)


@pytest.mark.parametrize("text", ["the river carries water " * 100_000, "x" * 2_000_000])
def test_a_text_far_over_the_context_is_refused_after_a_look_at_its_beginning(text: str) -> None:
    with pytest.raises(ContextLengthExceeded, match="262144") as refused:
        PROMPTER.text(text, tokens_max=1000)
    assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as refused:
        PROMPTER.chat(messages(user(text)), None, tokens_max=1000)
    assert refused.value.param == "messages"


def test_a_long_text_that_fits_is_tokenised_whole() -> None:
    text = "the river carries water " * 20_000
    whole = PROMPTER.text(text)
    assert PROMPTER.text(text, tokens_max=len(whole)) == whole
    assert len(whole) > 20_000


def _longest_gap() -> float:
    """Tokenise a long text; return the part of that in which no other thread ran at a stretch."""
    gaps_s = [0.0]
    done = threading.Event()

    def watch() -> None:
        last_s = time.monotonic()
        while not done.wait(0.002):
            now_s = time.monotonic()
            gaps_s.append(now_s - last_s)
            last_s = now_s

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun_s = time.monotonic()
    PROMPTER.text("the river carries water " * 50_000)
    took_s = time.monotonic() - begun_s
    done.set()
    watcher.join()
    return max(gaps_s) / took_s


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    assert min(_longest_gap() for _ in range(4)) < 1 / 2  # the machine may stand still, too

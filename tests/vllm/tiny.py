"""Models of random weights that answer at once, with the simulated engine's tokenizer.

What they say is noise, but the same noise from whoever asks: for comparing servers in little time.
Their chat templates show tools and their calls.
"""

import json
from pathlib import Path
from typing import Any

from workers.sim.vocabulary import tokenizer_files

CONTEXT_TOKENS = 2048
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""The further tokens of the thinking model; their ids follow on the others."""
_VOCABULARY = 2048
_BLANKS = "ĠĊĉč"  # as a byte-level BPE writes them
_ENDS_THINKING = 130.0
"""The weight of `</think>`: it becomes the likeliest token once in some ten."""
_THINKING_TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
"""It loops over the parts of content, so that vLLM's server gives it parts."""


def make_tiny_model(folder: Path) -> Path:
    """Write the model into a folder and return it."""
    return _write(folder, _model(_VOCABULARY), tokenizer_files())


def make_thinking_model(folder: Path) -> Path:
    """Write a model that thinks at first: its `</think>` comes after some tokens of noise."""
    import torch

    files = thinking_files()
    vocabulary: dict[str, int] = json.loads(files["tokenizer.json"])["model"]["vocab"]
    blank = [token for name, token in vocabulary.items() if not name.strip(_BLANKS)]
    model = _model(_VOCABULARY + len(MARKUP))
    with torch.no_grad():
        # One dimension is the same at each token, and only the logits of these look at it.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[_VOCABULARY:] = 0.0
        model.lm_head.weight[_VOCABULARY + MARKUP.index("</think>"), 0] = _ENDS_THINKING
        model.lm_head.weight[blank] = 0.0
        model.lm_head.weight[blank, 0] = -_ENDS_THINKING  # else it may fill an object with them
    return _write(folder, model, files)


def thinking_files() -> dict[str, bytes]:
    """Return the thinking model's tokenizer files by name."""
    files = tokenizer_files()
    tokenizer: dict[str, Any] = json.loads(files["tokenizer.json"])
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": _THINKING_TEMPLATE}
    # Not special, as with the models that have them: a text shows them.
    pattern = tokenizer["added_tokens"][-1] | {"special": False}
    for token, text in enumerate(MARKUP, _VOCABULARY):
        entry = pattern | {"id": token, "content": text}
        tokenizer["added_tokens"].append(entry)
        config["added_tokens_decoder"][str(token)] = {
            name: value for name, value in entry.items() if name != "id"
        }
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def _model(vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.3,  # so that no two tokens are nearly as likely
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def _write(folder: Path, model: Any, files: dict[str, bytes]) -> Path:
    model.save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder

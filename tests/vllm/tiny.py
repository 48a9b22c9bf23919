"""A model of random weights that answers at once, with the simulated engine's tokenizer.

What it says is noise, but the same noise from whoever asks: for comparing servers in little time.
Its chat template shows tools and their calls.
"""

from pathlib import Path

from workers.sim.vocabulary import tokenizer_files

CONTEXT_TOKENS = 2048


def make_tiny_model(folder: Path) -> Path:
    """Write the model into a folder and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=2048,
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
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder

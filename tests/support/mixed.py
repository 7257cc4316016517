"""Tiny models with random weights, two of whose four layers attend to everything."""

from pathlib import Path

import torch
from transformers import JambaConfig, JambaForCausalLM, Llama4ForCausalLM, Llama4TextConfig


def save_llama4(folder: Path, chunk: int) -> Path:
    """Saves a Llama 4; its other layers attend to chunks of `chunk` tokens."""
    torch.manual_seed(1)
    config = Llama4TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, intermediate_size_mlp=96, num_hidden_layers=4, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, attention_chunk_size=chunk,
        num_local_experts=1, initializer_range=0.3, no_rope_layers=[1, 0] * 2,
        layer_types=["chunked_attention", "full_attention"] * 2,
    )  # fmt: skip
    Llama4ForCausalLM(config).save_pretrained(folder)
    return folder


def save_jamba(folder: Path) -> Path:
    """Saves a Jamba; its other layers have a state."""
    torch.manual_seed(1)
    config = JambaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        num_experts_per_tok=1, initializer_range=0.3,
    )  # fmt: skip
    JambaForCausalLM(config).save_pretrained(folder)
    return folder

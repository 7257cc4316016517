"""A tiny Llama with random weights, large enough for distinct token probabilities."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, KV_HEADS, GROUP, HEAD_SIZE = 2, 2, 2, 32


def save_llama(folder: Path, longest: int) -> Path:
    """Saves the model for contexts of up to `longest` tokens; its weights are always the same."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=HEAD_SIZE,
        num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS, max_position_embeddings=longest,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder

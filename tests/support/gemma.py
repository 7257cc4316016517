"""A tiny Gemma 3 with random weights: layers with a window, and layers without one."""

from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

LAYERS, WINDOW = 3, 24


def save_gemma(folder: Path) -> Path:
    """Saves the model; its second layer has no window, and its weights are always the same."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, sliding_window=WINDOW,
        query_pre_attn_scalar=48, initializer_range=0.3, bos_token_id=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            # A new model has norms of zero, which stand for one.
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder

"""The families of models, and the ways of attention to serve them with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.config import KEY

MAX_MODEL_LEN = 1024
SHORT_PROMPT, LONG_PROMPT, NEW_TOKENS = 200, 600, 10
"""Tokens of a prompt that fits the budget with its answer, of a prompt that does not, and of the answer."""
BUDGET = 256
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Common fields of the configurations; a family may override them."""


@dataclass(frozen=True)
class Family:
    """Models that vLLM builds in the same way."""

    name: str
    """Its common name."""
    configuration: str
    """Configuration class of transformers."""
    architecture: str
    """Name of vLLM's model class."""
    special: str
    """Differences from Llama, for the table."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from `SMALL`; None removes a field."""
    only_windows: bool = False
    """Whether no layer attends to its whole context, so that nothing is sparse."""

    @property
    def key(self) -> str:
        """The name for options and files."""
        return self.name.lower().replace(" ", "_").replace(".", "_").replace("-", "_")

    def write(self, folder: Path) -> None:
        """Writes the configuration of a tiny model into a folder."""
        import transformers

        fields = {name: value for name, value in {**SMALL, **self.changes}.items() if value is not None}
        config = getattr(transformers, self.configuration)(**fields)
        config.architectures = [self.architecture]
        config.save_pretrained(folder)


_GATED_DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    # The state is larger than the keys of a block. Blocks then grow to a number of tokens that is not a power of two.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "head_dim": 256,
}
_SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_MIXED_WINDOWS = {"sliding_window": 64, "layer_types": [SLIDING, FULL, SLIDING, FULL]}

_FAMILIES = (
    Family("Llama", "LlamaConfig", "LlamaForCausalLM", "grouped queries"),
    Family(
        "Mistral",
        "MistralConfig",
        "MistralForCausalLM",
        "every layer a sliding window",
        {"sliding_window": 64},
        only_windows=True,
    ),
    Family("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", "keys with a bias"),
    Family("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", "normalised queries and keys"),
    Family(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "experts",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    Family(
        "Phi-3",
        "Phi3Config",
        "Phi3ForCausalLM",
        "head size 96",
        {"hidden_size": 384, "head_dim": None, "original_max_position_embeddings": 4096},
    ),
    Family(
        "Granite",
        "GraniteConfig",
        "GraniteForCausalLM",
        "a softmax scale of its own",
        {"attention_multiplier": 0.2, "head_dim": None},
    ),
    Family(
        "GPT-NeoX",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        "as many KV heads as query heads",
        # With random weights and a quarter of each head rotated, it repeats a few tokens.
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    Family("OLMo 2", "Olmo2Config", "Olmo2ForCausalLM", "norms behind the layers", {"head_dim": None}),
    Family(
        "Gemma 2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "capped logits, sliding windows beside full attention",
        {**_MIXED_WINDOWS, "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 5.0},
    ),
    Family(
        "Gemma 3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "sliding windows beside full attention",
        {**_MIXED_WINDOWS, "head_dim": 256, "query_pre_attn_scalar": 256},
    ),
    Family(
        "Gemma 3n",
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        "layers that share a cache, sliding windows",
        {
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "intermediate_size": [256] * 6,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "sliding_window": 64,
            "layer_types": [SLIDING, FULL] * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
        },
    ),
    Family(
        "Cohere 2",
        "Cohere2Config",
        "Cohere2ForCausalLM",
        "sliding windows beside full attention without positions",
        {**_MIXED_WINDOWS, "logit_scale": 1.0, "tie_word_embeddings": True},
    ),
    Family(
        "Llama 4",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        "attention to chunks, experts",
        {
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
            "layer_types": [CHUNKED, CHUNKED, CHUNKED, FULL],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Family(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        "learned sink logits, sliding windows, experts",
        {**_MIXED_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2, "quantization_config": None},
    ),
    Family(
        "Qwen3-Next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "hybrid: gated delta net, experts",
        {**_GATED_DELTA_NET, **_SHARED_EXPERT},
    ),
    Family("Qwen3.5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "hybrid: gated delta net", _GATED_DELTA_NET),
    Family(
        "Qwen3.5-MoE",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        "hybrid: gated delta net, experts",
        {**_GATED_DELTA_NET, **_SHARED_EXPERT},
    ),
    Family(
        "LFM2",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        "hybrid: short convolutions",
        {
            "layer_types": ["conv", FULL, "conv", FULL],
            "conv_dim": 256,
            "block_dim": 256,
            "head_dim": None,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "Jamba",
        "JambaConfig",
        "JambaForCausalLM",
        "hybrid: Mamba, experts",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 16,
            "head_dim": None,
        },
    ),
    Family(
        "Nemotron-H",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        "hybrid: Mamba 2",
        {
            "num_hidden_layers": None,
            "layers_block_type": [LINEAR, FULL, "mlp", LINEAR, FULL, "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "chunk_size": 64,
        },
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        "MLA",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": None,
        },
    ),
    Family("BLOOM", "BloomConfig", "BloomForCausalLM", "ALiBi", {"n_layer": 2, "n_head": 4, "head_dim": None}),
    Family(
        "Mamba 2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        "no attention",
        {"num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 2, "chunk_size": 64},
    ),
)
FAMILIES: Mapping[str, Family] = {family.key: family for family in _FAMILIES}


@dataclass(frozen=True)
class Way:
    """One way of attention, and the expected results."""

    backend: str
    settings: Mapping[str, Any]
    """The plugin's section of `--additional-config`."""
    bits: bool = True
    """Whether a CPU decodes contexts within the budget bit for bit like dense attention."""
    judged: bool = True
    """Whether the long context decodes in this project's kernels."""
    selects: bool = False
    """Whether only some tokens of the long context are read."""
    evicts: bool = False
    """Whether tokens of the long context are given back."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        return {"attention_backend": self.backend, "additional_config": {KEY: dict(self.settings)}}


def _selecting(preset: str, **more: object) -> Way:
    return Way(preset, {"selection": {"budget_tokens": BUDGET}, "min_context_tokens": 16, **more}, selects=True)


def _keeping(method: str, preset: str, **more: object) -> Way:
    compaction = {"method": method, "budget_tokens": BUDGET, "min_context_tokens": 0, **more}
    return Way(preset, {"compaction": compaction}, judged=False, selects=True, evicts=True)


_ABOVE_SHORT = BUDGET + 1
WAYS: Mapping[str, Way] = {
    **{preset: _selecting(preset) for preset in ("unique", "unique_paper", "quest", "infllm", "mean")},
    # Compaction refuses many of the families. The pages read are the same without it.
    "streaming_llm": _selecting("streaming_llm", compaction=None),
    "dense": Way("dense", {"min_context_tokens": 16}, judged=False),
    # Random keys have random directions: about half of the groups are skipped.
    "sinkrouter": Way(
        "sinkrouter",
        {
            "routing": {"threshold": 0.0, "dense_layers": 0, "accept": "uncalibrated"},
            "min_context_tokens": _ABOVE_SHORT,
        },
    ),
    "art": Way(
        "art",
        {
            "stopping": {
                "scale_tolerance": 1.0, "direction_tolerance": 0.1, "patience": 2, "block_tokens": 64,
            },
            "min_context_tokens": _ABOVE_SHORT,
        },
    ),
    # Beyond the budget, the referee compares votes, kept tokens and moved rows with a reference.
    "snapkv": _keeping("snapkv", "dense", window_tokens=16),
    "evicting h2o": _keeping("h2o", "dense", every=16),
    "evicting r_kv": _keeping("r_kv", "dense", every=16),
    "every page": Way(
        "dense", {"stopping": {"patience": 0, "block_tokens": 64}, "min_context_tokens": 16}, bits=False
    ),
}  # fmt: skip
"""The presets by name, with a budget that the short prompt fits, and `every page`: dense attention in this project's
kernels."""
FEATURES_OF = "features"
"""Takes the place of a family in the cells of features."""
LORA, STRUCTURED, PROMPT_LOGPROBS = "LoRA", "structured output", "prompt log probabilities"
PREFIX_OF_HYBRID = "prefix caching of a hybrid"
EAGLE, EAGLE_3, MTP, DRAFT_MODEL = "EAGLE", "EAGLE-3", "MTP", "draft model"
IMAGES, AUDIO = "images (Idefics 3)", "audio (Qwen2-Audio)"
FEATURES = (
    LORA, STRUCTURED, PROMPT_LOGPROBS, PREFIX_OF_HYBRID, EAGLE, EAGLE_3, MTP, DRAFT_MODEL, IMAGES, AUDIO
)  # fmt: skip
"""Features of vLLM that are tested with `unique`."""

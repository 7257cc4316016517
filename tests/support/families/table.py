"""The families of models, and the ways of attention that serve them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.presets import serving

from vllm_sparse_plugin.config import KEY

MAX_MODEL_LEN = 1024
SHORT_PROMPT, LONG_PROMPT, NEW_TOKENS = 200, 600, 10
"""Tokens of a prompt that fits the budget with its answer, of a prompt that does not, and of the answer."""
BUDGET = 256
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
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

    configuration: str
    """Class of transformers."""
    architecture: str
    """Class of vLLM."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from `SMALL`; None removes a field."""
    refuses: Collection[str] = ()
    """Ways of attention that the plugin refuses."""
    only_windows: bool = False
    """Whether no layer attends to its whole context, so that nothing is sparse."""

    def write(self, folder: Path) -> None:
        """Writes the configuration of a tiny model into a folder."""
        import transformers

        fields = {name: value for name, value in {**SMALL, **self.changes}.items() if value is not None}
        config = getattr(transformers, self.configuration)(**fields)
        config.architectures = [self.architecture]
        config.save_pretrained(folder)


def _family(name: str, configuration: str = "", refuses: Collection[str] = (), **changes: Any) -> Family:
    return Family(f"{configuration or name}Config", f"{name}ForCausalLM", changes, refuses)


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
        return serving({"attention_backend": self.backend, "additional_config": {KEY: dict(self.settings)}})


def _selecting(preset: str, **more: object) -> Way:
    return Way(preset, {"selection": {"budget_tokens": BUDGET}, "min_context_tokens": 16, **more}, selects=True)


def _keeping(method: str, preset: str, **more: object) -> Way:
    compaction = {"method": method, "budget_tokens": BUDGET, "min_context_tokens": 0, **more}
    return Way(preset, {"compaction": compaction}, judged=False, selects=True, evicts=True)


WAYS: Mapping[str, Way] = {
    **{preset: _selecting(preset) for preset in ("unique", "unique_paper", "quest")},
    # Compaction refuses many of the families. The pages read are the same without it.
    "streaming_llm": _selecting("streaming_llm", compaction=None),
    "dense": Way("dense", {"min_context_tokens": 16}, judged=False),
    # Random keys have random directions: about half of the groups are skipped.
    "sinkrouter": Way("sinkrouter", {
        "routing": {"threshold": 0.0, "dense_layers": 0, "accept": "uncalibrated"}, "min_context_tokens": BUDGET + 1,
    }),
    "art": Way("art", {
        "stopping": {"scale_tolerance": 1.0, "direction_tolerance": 0.1, "patience": 2, "block_tokens": 64},
        "min_context_tokens": BUDGET + 1,
    }),
    # Beyond the budget, the referee compares votes, kept tokens and moved rows with a reference.
    "snapkv": _keeping("snapkv", "dense", window_tokens=16),
    "evicting h2o": _keeping("h2o", "dense", every=16),
    "every page": Way("dense", {"stopping": {"patience": 0, "block_tokens": 64}, "min_context_tokens": 16}, bits=False),
}  # fmt: skip
"""The presets by name, with a budget that the short prompt fits, and `every page`: dense attention in this project's
kernels."""

_EVICTING = [name for name, way in WAYS.items() if way.evicts]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_GATED_DELTA_NET = {
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    # The state is larger than the keys of a block. Blocks then grow to a number of tokens that is not a power of two.
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "head_dim": 256,
}  # fmt: skip
_GATED_EXPERTS = {**_GATED_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 128}
_WINDOWS = {"sliding_window": 64, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
_GEMMA = {**_WINDOWS, "head_dim": 256, "query_pre_attn_scalar": 256}
FAMILIES = {
    "llama": _family("Llama"),
    "mistral": replace(_family("Mistral", refuses=_EVICTING, sliding_window=64), only_windows=True),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3"),
    "qwen3_moe": _family("Qwen3Moe", **_EXPERTS),
    "glm_4_moe": _family(
        "Glm4Moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, first_k_dense_replace=1,
        partial_rotary_factor=0.5, use_qk_norm=True,
    ),
    "minimax_m2": _family(
        "MiniMaxM2", num_local_experts=4, num_experts_per_tok=2, rotary_dim=32, scoring_func="sigmoid",
    ),
    "hy_v3": _family(
        "HYV3", num_experts=4, num_experts_per_tok=2, expert_hidden_dim=128, moe_intermediate_size=128,
        first_k_dense_replace=1, route_norm=True, qk_norm=True,
    ),
    # The heads of layers without a window have 512 elements.
    "gemma_4": _family("Gemma4", "Gemma4Text", **_GEMMA),
    "phi_3": _family("Phi3", hidden_size=384, head_dim=None, original_max_position_embeddings=4096),
    "granite": _family("Granite", attention_multiplier=0.2, head_dim=None),
    # With random weights and a quarter of each head rotated, it repeats a few tokens.
    "gpt_neox": _family("GPTNeoX", head_dim=None, num_key_value_heads=None, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    }),
    "olmo_2": _family("Olmo2", head_dim=None),
    "gemma_2": _family("Gemma2", **_GEMMA, attn_logit_softcapping=5.0),
    "gemma_3": _family("Gemma3", "Gemma3Text", **_GEMMA),
    "gemma_3n": _family(
        "Gemma3n", "Gemma3nText", _EVICTING, vocab_size_per_layer_input=512, hidden_size_per_layer_input=32,
        intermediate_size=[256] * 6, num_hidden_layers=6, num_kv_shared_layers=2, sliding_window=64,
        layer_types=[SLIDING, FULL] * 3, activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2, laurel_rank=8,
    ),
    "cohere_2": _family("Cohere2", **_WINDOWS, logit_scale=1.0, tie_word_embeddings=True),
    "llama_4": _family(
        "Llama4", "Llama4Text", _EVICTING, intermediate_size_mlp=256, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=128, layer_types=[CHUNKED, CHUNKED, CHUNKED, FULL], no_rope_layers=[1, 1, 1, 0],
    ),
    "gpt_oss": _family(
        "GptOss", refuses=["sinkrouter"], **_WINDOWS, num_local_experts=4, num_experts_per_tok=2,
        quantization_config=None,
    ),
    "qwen3_next": _family("Qwen3Next", **_GATED_EXPERTS),
    "qwen3_5": _family("Qwen3_5", "Qwen3_5Text", **_GATED_DELTA_NET),
    "qwen3_5_moe": _family("Qwen3_5Moe", "Qwen3_5MoeText", **_GATED_EXPERTS),
    "lfm2": _family(
        "Lfm2", layer_types=["conv", FULL, "conv", FULL], conv_dim=256, block_dim=256, head_dim=None,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=True,
    ),
    # vLLM's CPU build cannot run it.
    "jamba": _family(
        "Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, mamba_dt_rank=16, head_dim=None,
    ),
    "nemotron_h": _family(
        "NemotronH", num_hidden_layers=None, layers_block_type=[LINEAR, FULL, "mlp", LINEAR, FULL, "mlp"],
        ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=64, n_groups=2, chunk_size=64,
    ),
    "deepseek_v3": _family(
        "DeepseekV3", refuses=WAYS, num_key_value_heads=4, first_k_dense_replace=4, n_routed_experts=4, kv_lora_rank=64,
        q_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, head_dim=None,
    ),
    "bloom": _family("Bloom", refuses=WAYS, n_layer=2, n_head=4, head_dim=None),
    "mamba_2": _family("Mamba2", refuses=WAYS, num_heads=8, head_dim=64, state_size=16, n_groups=2, chunk_size=64),
}  # fmt: skip

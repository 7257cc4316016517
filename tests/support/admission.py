"""Small models and engine configurations for the tests of admission."""

import pytest
from support.presets import serving
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_sparse_plugin.errors import ConfigurationError

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
ENCODER_DECODER = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "is_encoder_decoder": True,
}
MODELS = {
    "LlamaForCausalLM": SMALL | {"model_type": "llama"},
    "DeepseekV2ForCausalLM": SMALL
    | {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
    },
    "BloomForCausalLM": {"model_type": "bloom", "vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "MambaForCausalLM": {
        "model_type": "mamba",
        "vocab_size": 256,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
    },
    "JambaForCausalLM": SMALL
    | {
        "model_type": "jamba",
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
    },
    "FalconH1ForCausalLM": SMALL | {"model_type": "falcon_h1"},
    "BartForConditionalGeneration": ENCODER_DECODER | {"model_type": "bart", "max_position_embeddings": 512},
    "WhisperForConditionalGeneration": ENCODER_DECODER | {"model_type": "whisper", "max_target_positions": 512},
}
UNIQUE = "allowed with attention backend unique: "


def settings(**selection: object) -> dict:
    return {"sparse_attention": {"selection": selection}}


def connector(name: str) -> dict:
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}}


BOTH_WAYS = connector("NixlConnector")
BOTH_WAYS["kv_transfer_config"]["kv_connector_extra_config"] = {"bidirectional_kv_xfer": True}
"""The engine of prompts also takes the blocks of answers."""
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}


def engine_config(model: str, **arguments: object) -> VllmConfig:
    given = {
        "model": model,
        "attention_backend": "unique",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    return EngineArgs(**serving(given | arguments)).create_engine_config()


def refusal(model: str, **arguments: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        engine_config(model, **arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def lossless(**sections: object) -> dict:
    """The arguments of an engine in lossless mode, with further sections of settings."""
    return {"additional_config": {"sparse_attention": {"lossless": {"draft_tokens": 3}, **sections}}}


def drafted(model: str, method: str = "draft_model", how: str = "dense", **more: object) -> dict:
    """Arguments of an engine with a draft of the same configuration."""
    return {
        "speculative_config": {"model": model, "method": method, "num_speculative_tokens": 2, **more},
        "additional_config": {"sparse_attention": {"speculation": {"draft": how}}},
    }


UNCALIBRATED = {"accept": "uncalibrated"}


def routed(**settings: object) -> dict:
    return {"attention_backend": "sinkrouter", "additional_config": {"sparse_attention": {"routing": settings}}}


CUBIC = {"cubic": [0.5, 0, 0, 0], "shortest": 16, "longest": 256}


def on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "is_cuda", lambda self: True)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls: DeviceCapability(*capability)))

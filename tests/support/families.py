"""Tiny models of several families with random, sharp weights, served by vLLM in this process one after the other.

`python tests/support/families.py FAMILY FOLDER` writes the model's configuration into the folder and prints as JSON
what each way of attention decodes: ids of tokens and their log probabilities.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
from pathlib import Path

import torch

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "quantization_config": None,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
            "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", FULL],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "intermediate_size": [128] * 6,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "sliding_window": 64,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
        },
    ),
}
"""Configuration class of transformers, architecture of vLLM, and what differs from `SMALL`."""
PROMPT_TOKENS, NEW_TOKENS = 300, 10


def sparse(backend: str, **settings: object) -> dict[str, object]:
    """Arguments of an engine with a backend of ours, of which the prompt is no short context."""
    return {
        "attention_backend": backend,
        "additional_config": {"sparse_attention": {"min_context_tokens": 16, **settings}},
    }


WAYS = {
    "dense": {},
    "budget of the context": sparse("unique", selection={"budget_tokens": 1024}),
    "every page": sparse("dense", termination={"patience": 0, "block_tokens": 64}),
    "small budget": sparse("unique", selection={"budget_tokens": 64}),
}
"""Arguments of the engines that decode the same: vLLM's attention, and ours. `every page` reads them in our kernels."""


def write_model(family: str, folder: Path) -> None:
    """Writes the configuration of a tiny model of a family."""
    import transformers

    name, architecture, changes = FAMILIES[family]
    config = getattr(transformers, name)(**(SMALL | changes))
    config.architectures = [architecture]
    config.save_pretrained(folder)


def decode(folder: Path, arguments: dict[str, object]) -> dict[str, list]:
    """Greedy tokens of one prompt and their log probabilities."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    seeds = itertools.count()

    def sharp(weights: torch.Tensor) -> None:
        # In vLLM's own range every token is as likely as the next, and all layers are the same.
        weight_utils.initialize_single_dummy_weight(weights, low=-0.3, high=0.3, seed=next(seeds))

    dummy_loader.initialize_single_dummy_weight = sharp
    llm = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
        max_num_seqs=2, seed=0, enable_prefix_caching=False, **arguments,
    )  # fmt: skip
    prompt = {"prompt_token_ids": [3 + i * 37 % 500 for i in range(PROMPT_TOKENS)]}
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True, detokenize=False)
    completion = llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0]
    chosen = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    del llm
    gc.collect()
    with contextlib.suppress(Exception):
        cleanup_dist_env_and_memory()
    return {"tokens": list(completion.token_ids), "logprobs": chosen}


def main() -> None:
    """Decodes one family in every way."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    family, folder = sys.argv[1], Path(sys.argv[2])
    write_model(family, folder)
    print(json.dumps({way: decode(folder, arguments) for way, arguments in WAYS.items()}))


if __name__ == "__main__":
    main()

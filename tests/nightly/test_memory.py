"""Long prompts in an engine that gives nearly all GPU memory to the KV cache: scratch must fit vLLM's profile."""

import math

import pytest
from support.engines import in_fresh_process

from bench.common.in_process import engine_in_process
from bench.common.models import open_model

pytestmark = [pytest.mark.nightly, pytest.mark.gpu, pytest.mark.timeout(900)]
CONTEXT, REQUESTS, ANSWER_TOKENS = 1 << 17, 6, 32


def ask_long_prompts(backend: str) -> list[list[float]]:
    """The log probabilities of the answers to prompts of the longest context, with drawn weights of an 8B model."""
    from vllm import SamplingParams

    arguments = {"attention_backend": backend, "max_model_len": CONTEXT, "gpu_memory_utilization": 0.97}
    prompts = [{"prompt_token_ids": [7 + word] * (CONTEXT - ANSWER_TOKENS)} for word in range(REQUESTS)]
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )  # fmt: skip
    with (
        open_model("llama-3.1-8b") as model,
        engine_in_process(
            model=str(model.folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, **arguments,
        ) as llm,
    ):  # fmt: skip
        done = llm.generate(prompts, sampling, use_tqdm=False)
    return [[entry.logprob for step in each.outputs[0].logprobs for entry in step.values()] for each in done]


@pytest.mark.parametrize("backend", ["h2o", "art", "unique_prefill", "unique", "zipvl"])
def test_long_prompts_fit_beside_the_cache(backend):
    found = in_fresh_process(ask_long_prompts, backend)
    assert [len(logprobs) for logprobs in found] == [ANSWER_TOKENS] * REQUESTS
    assert all(math.isfinite(logprob) for logprobs in found for logprob in logprobs)

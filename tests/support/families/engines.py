"""Engines of tiny models in this process, one after the other, compared with dense attention and the reference."""

import functools
import gc
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from support.families.evictions import watch_evictions
from support.families.referee import watch
from support.families.table import FAMILIES, LONG_PROMPT, MAX_MODEL_LEN, NEW_TOKENS, SHORT_PROMPT, WAYS

from bench.common.in_process import engine_in_process
from vllm_sparse_plugin.errors import ConfigurationError

_GAIN = 2.0
"""Factor by which a matrix enlarges its input."""


def prompt(length: int) -> dict[str, list[int]]:
    """A prompt of `length` tokens."""
    return {"prompt_token_ids": [3 + index * 37 % 500 for index in range(length)]}


@contextmanager
def engine(folder: Path, **arguments: Any) -> Iterator[Any]:
    """An engine of a tiny model with random weights, freed afterwards."""
    if "gpu_memory_utilization" not in arguments:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # By default vLLM imports each model in a separate process, which takes longer than the rest.
    registry._run_in_subprocess = lambda inspect: inspect()
    DummyModelLoader.load_weights = lambda self, model, model_config: draw_weights(model)
    defaults: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 2, "max_num_batched_tokens": 512, "seed": 0, "enable_prefix_caching": False,
    }  # fmt: skip
    if not current_platform.is_cpu():
        # Triton's kernels for the prefill of a gated delta net need no other package.
        defaults |= {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.02, "gdn_prefill_backend": "triton"}
    # vLLM collects garbage several times per engine. Imported modules and compiled kernels are never garbage.
    gc.freeze()
    _register_kernels_once()
    with engine_in_process(model=str(folder), **(defaults | arguments)) as llm:
        yield llm


@functools.cache
def _register_kernels_once() -> None:
    """Lets only the first engine search modules for kernels: vLLM's search fails on Numba's modules."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.register_triton_kernel_overrides = staticmethod(functools.cache(platform.register_triton_kernel_overrides))


def draw_weights(model: torch.nn.Module) -> None:
    """Draws weights such that some tokens are far likelier than others, and some keys get most of the attention.

    With vLLM's dummy weights all tokens are equally likely, and all layers are equal.
    """
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        uniform = torch.rand(weight.shape, generator=generator)
        last = name.rpartition(".")[2]
        if last == "A":
            drawn = -0.5 - uniform  # a state that decays
        elif last in ("A_log", "dt_bias") or name.endswith("dt_proj.bias"):
            drawn = -1 - 2 * uniform  # slowly
        elif last == "bias" and "norm" in name:
            drawn = 0.5 * uniform - 0.25
        elif weight.dim() < 2:
            drawn = 0.5 + uniform
        else:
            # If head and embedding are shared, a large embedding would repeat the last token.
            gain = _GAIN / 16 if "embed" in name else _GAIN
            drawn = torch.randn(weight.shape, generator=generator) * gain * weight.shape[-1] ** -0.5
        weight.data.copy_(drawn)


def continuations(llm: Any, lora: Any = None, new_tokens: int = NEW_TOKENS) -> list[Continuation]:
    """The continuations of the short and the long prompt, one after the other, optionally with an adapter."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=2, ignore_eos=True, detokenize=False)
    # vLLM's CPU attention splits its work by the batch. Bits are comparable only for single requests.
    return [
        continuation(llm.generate(prompt(length), sampling, lora_request=lora, use_tqdm=False)[0])
        for length in (SHORT_PROMPT, LONG_PROMPT)
    ]


def decode(folder: Path, lora: Any = None, **arguments: Any) -> list[Continuation]:
    """The continuations of the short and the long prompt in a new engine."""
    with engine(folder, **arguments) as llm:
        return continuations(llm, lora)


def refusal_of(error: BaseException | None) -> str:
    """The plugin's sentence if it refused the engine; else an empty text."""
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__ or error.__context__
    return str(error or "")


def outcomes(key: str, ways: Sequence[str], heads: int = 4) -> dict[str, str]:
    """Serves a family in several ways: `ok`, `refused`, or the faults of each.

    Args:
        key: of the family.
        ways: keys of `WAYS`.
        heads: query heads of the model.
    """
    from vllm import ModelRegistry

    family = replace(FAMILIES[key], changes={"num_attention_heads": heads, **FAMILIES[key].changes})
    # vLLM would hide the reason of a failed import.
    ModelRegistry.models[family.architecture].load_model_cls()
    with tempfile.TemporaryDirectory() as folder:
        family.write(Path(folder))
        dense = functools.cache(lambda: decode(Path(folder)))
        found = {}
        for way in ways:
            try:
                found[way] = "; ".join(_faults(Path(folder), way, family.only_windows, dense)) or "ok"
            except Exception as error:  # vLLM wraps a refusal
                if not refusal_of(error):
                    raise
                found[way] = "refused"
        return found


def _faults(folder: Path, name: str, only_windows: bool, densely: Callable[[], list[Continuation]]) -> Iterator[str]:
    from vllm.platforms import current_platform

    way = WAYS[name]
    with watch() as referee, watch_evictions(referee.note) as moves:
        found = decode(folder, **way.arguments)
    dense = densely()
    yield from referee.faults
    if bool(moves[0]) != way.evicts:
        yield f"layers moved tokens {moves[0]} times"
    if len({token for part in dense for token in part.tokens}) < 5:
        yield "the model repeats a few tokens, with any attention"
    error = logprob_error(dense[0], found[0])
    allowed = 0.0 if way.bits and current_platform.is_cpu() else LOGPROB_TOLERANCE
    if error > allowed and not current_platform.is_cpu():
        # vLLM's two backends differ, more so with experts, because their choice may change.
        allowed = max(allowed, 2 * max(map(logprob_error, dense, decode(folder, attention_backend="TRITON_ATTN"))))
    if error > allowed:
        yield f"within the budget log probabilities differ by {error:.3g} from dense attention's"
    if not all(math.isfinite(logprob) for part in found for step in part.logprobs for logprob in step.values()):
        yield "log probabilities are not finite"
    if bool(referee.steps) != (way.judged and not only_windows):
        yield f"layers decoded in the plugin's kernels {referee.steps} times"
    if way.selects and not only_windows and found[1].logprobs == dense[1].logprobs:
        yield "a small budget changes nothing"

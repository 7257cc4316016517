"""Engines of a family in this process, one after the other, and their decoded tokens."""

from __future__ import annotations

import functools
import gc
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from bench.robustness.families.cells import OK, Cell, unless_raised
from bench.robustness.families.table import (
    FAMILIES,
    LONG_PROMPT,
    MAX_MODEL_LEN,
    NEW_TOKENS,
    SHORT_PROMPT,
    WAYS,
    Family,
    Way,
)
from vllm_sparse_plugin.tools.engine import engine_in_process

if TYPE_CHECKING:
    import torch
    from vllm import LLM

_GAIN = 2.0
"""Factor by which a matrix enlarges its input."""


def prompt(length: int) -> dict[str, list[int]]:
    """A prompt of `length` tokens."""
    return {"prompt_token_ids": [3 + index * 37 % 500 for index in range(length)]}


@contextmanager
def engine(folder: Path, **arguments: Any) -> Iterator[LLM]:
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
    import torch

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


def continuations(llm: LLM, lora: Any = None, new_tokens: int = NEW_TOKENS) -> list[Continuation]:
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


class FamilyRun:
    """Serves one family with several ways of attention, and once densely."""

    def __init__(self, family: Family, folder: Path) -> None:
        """Writes the family's configuration into a folder."""
        self.family = family
        self.folder = folder
        family.write(folder)
        self._dense: list[Continuation] | Exception | None = None
        self._apart: float | None = None

    def dense(self) -> list[Continuation]:
        """The continuations of vLLM's own attention; raises the exception of its engine."""
        if self._dense is None:
            try:
                self._dense = self._decode({})
            except Exception as error:  # kept, because failing again takes time
                self._dense = error
        if isinstance(self._dense, Exception):
            raise self._dense
        return self._dense

    def cell(self, name: str) -> Cell:
        """Serves the family with one way of attention."""
        way, cell = WAYS[name], Cell(self.family.key, name, OK)

        def serve() -> Cell:
            from bench.robustness.families.evictions import watch_evictions
            from bench.robustness.families.referee import watch

            with watch() as referee, watch_evictions(referee.note) as moves:
                found = self._decode(way.arguments)
            if bool(moves[0]) != way.evicts:
                referee.note(f"layers moved tokens {moves[0]} times")
            dense = self.dense()
            served = replace(
                cell,
                logprob_error=logprob_error(dense[0], found[0]),
                judged_steps=referee.steps,
                output_error=referee.output_error,
                distinct_tokens=len({token for part in dense for token in part.tokens}),
            )
            return served.with_faults([*referee.faults, *self._faults(way, served, found)])

        return unless_raised(cell, serve, self.dense)

    def _decode(self, arguments: Mapping[str, Any]) -> list[Continuation]:
        from vllm import ModelRegistry

        # vLLM would hide the reason of a failed import.
        ModelRegistry.models[self.family.architecture].load_model_cls()
        return decode(self.folder, **arguments)

    def _rounding(self) -> float:
        """The difference between vLLM's two own backends. It is larger with experts, because their choice may
        change."""
        if self._apart is None:
            other = self._decode({"attention_backend": "TRITON_ATTN"})
            self._apart = max(map(logprob_error, self.dense(), other))
        return self._apart

    def _faults(self, way: Way, cell: Cell, found: Sequence[Continuation]) -> Iterator[str]:
        """The faults in continuations of the short and the long prompt."""
        from vllm.platforms import current_platform

        dense = self.dense()
        assert cell.distinct_tokens is not None
        if cell.distinct_tokens < 5:
            yield "the model repeats a few tokens, with any attention"
        assert cell.logprob_error is not None
        allowed = 0.0 if way.bits and current_platform.is_cpu() else LOGPROB_TOLERANCE
        if cell.logprob_error > allowed and not current_platform.is_cpu():
            allowed = max(allowed, 2 * self._rounding())
        if cell.logprob_error > allowed:
            yield f"within the budget log probabilities differ by {cell.logprob_error:.3g} from dense attention's"
        if not all(math.isfinite(logprob) for part in found for step in part.logprobs for logprob in step.values()):
            yield "log probabilities are not finite"
        if bool(cell.judged_steps) != (way.judged and not self.family.only_windows):
            yield f"layers decoded in the plugin's kernels {cell.judged_steps} times"
        if way.selects and not self.family.only_windows and found[1].logprobs == dense[1].logprobs:
            yield "a small budget changes nothing"


def run_family(key: str, ways: Sequence[str]) -> Iterator[Cell]:
    """Serves a family with several ways of attention, one after the other, in this process."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        run = FamilyRun(FAMILIES[key], Path(folder))
        yield from map(run.cell, ways)

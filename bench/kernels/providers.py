"""The operations, and for each the provider under test and its rivals.

A provider is loaded once. If this fails, the reason is recorded for each of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from sparse_kernels.limits import MAX_K
from sparse_kernels.stopping import StopRule

from bench.kernels import calls, checks, prefill, rivals, token_prefill, traffic
from bench.kernels.calls import Call, imported
from bench.kernels.cases import Geometry
from bench.kernels.workload import DecodeInputs, PrefillInputs, Workload

Inputs = TypeVar("Inputs")

ART = StopRule(scale_tolerance=1e-5, direction_tolerance=1e-3, patience=5, block_tokens=512)
"""The paper's rule, with test intervals that a thread block reads in a few microseconds."""
IN_VAIN = ART._replace(scale_tolerance=0.0)
"""Tests after every interval and never stops."""
ENDLESS = ART._replace(patience=1 << 20)
"""The paper's p = infinity."""


@dataclass(frozen=True)
class Provider(Generic[Inputs]):
    """One way to compute an operation."""

    name: str
    load: Callable[[], Any]
    """Imports and builds. If it raises, the provider is unavailable for the whole run."""
    prepare: Callable[[Any, Inputs], Call]
    """Takes the result of `load` and returns the call to check and to time."""
    check: Callable[[Inputs, checks.Calls], None]
    traffic: Callable[[Any, Geometry], int]
    """Bytes of a case."""


@dataclass(frozen=True)
class Op(Generic[Inputs]):
    """An operation: the source of its inputs, and its providers, the one under test first."""

    inputs: Callable[[Workload, Any], Inputs]
    providers: Sequence[Provider[Inputs]]

    @property
    def subject(self) -> str:
        """The provider whose speed-up over its rivals is reported."""
        return self.providers[0].name


_SPARSE_DECODE = "sparse_kernels.sparse_decode:sparse_decode"
_SPLIT_ATTENTION = "sparse_kernels.split_attention:split_attention"
_WRITE_CACHE = "sparse_kernels.page_statistics:write_cache"
_SCORE_PAGES = "sparse_kernels.page_score:score_pages"
_SELECT_PAGES = "sparse_kernels.page_topk:select_pages"
_ATTEND_PAGES = "sparse_kernels.sparse_attention:attend_pages"

_DENSE_FLASH_ATTENTION: Provider[DecodeInputs] = Provider(
    "FlashAttention 3",
    rivals.load_flash_attention,
    lambda loaded, inputs: rivals.flash_attention(loaded, inputs, inputs.lengths),
    checks.dense,
    traffic.dense,
)

_TOGETHER: Provider[DecodeInputs] = Provider(
    "multi_token_decode",
    imported("sparse_kernels.multi_token_decode:multi_token_decode"),
    calls.together,
    checks.dense,
    traffic.dense,
)

_NOT_ROUTED: Provider[DecodeInputs] = Provider(
    "sinkrouter, not routed",
    imported(_SPLIT_ATTENTION),
    lambda loaded, inputs: calls.split(loaded, inputs, None),
    checks.dense,
    traffic.dense,
)

_FLASH_ATTENTION_PREFILL: Provider[PrefillInputs] = Provider(
    "FlashAttention 3",
    rivals.load_flash_attention,
    lambda loaded, inputs: prefill.dense(loaded[0], inputs),
    prefill.check_dense,
    traffic.dense_prefill,
)

_PREFILL: tuple[Provider[PrefillInputs], ...] = (
    Provider(
        f"unique, density {prefill.DENSITY}",
        rivals.load_sparse_prefill,
        lambda loaded, inputs: prefill.whole(loaded[0], inputs),
        prefill.check_whole,
        traffic.sparse_prefill,
    ),
    _FLASH_ATTENTION_PREFILL,
    Provider(
        f"unique, density {prefill.SPARSER}",
        rivals.load_sparse_prefill,
        lambda loaded, inputs: prefill.whole(loaded[0], inputs, prefill.SPARSER),
        partial(prefill.check_whole, density=prefill.SPARSER),
        traffic.sparse_prefill,
    ),
)

_TOKEN_PREFILL: tuple[Provider[PrefillInputs], ...] = (
    *(
        Provider(
            name,
            token_prefill.load_attention,
            partial(token_prefill.whole, rule=rule),
            partial(token_prefill.check_whole, rule=rule),
            traffic.dense_prefill,
        )
        for name, rule in (("zipvl", token_prefill.ALL_ATTEND), ("zipvl_paper", token_prefill.PUBLISHED))
    ),
    _FLASH_ATTENTION_PREFILL,
    Provider(
        "part: probe",
        token_prefill.load_kernels,
        lambda _, inputs: token_prefill.probing(inputs),
        token_prefill.check_sums,
        traffic.probe,
    ),
    Provider(
        "part: choice",
        token_prefill.load_kernels,
        lambda _, inputs: token_prefill.choosing(inputs),
        token_prefill.check_choice,
        traffic.token_choice,
    ),
)

PROVIDERS: dict[str, Op[Any]] = {
    "decode": Op(
        Workload.decode_inputs,
        (
            Provider(
                "unique", imported(_SPARSE_DECODE, _WRITE_CACHE), calls.step, checks.sparse_decode, traffic.decode
            ),
            _DENSE_FLASH_ATTENTION,
            Provider(
                "FlashInfer", rivals.load_flashinfer_decode, rivals.flashinfer_decode, checks.dense, traffic.dense
            ),
            Provider(
                "unique, without the write", imported(_SPARSE_DECODE), calls.fused, checks.sparse_decode, traffic.sparse
            ),
        ),
    ),
    "route": Op(
        Workload.decode_inputs,
        (
            Provider(
                "sinkrouter",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: calls.split(loaded, inputs, inputs.case.skipped_groups(inputs.geometry)),
                checks.routed,
                traffic.routed,
            ),
            _DENSE_FLASH_ATTENTION,
            Provider(
                "sinkrouter, nothing skipped",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: calls.split(loaded, inputs, 0),
                checks.dense,
                traffic.dense,
            ),
            _NOT_ROUTED,
        ),
    ),
    "route_unique": Op(
        Workload.decode_inputs,
        (
            Provider(
                "unique, routed",
                imported(_SPARSE_DECODE),
                lambda loaded, inputs: calls.fused(loaded, inputs, inputs.case.skipped_groups(inputs.geometry)),
                checks.routed_sparse_decode,
                traffic.routed_sparse,
            ),
            Provider(
                "unique, nothing skipped",
                imported(_SPARSE_DECODE),
                lambda loaded, inputs: calls.fused(loaded, inputs, 0),
                checks.sparse_decode,
                traffic.sparse,
            ),
            Provider("unique", imported(_SPARSE_DECODE), calls.fused, checks.sparse_decode, traffic.sparse),
        ),
    ),
    "topk": Op(
        Workload.topk_inputs,
        (
            Provider("unique", imported(_SELECT_PAGES), calls.select, checks.exact_selection, traffic.topk),
            Provider(
                "flashinfer.top_k",
                rivals.load_flashinfer_topk,
                rivals.flashinfer_topk,
                checks.equal_scores,
                traffic.topk,
            ),
            Provider(
                "flashinfer.top_k_page_table_transform",
                rivals.load_flashinfer_topk,
                rivals.flashinfer_mapped,
                checks.mapped_pages,
                traffic.topk,
            ),
            Provider("torch.topk", imported("torch:topk"), rivals.torch_topk, checks.equal_scores, traffic.topk),
        ),
    ),
    "score": Op(
        Workload.decode_inputs,
        (Provider("unique", imported(_SCORE_PAGES), calls.score, checks.scores, traffic.score),),
    ),
    "attend": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_ATTEND_PAGES), calls.attend, checks.attended, traffic.attend),
            Provider(
                "FlashAttention 3, as many tokens",
                rivals.load_flash_attention,
                lambda loaded, inputs: rivals.flash_attention(loaded, inputs, checks.selected_lengths(inputs)),
                checks.dense_prefix,
                traffic.selected_tokens,
            ),
        ),
    ),
    "stop": Op(
        Workload.recent_inputs,
        (
            Provider(
                "art",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: calls.stopping(loaded, inputs, ART),
                checks.dense,
                traffic.dense,
            ),
            Provider(
                "art that never stops",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: calls.stopping(loaded, inputs, IN_VAIN),
                checks.dense,
                traffic.dense,
            ),
            Provider(
                "art, endless patience",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: calls.stopping(loaded, inputs, ENDLESS),
                checks.dense,
                traffic.dense,
            ),
            _NOT_ROUTED,
            _DENSE_FLASH_ATTENTION,
        ),
    ),
    "write": Op(
        Workload.decode_inputs,
        (
            Provider(
                "unique",
                imported(_WRITE_CACHE),
                lambda loaded, inputs: calls.write(loaded[0], inputs),
                checks.written,
                traffic.write,
            ),
            Provider(
                "vLLM, without statistics",
                imported("vllm._custom_ops:reshape_and_cache_flash"),
                rivals.vllm_write,
                checks.copied,
                traffic.copy,
            ),
        ),
    ),
    "pieces": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SPARSE_DECODE), calls.fused, checks.sparse_decode, traffic.sparse),
            Provider(
                "in pieces",
                imported("sparse_kernels.sparse_decode.cuda:decode_in_pieces"),
                calls.in_pieces,
                checks.sparse_decode,
                traffic.sparse,
            ),
            _DENSE_FLASH_ATTENTION,
        ),
    ),
    "budgets": Op(
        Workload.decode_inputs,
        tuple(
            Provider(
                name,
                imported(_SPARSE_DECODE),
                partial(calls.budgets, most_pages=most),
                checks.sparse_decode,
                traffic.sparse,
            )
            for name, most in (("unique", MAX_K), ("unique, room for no more", 1), ("unique, one for all", None))
        ),
    ),
    "whole": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SPARSE_DECODE), calls.whole, checks.dense, traffic.dense),
            _TOGETHER,
            _DENSE_FLASH_ATTENTION,
        ),
    ),
    "verify": Op(
        Workload.verify_inputs,
        (
            replace(_TOGETHER, name="unique"),
            _DENSE_FLASH_ATTENTION,
        ),
    ),
    "prefill": Op(Workload.prefill_inputs, _PREFILL),
    "tokens": Op(Workload.prefill_inputs, _TOKEN_PREFILL),
}
"""Every operation and its providers."""

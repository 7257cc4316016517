"""The operations, and for each the provider under test and its rivals.

A provider is loaded once. If this fails, the reason is recorded for each of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.limits import MAX_K
from sparse_kernels.page_coverage import Limits
from sparse_kernels.page_statistics import STATISTICS_FORMATS, RecordFormat
from sparse_kernels.split_attention import Stopping, stop_scratch
from sparse_kernels.stopping import StopRule

from bench.kernels import checks, prefill, traffic
from bench.kernels.cases import Case, DecodeCase, Geometry
from bench.kernels.workload import DecodeInputs, PrefillInputs, TopKInputs, Workload

Inputs = TypeVar("Inputs")
Call = Callable[[], Any]

_NUM_SPLITS = 32
"""vLLM's `flash_attn_max_num_splits_for_cuda_graph`."""
_COVERAGE = 0.95
"""Share of the attention weight of the coverage."""
_FLASHINFER_WORKSPACE = 512 << 20
ART = StopRule(scale_tolerance=1e-5, direction_tolerance=1e-3, patience=5, block_tokens=512)
"""The paper's rule, with test intervals that a thread block reads in a few microseconds."""
IN_VAIN = ART._replace(scale_tolerance=0.0)
"""Tests after every interval and never stops."""
ENDLESS = ART._replace(patience=1 << 20)
"""The paper's p = infinity."""


def imported(*names: str) -> Callable[[], list[Any]]:
    """A loader of `module:attribute` names."""

    def load() -> list[Any]:
        return [getattr(import_module(module), name) for module, _, name in (each.partition(":") for each in names)]

    return load


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
    formats: Sequence[RecordFormat] | None = None
    """Formats of statistics that it can read; None for all, or without statistics."""

    def serves(self, case: Case) -> bool:
        """Whether the provider supports a case."""
        return self.formats is None or not isinstance(case, DecodeCase) or case.format in self.formats


@dataclass(frozen=True)
class Op(Generic[Inputs]):
    """An operation: the source of its inputs, and its providers, the one under test first."""

    inputs: Callable[[Workload, Any], Inputs]
    providers: Sequence[Provider[Inputs]]

    @property
    def subject(self) -> str:
        """The provider whose speed-up over its rivals is reported."""
        return self.providers[0].name


def _write(write_cache: Any, inputs: DecodeInputs) -> Call:
    page_size = inputs.geometry.page_size

    def call() -> None:
        write_cache(inputs.new_keys, inputs.new_values, inputs.token_rows, inputs.statistics, inputs.slots, page_size)

    return call


def _attention_caches(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[num_blocks, block_size, num_kv_heads, head_size]`, as vLLM passes them to its kernels."""
    keys, values = inputs.token_rows.transpose(1, 2).split(inputs.geometry.head_size, dim=-1)
    return keys, values


def _vllm_write(loaded: list[Any], inputs: DecodeInputs) -> Call:
    (reshape_and_cache,) = loaded
    keys, values = _attention_caches(inputs)
    one = torch.ones((), dtype=torch.float32, device=keys.device)

    def call() -> None:
        reshape_and_cache(inputs.new_keys, inputs.new_values, keys, values, inputs.slots, "auto", one, one)

    return call


def _score(loaded: list[Any], inputs: DecodeInputs) -> Call:
    (score_pages,) = loaded
    num_pages, std_weight = inputs.num_pages, inputs.geometry.std_weight
    return lambda: score_pages(inputs.grouped_query, inputs.statistics, inputs.block_table, num_pages, std_weight)


def _attend(loaded: list[Any], inputs: DecodeInputs) -> Call:
    (attend_pages,) = loaded
    tokens, cache, softmax = inputs.tokens, inputs.cache, inputs.softmax
    return lambda: attend_pages(tokens, cache, inputs.pages, softmax)


def _split(loaded: list[Any], inputs: DecodeInputs, skipped_groups: int | None) -> Call:
    """Dense attention with `skipped_groups` groups skipped; None without routing."""
    (split_attention,) = loaded
    routing = None if skipped_groups is None else inputs.routing(skipped_groups)
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: split_attention(batch, cache, softmax, routing=routing)


def _together(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """Dense attention with several query tokens of each request at once."""
    (multi_token_decode,) = loaded
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: multi_token_decode(batch, cache, softmax)


def _fused(loaded: list[Any], inputs: DecodeInputs, skipped_groups: int | None = None) -> Call:
    sparse_decode = loaded[0]
    geometry = inputs.geometry
    routing = None if skipped_groups is None else inputs.routing(skipped_groups)
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: sparse_decode(batch, cache, softmax, geometry.selection, routing=routing)


def _budgets(loaded: list[Any], inputs: DecodeInputs, most_pages: int | None) -> Call:
    """A decode step without the write, with a budget per request; None for one budget of all.

    All budgets are equal, so the same pages are read. There is room for the largest budget of a request.
    """
    (sparse_decode,) = loaded
    batch, selection = inputs.batch, inputs.geometry.selection
    if most_pages is not None:
        budgets = torch.full((len(batch.seq_lens),), selection.k, dtype=torch.int32, device=batch.query.device)
        batch, selection = replace(batch, budgets=budgets), replace(selection, k=max(selection.k, most_pages))
    cache, softmax = inputs.cache, inputs.softmax
    return lambda: sparse_decode(batch, cache, softmax, selection)


def _counted(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step without the write, after counting the pages of a coverage.

    It attends to the pages of a fixed budget, given for each row, so that the same pages are read.
    """
    sparse_decode, count_rows = loaded
    batch, cache, softmax, selection = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry.selection
    rows, device = len(batch.seq_lens), batch.query.device
    always = selection.sink_pages + selection.recent_pages
    limits = Limits(
        torch.full((rows,), _COVERAGE, device=device),
        torch.full((rows,), max(always, 1), device=device),
        torch.full((rows,), MAX_K, device=device),
    )
    budgets = torch.full((rows, inputs.geometry.num_kv_heads), selection.k, dtype=torch.int32, device=device)
    most = replace(selection, k=MAX_K)

    def call() -> torch.Tensor:
        counted = replace(count_rows(batch, cache, selection, softmax, limits), budgets=budgets)
        output: torch.Tensor = sparse_decode(counted, cache, softmax, most)
        return output

    return call


def _one_launch(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step that attends in one launch, for any budget."""
    sparse_decode, launch_of, shape_of = loaded
    geometry, batch, cache = inputs.geometry, inputs.batch, inputs.cache
    max_pages = batch.block_table.shape[1] * geometry.pages_per_block
    shape = shape_of(inputs.case.group, geometry.head_size, max_pages, geometry.k)
    rows = len(inputs.query) * geometry.num_kv_heads
    record_bytes = inputs.statistics.vectors.shape[3] * inputs.statistics.vectors.element_size()
    launch = launch_of(rows, shape, record_bytes, torch.cuda.get_device_capability(inputs.query.device))
    selection, output = geometry.selection, torch.empty_like(inputs.query)

    def call() -> torch.Tensor:
        sparse_decode(batch, cache, inputs.softmax, selection, None, None, DecodeOutput(output), launch)
        return output

    return call


def _in_pieces(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """The same in pieces, which another launch adds up."""
    (decode_in_pieces,) = loaded
    batch, cache, softmax, selection = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry.selection
    output = torch.empty_like(inputs.query)

    def call() -> torch.Tensor:
        decode_in_pieces(batch, cache, softmax, selection, None, DecodeOutput(output))
        return output

    return call


def _stopping(loaded: list[Any], inputs: DecodeInputs, rule: StopRule) -> Call:
    """Dense attention by this project's kernel, newest tokens first under a stop rule."""
    (split_attention,) = loaded
    geometry, table = inputs.geometry, inputs.block_table
    rows = len(inputs.query) * geometry.num_kv_heads
    scratch = stop_scratch(rule, rows, table.shape[1] * geometry.block_size, table.device)
    batch, cache, softmax, stopping = inputs.batch, inputs.cache, inputs.softmax, Stopping(rule, scratch=scratch)
    return lambda: split_attention(batch, cache, softmax, stopping=stopping)


def _step(loaded: list[Any], inputs: DecodeInputs) -> Call:
    attend = _fused(loaded, inputs)
    write = _write(loaded[1], inputs)

    def call() -> Any:
        write()
        return attend()

    return call


def _separate(loaded: list[Any], inputs: DecodeInputs) -> Call:
    score_pages, select_pages, attend_pages, write_cache = loaded
    geometry, num_pages = inputs.geometry, inputs.num_pages
    tokens, cache, softmax = inputs.tokens, inputs.cache, inputs.softmax
    write = _write(write_cache, inputs)

    def call() -> Any:
        write()
        scores = score_pages(
            inputs.grouped_query, inputs.statistics, inputs.block_table, num_pages, geometry.std_weight
        )
        pages = select_pages(scores, num_pages, geometry.k, geometry.sink_pages, geometry.recent_pages)
        return attend_pages(tokens, cache, pages, softmax)

    return call


def _load_flash_attention() -> list[Any]:
    loaded = imported("vllm.vllm_flash_attn:flash_attn_varlen_func", "vllm.vllm_flash_attn:get_scheduler_metadata")()
    (reason,) = imported("vllm.vllm_flash_attn.flash_attn_interface:FA3_UNAVAILABLE_REASON")()
    if reason is not None:
        raise ImportError(reason)
    return loaded


def _flash_attention(loaded: list[Any], inputs: DecodeInputs, lengths: Sequence[int]) -> Call:
    """The call of vLLM's FLASH_ATTN backend in a decode step under full CUDA graphs.

    The schedule is made outside, as vLLM makes it once per step for all layers.
    """
    attention, get_scheduler_metadata = loaded
    geometry, case, query = inputs.geometry, inputs.case, inputs.query
    keys, values = _attention_caches(inputs)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=query.device)
    starts = case.tokens * torch.arange(case.batch + 1, dtype=torch.int32, device=query.device)
    schedule = get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=case.tokens,
        max_seqlen_k=max(lengths),
        num_heads_q=query.shape[1],
        num_heads_kv=geometry.num_kv_heads,
        headdim=geometry.head_size,
        cache_seqlens=seq_lens,
        qkv_dtype=query.dtype,
        cu_seqlens_q=starts,
        page_size=geometry.block_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=_NUM_SPLITS,
    )
    one = torch.ones((), dtype=torch.float32, device=query.device).expand(case.batch, geometry.num_kv_heads)

    def call() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=case.tokens,
            seqused_k=seq_lens,
            max_seqlen_k=max(lengths),
            softmax_scale=geometry.scale,
            causal=True,
            alibi_slopes=None,
            window_size=[-1, -1],
            block_table=inputs.block_table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            q_descale=one,
            k_descale=one,
            v_descale=one,
            num_splits=_NUM_SPLITS,
        )
        return out

    return call


def _load_sparse_prefill() -> list[Any]:
    """Attention over virtual sequences. Imports the kernels now instead of in the first case."""
    prefill.load_kernels()
    return _load_flash_attention()


def _load_flashinfer_decode() -> Any:
    """The wrapper and its workspace. Builds or loads the kernels now instead of in the first case."""
    wrapper, get_module = imported(
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper", "flashinfer.prefill:get_batch_prefill_module"
    )()
    geometry, bf16 = Geometry(), torch.bfloat16
    sizes = (geometry.head_size, geometry.head_size)
    get_module("fa2", bf16, bf16, bf16, torch.int32, *sizes, 0, False, False, False)
    return wrapper, torch.zeros(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")


def _flashinfer_decode(loaded: Any, inputs: DecodeInputs) -> Call:
    wrapper_class, workspace = loaded
    geometry, query = inputs.geometry, inputs.query
    counts = [-(-length // geometry.block_size) for length in inputs.lengths]
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    blocks = torch.cat([row[:count] for row, count in zip(inputs.block_table, counts, strict=True)])
    last = (inputs.seq_lens - 1) % geometry.block_size + 1
    wrapper = wrapper_class(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(blocks),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    wrapper.plan(
        starts,
        blocks,
        last,
        query.shape[1],
        geometry.num_kv_heads,
        geometry.head_size,
        geometry.block_size,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
        sm_scale=geometry.scale,
    )
    caches = inputs.token_rows.split(geometry.head_size, dim=-1)
    return lambda: wrapper.run(query, caches)


def _load_flashinfer_topk() -> list[Any]:
    """`top_k` and `top_k_page_table_transform`. Builds or loads their module now instead of in the first case."""
    (get_module,) = imported("flashinfer.topk:get_topk_module")()
    get_module()
    return imported("flashinfer:top_k", "flashinfer.topk:top_k_page_table_transform")()


def _select(loaded: list[Any], inputs: TopKInputs) -> Call:
    (select_pages,) = loaded
    return lambda: select_pages(inputs.scores, inputs.num_pages, inputs.geometry.k)


def _flashinfer_topk(loaded: list[Any], inputs: TopKInputs) -> Call:
    top_k, k = loaded[0], inputs.geometry.k
    return lambda: top_k(inputs.rows, k)[1]


def _flashinfer_mapped(loaded: list[Any], inputs: TopKInputs) -> Call:
    transform, geometry = loaded[1], inputs.geometry
    rows, heads = inputs.rows, geometry.num_kv_heads
    lengths = inputs.num_pages.repeat_interleave(heads)
    tokens = torch.arange(len(inputs.num_pages), dtype=torch.int32, device=rows.device).repeat_interleave(heads)
    return lambda: transform(
        rows, inputs.block_table, lengths, geometry.k, row_to_batch=tokens, page_size=geometry.pages_per_block
    )


def _torch_topk(loaded: list[Any], inputs: TopKInputs) -> Call:
    (topk,) = loaded
    return lambda: topk(inputs.rows, inputs.geometry.k, dim=-1, sorted=False)[1]


_SPARSE_DECODE = "sparse_kernels.sparse_decode:sparse_decode"
_COUNT_ROWS = "sparse_kernels.page_coverage:count_rows"
_SPLIT_ATTENTION = "sparse_kernels.split_attention:split_attention"
_WRITE_CACHE = "sparse_kernels.page_statistics:write_cache"
_SCORE_PAGES = "sparse_kernels.page_score:score_pages"
_SELECT_PAGES = "sparse_kernels.page_topk:select_pages"
_ATTEND_PAGES = "sparse_kernels.sparse_attention:attend_pages"

_DENSE_FLASH_ATTENTION: Provider[DecodeInputs] = Provider(
    "FlashAttention 3",
    _load_flash_attention,
    lambda loaded, inputs: _flash_attention(loaded, inputs, inputs.lengths),
    checks.dense,
    traffic.dense,
)

_NOT_ROUTED: Provider[DecodeInputs] = Provider(
    "sinkrouter, not routed",
    imported(_SPLIT_ATTENTION),
    lambda loaded, inputs: _split(loaded, inputs, None),
    checks.dense,
    traffic.dense,
)

_PREFILL: tuple[Provider[PrefillInputs], ...] = (
    Provider(
        f"unique, density {prefill.DENSITY}",
        _load_sparse_prefill,
        lambda loaded, inputs: prefill.whole(loaded[0], inputs),
        prefill.check_whole,
        traffic.sparse_prefill,
    ),
    Provider(
        "FlashAttention 3",
        _load_flash_attention,
        lambda loaded, inputs: prefill.dense(loaded[0], inputs),
        prefill.check_dense,
        traffic.dense_prefill,
    ),
    Provider(
        f"unique, density {prefill.SPARSER}",
        _load_sparse_prefill,
        lambda loaded, inputs: prefill.whole(loaded[0], inputs, prefill.SPARSER),
        partial(prefill.check_whole, density=prefill.SPARSER),
        traffic.sparse_prefill,
    ),
    Provider(
        "part: keys from statistics",
        prefill.load_kernels,
        lambda _, inputs: prefill.launches(inputs).summaries,
        prefill.check_summaries,
        traffic.prefill_summaries,
    ),
    Provider(
        "part: scores, keys included",
        prefill.load_kernels,
        lambda _, inputs: prefill.scoring(inputs),
        prefill.check_scores,
        traffic.prefill_scores,
    ),
    Provider(
        "part: choice",
        prefill.load_kernels,
        lambda _, inputs: prefill.choosing(inputs),
        prefill.check_choice,
        traffic.prefill_choice,
    ),
    Provider(
        "part: attention",
        _load_sparse_prefill,
        lambda loaded, inputs: prefill.attending(loaded[0], inputs),
        prefill.check_attention,
        traffic.dense_prefill,
    ),
    Provider(
        "part: regrouping",
        prefill.load_kernels,
        lambda _, inputs: prefill.launches(inputs).regrouped,
        prefill.check_regrouped,
        traffic.prefill_regrouping,
    ),
)

PROVIDERS: dict[str, Op[Any]] = {
    "decode": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SPARSE_DECODE, _WRITE_CACHE), _step, checks.sparse_decode, traffic.decode),
            _DENSE_FLASH_ATTENTION,
            Provider("FlashInfer", _load_flashinfer_decode, _flashinfer_decode, checks.dense, traffic.dense),
            Provider(
                "unique, separate launches",
                imported(_SCORE_PAGES, _SELECT_PAGES, _ATTEND_PAGES, _WRITE_CACHE),
                _separate,
                checks.sparse_decode,
                traffic.decode,
            ),
            Provider(
                "unique, without the write", imported(_SPARSE_DECODE), _fused, checks.sparse_decode, traffic.sparse
            ),
        ),
    ),
    "route": Op(
        Workload.decode_inputs,
        (
            Provider(
                "sinkrouter",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: _split(loaded, inputs, inputs.case.skipped_groups(inputs.geometry)),
                checks.routed,
                traffic.routed,
            ),
            _DENSE_FLASH_ATTENTION,
            Provider(
                "sinkrouter, nothing skipped",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: _split(loaded, inputs, 0),
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
                lambda loaded, inputs: _fused(loaded, inputs, inputs.case.skipped_groups(inputs.geometry)),
                checks.routed_sparse_decode,
                traffic.routed_sparse,
            ),
            Provider(
                "unique, nothing skipped",
                imported(_SPARSE_DECODE),
                lambda loaded, inputs: _fused(loaded, inputs, 0),
                checks.sparse_decode,
                traffic.sparse,
            ),
            Provider("unique", imported(_SPARSE_DECODE), _fused, checks.sparse_decode, traffic.sparse),
        ),
    ),
    "topk": Op(
        Workload.topk_inputs,
        (
            Provider("unique", imported(_SELECT_PAGES), _select, checks.exact_selection, traffic.topk),
            Provider("flashinfer.top_k", _load_flashinfer_topk, _flashinfer_topk, checks.equal_scores, traffic.topk),
            Provider(
                "flashinfer.top_k_page_table_transform",
                _load_flashinfer_topk,
                _flashinfer_mapped,
                checks.mapped_pages,
                traffic.topk,
            ),
            Provider("torch.topk", imported("torch:topk"), _torch_topk, checks.equal_scores, traffic.topk),
        ),
    ),
    "score": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SCORE_PAGES), _score, checks.scores, traffic.score),
            Provider(
                "three launches",
                imported("bench.kernels.unfused:score_pages"),
                _score,
                checks.scores,
                traffic.score,
                STATISTICS_FORMATS,
            ),
        ),
    ),
    "attend": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_ATTEND_PAGES), _attend, checks.attended, traffic.attend),
            Provider(
                "FlashAttention 3, as many tokens",
                _load_flash_attention,
                lambda loaded, inputs: _flash_attention(loaded, inputs, checks.selected_lengths(inputs)),
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
                lambda loaded, inputs: _stopping(loaded, inputs, ART),
                checks.dense,
                traffic.dense,
            ),
            Provider(
                "art that never stops",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: _stopping(loaded, inputs, IN_VAIN),
                checks.dense,
                traffic.dense,
            ),
            Provider(
                "art, endless patience",
                imported(_SPLIT_ATTENTION),
                lambda loaded, inputs: _stopping(loaded, inputs, ENDLESS),
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
                lambda loaded, inputs: _write(loaded[0], inputs),
                checks.written,
                traffic.write,
            ),
            Provider(
                "vLLM, without statistics",
                imported("vllm._custom_ops:reshape_and_cache_flash"),
                _vllm_write,
                checks.copied,
                traffic.copy,
            ),
        ),
    ),
    "pieces": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SPARSE_DECODE), _fused, checks.sparse_decode, traffic.sparse),
            Provider(
                "one launch attends",
                imported(
                    "sparse_kernels.sparse_decode.cuda:sparse_decode",
                    "sparse_kernels.sparse_decode.launches:launch_of",
                    "sparse_kernels.limits:DecodeShape",
                ),
                _one_launch,
                checks.sparse_decode,
                traffic.sparse,
            ),
            Provider(
                "in pieces",
                imported("sparse_kernels.sparse_decode.cuda:decode_in_pieces"),
                _in_pieces,
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
                partial(_budgets, most_pages=most),
                checks.sparse_decode,
                traffic.sparse,
            )
            for name, most in (("unique", MAX_K), ("unique, room for no more", 1), ("unique, one for all", None))
        ),
    ),
    "coverage": Op(
        Workload.decode_inputs,
        (
            Provider("unique", imported(_SPARSE_DECODE, _COUNT_ROWS), _counted, checks.sparse_decode, traffic.sparse),
            Provider(
                "unique, one for all",
                imported(_SPARSE_DECODE),
                partial(_budgets, most_pages=None),
                checks.sparse_decode,
                traffic.sparse,
            ),
        ),
    ),
    "verify": Op(
        Workload.verify_inputs,
        (
            Provider(
                "unique",
                imported("sparse_kernels.multi_token_decode:multi_token_decode"),
                _together,
                checks.dense,
                traffic.dense,
            ),
            _DENSE_FLASH_ATTENTION,
        ),
    ),
    "prefill": Op(Workload.prefill_inputs, _PREFILL),
}
"""Every operation and its providers."""

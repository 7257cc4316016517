"""Triton's attention on a GPU against the torch references: sparse prefill of kept tokens with both of its attention
kernels, and rolling positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rolling_attention import RollingWindow, Rotation, attend_rolling
from sparse_kernels.rolling_attention.reference import attend_rolling as reference_rolling
from sparse_kernels.token_prefill import ListedAttention, TokenRule, draw_probes, reference, token_prefill
from sparse_kernels.token_prefill.tokens import choose_tokens
from support.prefill import Prefill, make_prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

RULE = TokenRule(tau=0.9)


@dataclass(frozen=True)
class Case:
    requests: tuple[tuple[int, int], ...]
    """Tokens of each context, and of its chunk."""
    num_kv_heads: int = 2
    group: int = 4
    head_size: int = 128
    padding: int = 0
    softcap: float = 0.0
    sinks: bool = False
    eight_bits: bool = False
    rule: TokenRule = RULE


CASES = {
    "one prompt": Case(((3000, 3000),)),
    "ragged, padded": Case(((3000, 700), (0, 0), (517, 517), (1, 1), (130, 1), (2049, 1024)), padding=7),
    "multi-head, heads of 64": Case(((2000, 1501), (129, 129)), group=1, head_size=64),
    "group of 16": Case(((2000, 1501),), num_kv_heads=1, group=16),
    "group of 3, heads of 256": Case(((1500, 800),), group=3, head_size=256),
    "softcap": Case(((2000, 1501),), softcap=20.0),
    "learned sinks": Case(((2000, 1501), (300, 64)), sinks=True),
    "8 bits": Case(((2000, 1501), (300, 64)), eight_bits=True),
    "everything": Case(((2000, 1501), (300, 64)), rule=replace(RULE, tau=1.0)),
    "fixed ratio": Case(((3000, 700), (130, 1)), rule=TokenRule(fixed_ratio=0.3)),
    "few probes": Case(((2000, 1501), (300, 64)), rule=TokenRule(0.9, 5, 6)),
    "one newest token, no sinks": Case(((2000, 1501), (300, 64)), rule=replace(RULE, local_tokens=1, sink_tokens=0)),
    "more newest tokens than a tile": Case(((2000, 1501), (300, 64)), rule=replace(RULE, tau=0.5, local_tokens=129)),
}


def inputs(case: Case) -> tuple[Prefill, Softmax]:
    prefill = make_prefill(
        list(case.requests), case.num_kv_heads, case.group, case.head_size, block_size=64, padding=case.padding
    )
    scales: list[torch.Tensor | None] = [None] * 3
    query = prefill.batch.query
    paged = [prefill.cache.keys, prefill.cache.values]
    if case.eight_bits:
        query = query.to(torch.float8_e4m3fn)
        scales = [torch.tensor([x]).cuda() for x in (0.5, 1.5, 0.7)]
    # As in vLLM's cache: a head's keys and values are adjacent, followed by rows of statistics.
    memory = torch.empty(0, dtype=torch.bfloat16).set_(paged[0].view.untyped_storage())
    if case.eight_bits:
        memory = memory.nan_to_num(0, 0, 0).clamp(-400, 400).to(torch.float8_e4m3fn)
    memory = memory.cuda()
    on_gpu = [
        replace(one, view=memory.as_strided(one.view.shape, one.view.stride(), one.view.storage_offset()))
        for one in paged
    ]
    batch = replace(
        prefill.batch,
        query=query.cuda(),
        query_start=prefill.batch.query_start.cuda(),
        block_table=prefill.batch.block_table.cuda(),
        seq_lens=prefill.batch.seq_lens.cuda(),
        query_scale=scales[0],
    )
    heads = case.num_kv_heads * case.group
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(9)).bfloat16().cuda() if case.sinks else None
    cache = KVCache(*on_gpu, None, *scales[1:])
    return replace(prefill, batch=batch, cache=cache), Softmax(case.head_size**-0.5, case.softcap, sinks)


def flash_attention(listed: ListedAttention) -> None:
    """FlashAttention 3 as vLLM builds it, over pages of one token."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def by_head(scale: torch.Tensor | None) -> torch.Tensor | None:
        return None if scale is None else scale.expand(len(listed.counts), listed.keys.shape[2])

    flash_attn_varlen_func(
        q=listed.query, k=listed.keys, v=listed.values, out=listed.output, cu_seqlens_q=listed.query_start,
        max_seqlen_q=listed.max_query_tokens, seqused_k=listed.counts, max_seqlen_k=listed.max_seq_tokens,
        softmax_scale=listed.softmax.scale, causal=True, softcap=listed.softmax.softcap, block_table=listed.rows,
        fa_version=3, s_aux=listed.softmax.sink_logits, q_descale=by_head(listed.query_scale),
        k_descale=by_head(listed.key_scale), v_descale=by_head(listed.value_scale), num_splits=1,
    )  # fmt: skip


def attention(name: str) -> Callable[[ListedAttention], None] | None:
    if name == "triton":
        return None
    interface = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    if not interface.is_fa_version_supported(3):
        pytest.skip(interface.fa_version_unsupported_reason(3))
    return flash_attention


def checked(error: torch.Tensor, expected: torch.Tensor, eight_bits: bool) -> None:
    """Weights and outputs are rounded to bfloat16 (2^-9 each); FlashAttention rounds weights to 8 bits (2^-4)."""
    allowed = 2**-4 if eight_bits else 2**-7
    assert bool((error.norm(dim=-1) <= allowed * expected.float().norm(dim=-1)).all())


@pytest.mark.parametrize(
    ("kernel", "form"),
    [(kernel, form) for kernel in ("triton", "FlashAttention 3") for form in ("attend", "zero")],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gpu_equals_the_reference(case: Case, kernel: str, form: Literal["attend", "zero"]) -> None:
    from sparse_kernels.token_prefill import triton
    from sparse_kernels.token_prefill.scratch import PrefillSizes, Scratch

    prefill, softmax = inputs(case)
    batch, cache, attend = prefill.batch, prefill.cache, attention(kernel)
    output, rule = prefill.output(), replace(case.rule, others=form)
    kept = token_prefill(batch, cache, softmax, rule, output, attend=attend)

    probes = draw_probes(batch, rule)
    on_host = replace(
        batch, query=batch.query.cpu(), query_start=batch.query_start.cpu(), seq_lens=batch.seq_lens.cpu()
    )
    assert torch.equal(probes.cpu(), draw_probes(on_host, rule))
    sizes = PrefillSizes(batch.num_tokens, batch.num_requests, batch.max_seq_tokens, *batch.query.shape[1:])
    scratch = Scratch.make(sizes, rule, batch.query.dtype, output.dtype, output.device)
    sums = triton.launch_sums(batch, cache, softmax, probes, scratch)
    expected_sums = reference.column_sums(batch, cache, softmax, probes)
    for request, (context, chunk) in enumerate(case.requests):
        length = context if chunk else 0
        # Exponentials of float32 logits up to some tens; one term per probe row and head.
        torch.testing.assert_close(sums[request, :length], expected_sums[request, :length], rtol=1e-4, atol=1e-5)
    # Of nearly equal sums either token may be kept, so T is computed from the GPU's sums.
    again = choose_tokens(sums, probes, batch, rule)
    on_cpu = choose_tokens(sums.cpu(), probes.cpu(), on_host, rule)
    assert torch.equal(kept.positions, again.positions)
    assert torch.equal(kept.positions.cpu(), on_cpu.positions)
    assert torch.equal(kept.important.cpu(), on_cpu.important)

    expected = torch.zeros_like(output)
    if form == "attend":
        reference.attend_all(batch, cache, softmax, kept, rule, expected)
    else:
        reference.attend_kept(batch, cache, softmax, kept, expected)
    checked(output.float() - expected.float(), expected, case.eight_bits and kernel != "triton")
    assert torch.equal(output.eq(0).all(dim=-1), expected.eq(0).all(dim=-1))


def test_a_choice_does_not_depend_on_width_or_device() -> None:
    rule, length = TokenRule(), 100_000
    # A few large sums and many small ones. A float32 sum would lose the small ones.
    sums = torch.rand(1, 1 << 18, generator=torch.Generator().manual_seed(3)).pow(40)
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, 8192], dtype=torch.int32)
    batch = PrefillBatch(torch.zeros(8192, 1, 16), starts, torch.zeros(1, 1).int(), lengths, 8192, length)
    probes = draw_probes(batch, rule)
    expected = choose_tokens(sums[:, :length], probes, batch, rule)
    on_gpu = replace(batch, query=batch.query.cuda(), query_start=starts.cuda(), seq_lens=lengths.cuda())
    for width in (length, length + 1, 1 << 18):
        kept = choose_tokens(sums[:, :width].cuda(), probes.cuda(), on_gpu, rule)
        assert torch.equal(kept.positions[:, :length].cpu(), expected.positions)
        assert torch.equal(kept.important.cpu(), expected.important)


BOTH_FORMS = pytest.mark.parametrize("rule", [RULE, replace(RULE, others="zero")], ids=["attend", "zero"])
BOTH_KERNELS = pytest.mark.parametrize("kernel", ["triton", "FlashAttention 3"])


@BOTH_KERNELS
@BOTH_FORMS
def test_a_request_has_its_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch, rule: TokenRule, kernel: str) -> None:
    prefill, softmax = inputs(CASES["ragged, padded"])
    output, attend = prefill.output(), attention(kernel)
    token_prefill(prefill.batch, prefill.cache, softmax, rule, output, attend=attend)
    for request in (0, 2, 5):
        alone = prefill.alone(request)
        single = alone.output()
        token_prefill(alone.batch, alone.cache, softmax, rule, single, attend=attend)
        assert torch.equal(single, output[prefill.chunks[request]])
    monkeypatch.setattr("sparse_kernels.token_prefill.scratch._TOKENS_AT_ONCE", 1)
    monkeypatch.setattr("sparse_kernels.token_prefill.triton.listed.LISTED_AT_ONCE", 1)
    one_by_one = prefill.output()
    token_prefill(prefill.batch, prefill.cache, softmax, rule, one_by_one, attend=attend)
    assert torch.equal(one_by_one, output)


@BOTH_KERNELS
@BOTH_FORMS
def test_the_host_does_not_wait(rule: TokenRule, kernel: str) -> None:
    prefill, softmax = inputs(CASES["ragged, padded"])
    output, attend = prefill.output(), attention(kernel)
    arguments = prefill.batch, prefill.cache, softmax, rule, output
    token_prefill(*arguments, attend=attend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_prefill(*arguments, attend=attend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("local_tokens", [64, 16384])
def test_scratch_fits_what_an_engine_reserves(local_tokens: int) -> None:
    """See `start_up._TOKEN_SCRATCH`."""
    prefill, softmax = inputs(Case(((131072, 8192),), num_kv_heads=1, group=32))
    output = prefill.output()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rule = replace(RULE, tau=0.99, local_tokens=local_tokens)
    token_prefill(prefill.batch, prefill.cache, softmax, rule, output, attend=attention("FlashAttention 3"))
    assert torch.cuda.max_memory_allocated() - before <= 300 * 2**20


WINDOW = RollingWindow(sink_tokens=4, cache_tokens=516, whole_tokens=516)
EDGES = tuple((length, 1) for edge in (1, 4, 64, 512, 516, 576, 1024) for length in (edge - 1, edge, edge + 1))
ROLLING = {
    "prompts": (Case(((3000, 3000), (517, 200))), WINDOW),
    "ragged, padded": (Case(((3000, 700), (0, 0), (517, 517), (1, 1), (130, 1), (2049, 1024)), padding=7), WINDOW),
    "requests that decode": (Case(EDGES), WINDOW),
    "many requests": (Case(tuple((100 + 9 * request, 1) for request in range(200))), WINDOW),
    "multi-head, heads of 64": (Case(((2000, 1501), (129, 129)), group=1, head_size=64), WINDOW),
    "group of 16": (Case(((2000, 1501), (700, 1)), num_kv_heads=1, group=16), WINDOW),
    "group of 3, heads of 96": (Case(((1500, 800),), group=3, head_size=96), WINDOW),
    "heads of 256": (Case(((1500, 800), (700, 1)), group=2, head_size=256), WINDOW),
    "softcap": (Case(((2000, 1501), (700, 1)), softcap=20.0), WINDOW),
    "many sinks, longer contexts whole": (Case(((2000, 1501), (700, 1))), RollingWindow(100, 516, 900)),
    "no sinks": (Case(((2000, 1501), (700, 1))), RollingWindow(0, 516, 516)),
}


def rotation(head_size: int, interleaved: bool = False) -> Rotation:
    """For positions up to the longest context."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * frequencies
    return Rotation(torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16().cuda(), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("case", "window"), ROLLING.values(), ids=ROLLING)
def test_rolling_positions_are_those_of_the_reference(case: Case, window: RollingWindow, interleaved: bool) -> None:
    prefill, softmax = inputs(case)
    made = rotation(case.head_size, interleaved)
    output, expected = prefill.output(), prefill.output()
    attend_rolling(prefill.batch, prefill.cache, softmax, window, made, output)
    reference_rolling(prefill.batch, prefill.cache, softmax, window, made, expected)
    tokens = prefill.chunks[-1].stop
    assert output[tokens:].isnan().all()
    checked(output[:tokens].float() - expected[:tokens].float(), expected[:tokens], eight_bits=False)


def test_a_graph_holds_the_launch_of_rolling_positions() -> None:
    """A captured step does not depend on the lengths, tables and queries of later replays."""
    prefill, softmax = inputs(Case(((3000, 1), (2000, 1), (700, 1), (517, 1))))
    batch, made = replace(prefill.batch, max_query_tokens=1), rotation(128)
    arguments = prefill.cache, softmax, WINDOW, made

    def buffers() -> list[torch.Tensor]:
        return [batch.query, batch.query_start, batch.block_table, batch.seq_lens]

    # Two requests; the others are padding.
    later = [one.clone() for one in buffers()]
    later[0] = later[0].flip(0)
    later[1].copy_(torch.tensor([0, 1, 2, 2, 2]))
    later[2] = later[2].flip(0)
    later[3].copy_(torch.tensor([517, 700, 0, 0]))
    output = prefill.output()
    attend_rolling(batch, *arguments, output)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_rolling(batch, *arguments, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_rolling(batch, *arguments, output)
    for buffer, numbers in zip(buffers(), later, strict=True):
        buffer.copy_(numbers)
    expected = prefill.output()
    attend_rolling(batch, *arguments, expected)
    output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(output[:2], expected[:2])
    assert output[:2].isfinite().all()
    assert output[2:].isnan().all()

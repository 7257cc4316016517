"""Block-sparse prefill: the reference against plain loops, and the kernels (interpreted without a GPU) against it."""

import itertools
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from sparse_kernels.batch import Copies, PrefillBatch, Prompts, Softmax
from sparse_kernels.block_prefill import (
    COUNTERS,
    SHARE_UNITS,
    BlockRule,
    VirtualSequences,
    plan_tiles,
    prefill_blocks,
    reference,
    scratch_bytes,
)
from sparse_kernels.block_prefill.reference import read_share
from sparse_kernels.block_prefill.rule import padded_blocks
from sparse_kernels.block_prefill.sequences import PageEntries
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from support.paged import PagedBatch, assert_as_accurate, make_batch

HAS_GPU = torch.cuda.is_available()
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
ON_CPU = pytest.param(
    "cpu", marks=[NO_TRITON, pytest.mark.skipif(HAS_GPU, reason="beside a GPU Triton compiles its kernels")]
)
ON_GPU = pytest.param("cuda", marks=[NO_TRITON, pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])
on_devices = pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
RULE = BlockRule(tile_tokens=16, block_tokens=16, density=0.4, least_blocks=2, dense_tokens=32, query_stride=2)
HEADS, SIZE = 2, 32


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, modules that Triton imports at the first launch must be interpreted too."""
    if not HAS_GPU and find_spec("triton") is not None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def prompts_of(contexts: list[int], chunks: list[int], table: torch.Tensor) -> Prompts:
    start = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    return Prompts(
        start, table.to(torch.int32), torch.tensor(contexts, dtype=torch.int32), tuple(chunks), tuple(contexts)
    )


@dataclass
class Case:
    """A batch of chunks of prompts, in a shuffled cache with garbage elsewhere."""

    paged: PagedBatch
    prompts: Prompts
    batch: PrefillBatch

    def on(self, device: str) -> "Case":
        paged, prompts = self.paged, self.prompts
        cache = paged.paged_keys.view.untyped_storage()
        moved = torch.tensor([], dtype=torch.uint8).set_(cache).to(device).untyped_storage()

        def move(view: torch.Tensor) -> torch.Tensor:
            return torch.empty(0, dtype=view.dtype, device=device).set_(
                moved, view.storage_offset(), view.shape, view.stride()
            )

        statistics = paged.statistics
        scales, spread = (None if part is None else move(part) for part in (statistics.scales, statistics.spread))
        placed = replace(
            paged,
            paged_keys=replace(paged.paged_keys, view=move(paged.paged_keys.view)),
            paged_values=replace(paged.paged_values, view=move(paged.paged_values.view)),
            statistics=replace(statistics, vectors=move(statistics.vectors), scales=scales, spread=spread),
        )
        there = Prompts(
            *(part.to(device) for part in (prompts.query_start, prompts.block_table, prompts.seq_lens)),
            prompts.query_lens, prompts.longest,
        )  # fmt: skip
        return Case(placed, there, there.batch(self.batch.query.to(device)))


def make_case(
    contexts: list[int], chunks: list[int], group: int = 2, kind: str = "mean_and_spread", seed: int = 0, **shape: int
) -> Case:
    stored = KINDS[kind].formats[0]
    paged = make_batch(contexts, HEADS, SIZE, statistics=stored, kind=kind, seed=seed, **{"block_size": 64, **shape})
    generator = torch.Generator().manual_seed(seed + 1)
    # The queries are a view of a wider tensor, as in a fused projection.
    projected = torch.randn(sum(chunks), HEADS * group + 3, SIZE, generator=generator).bfloat16()
    query = projected[:, : HEADS * group]
    prompts = prompts_of(contexts, chunks, paged.block_table)
    return Case(paged, prompts, prompts.batch(query))


def attend_plainly(sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> torch.Tensor | None:
    """Computes FlashAttention, one sequence after the other."""
    lse = torch.full(sequences.queries.shape[1::-1], float("nan"))
    rows = sequences.query_rows.tolist()
    scale = SIZE**-0.5
    for index, (first, last) in enumerate(itertools.pairwise(rows)):
        if first == last:
            continue
        length = int(sequences.lengths[index])
        assert last - first <= sequences.max_rows
        assert length <= sequences.max_length
        pages = sequences.page_table[index, : -(-length // sequences.keys.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length, 0].float() for x in (sequences.keys, sequences.values))
        logits = torch.einsum("rgd,nd->grn", sequences.queries[first:last].float(), keys) * scale
        visible = torch.arange(length) < torch.arange(length - (last - first) + 1, length + 1)[:, None]
        logits = logits.masked_fill(~visible.to(logits.device), -torch.inf)
        lse[:, first:last] = logits.logsumexp(dim=-1)
        output[first:last] = (logits.softmax(dim=-1) @ values).transpose(0, 1).to(output.dtype)
    return lse.to(output.device) if wants_lse else None


def run(
    case: Case, rule: BlockRule, kernels: bool, softmax: Softmax | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, initially NaN, and the counters."""
    tiles = plan_tiles(case.prompts, rule, case.batch.query.shape[1] // HEADS)
    output = torch.full_like(case.batch.query.contiguous(), float("nan"))
    counters = torch.zeros(HEADS, COUNTERS, dtype=torch.int64, device=output.device)
    prefill_blocks(
        case.batch, case.paged.cache, softmax or Softmax(SIZE**-0.5), rule, tiles, output=output, counters=counters,
        attend=attend_plainly if kernels else None,
    )  # fmt: skip
    return output, counters


def best_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    spread: torch.Tensor | None,
    positions: list[int],
    past: int,
    rule: BlockRule,
    scale: float,
) -> set[int]:
    """The past blocks that a tile and KV head reads, written number by number.

    Args:
        queries: `[scoring, group_size, head_size]`, of the tokens that score.
        keys: `[num_pages, summary_keys, head_size]`.
        spread: `[num_pages]`, or None.
        positions: of the tokens that score.
        past: number of past blocks.
        rule: the rule.
        scale: of logits.
    """
    scores = [0.0] * past
    for (place, token), g in itertools.product(enumerate(positions), range(queries.shape[1])):
        q = queries[place, g].double()
        logits: dict[int, float] = {}
        for page in range((token + 1) // 8):
            products = keys[page].double() @ q
            spread_by = 0.0 if spread is None else float(spread[page]) * rule.std_weight
            logit = float((products.max() + spread_by * q.norm()) * scale)
            block = page * 8 // rule.block_tokens
            logits[block] = max(logits.get(block, -math.inf), logit)
        total = sum(math.exp(logit) for logit in logits.values())
        for block in range(past):
            scores[block] += math.exp(logits[block]) / total
    always = [b for b in range(past) if b < rule.sink_blocks or b >= past - rule.recent_blocks]
    others = sorted((b for b in range(past) if b not in always), key=lambda b: (-scores[b], b))
    reads = min(past, max(math.ceil(rule.density * past), rule.least_blocks))
    return set((always + others)[:reads])


def plain_attention(case: Case, rule: BlockRule, softmax: Softmax) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Attention written token by token, in float64 and in float32, and the past blocks read."""
    outputs: dict[torch.dtype, list[torch.Tensor]] = {torch.float64: [], torch.float32: []}
    blocks_read = first = 0
    paged, prompts = case.paged, case.prompts
    for request, (context, chunk) in enumerate(zip(prompts.longest, prompts.query_lens, strict=True)):
        queries = case.batch.query[first : first + chunk].unflatten(1, (HEADS, -1))
        blocks = prompts.block_table[request, : -(-context // 64)].long()
        keys, spread = reference.page_summaries(paged.statistics, blocks)
        chosen: list[set[int]] = []
        for begin in range(context - chunk, context):
            tile = begin // rule.tile_tokens * rule.tile_tokens
            own = tile // rule.block_tokens * rule.block_tokens
            past = own // rule.block_tokens
            if begin in (tile, context - chunk):
                # The first token of a tile chooses for all.
                in_tile = list(range(begin, min(tile + rule.tile_tokens, context)))
                scoring = in_tile[::-1][:: rule.query_stride]
                rows = queries[[token - (context - chunk) for token in scoring]]
                chosen = [
                    best_blocks(
                        rows[:, head], keys[head], None if spread is None else spread[head], scoring, past, rule,
                        softmax.scale,
                    )
                    if own >= rule.dense_tokens
                    else set(range(past))
                    for head in range(HEADS)
                ]  # fmt: skip
                blocks_read += sum(map(len, chosen))
            for head in range(HEADS):
                positions = [
                    t for b in sorted(chosen[head]) for t in range(b * rule.block_tokens, (b + 1) * rule.block_tokens)
                ]
                positions += list(range(own, begin + 1))
                for dtype, of_dtype in outputs.items():
                    key, value = (x[request][positions, head].to(dtype) for x in (paged.keys, paged.values))
                    weights = queries[begin - (context - chunk), head].to(dtype) @ key.T * softmax.scale
                    if softmax.softcap:
                        weights = softmax.softcap * torch.tanh(weights / softmax.softcap)
                    if softmax.sink_logits is not None:
                        sinks = softmax.sink_logits.view(HEADS, -1)[head].to(dtype)[:, None]
                        weights = torch.cat([weights, sinks], dim=1)
                    of_dtype.append(weights.softmax(dim=-1)[:, : len(positions)] @ value)
        first += chunk
    exact, rounded = (torch.stack(each).view(len(case.batch.query), -1, SIZE) for each in outputs.values())
    return exact, rounded, blocks_read


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_reference_is_attention_over_the_best_blocks(stride: int, softcap: float) -> None:
    case = make_case([100, 37], [53, 37])
    rule = replace(RULE, query_stride=stride)
    softmax = Softmax(SIZE**-0.5, softcap, torch.linspace(-1, 2, HEADS * 2) if softcap else None)
    output, counters = run(case, rule, kernels=False, softmax=softmax)
    exact, rounded, blocks_read = plain_attention(case, rule, softmax)
    assert_as_accurate(output, exact, rounded)
    assert int(counters[:, 0].sum()) == blocks_read < int(counters[:, 1].sum())


@pytest.mark.parametrize("coverage", [0.3, 0.8])
def test_the_weight_that_was_read_is_counted(coverage: float) -> None:
    case = make_case([200, 150], [200, 50])
    _, counters = run(case, replace(RULE, coverage=coverage, least_blocks=2), kernels=False)
    share = counters[:, 2] / SHARE_UNITS / counters[:, 3]
    assert (counters[:, 0] < counters[:, 1]).all()
    assert (share >= coverage).all()
    assert (share < 1).all()
    masses, read = torch.tensor([[2.0, 1.0, 0.5]]), torch.tensor([[True, False, True]])
    assert read_share(masses, read, total=4).tolist() == [0.75]


SHAPES = [
    ([100], [100], {}),
    ([101, 16, 130], [53, 16, 1], {}),
    ([130, 129, 128, 127], [17, 16, 15, 31], {}),
    ([100], [50], {"group": 1}),
    ([100, 70], [50, 70], {"group": 5}),
    ([90], [40], {"group": 16}),
    ([150], [70], {"block_size": 128}),
]
RULES = {
    "density": RULE,
    "stride": replace(RULE, query_stride=3),
    "wide tiles": replace(RULE, tile_tokens=32),
    "wide blocks": replace(RULE, block_tokens=32),
    "narrow blocks": replace(RULE, block_tokens=8, least_blocks=4),
    "coverage": replace(RULE, coverage=0.8),
    "coverage of few": replace(RULE, coverage=0.3, query_stride=4),
    "maximum": replace(RULE, measure="maximum"),
    "every query": replace(RULE, query_stride=1),
    "nothing always": replace(RULE, sink_blocks=0, recent_blocks=0, least_blocks=1, density=0.01),
}
SHAPES_OF_RULES = {
    "density": range(len(SHAPES)),
    "coverage of few": range(len(SHAPES)),
    "stride": (1, 4),
    "wide tiles": (1, 5),
    "wide blocks": (1, 6),
    "narrow blocks": (1, 4),
    "coverage": (1, 2),
    "maximum": (1, 3),
    "every query": (1, 2),
    "nothing always": (1, 0),
}
"""The shapes of each rule. Two rules have all shapes, and all rules have a ragged one."""


@on_devices
@pytest.mark.parametrize(("name", "index"), [(name, index) for name, of in SHAPES_OF_RULES.items() for index in of])
def test_the_kernels_choose_and_regroup_as_the_reference(name: str, index: int, device: str) -> None:
    (contexts, chunks, shape), rule = SHAPES[index], RULES[name]
    case = make_case(contexts, chunks, **shape)
    expected, read = run(case, rule, kernels=False)
    output, counted = run(case.on(device), rule, kernels=True)
    assert_as_accurate(output.cpu(), expected.double(), expected.float())
    assert torch.equal(counted[:, [0, 1, 3]].cpu(), read[:, [0, 1, 3]])
    # Logits are float16. Their last bit may depend on the order of a sum.
    shares = (counted[:, 2].cpu() - read[:, 2]).abs() / SHARE_UNITS
    assert (shares <= read[:, 3] * 2.0**-9).all()
    assert bool(read[:, 3].any()) == (rule.measure == "mass" and bool((read[:, 0] < read[:, 1]).any()))


@on_devices
@pytest.mark.parametrize(("dense_tokens", "context"), [(64, 65), (64, 70), (64, 80), (60, 64), (65, 81), (65, 80)])
def test_the_first_sparse_tile_is_scored(dense_tokens: int, context: int, device: str) -> None:
    # The newest tile is the first one that may leave out blocks, or the last one that may not.
    case, rule = make_case([context], [20]), replace(RULES["nothing always"], dense_tokens=dense_tokens)
    expected, read = run(case, rule, kernels=False)
    output, counted = run(case.on(device), rule, kernels=True)
    assert_as_accurate(output.cpu(), expected.double(), expected.float())
    assert torch.equal(counted[:, [0, 1, 3]].cpu(), read[:, [0, 1, 3]])
    tiles = plan_tiles(case.prompts, rule, 2)
    assert tiles.max_reads == int(tiles.reads.max())


def _sum_as_on_a_gpu(self: Any, data: torch.Tensor) -> Any:
    """Replaces `ReduceOps.sum` of Triton's interpreter: threads add their numbers, and then halves of threads. The
    kernel that chooses has more threads where it has room for more blocks."""
    numbers = data.handle.data
    if numbers.dtype == np.float32:
        threads = 128 if len(numbers) <= 4096 else 512
        numbers = np.pad(numbers, (0, -len(numbers) % threads)).reshape(-1, threads)
        numbers = np.add.accumulate(numbers, axis=0)[-1]
        while len(numbers) > 1:
            numbers = numbers[: len(numbers) // 2] + numbers[len(numbers) // 2 :]
    return self.to_tensor(np.sum(numbers), data.dtype)


@on_devices
def test_a_long_neighbour_changes_no_choice_by_mass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_kernels.block_prefill.triton.choose import virtual_sequences

    if device == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.ReduceOps, "sum", _sum_as_on_a_gpu)
    rule, past, rows = replace(RULE, coverage=0.9, least_blocks=1), 600, 16
    entries = PageEntries.of(make_batch([16], HEADS, SIZE, block_size=16).paged_keys, 16)
    # The blocks of least mass hold just what may stay unread, as far as float32 can tell.
    generator = torch.Generator().manual_seed(0)
    masses = torch.rand(8 * HEADS, past, generator=generator).double() + 1
    unread = torch.arange(past) % 3 == 1
    masses[:, unread] *= 0.1 * rows / masses[:, unread].sum(dim=1, keepdim=True)
    masses[:, ~unread] *= (0.8 + 0.1 * torch.rand(8 * HEADS, 1, generator=generator)) * rows / 600
    chosen = []
    for others in ([], [4200 * 16 + 16]):
        contexts = [past * 16 + 16] * 8 + others
        table = torch.arange(max(contexts) // 16, dtype=torch.int32).expand(len(contexts), -1).contiguous()
        case = prompts_of(contexts, [16] * len(contexts), table.to(device))
        case = replace(case, query_start=case.query_start.to(device), seq_lens=case.seq_lens.to(device))
        tiles = plan_tiles(case, rule, 2)
        scores = torch.full((len(tiles), HEADS, tiles.max_blocks), 1e-3)
        mine = torch.arange(0, 16, 2)
        scores[mine, :, :past] = masses.float().view(8, HEADS, past)
        _, lengths = virtual_sequences(scores.to(device), case.block_table, tiles, entries, 2, rule, None)
        chosen.append(lengths.view(-1, HEADS)[mine].cpu())
    assert torch.equal(*chosen)


@on_devices
def test_logits_that_round_to_zero_are_ties(device: str) -> None:
    case = make_case([200], [20])
    case.batch.query.mul_(1e-12)
    rule = replace(RULES["maximum"], sink_blocks=0, recent_blocks=0)
    expected, _ = run(case, rule, kernels=False)
    output, _ = run(case.on(device), rule, kernels=True)
    assert_as_accurate(output.cpu(), expected.double(), expected.float())


@on_devices
def test_heads_of_queries_and_outputs_may_lie_apart(device: str) -> None:
    case = make_case([101, 16, 130], [53, 16, 1], group=3).on(device)
    expected, _ = run(case, RULE, kernels=True)
    query, output = (torch.full((*expected.shape[:2], SIZE + 8), torch.nan).bfloat16().to(device) for _ in range(2))
    query[..., :SIZE] = case.batch.query
    prefill_blocks(
        replace(case.batch, query=query[..., :SIZE]), case.paged.cache, Softmax(SIZE**-0.5), RULE,
        plan_tiles(case.prompts, RULE, 3), output=output[..., :SIZE], attend=attend_plainly,
    )  # fmt: skip
    assert torch.equal(output[..., :SIZE], expected)
    assert output[..., SIZE:].isnan().all()


@on_devices
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("index", [1, 6])
def test_copies_of_the_blocks_give_the_bits_of_the_cache(index: int, kernels: bool, device: str) -> None:
    contexts, chunks, shape = SHAPES[index]
    case = make_case(contexts, chunks, **shape).on(device)
    expected, read = run(case, RULE, kernels)
    rows, table = case.paged.cache.rows, case.batch.block_table
    places = torch.arange(table.numel(), dtype=torch.int32, device=device).flip(0).view_as(table)
    buffer = torch.full((table.numel() + 2, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=device)
    for request, context in enumerate(contexts):
        taken = -(-context // rows.shape[2])
        buffer[places[request, :taken].long()] = rows[table[request, :taken].long()]
    # Only the records of the cache are read.
    rows.fill_(torch.nan)
    copied = KVCache.from_rows(buffer, case.paged.cache.page_size)
    copies = Copies(copied.keys, copied.values, places)
    output, counted = run(replace(case, batch=replace(case.batch, copies=copies)), RULE, kernels)
    assert torch.equal(output, expected)
    assert torch.equal(counted, read)


def test_some_requests_of_a_batch_have_their_rows_of_the_copies() -> None:
    case = make_case([100, 37, 60], [53, 37, 1])
    cache, places = case.paged.cache, torch.arange(6, dtype=torch.int32).view(3, 2)
    batch = replace(case.batch, copies=Copies(cache.keys, cache.values, places))
    part = batch.requests(1, 3)
    assert part.copies is not None
    assert torch.equal(part.copies.block_table, places[1:])
    with pytest.raises(ValueError, match=r"^copies.block_table: got 3 rows, allowed: 2 for 2 requests"):
        replace(part, copies=batch.copies).check(HEADS, SIZE)


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_statistics_has_a_summary(kind: str, device: str) -> None:
    from sparse_kernels.block_prefill import triton

    case = make_case([200, 77], [8, 8], kind=kind)
    there = case.on(device)
    tiles = plan_tiles(there.prompts, RULE, 2)
    summaries = triton.page_summaries(there.paged.statistics, there.batch, tiles, 8, torch.bfloat16)
    for request, context in enumerate((200, 77)):
        pages = context // 8
        blocks = case.prompts.block_table[request, : -(-context // 64)].long()
        keys, spread = reference.page_summaries(case.paged.statistics, blocks)
        first = int(tiles.context_start[request]) // 8
        here = slice(first, first + pages)
        torch.testing.assert_close(
            summaries.keys[:, here].cpu().float(), keys[:, :pages].float(), rtol=2**-7, atol=1e-2
        )
        assert (spread is None) == (summaries.spread is None)
        if spread is not None:
            torch.testing.assert_close(summaries.spread[:, here].cpu(), spread[:, :pages], rtol=1e-4, atol=1e-4)
        mean = case.paged.keys[request][: pages * 8].double().unflatten(0, (pages, 8)).movedim(2, 0).mean(dim=2)
        error = (keys[:, :pages].double().mean(dim=2) - mean).norm(dim=-1)
        assert error.mean() < mean.norm(dim=-1).mean() / 2


@on_devices
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_large_queries_in_float16_cost_no_more_than_the_rounding_of_summaries(size: float, device: str) -> None:
    """Kernels multiply in bfloat16, as wide as float32 and as exact as the summaries."""
    from sparse_kernels.block_prefill import triton

    case, rule = make_case([1008], [16], kind="quarters"), replace(RULES["maximum"], query_stride=1)
    query = size * torch.randn(case.batch.query.shape, generator=torch.Generator().manual_seed(4))
    case = replace(case, batch=case.prompts.batch(query.half()))
    there, tiles = case.on(device), plan_tiles(case.on(device).prompts, rule, 2)
    rows, scale = triton.group_queries(there.batch, tiles, HEADS), SIZE**-0.5 / size
    (tile,) = (index for index in range(len(tiles)) if int(tiles.num_tokens[index]))
    past = int(tiles.past_blocks[tile])
    found = triton.score_past(rows, there.batch, tiles, there.paged.cache, rule, scale)[tile, :, :past].cpu().double()

    blocks = case.prompts.block_table[0, : -(-1008 // 64)].long()
    exact, _ = case.paged.statistics.summaries(blocks)
    errors = []
    queries = case.batch.grouped(HEADS).double().movedim(1, 0).flatten(1, 2)
    for keys in (exact.double(), exact.bfloat16().double()):
        pages = torch.einsum("hrd,hpsd->hrps", queries, keys).amax(dim=(1, 3)) * scale
        errors.append(pages[:, : past * 2].unflatten(1, (past, 2)).amax(dim=2))
    expected, rounded = errors
    assert (found - expected).abs().mean() <= 2 * (rounded - expected).abs().mean()
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


@on_devices
def test_learned_sinks_join_every_denominator(device: str) -> None:
    case = make_case([100, 60], [50, 60])
    softmax = Softmax(SIZE**-0.5, sink_logits=torch.linspace(-2, 3, 4))
    expected, _ = run(case, RULE, kernels=False, softmax=softmax)
    there = replace(softmax, sink_logits=softmax.sink_logits.to(device))
    output, _ = run(case.on(device), RULE, kernels=True, softmax=there)
    assert_as_accurate(output.cpu(), expected.double(), expected.float())


@pytest.mark.parametrize("whole", [{"density": 1.0}, {"coverage": 1.0}, {"dense_tokens": 99}])
def test_a_rule_that_reads_everything_is_dense(whole: dict[str, float]) -> None:
    rule, case = replace(RULE, **whole), make_case([100, 37], [53, 37])
    output, counters = run(case, rule, kernels=False)
    everything = replace(RULE, dense_tokens=1 << 20)
    assert torch.equal(output, run(case, everything, kernels=False)[0])
    assert torch.equal(counters[:, 0], counters[:, 1])


@pytest.mark.parametrize("rule", [RULE, RULES["coverage"]])
def test_neighbours_and_cuts_at_tiles_change_no_bit(rule: BlockRule) -> None:
    alone, _ = run(make_case([100], [100]), rule, kernels=False)
    paged = make_case([100], [100])
    for first, last in ((0, 48), (48, 100)):
        prompts = prompts_of([last], [last - first], paged.prompts.block_table)
        part = replace(paged, prompts=prompts, batch=prompts.batch(paged.batch.query[first:last]))
        assert torch.equal(run(part, rule, kernels=False)[0], alone[first:last])


def test_pages_whose_keys_are_not_finite_are_read() -> None:
    case = make_case([160], [16])
    case.paged.paged_keys.view[case.prompts.block_table[0, 0], 1, 5, 0, 3] = float("inf")
    keys = torch.zeros(HEADS, 20, 1, SIZE).bfloat16()
    spread = torch.zeros(HEADS, 20)
    keys[:, 10], spread[:, 10] = reference._LARGEST, reference._LARGEST
    visible = torch.full((8,), 20)
    logits = reference.block_logits(case.batch.grouped(HEADS), keys, spread, visible, 2, SIZE**-0.5, RULE)
    masses = reference.measure_blocks(logits, RULE)
    assert masses.isfinite().all()
    assert (masses.argmax(dim=1) == 5).all()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_page_entries_lead_to_every_token(block_size: int, heads: int) -> None:
    paged = make_batch([300], heads, SIZE, block_size=block_size)
    entries = PageEntries.of(paged.paged_keys, 64)
    pages = entries.pages_of(paged.paged_keys)
    for position in (0, 15, 63, 64, 130, 299):
        block = int(paged.block_table[0, position // block_size])
        within = position % block_size
        for head in range(heads):
            page = block * entries.block_step + head * entries.head_step + within // entries.tokens * entries.sub_step
            assert torch.equal(pages[page, within % entries.tokens, 0], paged.keys[0][position, head])


@NO_TRITON
@pytest.mark.skipif(HAS_GPU, reason="beside a GPU Triton compiles its kernels")
@pytest.mark.parametrize("kind", ["quarters", "mean_and_spread"])
@pytest.mark.parametrize("rule", [RULE, RULES["wide tiles"], RULES["every query"], RULES["coverage"]])
def test_no_more_memory_is_taken_than_is_said(rule: BlockRule, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, taken, empty = make_case([150], [70], kind=kind), [], torch.empty

    def counted(*shape: int, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    run(case, rule, kernels=True)
    layout = StatisticsLayout(8, SIZE, KINDS[kind].formats[0], kind=KINDS[kind])
    said = scratch_bytes(rule, layout, HEADS, 2, 70, 150)
    assert sum(taken) <= said < 3 * sum(taken)


@pytest.mark.parametrize(("tile", "block"), [(64, 64), (96, 32), (16, 128), (4096, 16)])
@pytest.mark.parametrize("longest", [1, 700, 9000])
def test_some_contexts_need_every_kernel_that_contexts_may_need(tile: int, block: int, longest: int) -> None:
    rule = BlockRule(tile_tokens=tile, block_tokens=block)
    contexts = rule.contexts_of_kernels(longest)
    assert max(contexts) == longest
    assert min(contexts) > 0
    every = {padded_blocks(rule.past_blocks(context - 1)) for context in range(1, longest + 1)}
    assert {padded_blocks(rule.past_blocks(context - 1)) for context in contexts} == every


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("density", 0.0),
        ("density", 1.1),
        ("coverage", 0.0),
        ("query_stride", 0),
        ("tile_tokens", 0),
        ("sink_blocks", -1),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: got"):
        replace(RULE, **{field: value}).check()

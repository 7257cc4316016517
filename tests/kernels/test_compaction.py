"""The compaction of a prompt, compared with SnapKV in loops, for every packing of a cache."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import (
    CompactionRule,
    ObservationWindow,
    PromptBlocks,
    add_votes,
    compact_prompt,
    reference,
    voting_rows,
)
from sparse_kernels.compaction.api import choose_tokens
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, update_page_statistics
from sparse_kernels.token_prefill import TokenRule, token_prefill
from support.llama import GROUP, KV_HEADS, save_llama
from support.paged import garbage, make_batch
from support.snapkv import kept_tokens, zipvl_votes

from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel

BLOCK = 32
RULE = CompactionRule(window_tokens=8, pool_tokens=5, sink_tokens=4)


def prompt_of(length: int, group: int = 2, seed: int = 0) -> tuple:
    """A prompt's cache, its queries, and the batch of the tests it came from."""
    paged = make_batch([length, 70], 2, 16, BLOCK, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    query = (1.5 * torch.randn(length, 2 * group, 16, generator=generator)).bfloat16()
    return paged, query


@pytest.mark.parametrize("length", [320, 321, 335, 351])
@pytest.mark.parametrize("keep_blocks", [1, 3, 9])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, None), (2.0, None), (0.0, [9.0, -9.0, 2.0, 5.0])])
@pytest.mark.parametrize("ranges", [[], [*range(2, 6), *range(200, 215)]])
@pytest.mark.parametrize("by_votes", [False, True])
def test_kept_tokens_are_those_of_the_paper_and_lie_in_the_last_full_blocks(
    length, keep_blocks, softcap, sinks, ranges, by_votes
):
    paged, query = prompt_of(length)
    first = length // BLOCK - keep_blocks
    softmax = Softmax(0.25, softcap, None if sinks is None else torch.tensor(sinks))
    window = ObservationWindow(query[-8:], length - 8)
    # Unused memory holds NaNs, so bits are compared.
    before = [tensor.view.view(torch.int16).clone() for tensor in (paged.cache.keys, paged.cache.values)]
    protected = torch.zeros(length, dtype=torch.bool)
    protected[[*ranges, length - 1]] = True
    prompt = PromptBlocks(paged.block_table[0], length, first, protected if ranges else None)
    kept = compact_prompt(window, prompt, paged.cache, softmax, replace(RULE, in_order_of_votes=by_votes))
    expected = kept_tokens(
        query[-8:], paged.keys[0], keep_blocks * BLOCK + length % BLOCK, softmax, RULE, BLOCK, protected=ranges
    )
    tail = set(range(length - length % BLOCK, length))
    assert [set(of_head.tolist()) | tail for of_head in kept] == expected
    assert torch.equal(kept, kept.sort().values) == (not by_votes)
    blocks = paged.block_table[0][first : length // BLOCK]
    page = torch.arange(BLOCK // paged.cache.page_size)
    for tensor, tokens in ((paged.cache.keys, paged.keys[0]), (paged.cache.values, paged.values[0])):
        for head in range(2):
            moved = tensor.gather(blocks[:, None], torch.tensor(head), page).flatten(0, 2)
            assert torch.equal(moved, tokens[kept[head], head])
    # Everything else is unchanged: the other request, the blocks before and the tail.
    others = torch.ones(len(before[0]), dtype=torch.bool)
    others[blocks] = False
    for tensor, was in zip((paged.cache.keys, paged.cache.values), before, strict=True):
        assert torch.equal(tensor.view.view(torch.int16)[others], was[others])


def test_statistics_are_those_of_the_moved_keys():
    paged, query = prompt_of(350)
    prompt = PromptBlocks(paged.block_table[0], 350, 6)
    compact_prompt(ObservationWindow(query[-8:], 342), prompt, paged.cache, Softmax(0.25), RULE)
    written = [part.clone() for part in paged.cache.statistics.parts]
    blocks = paged.block_table[0][6:10]
    pages = torch.arange(BLOCK // paged.cache.page_size)
    update_page_statistics(
        paged.cache.keys, paged.cache.statistics, blocks.repeat_interleave(len(pages)), pages.repeat(len(blocks))
    )
    for part, was in zip(paged.cache.statistics.parts, written, strict=True):
        assert torch.equal(part[blocks], was[blocks])


def test_equal_votes_keep_the_lowest_tokens_and_sinks_and_window_always():
    votes = torch.zeros(1, 100)
    kept = choose_tokens(votes, num_tokens=100, candidates=96, before=64, rule=RULE)
    # 4 sinks and 4 of the window are among the candidates; the other 24 have equal votes.
    assert kept.tolist() == [[*range(28), 92, 93, 94, 95]]
    votes[0, 50] = 1.0
    kept = choose_tokens(votes, num_tokens=100, candidates=96, before=64, rule=RULE)
    assert kept.tolist() == [[*range(23), *range(48, 53), 92, 93, 94, 95]]


def test_protected_tokens_are_kept_whatever_the_votes_and_lend_their_neighbours_nothing():
    votes = torch.arange(100, 0, -1).float().repeat(2, 1)
    protected = torch.zeros(2, 100, dtype=torch.bool)
    protected[0, 40:60] = protected[1, 70:71] = protected[:, 98] = True
    kept = choose_tokens(votes, num_tokens=100, candidates=96, before=64, rule=RULE, protected=protected)
    assert kept.tolist() == [[*range(8), *range(40, 60), *range(92, 96)], [*range(27), 70, *range(92, 96)]]
    # A mask without heads holds for all of them.
    kept = choose_tokens(votes, num_tokens=100, candidates=96, before=64, rule=RULE, protected=protected[0])
    assert kept.tolist() == [[*range(8), *range(40, 60), *range(92, 96)]] * 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("vote", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("in_order_of_votes", [False, True])
def test_votes_that_are_no_numbers_drop_no_token_that_is_always_kept(vote, in_order_of_votes):
    from sparse_kernels.compaction import triton

    votes, protected = torch.full((1, 100), vote), torch.zeros(100, dtype=torch.bool)
    protected[70:72] = True
    rule = replace(RULE, in_order_of_votes=in_order_of_votes)
    # 4 sinks, 2 protected tokens and 4 of the window: as many as are kept, and then two more.
    for kept, others in ((10, []), (12, [4, 5])):
        for choose in (reference.choose_tokens, triton.choose_tokens):
            chosen = choose(votes, kept, 96, 92, rule, protected)
            assert chosen.tolist() == [[*range(4), *others, 70, 71, *range(92, 96)]]


def test_a_request_with_nan_keeps_its_newest_tokens_and_changes_no_neighbour():
    paged, query = prompt_of(320)
    keys, table = paged.cache.keys.view, paged.block_table[0]
    keys[table[5].long()] = torch.nan
    before = keys.view(torch.int16).clone()
    window = ObservationWindow(query[-8:], 312)
    kept = compact_prompt(window, PromptBlocks(table, 320, 7), paged.cache, Softmax(0.25), RULE)
    for of_head in kept.tolist():
        assert of_head == sorted(set(of_head))
        assert (of_head[:4], of_head[-8:]) == ([*range(4)], [*range(312, 320)])
    others = torch.ones(len(keys), dtype=torch.bool)
    others[table[7:10].long()] = False
    assert torch.equal(keys.view(torch.int16)[others], before[others])


def test_tokens_may_lie_in_the_order_of_their_votes_between_sinks_and_window():
    votes = torch.rand(2, 100, generator=torch.Generator().manual_seed(3))
    votes[:, 30:50] = 2.0
    by_votes = replace(RULE, pool_tokens=3, in_order_of_votes=True)
    protected = torch.zeros(100, dtype=torch.bool)
    protected[60] = True
    kept = choose_tokens(votes, 100, 96, 48, by_votes, protected)
    plain = choose_tokens(votes, 100, 96, 48, replace(by_votes, in_order_of_votes=False), protected)
    assert torch.equal(kept.sort().values, plain)
    for head in range(2):
        pooled = [float(votes[head, max(0, token - 1) : min(92, token + 2)].max()) for token in range(92)]
        chosen = sorted(set(plain[head].tolist()) - {*range(4), 60, *range(92, 96)}, key=lambda token: pooled[token])
        assert kept[head].tolist() == [*range(4), *chosen, 60, *range(92, 96)]
        assert pooled[chosen[-1]] == 2.0 > pooled[chosen[0]]


def test_a_share_of_what_is_kept_is_for_the_newest_and_never_takes_the_place_of_the_sinks():
    votes = torch.arange(100, 0, -1).float()[None]
    for share, sinks in ((0.5, 4), (0.5, 0), (1.0, 4), (0.5, 20), (0.0, 4)):
        rule = CompactionRule(0, 1, sinks, recent_share=share, every_query=True)
        kept = choose_tokens(votes, num_tokens=100, candidates=96, before=68, rule=rule)
        # 4 of the newest tokens are in the incomplete block, which is kept in addition.
        newest = max(0, min(int(share * 28), 28 - sinks) - 4)
        assert kept.tolist() == [[*range(28 - newest), *range(96 - newest, 96)]]


def test_a_window_of_nobody_keeps_the_first_tokens_and_its_own():
    paged, query = prompt_of(320)
    window = ObservationWindow(query[:0], 0)
    kept = compact_prompt(window, PromptBlocks(paged.block_table[0], 320, 9), paged.cache, Softmax(0.25), RULE)
    assert kept.tolist() == [[*range(24), *range(312, 320)]] * 2


def test_a_window_that_ends_before_the_prompt_votes_for_what_it_sees():
    paged, query = prompt_of(330)
    softmax = Softmax(0.25)
    kept = compact_prompt(
        ObservationWindow(query[315:323], 315), PromptBlocks(paged.block_table[0], 330, 7), paged.cache, softmax, RULE
    )
    expected = kept_tokens(query[315:323], paged.keys[0], 3 * BLOCK + 10, softmax, RULE, BLOCK, last_query=322)
    assert [set(of_head.tolist()) | set(range(320, 330)) for of_head in kept] == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_bytes_move_as_they_are(dtype):
    paged, query = prompt_of(320)
    every = torch.arange(len(paged.cache.keys.view))[:, None, None], torch.arange(2)[:, None], torch.arange(4)
    halves = [tensor.gather(*every).flatten(2, 3) for tensor in (paged.cache.keys, paged.cache.values)]
    rows = torch.cat(halves, dim=-1).nan_to_num().clamp(-9, 9).to(dtype)
    scales = (torch.tensor(0.5), torch.tensor(2.0)) if dtype.itemsize == 1 else (None, None)
    cache = KVCache.from_rows(rows.clone(), 8, None, *scales)
    kept = compact_prompt(
        ObservationWindow(query[-8:].to(torch.bfloat16), 312), PromptBlocks(paged.block_table[0], 320, 7), cache,
        Softmax(0.25), RULE,
    )  # fmt: skip
    table = paged.block_table[0]
    for head in range(2):
        source = rows[table[kept[head] // BLOCK], head, kept[head] % BLOCK].float()
        moved = torch.cat(
            [tensor.gather(table[7:10, None], torch.tensor(head), torch.arange(4)).flatten(0, 2).float()
             for tensor in (cache.keys, cache.values)], dim=-1,
        )  # fmt: skip
        assert torch.equal(moved, source)


def test_bad_arguments_are_refused():
    paged, query = prompt_of(320)
    window = ObservationWindow(query[-8:], 312)
    for first in (0, 10, 11):
        with pytest.raises(ValueError, match=f"first_block: got {first}, allowed: 1 to 9"):
            compact_prompt(window, PromptBlocks(paged.block_table[0], 320, first), paged.cache, Softmax(1.0), RULE)
    prompt = PromptBlocks(paged.block_table[0], 320, 5)
    with pytest.raises(ValueError, match="pool_tokens: got 4"):
        compact_prompt(window, prompt, paged.cache, Softmax(1.0), replace(RULE, pool_tokens=4))
    with pytest.raises(ValueError, match=r"recent_share: got 1\.5"):
        compact_prompt(window, prompt, paged.cache, Softmax(1.0), replace(RULE, recent_share=1.5))
    with pytest.raises(ValueError, match="window_tokens: got -1"):
        compact_prompt(window, prompt, paged.cache, Softmax(1.0), replace(RULE, window_tokens=-1))
    with pytest.raises(ValueError, match="probes: got some, allowed without every_query: None"):
        compact_prompt(window, prompt, paged.cache, Softmax(1.0), replace(RULE, probes=TokenRule()))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_triton_votes_choose_the_tokens_of_the_paper(monkeypatch, softcap):
    from sparse_kernels.token_prefill import triton

    monkeypatch.setattr("sparse_kernels.compaction.api.attention_sums", triton.attention_sums)
    paged, query = prompt_of(335, group=3)
    softmax = Softmax(0.25, softcap)
    # The window of a prompt whose last token ran in a graph.
    window = ObservationWindow(query[-9:-1], 326)
    kept = compact_prompt(window, PromptBlocks(paged.block_table[0], 335, 7), paged.cache, softmax, RULE)
    expected = kept_tokens(query[-9:-1], paged.keys[0], 3 * BLOCK + 15, softmax, RULE, BLOCK, last_query=333)
    assert [set(of_head.tolist()) | set(range(320, 335)) for of_head in kept] == expected


SPECIAL = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38, 1.0, 1.0 + 2**-23, 1e-42, 0.0, -0.0])
"""Votes that sorts may order differently."""


def votes_of_all_kinds(width: int) -> torch.Tensor:
    """Votes with few, many or only equal values, or non-finite ones; each KV head has another kind."""
    draw = torch.Generator().manual_seed(width)

    def some(of: torch.Tensor) -> torch.Tensor:
        return of[torch.randint(len(of), (width,), generator=draw)]

    return torch.stack(
        [
            torch.rand(width, generator=draw),
            1e-42 * torch.randn(width, generator=draw),
            torch.randint(-(1 << 31), 1 << 31, (width,), generator=draw).int().view(torch.float32),
            some(torch.arange(3.0)),
            torch.full((width,), 0.25),
            some(SPECIAL),
            some(SPECIAL[2:4]),
            some(SPECIAL[8:]),
            some(torch.tensor([torch.nan] * 9 + [1.0])),
        ]
    )


def check_choice(candidates: int, kept: int, first_of_window: int, rule: CompactionRule, device: str) -> None:
    from sparse_kernels.compaction import triton

    # The prompt continues after its full blocks.
    votes = votes_of_all_kinds(max(candidates, first_of_window) + 7)
    some = torch.rand(votes.shape, generator=torch.Generator().manual_seed(candidates)) < 0.3
    for protected in (None, some[0], some):
        expected = reference.choose_tokens(votes, kept, candidates, first_of_window, rule, protected)
        here = None if protected is None else protected.to(device)
        found = triton.choose_tokens(votes.to(device), kept, candidates, first_of_window, rule, here)
        assert found.dtype == torch.int64
        assert torch.equal(found.cpu(), expected)


CHOICES = [
    (1, 1, 0, CompactionRule(32, 1, 0)),
    (255, 100, 240, CompactionRule(32, 9, 0)),
    (256, 255, 300, CompactionRule(32, 5, 4)),
    (257, 257, 257, CompactionRule(32, 5, 4)),
    (513, 100, 490, CompactionRule(32, 1, 4)),
    (300, 100, 270, CompactionRule(32, 25, 4)),
    (60, 20, 50, CompactionRule(32, 99, 4)),
    (513, 100, 490, CompactionRule(32, 5, 4, in_order_of_votes=True)),
    (300, 299, 310, CompactionRule(32, 1, 0, in_order_of_votes=True)),
]
"""Candidates, number of kept tokens, and the first token of the window: around 256, which a program counts at a
time."""


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice[:3])))
def test_tokens_are_those_of_a_stable_sort(choice, monkeypatch):
    from sparse_kernels.compaction import triton

    monkeypatch.setattr(triton, "_COUNTED_AT_ONCE", 256)
    monkeypatch.setattr(triton, "_RANKED_AT_ONCE", 256)
    check_choice(*choice, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("candidates", [1, 40, 1023, 1024, 1025, 8191, 8192, 8193, 32768, 131071])
def test_tokens_on_a_gpu_are_those_of_a_stable_sort(candidates):
    for kept in {1, -(-candidates // 4), max(candidates - 1, 1), candidates}:
        before_window = max(candidates - 20, 0)
        for first_of_window, sinks, pool in (
            (before_window, 4, 5), (before_window, 4, 25), (before_window, 4, 99), (candidates + 20, 0, 1), (0, 4, 9),
        ):  # fmt: skip
            for by_votes in (False, True):
                rule = CompactionRule(32, pool, sinks, in_order_of_votes=by_votes)
                check_choice(candidates, kept, first_of_window, rule, "cuda")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("head_size", [16, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", [None, "quarters", "bounds"])
@pytest.mark.parametrize("in_text_order", [True, False])
def test_triton_moves_what_torch_does(dtype, kind, head_size, in_text_order):
    from sparse_kernels.compaction import triton

    block, draw = 64 if dtype.itemsize == 2 else 256, torch.Generator().manual_seed(3)
    layout = kind and StatisticsLayout(8, head_size, KINDS[kind].formats[0], dtype.itemsize, KINDS[kind])
    rows = block + (layout.rows(block) if layout else 0)
    # Arbitrary bits, including NaN, but finite keys: other tests cover the statistics of non-finite keys.
    memory = garbage(9, 3, rows, head_size * dtype.itemsize, generator=draw).view(torch.uint8)
    keys = torch.randn(9, 3, block, head_size, generator=draw).to(dtype)
    memory[:, :, :block].view(dtype)[..., :head_size] = keys
    table = torch.randperm(9, generator=draw)[:8]
    # Sources and targets overlap.
    kept = torch.rand(3, 7 * block, generator=draw).argsort(dim=1)[:, : 3 * block].contiguous()
    if in_text_order:
        kept = kept.sort(dim=1).values
    found = []
    for implementation in (reference, triton):
        mine = memory.clone().view(dtype)
        views = layout and layout.views(mine[:, :, block:], block)
        implementation.move_tokens(kept, table, 4, KVCache.from_rows(mine[:, :, :block], 8, views))
        found.append(mine.view(torch.uint8))
    assert torch.equal(*found)
    for head in range(3):
        moved = found[0][table[4:7], head, :block].flatten(0, 1)
        assert torch.equal(moved, memory[table[kept[head] // block], head, kept[head] % block])


def test_rows_of_a_cache_are_those_that_it_was_made_of():
    memory = torch.randn(5, 3, 40, 2 * 16)
    rows = memory[1:, :, :32]
    cache = KVCache.from_rows(rows, 8)
    assert cache.rows.data_ptr() == rows.data_ptr()
    assert torch.equal(cache.rows, rows)
    apart = replace(cache, values=KVCache.from_rows(rows.clone(), 8).values)
    for packed in (apart, replace(cache, keys=cache.values, values=cache.keys)):
        with pytest.raises(ValueError, match="keys and values: got packed blocks, allowed: one row per token"):
            _ = packed.rows


def accumulated(
    query: torch.Tensor, chunks: list[int], cache: KVCache, block_table: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Votes of all queries of a prompt that is computed in chunks. No query sees later tokens."""
    votes, begin = torch.zeros(cache.num_kv_heads, len(query)), 0
    for size in chunks:
        window = ObservationWindow(query[begin : begin + size], begin)
        add_votes(votes, window, block_table, cache, softmax)
        begin += size
    return votes


@pytest.mark.parametrize("chunks", [[335], [1, 200, 134], [128, 128, 79]])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_heavy_hitters_of_all_queries_and_the_newest_tokens_are_kept(chunks, softcap):
    paged, query = prompt_of(335)
    softmax, rule = Softmax(0.25, softcap), replace(RULE, pool_tokens=1, every_query=True)
    votes = accumulated(query, chunks, paged.cache, paged.block_table[0], softmax)
    nobody = ObservationWindow(query[:0], 0)
    kept = compact_prompt(nobody, PromptBlocks(paged.block_table[0], 335, 7), paged.cache, softmax, rule, votes)
    expected = kept_tokens(query, paged.keys[0], 3 * BLOCK + 15, softmax, rule, BLOCK)
    assert [set(of_head.tolist()) | set(range(320, 335)) for of_head in kept] == expected


def test_accumulated_attention_is_that_of_transformers(tmp_path):
    """H2O as published, from transformers' attention weights: the sums of their columns."""
    from transformers import AutoModelForCausalLM

    folder, length, budget, recent = save_llama(tmp_path, longest=512), 330, 96, 40
    tokens = torch.randint(97, (length,), generator=torch.Generator().manual_seed(5)).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    rule = CompactionRule(window_tokens=recent, pool_tokens=1, sink_tokens=0, every_query=True)
    for layer, attention in zip(CapturingModel(folder, "cpu").run(tokens, length), weights, strict=True):
        sums = attention[0].double().unflatten(0, (KV_HEADS, GROUP)).sum(dim=(1, 2))
        rows = torch.cat([layer.keys, layer.values], dim=-1)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -length % BLOCK)).unflatten(1, (-1, BLOCK)).transpose(0, 1)
        cache, softmax = KVCache.from_rows(rows.contiguous(), 8), Softmax(layer.scale)
        table, votes = torch.arange(-(-length // BLOCK)), torch.zeros(KV_HEADS, length)
        query = layer.query.flatten(1, 2)
        add_votes(votes, ObservationWindow(query, 0), table, cache, softmax)
        # transformers rounds its weights to bfloat16.
        assert (votes - sums).abs().max() < 2e-3 * length
        prompt = PromptBlocks(table, length, length // BLOCK - budget // BLOCK)
        kept = compact_prompt(ObservationWindow(query[:0], 0), prompt, cache, softmax, rule, votes)
        # Of the 40 newest tokens, 30 are in full blocks. The rest of the budget is for heavy hitters.
        newest = [token for token in range(length - recent, length) if token < length // BLOCK * BLOCK]
        for head in range(KV_HEADS):
            hitters = sums[head, : length - recent].topk(budget - len(newest)).indices.tolist()
            assert len(set(kept[head].tolist()) - {*hitters, *newest}) <= 1  # a tie within the rounding


def test_votes_without_a_place_are_refused():
    paged, query = prompt_of(320)
    window, prompt = ObservationWindow(query[-8:], 312), PromptBlocks(paged.block_table[0], 320, 5)
    with pytest.raises(ValueError, match=r"votes: got \[2, 319\], allowed: at least \[2, 320\]"):
        add_votes(torch.zeros(2, 319), window, paged.block_table[0], paged.cache, Softmax(1.0))
    with pytest.raises(ValueError, match=r"earlier: got \[2, 319\], allowed: \[2, 320\]"):
        compact_prompt(window, prompt, paged.cache, Softmax(1.0), RULE, torch.zeros(2, 319))


@pytest.mark.usefixtures("interpreted")
def test_triton_adds_up_the_attention_of_all_queries(monkeypatch):
    from sparse_kernels.token_prefill import triton

    paged, query = prompt_of(200, group=3)
    expected = accumulated(query, [200], paged.cache, paged.block_table[0], Softmax(0.25))
    monkeypatch.setattr("sparse_kernels.compaction.api.attention_sums", triton.attention_sums)
    found = accumulated(query, [100, 100], paged.cache, paged.block_table[0], Softmax(0.25))
    assert (found - expected).abs().max() < 1e-3
    rows, votes = voting_rows(200, PROBES, query.device), torch.zeros(2, 200)
    for begin in (0, 100):
        chunk = ObservationWindow(query[begin : begin + 100], begin)
        add_votes(votes, chunk, paged.block_table[0], paged.cache, Softmax(0.25), rows)
    assert votes[1].tolist() == pytest.approx(
        zipvl_votes(query, paged.keys[0], rows.tolist(), Softmax(0.25)), rel=1e-3, abs=1e-5
    )
    assert found.sum(dim=1).tolist() == pytest.approx([600.0] * 2, rel=1e-4)


def test_a_worker_with_some_of_the_heads_keeps_of_them_what_one_with_all_does():
    rows = torch.randn(12, 4, BLOCK, 2 * 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    _, query = prompt_of(335, group=4)
    found = []
    for heads in (slice(0, 4), slice(2, 4)):
        cache, part = KVCache.from_rows(rows[:, heads].clone(), 8), query[:, 2 * heads.start : 2 * heads.stop]
        votes = accumulated(part, [335], cache, torch.arange(12), Softmax(0.25))
        window = ObservationWindow(part[-8:], 327)
        prompt = PromptBlocks(torch.arange(12), 335, 7)
        found.append((votes, compact_prompt(window, prompt, cache, Softmax(0.25), RULE)))
    assert torch.equal(found[0][0][2:], found[1][0])
    assert torch.equal(found[0][1][2:], found[1][1])


PROBES = TokenRule(tau=0.4, recent_probes=16, random_probes=16, seed=3)
ZIPVL = CompactionRule(window_tokens=1, pool_tokens=1, sink_tokens=4, every_query=True, probes=PROBES)


@pytest.mark.parametrize("chunks", [[335], [1, 200, 134]])
def test_zipvl_keeps_what_probe_rows_of_the_prompt_attend_to_however_it_is_cut(chunks):
    paged, query = prompt_of(335)
    softmax, rows = Softmax(0.25), voting_rows(335, PROBES, query.device)
    assert sorted(rows.tolist())[16:] == list(range(319, 335))
    assert len(set(rows.tolist())) == 32
    votes, begin = torch.zeros(2, 335), 0
    for size in chunks:
        chunk = ObservationWindow(query[begin : begin + size], begin)
        add_votes(votes, chunk, paged.block_table[0], paged.cache, softmax, rows)
        begin += size
    expected = zipvl_votes(query, paged.keys[0], rows.tolist(), softmax)
    assert votes[0].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert torch.equal(votes[0], votes[1])
    nobody, prompt = ObservationWindow(query[:0], 0), PromptBlocks(paged.block_table[0], 335, 7)
    kept = compact_prompt(nobody, prompt, paged.cache, softmax, ZIPVL, votes)
    wanted = kept_tokens(query, paged.keys[0], 3 * BLOCK + 15, softmax, ZIPVL, BLOCK)
    assert [set(of_head.tolist()) | set(range(320, 335)) for of_head in kept] == wanted


def test_what_zipvls_prefill_has_kept_is_kept_of_the_cache_too():
    paged, query = prompt_of(335)
    softmax, length = Softmax(0.25), 335
    starts = torch.tensor([0, length], dtype=torch.int32)
    batch = PrefillBatch(query, starts, paged.block_table[:1].int(), starts[1:], length, length)
    found = token_prefill(batch, paged.cache, softmax, PROBES, torch.empty_like(query))
    important = set(found.positions[0, : int(found.counts[0])].tolist())
    assert 60 < len(important) < 251
    votes = torch.zeros(2, length)
    rows = voting_rows(length, PROBES, query.device)
    add_votes(votes, ObservationWindow(query, 0), paged.block_table[0], paged.cache, softmax, rows)
    nobody, prompt = ObservationWindow(query[:0], 0), PromptBlocks(paged.block_table[0], length, 2)
    kept = compact_prompt(nobody, prompt, paged.cache, softmax, ZIPVL, votes)
    assert important <= {*kept[0].tolist(), *range(320, 335)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "rule", [CompactionRule(32, 25, 4), CompactionRule(0, 1, 4, recent_share=0.5, every_query=True), ZIPVL],
    ids=["snapkv", "h2o", "zipvl"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "head_size", "length"), [(8, 128, 4135), (2, 64, 2049), (1, 256, 1100)])
def test_a_gpu_keeps_and_moves_what_a_cpu_does(rule, dtype, heads, head_size, length):
    generator = torch.Generator().manual_seed(7)
    blocks, block = -(-length // 64), 64
    rows = torch.randn(blocks + 3, heads, block, 2 * head_size, generator=generator).to(dtype)
    table = torch.randperm(blocks + 3, generator=generator)[:blocks]
    query = (2 * torch.randn(length, 4 * heads, head_size, generator=generator)).to(torch.bfloat16)
    scales = (torch.tensor(0.5), torch.tensor(2.0)) if dtype.itemsize == 1 else (None, None)
    first, softmax = length // block - 5, Softmax(head_size**-0.5)
    found = []
    for device in ("cpu", "cuda"):
        cache = KVCache.from_rows(
            rows.to(device, copy=True), 8, None, *(None if scale is None else scale.to(device) for scale in scales)
        )
        window, votes = ObservationWindow(query[length - 32 :].to(device), length - 32), None
        if rule.every_query:
            voting = None if rule.probes is None else voting_rows(length, rule.probes, window.query.device)
            votes, window = torch.zeros(heads, length, device=device), ObservationWindow(query[:0].to(device), 0)
            for begin, end in ((0, 700), (700, length)):
                chunk = ObservationWindow(query[begin:end].to(device), begin)
                add_votes(votes, chunk, table.to(device), cache, softmax, voting)
        prompt = PromptBlocks(table.to(device), length, first)
        kept = compact_prompt(window, prompt, cache, softmax, rule, votes).cpu()
        found.append(kept)
        target = first * block + torch.arange(kept.shape[1])
        for head in range(heads):
            source = rows[table[kept[head] // block], head, kept[head] % block].float()
            every = torch.arange(block // 8)
            moved = [
                tensor.gather(table[target // block].unique_consecutive()[:, None].to(device),
                              torch.tensor(head, device=device), every.to(device)).flatten(0, 2)
                for tensor in (cache.keys, cache.values)
            ]  # fmt: skip
            assert torch.equal(torch.cat(moved, dim=-1).float().cpu(), source)
    # Votes that differ only by rounding may be ranked in either order.
    same = sum(len(set(one.tolist()) & set(other.tolist())) for one, other in zip(*found, strict=True))
    assert same >= 0.98 * found[0].numel()

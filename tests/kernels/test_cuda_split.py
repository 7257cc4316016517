"""Routing and split attention on CUDA, against the torch references, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.split_attention.reference import split_attention as reference_split
from support.cuda import CASES, ON_GPU, STD_WEIGHT, Case, Inputs, assert_close, decode, launches, split

pytestmark = ON_GPU


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.skipped is not None])
def test_nothing_is_scored_for_a_skipped_group(name: str) -> None:
    from sparse_kernels.group_routing.cuda import skipped_groups
    from sparse_kernels.page_score.cuda import launch_scores

    case = CASES[name]
    inputs = Inputs(case)
    assert inputs.routing is not None
    skipped = skipped_groups(inputs.batch(case), inputs.kv(case), inputs.routing)
    lengths = inputs.context_lens(case)
    sinks = inputs.group_scores(case) >= inputs.routing.thresholds(lengths.clamp(min=1))
    wanted = sinks & (lengths > case.dense_tokens)[:, None]
    assert torch.equal(skipped.bool(), wanted)
    width = inputs.block_table.shape[1] * case.block_size // case.page_size
    all_scores, needed = (torch.full((*skipped.shape, width), 7.0, device="cuda").bfloat16() for _ in range(2))
    for scores, groups in ((all_scores, None), (needed, skipped)):
        launch_scores(inputs.batch(case), inputs.statistics, case.page_size, STD_WEIGHT, scores, groups)
    assert torch.equal(needed, torch.where(wanted[..., None], 7.0, all_scores))


@pytest.mark.parametrize("launch", range(4))
def test_routing_that_skips_nothing_changes_no_bit_and_counts(launch: int) -> None:
    case = Case((3000, 517, 1, 4096, 700), num_kv_heads=4)
    inputs = Inputs(case)
    how = launches(case.group, case.head_size)
    if launch >= len(how):
        pytest.skip("this GPU has one launch")
    plain = decode(inputs, case, how[launch])
    inputs.routing = inputs.forced(case, 0.0)
    assert torch.equal(decode(inputs, case, how[launch]), plain)
    assert inputs.routing.counts is not None
    assert inputs.routing.counts.tolist() == [[0, 5]] * 4
    inputs.routing = inputs.forced(case, 0.6)
    routed = decode(inputs, case, how[launch]).unflatten(1, (4, 4))
    skipped = inputs.group_scores(case) >= inputs.routing.coefficients[0, 0]
    assert int(skipped.sum()) == 12
    assert routed[skipped].eq(0).all()
    assert torch.equal(routed[~skipped], plain.unflatten(1, (4, 4))[~skipped])
    assert inputs.routing.counts[:, 0].tolist() == skipped.sum(dim=0).tolist()


SPLIT = {
    "ragged": Case((3000, 517, 1, 20000, 700), num_kv_heads=4, skipped=0.6),
    "piece boundaries": Case((255, 256, 257, 511, 512, 513, 16384, 16385), skipped=0.5),
    "nothing routed": Case((3000, 517, 1, 20000, 700)),
    "multi-head, small blocks": Case((3000, 517, 8, 7, 4096), group=1, block_size=16, skipped=0.6),
    "group of 2": Case((1777, 90), group=2, skipped=0.5, score="max"),
    "group of 3": Case((2000, 1501), group=3, block_size=32, skipped=0.5, score="min"),
    "group of 8, heads of 64": Case((2000, 15010), group=8, head_size=64, block_size=16, skipped=0.5),
    "group of 16": Case((2000, 15010), group=16, skipped=0.5),
    "group of 16, heads of 256": Case((2000, 1501), group=16, head_size=256, skipped=0.5),
    "three query tokens": Case((3000, 517, 4096), queries=3, skipped=0.6),
    "padded requests": Case((3000, 0, 517, 0), skipped=0.5),
    "softcap": Case((3000, 517), softcap=20.0, skipped=0.5),
    "short contexts whole": Case((3000, 517, 4096), dense_tokens=1000, skipped=0.5),
    "fp8 cache": Case((3000, 517, 15000), block_size=256, eight_bit_cache=True, skipped=0.5),
    "fp8 cache, heads of 64": Case(
        (3000, 517), group=8, head_size=64, block_size=256, eight_bit_cache=True, skipped=0.5
    ),
    "fp8 cache, group of 16": Case((3000, 517), group=16, block_size=512, eight_bit_cache=True),
    "everything skipped": Case((3000, 517, 4096), skipped=1.0),
    "heads of 80": Case((3000, 517), head_size=80, skipped=0.5),
    "heads of 112, fp8 cache": Case((3000, 517), head_size=112, block_size=256, eight_bit_cache=True, skipped=0.5),
    "heads of 192, group of 16": Case((2000, 1501), head_size=192, group=16, skipped=0.5),
    "group of 17": Case((3000, 517), group=17, skipped=0.5),
    "group of 64, one KV head": Case(
        (3000, 20000, 9), num_kv_heads=1, group=64, head_size=64, skipped=0.5, score="max"
    ),
    "learned sinks": Case((3000, 517, 20000), sinks=torch.float32),
    "learned sinks, group of 32": Case((3000, 517), group=32, sinks=torch.bfloat16, skipped=0.5),
}


@pytest.mark.parametrize("splits", [1, 7, 64])
@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_split_attention_equals_the_reference_whatever_the_launch(case: Case, splits: int) -> None:
    from sparse_kernels.split_attention.cuda import Launch

    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    first, *others = [split(inputs, case, splits, Launch(blocks)) for blocks in (1 << 20, 1, 24)]
    reference_split(*inputs.split_arguments(case, splits=splits), DecodeOutput(expected))
    assert_close(first, expected)
    assert torch.equal(first == 0, expected == 0)
    for other in others:
        assert torch.equal(other, first)


def test_split_attention_that_skips_nothing_changes_no_bit_and_counts() -> None:
    case = Case((3000, 517, 1, 20000, 700), num_kv_heads=4)
    inputs = Inputs(case)
    plain = split(inputs, case)
    inputs.routing = inputs.forced(case, 0.0)
    assert torch.equal(split(inputs, case), plain)
    inputs.routing = inputs.forced(case, 0.6)
    output, counts = split(inputs, case).unflatten(1, (4, 4)), inputs.routing.counts
    skipped = inputs.group_scores(case) >= inputs.routing.coefficients[0, 0]
    assert output[skipped].eq(0).all()
    assert torch.equal(output[~skipped], plain.unflatten(1, (4, 4))[~skipped])
    assert counts is not None
    assert torch.equal(counts, torch.stack([skipped.sum(dim=0), torch.full((4,), 5, device="cuda")], dim=1))


@pytest.mark.parametrize("dense", [True, False], ids=["split attention", "decode"])
def test_thresholds_follow_the_cubic_of_each_head(dense: bool) -> None:
    case = Case((3000, 517, 20, 9000, 700, 130), num_kv_heads=4)
    inputs = Inputs(case)
    scores, lengths = inputs.group_scores(case), inputs.seq_lens
    spread = float(scores.std())
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        coefficients = (torch.randn(4, 4, generator=generator) * spread).cuda()
        inputs.routing = GroupRouting(coefficients, shortest=256, longest=8192)
        thresholds = inputs.routing.thresholds(lengths)
        # Rounding cannot change a decision.
        assert (scores - thresholds).abs().min() > 1e-5 * spread
        output = split(inputs, case) if dense else decode(inputs, case)
        assert torch.equal(output.unflatten(1, (4, 4)).eq(0).all(dim=-1).all(dim=-1), scores >= thresholds)


def test_a_routed_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((3000, 517, 1, 20000, 700) * 13, skipped=0.5)
    inputs = Inputs(case)
    together = split(inputs, case)
    for row in (0, 3, 42):
        assert torch.equal(split(inputs.row(row), case)[0], together[row])


def test_a_graph_of_split_attention_serves_other_lengths() -> None:
    case = Case((3000, 517, 20000), skipped=0.5)
    inputs = Inputs(case)
    split(inputs, case)
    from sparse_kernels.split_attention import cuda

    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.split_attention(*inputs.split_arguments(case), DecodeOutput(out))
    for lengths in ((3000, 517, 20000), (1, 0, 2777), (600, 511, 15000)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, split(inputs, case))

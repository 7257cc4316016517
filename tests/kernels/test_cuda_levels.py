"""Decode steps that score in two levels on CUDA, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.page_score.cuda import launch_scores
from sparse_kernels.page_topk.reference import select_pages
from support.cuda import LEVELED, ON_GPU, Case, Inputs, assert_a_graph_serves, assert_scores_close, decode

pytestmark = ON_GPU


def launches() -> list[object]:
    """Every cluster, with few and with many warps."""
    from sparse_kernels.sparse_decode.launches import Launch

    return [Launch(True, cluster, warps, 1) for cluster in (1, 2, 4, 8) for warps in (8, 16)]


def scores_of(inputs: Inputs, case: Case, refined: float) -> torch.Tensor:
    """The scores of the two Triton launches."""
    width = inputs.block_table.shape[1] * inputs.keys.pages_per_block
    tokens = len(inputs.query)
    scores = torch.full((tokens, case.num_kv_heads, -(-width // 8) * 8), torch.nan, device="cuda").bfloat16()
    launch_scores(inputs.batch(case), inputs.statistics, case.page_size, 0.0, scores, refined=refined)
    return scores


@pytest.mark.parametrize("case", LEVELED.values(), ids=LEVELED)
def test_the_fused_kernel_selects_by_the_scores_of_triton(case: Case) -> None:
    from sparse_kernels.sparse_decode import cuda

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters")
    inputs = Inputs(case)
    inputs.routing = None
    lengths = inputs.batch(case).num_pages(case.page_size)
    scores, whole = scores_of(inputs, case, case.refined), scores_of(inputs, case, 1.0)
    wanted = select_pages(scores, lengths, case.k, 1, 1)
    found = []
    wide = case.group * case.head_size > 1024
    for launch in launches():
        if (wide and launch.cluster == 1) or ((case.head_size > 128 or case.group > 8) and launch.warps == 16):
            continue
        output = inputs.empty_output()
        pages = torch.empty(len(inputs.query), case.num_kv_heads, case.k, dtype=torch.int32, device="cuda")
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(output.heads, pages=pages), launch)
        found.append((output.heads, pages))
    for row, count in enumerate(lengths.tolist()):
        here = scores[row, :, :count]
        kept = here > -torch.inf
        assert torch.equal(here[kept], whole[row, :, :count][kept])
        assert kept.all() == (count <= 2048)
        for heads, pages in found:
            assert torch.equal(heads[row], found[0][0][row])
            if count > case.k:
                assert torch.equal(pages[row].sort(dim=-1).values, wanted[row].int())


def test_scores_of_two_levels_equal_the_reference() -> None:
    from sparse_kernels.page_score.reference import score_pages

    case = LEVELED["leveled"]
    inputs = Inputs(case)
    lengths = inputs.batch(case).num_pages(case.page_size)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    expected = score_pages(grouped, inputs.statistics, inputs.block_table.long(), lengths, 0.0)
    actual = scores_of(inputs, case, 0.25)[..., : expected.shape[2]]
    refined = actual > -torch.inf
    assert_scores_close(actual.masked_fill(~refined, 0), expected.masked_fill(~refined, 0), lengths)


def test_a_graph_crosses_the_border_of_flat_rows() -> None:
    case = Case((30003, 8 * 2049, 517), kind="leveled_quarters", format="int4", refined=0.25, k=128)
    assert_a_graph_serves(case, ((30003, 16392, 517), (16384, 16391, 100), (16399, 0, 517)))


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((30003, 517, 16392, 20000) * 12, kind="leveled_quarters", format="int4", refined=0.25, k=128)
    inputs = Inputs(case)
    together = decode(inputs, case)
    for row in (0, 2, 47):
        assert torch.equal(decode(inputs.row(row), case)[0], together[row])

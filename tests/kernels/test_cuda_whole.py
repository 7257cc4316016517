"""Long contexts that are attended whole, by the thread blocks of their row and by all of a launch, on a GPU."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeOutput, LongDenseRequests
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from sparse_kernels.stopping import StopRule
from support.cuda import ON_GPU, Case, Inputs, assert_close, decode, launches

pytestmark = ON_GPU

WHOLE = {
    "boundaries": (Case((4096, 4097, 4159, 4160, 4161, 5120, 5121, 16384, 16385, 16448)), tuple(range(10))),
    "ragged": (Case((30003, 517, 9001, 5000, 20000)), (0, 1, 3)),
    "small blocks, group of 1": (Case((9001, 5001), group=1, block_size=16), (1,)),
    "group of 3, heads of 64": (Case((9001, 5001), group=3, head_size=64), (0, 1)),
    "group of 16, heads of 80": (Case((9001, 5001), group=16, head_size=80), (0,)),
    "heads of 256": (Case((9001, 5001), head_size=256), (1,)),
    "fp8 cache": (Case((9001, 5001), block_size=256, eight_bit_cache=True), (0,)),
    "quarters": (Case((9001, 5001, 30000), kind="quarters", format="int4"), (2,)),
    "bounds": (Case((9001, 5001, 30000), kind="bounds"), (2,)),
    "three query tokens": (Case((4098, 9001, 30000), queries=3), (0, 2)),
    "padded requests": (Case((9001, 0, 5001, 0)), (0, 1)),
    "short contexts whole": (Case((9001, 5001, 30000), dense_tokens=10000), ()),
    "learned sinks and softcap": (Case((9001, 5001), sinks=torch.float32, softcap=20.0), (0,)),
    "routed": (Case((9001, 5001, 7000), num_kv_heads=4, skipped=0.6), (1,)),
    "newest pages": (Case((9001, 5001), statistics=False), (0,)),
    "many requests": (Case((5001, 517, 4097, 9000) * 20), (0, 2, 5, 40, 79)),
}
"""Cases, and the requests that are attended whole at any length."""


def whole_inputs(name: str) -> tuple[Case, Inputs]:
    case, dense = WHOLE[name]
    inputs = Inputs(case)
    inputs.dense_requests = torch.zeros(len(case.contexts), dtype=torch.bool, device="cuda")
    inputs.dense_requests[list(dense)] = True
    return case, inputs


def listing(
    case: Case, requests: tuple[int, ...], most: int = 100, room: int = 100, first: int = 0
) -> LongDenseRequests:
    """A list in memory with garbage in all undefined places."""
    rows = case.queries * case.num_kv_heads
    numbers = room * LongDenseRequests.scratch_numbers(rows, case.group, case.head_size)
    listed = torch.full((1 + most,), 1 << 20, dtype=torch.int32)
    listed[: 1 + len(requests)] = torch.tensor((len(requests), *requests))
    scratch = torch.full((numbers,), torch.nan, device="cuda")
    arrived = torch.zeros(LongDenseRequests.arrived_numbers(most, rows), dtype=torch.int32, device="cuda")
    return LongDenseRequests(listed.cuda(), scratch, arrived, first)


def decode_listed(
    inputs: Inputs, case: Case, whole: LongDenseRequests | None, launch: object = None, rule: StopRule | None = None
) -> torch.Tensor:
    from sparse_kernels.sparse_decode import cuda

    batch, *others = inputs.decode_arguments(case, rule)
    output = inputs.empty_output()
    cuda.sparse_decode(replace(batch, whole=whole), *others, output, launch)
    return output.heads


@pytest.mark.parametrize("name", WHOLE)
def test_long_contexts_equal_the_reference_whoever_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = whole_inputs(name)
    alone = decode(inputs, case)
    everything = tuple(range(len(case.contexts)))
    lists = [listing(case, everything), listing(case, everything[::2]), listing(case, everything[::-1], room=2)]
    for launch in (None, *launches(case.group, case.head_size)):
        assert torch.equal(decode_listed(inputs, case, None, launch), alone)
        for whole in lists:
            assert torch.equal(decode_listed(inputs, case, whole, launch), alone)
            assert not whole.arrived.any()
    from support.cuda import checked_scores

    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(alone, expected)


@pytest.mark.parametrize("name", ["ragged", "three query tokens", "many requests"])
def test_a_long_context_does_not_depend_on_its_neighbours(name: str) -> None:
    case, inputs = whole_inputs(name)
    whole = listing(case, tuple(range(len(case.contexts))))
    together = decode_listed(inputs, case, whole)
    for row in range(min(3, len(case.contexts))):
        part = slice(row * case.queries, (row + 1) * case.queries)
        alone = decode_listed(inputs.row(row), case, replace(whole, first_request=row))
        assert torch.equal(alone, together[part])


def test_under_a_stop_rule_a_long_context_is_read_to_its_end() -> None:
    case, inputs = whole_inputs("ragged")
    rule, plain = StopRule(0.5, 0.5, 2, 512), decode(inputs, case)
    from sparse_kernels.sparse_decode import cuda

    batch, *others = inputs.decode_arguments(case, rule)
    for whole in (None, listing(case, (0, 3))):
        rows = torch.full((len(inputs.query), case.num_kv_heads), -1, dtype=torch.int32, device="cuda")
        output = replace(inputs.empty_output(), pages_read=rows)
        cuda.sparse_decode(replace(batch, whole=whole), *others, output)
        assert torch.equal(output.heads[[0, 3]], plain[[0, 3]])
        assert (rows[[0, 3]] == torch.tensor([[30003 // 8], [5000 // 8]], device="cuda")).all()


def test_a_graph_serves_other_lists() -> None:
    case, inputs = whole_inputs("ragged")
    from sparse_kernels.sparse_decode import cuda

    whole, output = listing(case, ()), inputs.empty_output()
    batch, *others = inputs.decode_arguments(case)
    batch = replace(batch, whole=whole)
    cuda.sparse_decode(batch, *others, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(batch, *others, output)
    assert inputs.dense_requests is not None
    for dense in ((), (0,), (0, 2, 4), (1, 3)):
        inputs.dense_requests.zero_()
        inputs.dense_requests[list(dense)] = True
        whole.requests[: 1 + len(dense)] = torch.tensor((len(dense), *dense), dtype=torch.int32, device="cuda")
        graph.replay()
        assert torch.equal(output.heads, decode(inputs, case))
        assert not whole.arrived.any()

"""Groups of many query heads in parts, with torch in place of the kernels."""

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.cuda.head_parts import attend_in_parts, parts_of, queries_in_parts
from sparse_kernels.limits import MAX_GROUP
from sparse_kernels.split_attention.reference import split_attention
from support.paged import make_batch


@pytest.mark.parametrize("group", [1, 15, 16, 17, 32, 33, 64, 71])
def test_parts_are_nearly_equal_and_leave_no_head_out(group: int) -> None:
    parts = parts_of(group)
    heads = [head for part in parts for head in range(group)[part]]
    sizes = [part.stop - part.start for part in parts]
    assert heads == list(range(group))
    assert max(sizes) <= MAX_GROUP
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-group // MAX_GROUP)


@pytest.mark.parametrize("group", [4, 17, 40])
def test_attention_in_parts_is_attention_of_all_heads(group: int) -> None:
    batch, heads = make_batch([40, 9], 3, 32), 3
    generator = torch.Generator().manual_seed(1)
    # A slice of a wider tensor, as vLLM's query is.
    query = torch.randn(2, heads * group + 5, 32, generator=generator).bfloat16()[:, : heads * group]
    softmax = Softmax(0.2, sink_logits=torch.randn(heads * group, generator=generator))
    requests = DecodeBatch(query, batch.block_table.int(), batch.context_lens.int())
    whole, parted = (torch.full(query.shape, torch.nan).bfloat16() for _ in range(2))
    split_attention(requests, batch.cache, softmax, None, None, 1, DecodeOutput(whole))
    sizes = []

    def attend(part: DecodeBatch, softmax: Softmax, output: DecodeOutput) -> None:
        sizes.append(part.query.shape[1] // heads)
        output.check(part, heads)
        softmax.check(part.query.shape[1])
        split_attention(part, batch.cache, softmax, None, None, 1, output)

    attend_in_parts(requests, heads, softmax, DecodeOutput(parted), attend)
    assert sum(sizes) == group
    assert max(sizes) <= MAX_GROUP
    assert sizes == [part.query.shape[1] // heads for part in queries_in_parts(requests, heads)]
    # A sum over more rows may have another order.
    torch.testing.assert_close(parted.float(), whole.float(), atol=2**-8, rtol=2**-7)

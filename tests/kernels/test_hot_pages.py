"""Copies of pages: what a step forgets; and on a GPU, decode steps over them."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.hot_pages import WAYS, HotPool, begin_step
from sparse_kernels.hot_pages import api as torch_form
from sparse_kernels.hot_pages import triton as triton_form
from sparse_kernels.hot_pages.pages import set_of
from support.cuda import CASES, ON_GPU, Case, Inputs, decode

PAGE = 8
SERVED = {name: case for name, case in CASES.items() if case.statistics and case.skipped is None}


def pool_of(pages: list[int], sets: int = 5, device: str = "cpu") -> HotPool:
    """Two layers of three heads with copies of some pages, which earlier steps have read."""
    pool = HotPool.empty(2, 3, sets, PAGE, 16, torch.bfloat16, torch.device(device))
    pool.clock.fill_(6)
    for page in pages:
        of_page = pool.tags[..., int(set_of(torch.tensor(page), sets)) * WAYS :][..., :WAYS]
        way = int((of_page[0, 0] != 0).sum())
        of_page[..., way] = (9 << 32) + page + 1
    return pool


def held(pool: HotPool) -> list[set[int]]:
    """The pages with copies, of each layer and head."""
    return [{int(tag & 0xFFFFFFFF) - 1 for tag in row if tag} for row in pool.tags.flatten(0, 1)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", [torch_form, triton_form])
@pytest.mark.parametrize("sets", [1, 5, 16])
def test_a_step_forgets_the_pages_that_it_completes_and_no_others(form, sets):
    pages = [0, 1, 7, 40, 41, 100_000_000]
    pool = pool_of(pages, sets)
    last = PAGE - 1
    # The last tokens of pages 0, 41 and 100,000,000; the first of 1; the last but one of 7; no token; one never held.
    slots = [last, 41 * PAGE + last, 100_000_000 * PAGE + last, PAGE, 7 * PAGE + last - 1, -1, 30 * PAGE + last]
    form.begin_step(pool, torch.tensor(slots))
    assert held(pool) == [{1, 7, 40}] * 6
    assert int(pool.clock) == 7


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", [torch_form, triton_form])
def test_each_copy_of_a_page_is_forgotten(form):
    pool = pool_of([3, 3, 4], sets=1)
    form.begin_step(pool, torch.tensor([3 * PAGE + PAGE - 1]))
    assert held(pool) == [{4}] * 6
    assert (pool.tags != 0).sum() == 6


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", [torch_form, triton_form])
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 300])
def test_any_number_of_tokens_is_one_step(form, tokens):
    pool = pool_of(list(range(300 // PAGE + 1)), sets=64)
    form.begin_step(pool, torch.arange(tokens))
    assert held(pool) == [set(range(tokens // PAGE, 300 // PAGE + 1))] * 6
    assert int(pool.clock) == 7


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", [torch_form, triton_form])
def test_a_step_has_a_number_of_31_bits(form):
    pool = pool_of([3])
    pool.clock.fill_(2**31 - 2)
    clocks = []
    for _ in range(3):
        form.begin_step(pool, torch.tensor([-1]))
        clocks.append(int(pool.clock))
    assert clocks == [2**31 - 1, 0, 1]


def test_a_high_stamp_is_no_page():
    pool = pool_of([3], sets=1)
    pool.tags[..., 1] = -(1 << 40) + 6
    begin_step(pool, torch.tensor([5 * PAGE + PAGE - 1]))
    assert (pool.tags[..., 1] == 0).all()
    assert held(pool) == [{3}] * 6


class TestDecode:
    """Decode steps over copies."""

    pytestmark = ON_GPU

    @staticmethod
    def with_copies(inputs: Inputs, case: Case, sets: int) -> tuple[HotPool, torch.Tensor]:
        cache = inputs.cache
        pool = HotPool.empty(1, case.num_kv_heads, sets, case.page_size, case.head_size, cache.dtype, cache.device)
        pool.rows.view(torch.uint8).fill_(0xFF)
        pool.clock.fill_(1)
        counters = torch.zeros(case.num_kv_heads, 2, dtype=torch.int64, device=cache.device)
        inputs.hot = pool.of_layer(0, counters)
        return pool, counters

    @pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
    @pytest.mark.parametrize("sets", [1, 3, 400])
    def test_bits_are_those_without_copies_whatever_the_launch(self, case, sets):
        from support.cuda import launches

        inputs = Inputs(case)
        expected = decode(inputs, case)
        pool, _ = self.with_copies(inputs, case, sets)
        for launch in (None, *launches(case.group, case.head_size)):
            for _ in range(2):
                pool.clock.add_(1)
                assert torch.equal(decode(inputs, case, launch), expected)

    @pytest.mark.parametrize("name", ["ragged", "fp8 cache", "group of 3, pages of 32", "heads of 80"])
    def test_pages_with_copies_are_not_read_again(self, name):
        case = replace(CASES[name], dense_tokens=0)
        inputs = Inputs(case)
        expected = decode(inputs, case)
        pool, counters = self.with_copies(inputs, case, 4000)
        first = decode(inputs, case)
        counts = counters[:, 0].tolist()
        assert torch.equal(first, expected)
        # A page may have been left out in the first step, because another was given the last place of its set.
        for _ in range(4):
            pool.clock.add_(1)
            decode(inputs, case)
        counters.zero_()
        pool.clock.add_(1)
        keys = inputs.cache[:, :, : case.block_size]
        whole = [int(length) // case.page_size * case.page_size for length in inputs.seq_lens]
        kept = keys.clone()
        for row, length in enumerate(whole):
            for start in range(0, length, case.block_size):
                block = int(inputs.block_table[row, start // case.block_size])
                keys[block, :, : min(case.block_size, length - start)].view(torch.uint8).fill_(0xFF)
        again = decode(inputs, case)
        keys.copy_(kept)
        assert torch.equal(again, expected)
        assert counters[:, 1].tolist() == [0] * case.num_kv_heads
        assert counters[:, 0].tolist() == counts

    def test_a_forgotten_page_is_read_again(self):
        case = Case((3000, 4096, 700))
        inputs = Inputs(case)
        pool, _ = self.with_copies(inputs, case, 4000)
        decode(inputs, case)
        keys = inputs.cache[:, :, : case.block_size]
        new = torch.randn_like(keys.float()).to(keys.dtype)
        keys.copy_(new)
        begin_step(pool, torch.arange(len(inputs.cache) * case.block_size, device="cuda"))
        found = decode(inputs, case)
        inputs.hot = None
        assert torch.equal(found, decode(inputs, case))

    def test_rows_that_share_pages_share_copies(self):
        case = Case((4096,) * 40)
        inputs = Inputs(case)
        inputs.block_table = inputs.block_table[:1].expand(40, -1).contiguous()
        expected = decode(inputs, case)
        pool, _ = self.with_copies(inputs, case, 64)
        for _ in range(5):
            pool.clock.add_(1)
            assert torch.equal(decode(inputs, case), expected)

    def test_contexts_that_move_on_replace_old_copies(self):
        case = Case((4096, 3000, 4096), kind="quarters", format="int4")
        inputs = Inputs(case)
        pool, counters = self.with_copies(inputs, case, 60)
        for step in range(30):
            inputs.query = torch.randn_like(inputs.query.float()).bfloat16() * 2
            begin_step(pool, torch.empty(0, dtype=torch.int64, device="cuda"))
            found = decode(inputs, case)
            kept, inputs.hot = inputs.hot, None
            assert torch.equal(found, decode(inputs, case)), step
            inputs.hot = kept
        read, missed = counters.sum(0).tolist()
        assert 0 < missed < read

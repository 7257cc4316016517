"""Prepares the copies for a step on a GPU, in one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.hot_pages.pages import FACTOR, LAST_STEP, WAYS, HotPool

_TOKENS = 128


# Numbers of tokens differ between steps. A kernel specialised for one number would not serve the next.
@triton.jit(do_not_specialize=["num_tokens"])
def _begin(
    clock_ptr, tags_ptr, slots_ptr, num_tokens, sets, PAGE_SIZE: tl.constexpr, FACTOR: tl.constexpr,
    LAST_STEP: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(clock_ptr, (tl.load(clock_ptr) + 1) & LAST_STEP)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    completes = (slot >= 0) & (slot % PAGE_SIZE == PAGE_SIZE - 1)
    page = slot // PAGE_SIZE
    of_page = ((page * FACTOR & 0xFFFFFFFF) * sets) >> 32
    tags_ptr += tl.program_id(0).to(tl.int64) * sets * PLACES
    place = tags_ptr + of_page[:, None] * PLACES + tl.arange(0, PLACES)[None, :]
    tag = tl.load(place, mask=completes[:, None], other=0)
    tl.store(place, 0, mask=completes[:, None] & ((tag & 0xFFFFFFFF) == page[:, None] + 1))


def begin_step(pool: HotPool, slots: torch.Tensor) -> None:
    """See `api.begin_step`."""
    layers, kv_heads, places = pool.tags.shape
    # Without tokens, one program counts the step.
    grid = layers * kv_heads, max(1, triton.cdiv(len(slots), _TOKENS))
    _begin[grid](
        pool.clock, pool.tags, slots, len(slots), places // WAYS, PAGE_SIZE=pool.rows.shape[3], FACTOR=FACTOR,
        LAST_STEP=LAST_STEP, PLACES=WAYS, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip

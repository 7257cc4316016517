"""Attention over selected pages on CPU, compiled: reads pages where they lie in the cache. bfloat16 only."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.paging import PagedTensor

_FASTMATH = {"reassoc", "contract"}


@numba.njit(nogil=True)
def _load_page(storage, strides, per_group, offsets, block, head, within, bits):
    start = block * strides[0] + head * strides[1] + within // per_group * strides[2]
    start += within % per_group * strides[3]
    for i in range(bits.size):
        bits[i] = np.int32(storage[start + offsets[i]]) << 16


@functools.cache
def _kernel(group_size: int, head_size: int) -> Any:
    """Compiled for one model's shape: the compiler unrolls loops whose lengths it knows."""

    @numba.njit(fastmath=_FASTMATH, nogil=True, parallel=True, cache=True)
    def attend(
        query,
        keys,
        key_strides,
        key_offsets,
        values,
        value_strides,
        value_offsets,
        per_group,
        page_size,
        pages_per_block,
        block_table,
        context_lens,
        pages,
        scale,
        sinks,
        softcap,
        output,
    ):
        num_tokens, num_kv_heads, k = pages.shape
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            tail_page, tail_len = context_lens[token] // page_size, context_lens[token] % page_size
            heads = np.empty((group_size, head_size), np.float32)
            for g in range(group_size):
                for d in range(head_size):
                    heads[g, d] = query[token, head, g, d] * scale
            bits = np.empty(page_size * head_size, np.int32)
            loaded = bits.view(np.float32).reshape(page_size, head_size)
            logits = np.empty((group_size, (k + 1) * page_size), np.float32)
            count = 0
            for slot in range(k + 1):
                page = pages[token, head, slot] if slot < k else tail_page
                tokens = page_size if slot < k else tail_len
                if page < 0 or tokens == 0:
                    continue
                block, within = block_table[token, page // pages_per_block], page % pages_per_block
                _load_page(keys, key_strides, per_group[0], key_offsets, block, head, within, bits)
                for t in range(tokens):
                    for g in range(group_size):
                        dot = np.float32(0)
                        for d in range(head_size):
                            dot += heads[g, d] * loaded[t, d]
                        logits[g, count + t] = dot
                count += tokens
            inverse = np.empty(group_size, np.float32)
            for g in range(group_size):
                if softcap > 0:
                    for i in range(count):
                        logits[g, i] = softcap * np.tanh(logits[g, i] / softcap)
                largest = np.float32(-np.inf)
                if sinks.size:
                    largest = sinks[head * group_size + g]
                for i in range(count):
                    largest = max(largest, logits[g, i])
                total = np.float32(0)
                if sinks.size:
                    total = np.exp(sinks[head * group_size + g] - largest)
                for i in range(count):
                    logits[g, i] = np.exp(logits[g, i] - largest)
                    total += logits[g, i]
                inverse[g] = np.float32(1) / total
            accumulated = np.zeros((group_size, head_size), np.float32)
            count = 0
            for slot in range(k + 1):
                page = pages[token, head, slot] if slot < k else tail_page
                tokens = page_size if slot < k else tail_len
                if page < 0 or tokens == 0:
                    continue
                block, within = block_table[token, page // pages_per_block], page % pages_per_block
                _load_page(values, value_strides, per_group[1], value_offsets, block, head, within, bits)
                for t in range(tokens):
                    for g in range(group_size):
                        weight = logits[g, count + t]
                        for d in range(head_size):
                            accumulated[g, d] += weight * loaded[t, d]
                count += tokens
            for g in range(group_size):
                for d in range(head_size):
                    output[token, head, g, d] = accumulated[g, d] * inverse[g]

    return attend


def attend_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """See `api.attend_pages`."""
    key_pages, value_pages = keys.addresses, values.addresses
    output = torch.empty(query.shape, dtype=torch.float32)
    _kernel(*query.shape[2:])(
        query.float().numpy(),
        key_pages.elements.view(torch.int16).numpy(),
        key_pages.strides,
        key_pages.offsets.numpy(),
        value_pages.elements.view(torch.int16).numpy(),
        value_pages.strides,
        value_pages.offsets.numpy(),
        (keys.view.shape[3], values.view.shape[3]),
        keys.page_size,
        keys.pages_per_block,
        block_table.numpy(),
        context_lens.numpy(),
        pages.numpy(),
        np.float32(scale),
        np.empty(0, np.float32) if sinks is None else sinks.float().numpy(),
        np.float32(softcap),
        output.numpy(),
    )
    return output.flatten(1, 2).to(query.dtype)

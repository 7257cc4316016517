"""Attends to selected pages on a CPU, compiled. Reads pages in place, from a bfloat16 cache."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compiled import (
    CHUNK_TOKENS,
    FASTMATH,
    add_products,
    exp,
    index_array,
    narrow,
    parallel_kernel,
    sink_array,
    unpack_page,
)
from sparse_kernels.threads import use_threads


@functools.cache
def _kernel(
    group_size: int, head_size: int, page_size: int, key_length: int, key_step: int, value_length: int, value_step: int
) -> Any:
    """Compiles the kernel for one shape and packing. The compiler unrolls loops of constant length."""
    chunk_pages = max(1, CHUNK_TOKENS // page_size)
    chunk_tokens = chunk_pages * page_size

    @parallel_kernel(FASTMATH)
    def attend(
        query,
        keys,
        values,
        pages_per_block,
        block_table,
        context_lens,
        pages,
        scale,
        sink_logits,
        softcap,
        output,
    ):
        num_tokens, num_kv_heads, k = pages.shape
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            # The incomplete page follows the selected pages.
            chosen = np.empty(k + 1, np.int64)
            count = 0
            for slot in range(k):
                if pages[token, head, slot] >= 0:
                    chosen[count] = pages[token, head, slot]
                    count += 1
            tail = context_lens[token] % page_size
            num_read = count * page_size + tail
            if tail:
                chosen[count] = context_lens[token] // page_size
                count += 1
            heads = np.empty((group_size, head_size), np.float32)
            for g in range(group_size):
                for d in range(head_size):
                    heads[g, d] = query[token, head, g, d] * scale
            num_chunks = (count + chunk_pages - 1) // chunk_pages
            logits = np.zeros((group_size, num_chunks * chunk_tokens), np.float32)
            by_dim = np.zeros((head_size, chunk_tokens), np.float32)
            for first in range(0, count, chunk_pages):
                for slot in range(first, min(first + chunk_pages, count)):
                    block, within = block_table[token, chosen[slot] // pages_per_block], chosen[slot] % pages_per_block
                    at = (slot - first) * page_size
                    unpack_page(keys, key_length, key_step, block, head, within, by_dim, 0, at, page_size)
                add_products(heads, 0, by_dim, logits, first * page_size)
            inverse = np.empty(group_size, np.float32)
            for g in range(group_size):
                if softcap > 0:
                    for i in range(num_read):
                        logits[g, i] = softcap * np.tanh(logits[g, i] / softcap)
                largest = np.float32(-np.inf)
                if sink_logits.size:
                    largest = sink_logits[head * group_size + g]
                for i in range(num_read):
                    largest = max(largest, logits[g, i])
                total = np.float32(0)
                if sink_logits.size:
                    total = exp(sink_logits[head * group_size + g] - largest)
                for i in range(num_read):
                    logits[g, i] = exp(logits[g, i] - largest)
                    total += logits[g, i]
                # A NaN is not 0, and must reach the output.
                inverse[g] = np.float32(1) / total if total != 0 else np.float32(0)
                logits[g, num_read:] = 0
            accumulated = np.zeros((group_size, head_size), np.float32)
            by_token = np.zeros((chunk_tokens, head_size), np.float32)
            for first in range(0, count, chunk_pages):
                for slot in range(first, min(first + chunk_pages, count)):
                    block, within = block_table[token, chosen[slot] // pages_per_block], chosen[slot] % pages_per_block
                    at = (slot - first) * page_size
                    unpack_page(values, value_length, value_step, block, head, within, by_token, at, 0, head_size)
                # Memory beyond the context is stale and may hold NaN. A weight of 0 would not hide NaN.
                by_token[max(0, num_read - first * page_size) :] = 0
                add_products(logits, first * page_size, by_token, accumulated, 0)
            for g in range(group_size):
                for d in range(head_size):
                    output[token, head, g, d] = narrow(accumulated[g, d] * inverse[g])

    return attend


def attend_pages(tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """See `api.attend_pages`."""
    query = tokens.query
    key_pages, value_pages = cache.keys.head_major, cache.values.token_major
    output = torch.empty(query.shape, dtype=torch.bfloat16)
    kernel = _kernel(
        *query.shape[2:], cache.page_size, key_pages.length, key_pages.step, value_pages.length, value_pages.step
    )
    use_threads(pages.numel() * cache.page_size * (cache.head_size + cache.values.head_size))
    kernel(
        query.float().numpy(),
        key_pages.location,
        value_pages.location,
        cache.keys.pages_per_block,
        index_array(tokens.block_table),
        index_array(tokens.context_lens),
        index_array(pages),
        np.float32(softmax.scale),
        sink_array(softmax),
        np.float32(softmax.softcap),
        output.view(torch.uint16).numpy(),
    )
    return output.flatten(1, 2)

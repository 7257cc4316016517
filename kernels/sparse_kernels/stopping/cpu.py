"""Finds the stop on a CPU, compiled, from the probes of partial outputs in a bfloat16 cache."""

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
    parallel_kernel,
    sink_array,
    unpack_page,
)
from sparse_kernels.rules import StopRule, probe_elements
from sparse_kernels.threads import use_threads


@functools.cache
def _kernel(
    group_size: int, head_size: int, page_size: int, key_length: int, key_step: int, value_length: int, value_step: int
) -> Any:
    """Compiles the kernel for one shape and packing, as for attention."""
    chunk_pages = max(1, CHUNK_TOKENS // page_size)
    chunk_tokens = chunk_pages * page_size
    probe_size = len(probe_elements(head_size))

    @parallel_kernel(FASTMATH)
    def read_until_stable(
        query,
        keys,
        values,
        probe,
        pages_per_block,
        block_table,
        context_lens,
        pages,
        scale,
        sink_logits,
        softcap,
        scale_tolerance,
        direction_tolerance,
        patience,
        block_pages,
        least_pages,
        pages_read,
    ):
        num_tokens, num_kv_heads, k = pages.shape
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            count = 0
            while count < k and pages[token, head, count] >= 0:
                count += 1
            heads = np.empty((group_size, head_size), np.float32)
            for g in range(group_size):
                for d in range(head_size):
                    heads[g, d] = query[token, head, g, d] * scale
            largest = np.full(group_size, -np.inf, np.float32)
            total = np.zeros(group_size, np.float32)
            if sink_logits.size:
                for g in range(group_size):
                    largest[g] = sink_logits[head * group_size + g]
                    total[g] = np.float32(1)
            sums = np.zeros((group_size, probe_size), np.float32)
            before = np.zeros((group_size, probe_size), np.float32)
            by_dim = np.empty((head_size, chunk_tokens), np.float32)
            by_token = np.empty((chunk_tokens, head_size), np.float32)
            watched = np.empty((chunk_tokens, probe_size), np.float32)
            logits = np.empty((group_size, chunk_tokens), np.float32)
            tail = context_lens[token] % page_size
            # Pages are read in chunks; a test interval may hold several. The incomplete page is a separate chunk.
            consecutive, at, blocks, stopped = 0, 0 if tail == 0 else -1, 0, False
            while at < count and not stopped:
                first, last = at, min(at + chunk_pages, count, (blocks + 1) * block_pages)
                if at < 0:
                    first, last = 0, 1
                for slot in range(first, last):
                    page = context_lens[token] // page_size if at < 0 else pages[token, head, slot]
                    block, within = block_table[token, page // pages_per_block], page % pages_per_block
                    to = (slot - first) * page_size
                    unpack_page(keys, key_length, key_step, block, head, within, by_dim, 0, to, page_size)
                    unpack_page(values, value_length, value_step, block, head, within, by_token, to, 0, head_size)
                num_read = tail if at < 0 else (last - first) * page_size
                logits[:] = 0
                add_products(heads, 0, by_dim, logits, 0)
                for i in range(chunk_tokens):
                    for p in range(probe_size):
                        # Memory beyond the context is stale and may hold NaN.
                        watched[i, p] = by_token[i, probe[p]] if i < num_read else np.float32(0)
                for g in range(group_size):
                    highest = largest[g]
                    for i in range(num_read):
                        if softcap > 0:
                            logits[g, i] = softcap * np.tanh(logits[g, i] / softcap)
                        highest = max(highest, logits[g, i])
                    shrink = exp(largest[g] - highest)
                    largest[g] = highest
                    total[g] *= shrink
                    for p in range(probe_size):
                        sums[g, p] *= shrink
                    for i in range(num_read):
                        logits[g, i] = exp(logits[g, i] - highest)
                        total[g] += logits[g, i]
                    logits[g, num_read:] = 0
                add_products(logits, 0, watched, sums, 0)
                at = 0 if at < 0 else last
                if at == 0 or (at < count and at % block_pages):
                    continue
                blocks += 1
                stable = blocks > 1
                for g in range(group_size):
                    distance = product = now_squared = before_squared = np.float32(0)
                    for p in range(probe_size):
                        now = sums[g, p] / total[g]
                        distance += (now - before[g, p]) * (now - before[g, p])
                        product += now * before[g, p]
                        now_squared += now * now
                        before_squared += before[g, p] * before[g, p]
                        before[g, p] = now
                    norms = np.sqrt(now_squared) * np.sqrt(before_squared)
                    direction = np.float32(np.nan) if norms == 0 else 1 - product / norms
                    if not (np.sqrt(distance) < scale_tolerance and direction < direction_tolerance):
                        stable = False
                consecutive = consecutive + 1 if stable else 0
                stopped = consecutive >= patience and at >= least_pages
            pages_read[token, head] = at if stopped else count

    return read_until_stable


def pages_until_stable(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax, rule: StopRule
) -> torch.Tensor:
    """See `api.pages_until_stable`."""
    key_pages, value_pages = cache.keys.head_major, cache.values.token_major
    pages_read = pages.new_empty(pages.shape[:2])
    kernel = _kernel(
        *tokens.query.shape[2:], cache.page_size, key_pages.length, key_pages.step, value_pages.length, value_pages.step
    )
    use_threads(pages.numel() * cache.page_size * (cache.head_size + cache.values.head_size))
    kernel(
        tokens.query.float().numpy(),
        key_pages.location,
        value_pages.location,
        np.array(probe_elements(cache.values.head_size)),
        cache.keys.pages_per_block,
        index_array(tokens.block_table),
        index_array(tokens.context_lens),
        index_array(pages),
        np.float32(softmax.scale),
        sink_array(softmax),
        np.float32(softmax.softcap),
        np.float32(rule.scale_tolerance),
        np.float32(rule.direction_tolerance),
        rule.patience,
        rule.block_tokens // cache.page_size,
        rule.least_pages,
        pages_read.numpy(),
    )
    return pages_read

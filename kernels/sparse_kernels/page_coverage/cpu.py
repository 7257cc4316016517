"""Counts the pages of a coverage on a CPU, compiled. Reads codes and keys in place, from a bfloat16 cache."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compiled import (
    FASTMATH,
    add_products,
    exp,
    index_array,
    parallel_kernel,
    unpack_codes,
    unpack_page,
    widen,
)
from sparse_kernels.page_coverage.rule import Limits
from sparse_kernels.page_topk.cpu import ordered
from sparse_kernels.threads import use_threads


@numba.njit(nogil=True)
def _bucket(masses, missing):
    """Returns the highest bucket such that it and the buckets above it reach the missing mass, and the mass missing in
    it."""
    for bucket in range(255, 0, -1):
        if masses[bucket] >= missing:
            return bucket, missing
        missing -= masses[bucket]
    return 0, missing


@numba.njit(nogil=True)
def _best_that_reach(scores, masses, first, last, missing):
    """Returns how many of the best pages in `[first, last)` reach the missing mass."""
    keys = np.empty(last, np.uint16)
    high = np.zeros(256, np.float64)
    for page in range(first, last):
        keys[page] = ordered(scores[page])
        high[keys[page] >> 8] += masses[page]
    top, missing = _bucket(high, missing)
    low = np.zeros(256, np.float64)
    for page in range(first, last):
        if keys[page] >> 8 == top:
            low[keys[page] & 0xFF] += masses[page]
    bottom, missing = _bucket(low, missing)
    threshold, count = top << 8 | bottom, 0
    for page in range(first, last):
        count += keys[page] > threshold
    for page in range(first, last):
        if keys[page] == threshold and missing > 0:
            missing -= masses[page]
            count += 1
    return count


@functools.cache
def _kernel(
    group_size: int, head_size: int, page_size: int, key_length: int, key_step: int, bits: int, rows: int
) -> Any:
    """Compiles the kernel for one shape and packing. The compiler unrolls loops of constant length."""
    per_byte = 8 // bits
    middle_code = np.float32(((1 << bits) - 1) / 2)
    weight = np.float32(page_size)

    @parallel_kernel(FASTMATH)
    def count(
        query,
        features,
        dropped,
        keys,
        records,
        strides,
        steps,
        step_strides,
        pages_per_block,
        block_table,
        context_lens,
        scores,
        always,
        scale,
        softcap,
        share,
        least,
        most,
        counts,
    ):
        num_tokens, num_kv_heads = counts.shape
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            length, tail = context_lens[token] // page_size, context_lens[token] % page_size
            if length <= least[token] or least[token] == most[token]:
                counts[token, head] = least[token]
                continue
            if share[token] >= 1:
                counts[token, head] = min(most[token], length)
                continue
            heads = np.empty((group_size, head_size), np.float32)
            summarised = np.zeros((group_size, head_size), np.float32)
            middle = np.zeros(group_size, np.float32)
            for g in range(group_size):
                for d in range(head_size):
                    heads[g, d] = query[token, head, g, d] * scale
                for d in range(dropped, head_size):
                    summarised[g, d] = features[token, head, g, d] * scale
                    middle[g] += middle_code * summarised[g, d]
            first, last = always[0], length - always[1]
            # Pages that are always read: the leading pages, the newest pages and the incomplete page.
            num_known = always[0] + always[1] + 1
            known = np.zeros((group_size, num_known * page_size), np.float32)
            by_dim = np.zeros((head_size, page_size), np.float32)
            for slot in range(num_known):
                page = slot if slot < first else last + slot - first
                if page == length and tail == 0:
                    continue
                block, within = block_table[token, page // pages_per_block], page % pages_per_block
                unpack_page(keys, key_length, key_step, block, head, within, by_dim, 0, 0, page_size)
                add_products(heads, 0, by_dim, known, slot * page_size)
            end_of_known = (num_known - 1) * page_size + tail
            codes = np.empty((per_byte, head_size), np.float32)
            logits = np.full((group_size, last - first), -np.inf, np.float32)
            for page in range(first, last):
                block, within = block_table[token, page // pages_per_block], page % pages_per_block
                record = block * strides[0] + head * strides[1] + within * strides[2]
                scalars = block * step_strides[0] + head * step_strides[1] + within * step_strides[2]
                for shared in range(rows):
                    unpack_codes(records, np.uint64(record + shared * head_size), codes, bits)
                    step = widen(steps[np.uint64(scalars + shared * step_strides[3])])
                    for g in range(group_size):
                        for j in range(per_byte):
                            dot = np.float32(0)
                            for d in range(head_size):
                                dot += summarised[g, d] * codes[j, d]
                            logits[g, page - first] = max(logits[g, page - first], (dot - middle[g]) * step)
            masses = np.zeros(last, np.float64)
            missing = np.float64(share[token])
            for g in range(group_size):
                if softcap > 0:
                    for i in range(logits.shape[1]):
                        logits[g, i] = softcap * np.tanh(logits[g, i] / softcap)
                    for i in range(end_of_known):
                        known[g, i] = softcap * np.tanh(known[g, i] / softcap)
                largest = np.float32(-np.inf)
                for i in range(logits.shape[1]):
                    largest = max(largest, logits[g, i])
                for i in range(end_of_known):
                    largest = max(largest, known[g, i])
                read, unread = np.float32(0), np.float32(0)
                for i in range(end_of_known):
                    read += exp(known[g, i] - largest)
                for i in range(logits.shape[1]):
                    logits[g, i] = exp(logits[g, i] - largest)
                    unread += logits[g, i]
                total = group_size * (read + weight * unread)
                missing -= read / total
                for page in range(first, last):
                    masses[page] += weight * logits[g, page - first] / total
            found = first + always[1]
            if missing > 0:
                found += _best_that_reach(scores[token, head], masses, first, last, missing)
            counts[token, head] = max(least[token], min(found, most[token], length))

    return count


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
) -> torch.Tensor:
    """See `api.count_pages`."""
    statistics, key_pages = cache.statistics, cache.keys.head_major
    assert statistics is not None
    assert statistics.scales is not None
    codes = statistics.kind.codes
    assert codes is not None
    counts = torch.empty(tokens.query.shape[:2], dtype=torch.int64)
    records, steps, _ = statistics.memory
    heads = tokens.query.float()
    use_threads(scores.numel() * heads.shape[-1])
    _kernel(*heads.shape[2:], cache.page_size, key_pages.length, key_pages.step, codes.bits, codes.rows)(
        heads.numpy(),
        statistics.kind.features(heads, 0.0)[..., 0, :].numpy(),
        codes.dropped,
        key_pages.location,
        records,
        statistics.vectors.stride(),
        steps,
        statistics.scales.stride(),
        statistics.pages_per_block,
        index_array(tokens.block_table),
        index_array(tokens.context_lens),
        scores.view(torch.uint16).numpy(),
        (selection.sink_pages, selection.recent_pages),
        np.float32(softmax.scale),
        np.float32(softmax.softcap),
        limits.share.numpy(),
        limits.least.numpy(),
        limits.most.numpy(),
        counts.numpy(),
    )
    return counts

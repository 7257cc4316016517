"""Compares the votes, the kept tokens and the moved rows of an engine in this process with a reference."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import CompactionRule, HeldBlocks, LayerCaches, ObservationWindow, PromptBlocks, api
from sparse_kernels.compaction import held as held_module

_VOTE_TOLERANCE = 1e-3
"""Largest error of a token's votes, relative to the number of query heads and queries that vote."""
_NEARLY = 2e-3
"""Difference of two votes, relative to the largest, below which either token may be kept."""


def votes_of(window: ObservationWindow, table: torch.Tensor, cache: KVCache, softmax: Softmax) -> torch.Tensor:
    """The attention of some queries on each token, summed over queries and query heads, in float64.

    Returns:
        `[num_kv_heads, num_tokens]`, for the tokens that the last query sees.
    """
    heads, seen = cache.num_kv_heads, window.first_position + len(window.query)
    keys = _rows(cache, table, seen)[0].double()
    query = window.query.double().unflatten(1, (heads, -1))
    if window.query_scale is not None:
        query = query * window.query_scale
    logits = torch.einsum("qhgd,hnd->hgqn", query, keys) * cache.scaled_by_keys(softmax.scale)
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    position = torch.arange(window.first_position, seen, device=logits.device)
    logits.masked_fill_(torch.arange(seen, device=logits.device) > position[:, None], -torch.inf)
    if softmax.sink_logits is not None:
        sinks = softmax.sink_logits.double().view(heads, -1, 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:3], 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :seen].sum(dim=(1, 2))


def _rows(cache: KVCache, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of the first tokens, `[num_kv_heads, count, head_size]` each."""
    size, token = cache.page_size * cache.keys.pages_per_block, torch.arange(count, device=table.device)
    places = table.long()[token // size], torch.arange(cache.num_kv_heads, device=table.device)[:, None], token % size
    keys, values = (
        paged.gather_tokens(*places).view(paged.view.dtype) for paged in (cache.keys, cache.values)
    )  # fmt: skip
    return keys, values


def _rehearses(table: torch.Tensor) -> bool:
    """Whether a block table is that of a warm-up: it has one block in all places."""
    return len(table) > 1 and len(table.unique()) == 1


@contextmanager
def watch_evictions(note: Callable[[str], None]) -> Iterator[list[int]]:
    """Compares the compactions of every layer in this process, within the context.

    Args:
        note: takes a fault.

    Yields:
        A list with one number: the layers whose tokens have moved so far.
    """
    from vllm_sparse_plugin.attention import base as of_prompts
    from vllm_sparse_plugin.compaction import evictions as between_steps

    # The modules do not export what they import.
    base: Any = of_prompts
    evictions: Any = between_steps
    moves, add, add_of_layers = [0], api.add_votes, evictions.add_votes_of_layers
    compact, keep = base.compact_prompt, evictions.keep_tokens

    def judge_votes(found: torch.Tensor, window: ObservationWindow, *rest: Any) -> None:
        expected = votes_of(window, *rest)
        if not bool((found[:, : expected.shape[1]] - expected).abs().max() <= _VOTE_TOLERANCE * window.query.shape[0]):
            note("votes that are not the attention of the queries")

    def add_votes(votes: torch.Tensor, window: ObservationWindow, table: torch.Tensor, cache: KVCache,
                  softmax: Softmax, voting: torch.Tensor | None = None) -> None:  # fmt: skip
        before = votes.clone()
        add(votes, window, table, cache, softmax, voting)
        if voting is None and len(window.query):
            judge_votes(votes - before, window, table, cache, softmax)

    def add_votes_of_layers(votes: torch.Tensor, query: torch.Tensor, first: int, table: torch.Tensor,
                            caches: LayerCaches, softmax: Sequence[Softmax], scales: Any = None) -> None:  # fmt: skip
        before = votes.clone()
        add_of_layers(votes, query, first, table, caches, softmax, scales)
        for layer, cache in enumerate(caches.caches):
            window = ObservationWindow(query[layer], first, None if scales is None else scales[layer])
            judge_votes(votes[layer] - before[layer], window, table, cache, softmax[layer])

    def judge_moves(kept: torch.Tensor, before: Sequence[torch.Tensor], cache: KVCache, table: torch.Tensor,
                    first: int) -> None:  # fmt: skip
        size = cache.page_size * cache.keys.pages_per_block
        if _rehearses(table[: first + kept.shape[1] // size]):
            return
        moves[0] += 1
        for was, now in zip(before, _rows(cache, table[first:], kept.shape[1]), strict=True):
            moved = was[torch.arange(len(kept), device=kept.device)[:, None], kept]
            if not torch.equal(moved.view(torch.uint8), now.view(torch.uint8)):
                note(f"kept tokens that are not in their places, in blocks of {size} tokens")

    def compact_prompt(window: ObservationWindow, prompt: PromptBlocks, cache: KVCache, softmax: Softmax,
                       rule: CompactionRule, earlier: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        before = _rows(cache, prompt.block_table, prompt.num_tokens)
        kept: torch.Tensor = compact(window, prompt, cache, softmax, rule, earlier)
        judge_moves(kept, before, cache, prompt.block_table, prompt.first_block)
        return kept

    def keep_tokens(scores: torch.Tensor, held: HeldBlocks, caches: LayerCaches, rule: CompactionRule) -> torch.Tensor:
        before = [_rows(cache, held.block_table, held.num_tokens) for cache in caches.caches]
        kept: torch.Tensor = keep(scores, held, caches, rule)
        for of_layer, was, cache in zip(kept, before, caches.caches, strict=True):
            judge_moves(of_layer, was, cache, held.block_table, held.first_block)
        return kept

    def choose_tokens(votes: torch.Tensor, num_tokens: int, candidates: int, before: int, rule: CompactionRule,
                      protected: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        kept = choose(votes, num_tokens, candidates, before, rule, protected)
        _judge_choice(votes, kept, num_tokens, candidates, rule, protected, note)
        return kept

    choose = api.choose_tokens
    with ExitStack() as patches:
        for module, name, watched in (
            (api, "add_votes", add_votes), (base, "add_votes", add_votes), (api, "choose_tokens", choose_tokens),
            (evictions, "add_votes_of_layers", add_votes_of_layers), (base, "compact_prompt", compact_prompt),
            (evictions, "keep_tokens", keep_tokens), (held_module, "choose_tokens", choose_tokens),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(module, name, watched))
        yield moves


def _judge_choice(
    votes: torch.Tensor, kept: torch.Tensor, num_tokens: int, candidates: int, rule: CompactionRule,
    protected: torch.Tensor | None, note: Callable[[str], None],
) -> None:  # fmt: skip
    """Notes a fault if a token is kept instead of one with more votes, or one that is always kept is not."""
    newest = max(rule.window_tokens, min(int(rule.recent_share * kept.shape[1]), kept.shape[1] - rule.sink_tokens))
    token, before = torch.arange(candidates, device=votes.device), max(num_tokens - newest, 0)
    by_head = ((token < rule.sink_tokens) | (token >= before)).expand(len(votes), -1)
    if protected is not None:
        by_head = by_head | protected[..., :candidates]
    reach = rule.pool_tokens // 2
    for of_head, chosen, always in zip(votes[:, :before].double(), kept, by_head, strict=True):
        windows = torch.nn.functional.pad(of_head, (reach, reach), value=-torch.inf).unfold(0, rule.pool_tokens, 1)
        # Tokens behind those before the window are always kept.
        pooled = torch.nn.functional.pad(windows.amax(dim=1), (0, candidates))[:candidates]
        is_kept = torch.zeros_like(always).index_fill_(0, chosen, True)
        if not bool(is_kept[always].all()):
            note("a token that is always kept is not")
        worst, best = pooled[is_kept & ~always], pooled[~is_kept]
        if len(worst) and bool(worst.min() < best.max() - _NEARLY * pooled.abs().max()):
            note("a token is kept instead of one with more votes")

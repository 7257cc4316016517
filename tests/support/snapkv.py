"""SnapKV as defined in the paper and its code (arXiv 2404.14469), and the votes of ZipVL, in loops and float64."""

from collections.abc import Iterable

import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.compaction import CompactionRule, voting_rows


def votes_of(
    query: torch.Tensor, key: torch.Tensor, last_query: int, softmax: Softmax, first_head: int = 0
) -> list[float]:
    """Attention of the query heads of one KV head on each token, summed over heads and queries.

    Args:
        query: `[num_queries, group_size, head_size]`, consecutive tokens up to `last_query`.
        key: `[prompt, head_size]`.
        last_query: position of the last query.
        softmax: how logits become weights.
        first_head: number of the first query head, for its sink logit.
    """
    votes = torch.zeros(len(key), dtype=torch.float64)
    for index in range(len(query)):
        position = last_query - len(query) + 1 + index
        for head in range(query.shape[1]):
            logits = key[: position + 1].double() @ query[index, head].double() * softmax.scale
            if softmax.softcap:
                logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
            if softmax.sink_logits is not None:
                logits = torch.cat([logits, softmax.sink_logits[first_head + head].double()[None]])
            votes[: position + 1] += logits.softmax(dim=0)[: position + 1]
    return votes.tolist()


def zipvl_votes(query: torch.Tensor, keys: torch.Tensor, rows: list[int], softmax: Softmax) -> list[float]:
    """Normalised attention of some rows on each token, over all heads: ZipVL, Eq. 6 and 8.

    Args:
        query: `[prompt, num_query_heads, head_size]`.
        keys: `[prompt, num_kv_heads, head_size]`.
        rows: positions of the rows.
        softmax: how logits become weights.
    """
    votes, group = [0.0] * len(query), query.shape[1] // keys.shape[1]
    for row in rows:
        for head in range(query.shape[1]):
            logits = keys[: row + 1, head // group].double() @ query[row, head].double() * softmax.scale
            for token, weight in enumerate(logits.softmax(dim=0).tolist()):
                votes[token] += weight / sum(other >= token for other in rows)
    return votes


def kept_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    count: int,
    softmax: Softmax,
    rule: CompactionRule,
    block_size: int,
    last_query: int | None = None,
    protected: Iterable[int] = (),
) -> list[set[int]]:
    """Tokens of a prompt that each KV head keeps.

    Args:
        query: `[num_queries, num_query_heads, head_size]`, the observation window, or the whole prompt.
        key: `[prompt, num_kv_heads, head_size]`.
        count: number of kept tokens, including those of the incomplete last block.
        softmax: how logits become weights.
        rule: window, pooling and sinks.
        block_size: tokens of a block; those of the incomplete last block are always kept.
        last_query: position of the last query, unless it is the prompt's last token.
        protected: tokens that are always kept.
    """
    prompt, num_kv_heads = key.shape[:2]
    group, kept = query.shape[1] // num_kv_heads, []
    shared = None
    if rule.probes is not None:
        rows = voting_rows(prompt, rule.probes, query.device)
        shared = zipvl_votes(query, key, rows[rows >= 0].tolist(), softmax)
    for head in range(num_kv_heads):
        votes = shared or votes_of(
            query[:, head * group : (head + 1) * group],
            key[:, head],
            prompt - 1 if last_query is None else last_query,
            softmax,
            head * group,
        )
        before = prompt - max(rule.window_tokens, int(rule.recent_share * (count - prompt % block_size)))
        reach = rule.pool_tokens // 2
        pooled = [max(votes[max(0, token - reach) : min(before, token + reach + 1)]) for token in range(before)]
        always = {*range(rule.sink_tokens), *range(before, prompt), *range(prompt // block_size * block_size, prompt)}
        always |= set(protected)
        others = sorted(set(range(before)) - always, key=lambda token: (-pooled[token], token))
        kept.append(always | set(others[: count - len(always)]))
    return kept

"""Attends with rows in torch: the specification."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparse_kernels.batch import Softmax
from sparse_kernels.row_attention.outputs import RowAttention


def masked_logits(
    query: torch.Tensor, keys: Iterable[torch.Tensor], context_lens: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Returns the logits of query tokens of one request.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        keys: consecutive pieces, `[num_kv_heads, num_tokens, head_size]` each.
        context_lens: `[num_queries]` integer, tokens that each query attends to.
        softmax: the scale and softcap of logits.

    Returns:
        `[num_queries, num_kv_heads, group_size, num_tokens]` float32, -inf beyond a context.
    """
    logits = torch.cat([torch.einsum("qhgd,hnd->qhgn", query.float(), piece.float()) for piece in keys], dim=-1)
    logits = logits * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    token = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(token >= context_lens[:, None, None, None], -torch.inf)


def attend(
    logits: torch.Tensor, values: Iterable[torch.Tensor], read: torch.Tensor, page_size: int, softmax: Softmax
) -> RowAttention:
    """Attends with query tokens of one request to their whole contexts, and to the pages read.

    Args:
        logits: see `masked_logits`.
        values: consecutive pieces, `[num_kv_heads, num_tokens, head_size]` each; finite.
        read: `[num_queries, num_kv_heads, num_pages]` bool.
        page_size: tokens of a page.
        softmax: the learned sinks.
    """
    heads, tokens = logits.shape[1], logits.shape[-1]
    sink = None if softmax.sink_logits is None else softmax.sink_logits.float().view(heads, -1, 1)
    padded = torch.nn.functional.pad(logits, (0, -tokens % page_size), value=-torch.inf)
    by_token = read.repeat_interleave(page_size, dim=-1)[..., :tokens]
    sparse = logits.masked_fill(~by_token[:, :, None], -torch.inf)
    outputs = _outputs(torch.stack([_softmax(sparse, sink), _softmax(logits, sink)]), values)
    return RowAttention(padded.unflatten(-1, (-1, page_size)).logsumexp(dim=-1), *outputs.unbind())


def _outputs(weights: torch.Tensor, values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the outputs `[n, num_queries, num_kv_heads, group_size, head_size]` of n sets of weights."""
    outputs, start = torch.zeros((), device=weights.device), 0
    for piece in values:
        end = start + piece.shape[1]
        outputs = outputs + torch.einsum("nqhgt,htd->nqhgd", weights[..., start:end], piece.float())
        start = end
    return outputs


def _softmax(logits: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Takes the softmax over the last dimension, with a learned sink logit in the denominator."""
    if sink is None:
        return logits.softmax(dim=-1)
    return torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)[..., :-1]

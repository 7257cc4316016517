"""The loss of a row: of its text, and of the divergence from the dense model before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_LOGITS_AT_ONCE = 1 << 28
"""Number of logits in float32 at a time: 1 GiB."""


class Loss(NamedTuple):
    """Sums over the tokens of a row, float32."""

    text: torch.Tensor
    """Negative log probabilities of the learned tokens, in nats."""
    divergence: torch.Tensor
    """Kullback-Leibler divergences from the dense model to this one at learned tokens, in nats; 0 without a dense
    model."""
    drift: torch.Tensor
    """The same after every token, learned or not."""


def row_loss(logits: torch.Tensor, tokens: torch.Tensor, learned: torch.Tensor, dense: torch.Tensor | None) -> Loss:
    """Returns the loss of a row.

    Args:
        logits: `[num_tokens, vocabulary]`, for the token after each.
        tokens: `[num_tokens]` int64.
        learned: `[num_tokens]` bool, the tokens to predict.
        dense: like `logits`, of the dense model; None for no divergence.
    """
    # No token follows the last one. Logits are split, not sliced, so their gradient is assembled once.
    targets, where = functional.pad(tokens[1:], (0, 1)), functional.pad(learned[1:], (0, 1))
    sums = logits.new_zeros(len(Loss._fields), dtype=torch.float32)
    tokens_at_once = max(_LOGITS_AT_ONCE // logits.shape[1], 1)
    parts = [x.split(tokens_at_once) for x in (logits, targets, where)]
    others = [None] * len(parts[0]) if dense is None else dense.split(tokens_at_once)
    for part in zip(*parts, others, strict=True):
        sums = sums + checkpoint(_sums, *part, use_reentrant=False, preserve_rng_state=False)
    return Loss(*sums.unbind())


def _sums(logits: torch.Tensor, targets: torch.Tensor, where: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
    logs = logits.float().log_softmax(dim=-1)
    text = (functional.nll_loss(logs, targets, reduction="none") * where).sum()
    if dense is None:
        return torch.stack([text, torch.zeros_like(text), torch.zeros_like(text)])
    wanted = dense.float().log_softmax(dim=-1)
    divergence = functional.kl_div(logs, wanted, reduction="none", log_target=True).sum(dim=-1)
    return torch.stack([text, (divergence * where).sum(), divergence.sum()])

"""The loss of a row: of its text, and of the divergence from the dense model before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_TOKENS_AT_ONCE = 2048
"""Tokens whose logits are in float32 at a time."""


class Loss(NamedTuple):
    """Sums over the tokens of a row that are learned, float32."""

    text: torch.Tensor
    """Negative log-probabilities, in nats."""
    divergence: torch.Tensor
    """Kullback-Leibler divergences from the dense model to this one, in nats; 0 without a dense model."""


def row_loss(logits: torch.Tensor, tokens: torch.Tensor, learned: torch.Tensor, dense: torch.Tensor | None) -> Loss:
    """Returns the loss of a row.

    Args:
        logits: `[num_tokens, vocabulary]`, of the token after each.
        tokens: `[num_tokens]` int64.
        learned: `[num_tokens]` bool, the tokens that are predicted.
        dense: like `logits`, of the dense model; None to leave the divergence out.
    """
    # The last token is followed by none. Logits are split, not cut, so that their gradient is put together once.
    targets, where = functional.pad(tokens[1:], (0, 1)), functional.pad(learned[1:], (0, 1))
    text = divergence = logits.new_zeros((), dtype=torch.float32)
    parts = [x.split(_TOKENS_AT_ONCE) for x in (logits, targets, where)]
    others = [None] * len(parts[0]) if dense is None else dense.split(_TOKENS_AT_ONCE)
    for part in zip(*parts, others, strict=True):
        sums = checkpoint(_sums, *part, use_reentrant=False)
        text, divergence = text + sums[0], divergence + sums[1]
    return Loss(text, divergence)


def _sums(
    logits: torch.Tensor, targets: torch.Tensor, where: torch.Tensor, dense: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = logits.float().log_softmax(dim=-1)
    text = (functional.nll_loss(logs, targets, reduction="none") * where).sum()
    if dense is None:
        return text, torch.zeros_like(text)
    wanted = dense.float().log_softmax(dim=-1)
    divergence = functional.kl_div(logs, wanted, reduction="none", log_target=True).sum(dim=-1)
    return text, (divergence * where).sum()

"""The loss of a row: of its text, and of the divergence from the dense model before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_LOGITS_AT_ONCE = 1 << 28
"""That are in float32 at a time: a gigabyte."""


class Loss(NamedTuple):
    """Sums over tokens of a row, float32."""

    text: torch.Tensor
    """Negative log-probabilities of the tokens that are learned, in nats."""
    divergence: torch.Tensor
    """Kullback-Leibler divergences from the dense model to this one where tokens are learned, in nats; 0 without a
    dense model."""
    drift: torch.Tensor
    """The same after every token, whether the next one is learned or not."""


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

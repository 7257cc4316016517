"""Temporary memory of a sparse prefill, which the layers of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.token_prefill.rule import TokenRule

SPLIT_TOKENS = 1024
"""Tokens of a context that one program reads for the softmax sums of a probe row. It is constant because the split
determines the order of additions, which must not depend on the batch."""
_TOKENS_AT_ONCE = 1 << 20
"""Most context tokens whose attention is sorted at the same time; about 60 bytes each."""

LISTED_AT_ONCE = 1 << 24
"""Most entries of the lists of tokens that exist at the same time; 4 bytes each."""


@dataclass(frozen=True)
class PrefillSizes:
    """Upper bounds on a batch that prefills."""

    num_tokens: int
    """Query tokens of all requests."""
    num_requests: int
    max_seq_tokens: int
    """Tokens of a context."""
    num_query_heads: int
    head_size: int

    @property
    def requests_at_once(self) -> int:
        """Requests whose tokens are chosen together. Other requests follow; the result is the same, bit for bit."""
        return max(1, min(self.num_requests, _TOKENS_AT_ONCE // self.max_seq_tokens))

    @property
    def splits(self) -> int:
        """Parts of the longest context."""
        return -(-self.max_seq_tokens // SPLIT_TOKENS)


@dataclass(frozen=True)
class Scratch:
    """Intermediate results of a sparse prefill on a GPU. Consecutive calls may share them."""

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]` of the query's dtype: queries in T. No tokens where all queries
    attend."""
    output: torch.Tensor
    """As the query, of the output's dtype: attention of the queries in T."""
    sums: torch.Tensor
    """`[requests_at_once, max_seq_tokens]` float32: attention on each token."""
    partial: torch.Tensor
    """`[requests_at_once * num_query_heads * splits * num_probes]` float32: log sums of parts of a context."""
    whole: torch.Tensor
    """`[requests_at_once, num_query_heads, num_probes]` float32: log sums of probe rows."""

    @classmethod
    def make(
        cls,
        sizes: PrefillSizes,
        rule: TokenRule,
        query_dtype: torch.dtype,
        output_dtype: torch.dtype,
        device: torch.device,
    ) -> Scratch:
        """Allocates scratch for batches of up to these sizes."""
        heads = (_gathered(sizes, rule), sizes.num_query_heads, sizes.head_size)
        rows = (sizes.requests_at_once, sizes.num_query_heads, rule.num_probes)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            torch.empty(heads, dtype=query_dtype, device=device),
            torch.empty(heads, dtype=output_dtype, device=device),
            numbers(sizes.requests_at_once, sizes.max_seq_tokens),
            numbers(rows[0] * rows[1] * sizes.splits * rows[2]),
            numbers(*rows),
        )

    def check(self, sizes: PrefillSizes, rule: TokenRule) -> None:
        """Raises ValueError unless the memory fits the batch, its heads and this rule."""
        for name, got, needed in (
            ("query tokens", len(self.query), _gathered(sizes, rule)),
            ("tokens of a context", self.sums.shape[1], sizes.max_seq_tokens),
        ):
            if got < needed:
                raise ValueError(f"scratch: got room for {got} {name}, allowed: at least the batch's {needed}")
        made_for = *self.query.shape[1:], self.whole.shape[2]
        needed_for = sizes.num_query_heads, sizes.head_size, rule.num_probes
        if made_for != needed_for:
            heads, size, probes = made_for
            raise ValueError(
                f"scratch: got one for {heads} query heads of size {size} and {probes} probe rows, allowed: "
                f"{sizes.num_query_heads} of size {sizes.head_size} and {rule.num_probes}"
            )


def _gathered(sizes: PrefillSizes, rule: TokenRule) -> int:
    """Returns the number of query tokens that are gathered: only outputs of zero need it."""
    return sizes.num_tokens if rule.others == "zero" else 0

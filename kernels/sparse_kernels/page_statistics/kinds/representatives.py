"""InfLLM (arXiv 2402.04617) stores the mean of a few keys that represent their page."""

from __future__ import annotations

import torch

from sparse_kernels.optional_triton import jit, tl
from sparse_kernels.page_statistics.kinds.base import StatisticsKind, finite_or


@jit
def _summarise(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    mean = tl.sum(keys, axis=0) / PAGE_SIZE
    merit = tl.sum(tl.reshape(keys * mean[None, :], (PAGE_SIZE, HEADS, DIMS)), axis=2)
    # A key is among the `count` best if fewer than `count` keys rank before it. Of equal keys the older ranks first.
    # Keys come newest first.
    ranked, rival = merit[:, None, :], merit[None, :, :]
    age = tl.arange(0, PAGE_SIZE)
    older = (age[None, :] > age[:, None])[:, :, None]
    before = tl.sum(((rival > ranked) | ((rival == ranked) & older)).to(tl.int32), axis=1)
    count: tl.constexpr = max(PAGE_SIZE // 4, 1)
    chosen = tl.reshape(tl.broadcast_to((before < count)[:, :, None], (PAGE_SIZE, HEADS, DIMS)), keys.shape)
    return (finite_or(tl.sum(tl.where(chosen, keys, 0.0), axis=0) / count, 0.0),)


class Representatives(StatisticsKind):
    """The mean of the page's representative keys.

        r_i = k_i . (1/B) sum_j k_j      R = the B / 4 keys of largest r_i      s_p(q) = q . (1/|R|) sum_(i in R) k_i

    From the paper: the representatives are the keys of largest representative score, and a page's relevance is the sum
    of its representatives' dot products with the query. This sum equals one dot product with their mean, up to a
    factor that all pages share. A record therefore holds only the mean.

    Differences from the paper:

    - A key's representative score is the mean of its dot products with the page's keys, not with later queries. Later
      queries do not exist when the page fills. Scores that depend on them would change with chunks and with
      prefix-cache hits.
    - Keys have positions, which the paper's retrieval omits.
    - Pages are chosen per KV head by the best of its query heads, as in every policy here. In the paper all heads of a
      layer share the choice.
    - A quarter of the keys are representatives. The paper takes 4 of 128 keys, which is less than one of 8.
    """

    name = "representatives"
    triton_summarise = _summarise

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        merit = (keys * keys.mean(dim=-2, keepdim=True)).sum(dim=-1)
        # The sort is stable: of equal keys the older one is taken.
        best = merit.sort(dim=-1, descending=True, stable=True).indices[..., : max(keys.shape[-2] // 4, 1)]
        chosen = keys.gather(-2, best.unsqueeze(-1).expand(*best.shape, keys.shape[-1]))
        return chosen.mean(dim=-2, keepdim=True), None

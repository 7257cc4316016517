"""Decode from the question in torch: dense prefill of a document, then everything after it under a page selection.

A token of a question is given, not chosen, and attention is causal. So the tokens after the document can pass
through a layer together, each with the pages that it selects for itself, and the result is what decoding them one by
one gives. With the right answer appended to the question, a greedy decode is right if and only if the model's first
choice is the right one at every token of the answer: one pass tells.

Weights and activations are float32, keys and values are rounded to bfloat16 as a cache holds them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse_kernels.page_topk import reference, select_pages

from research.study.scores import PageScore
from research.study.settings import Setting, Stress

_ATTENTION = "study"
_SUMMARIES_KEPT = 2
_OUTLYING = 8.0


@dataclass(frozen=True, eq=False)
class Prefix:
    """A document after its prefill."""

    keys: list[torch.Tensor]
    """Per layer `[num_kv_heads, num_tokens, head_size]` bfloat16, with positions."""
    values: list[torch.Tensor]
    """Like `keys`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the document."""
        return self.keys[0].shape[1]

    def first(self, num_tokens: int) -> Prefix:
        """The beginning of the document."""
        return Prefix([x[:, :num_tokens] for x in self.keys], [x[:, :num_tokens] for x in self.values])


@dataclass(frozen=True)
class Decoded:
    """What the model says after each token of each tail."""

    best: torch.Tensor
    """`[num_tails, longest]` int64: the most probable next token."""
    log_probability: torch.Tensor
    """`[num_tails, longest - 1]` float32: of the tail's own next token."""
    pages_read: float
    """Complete pages read per KV head and token, mean over the sparse layers."""


@dataclass(frozen=True)
class Transform:
    """What is done to the keys of a layer, and undone in the queries: dense attention stays what it is."""

    factor: torch.Tensor
    """`[num_kv_heads, 1, head_size]` float32, powers of two."""
    offset: torch.Tensor
    """Like `factor`; the same for all keys, so a softmax does not see it."""

    @classmethod
    def of(cls, stress: Stress, keys: torch.Tensor, layer: int) -> Transform:
        """The transform of a layer with keys `[num_kv_heads, num_tokens, head_size]`."""
        heads, _, size = keys.shape
        generator = torch.Generator().manual_seed(layer)
        factor, offset = torch.ones(heads, 1, size), torch.zeros(heads, 1, size)
        if stress == "channels":
            for head in factor:
                pairs = torch.randperm(size // 2, generator=generator)[: size // 32]
                head[:, torch.cat([pairs, pairs + size // 2])] = _OUTLYING
        elif stress == "offset":
            # The dimensions that rotate slowest, where a bias of the projection looks the same at every position.
            slow = torch.arange(size // 2 - size // 8, size // 2)
            slow = torch.cat([slow, slow + size // 2])
            drawn = torch.randn(heads, 1, len(slow), generator=generator)
            offset[..., slow] = _OUTLYING * drawn * keys.float().square().mean(dim=(1, 2)).sqrt().cpu()[:, None, None]
        elif stress == "centred":
            offset = -keys.float().mean(dim=1, keepdim=True)
        return cls(factor.to(keys.device), offset.to(keys.device))

    def keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys as the cache holds them, bfloat16."""
        return (keys.float() * self.factor + self.offset).bfloat16()


@dataclass
class _Step:
    """One decode under way."""

    prefix: Prefix
    transforms: list[Transform]
    setting: Setting
    lengths: torch.Tensor
    pages_read: list[torch.Tensor]


class Decoder:
    """A model that prefills densely and decodes under a page selection."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self.device = torch.device(device)
        AttentionInterface.register(_ATTENTION, self._attention)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=_ATTENTION, dtype=torch.float32)
        self._model = model.to(self.device).eval()
        self._prefix: Prefix | None = None
        self._step: _Step | None = None
        self._summaries: OrderedDict[Any, list[Any]] = OrderedDict()
        self._stressed: OrderedDict[Any, tuple[Prefix, list[Transform]]] = OrderedDict()
        # What a CPU works on at a time should stay in its cache; a GPU wants all of it.
        self._elements = 1 << 20 if self.device.type == "cpu" else 1 << 28

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> Prefix:
        """Attend densely to all of `tokens` and keep their keys and values."""
        self._prefix, self._step = Prefix([], []), None
        self._model.model(torch.tensor([list(tokens)], device=self.device), use_cache=False)
        prefix, self._prefix = self._prefix, None
        return prefix

    @torch.inference_mode()
    def decode(self, prefix: Prefix, tails: Sequence[Sequence[int]], setting: Setting) -> Decoded:
        """Decode each of `tails` after the document, one independent request each."""
        lengths = torch.tensor([len(tail) for tail in tails], device=self.device)
        padded = torch.zeros(len(tails), max(map(len, tails)), dtype=torch.int64)
        for row, tail in zip(padded, tails, strict=True):
            row[: len(tail)] = torch.tensor(tail)
        padded = padded.to(self.device)
        positions = prefix.num_tokens + torch.arange(padded.shape[1], device=self.device).expand_as(padded)
        self._step = _Step(*self._stress(prefix, setting.stress), lengths=lengths, setting=setting, pages_read=[])
        logits = self._model(padded, position_ids=positions, use_cache=False).logits.float()
        pages_read = self._step.pages_read
        self._step = None
        likely = logits[:, :-1].log_softmax(dim=-1).gather(-1, padded[:, 1:, None]).squeeze(-1)
        read = torch.stack(pages_read).mean().item() if pages_read else 0.0
        return Decoded(logits.argmax(dim=-1).cpu(), likely.cpu(), read)

    def _attention(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        """What transformers calls: `[batch, heads, tokens, size]` in, `[batch, tokens, heads, size]` out."""
        key, value = key.bfloat16(), value.bfloat16()
        if self._prefix is not None:
            self._prefix.keys.append(key[0])
            self._prefix.values.append(value[0])
            group = query.shape[1] // key.shape[1]
            key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return output.transpose(1, 2), None
        assert self._step is not None
        transform = self._step.transforms[module.layer_idx]
        key = transform.keys(key)
        query = (query.unflatten(1, (key.shape[1], -1)) / transform.factor.unsqueeze(1)).flatten(1, 2)
        return self._attend(module.layer_idx, query, key.float(), value.float()), None

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        step = self._step
        assert step is not None
        prefix, setting = step.prefix, step.setting
        page_size = setting.page_size
        tails, heads, tokens, head_size = key.shape
        group = query.shape[1] // heads
        scale = head_size**-0.5
        query = query.unflatten(1, (heads, group)).permute(0, 3, 1, 2, 4)  # [tails, tokens, heads, group, size]
        rows = query.reshape(tails * tokens, heads, group, head_size)

        # The document's complete pages are shared; what follows them belongs to each tail.
        shared = prefix.num_tokens // page_size
        start = shared * page_size
        own_keys, own_values = (
            torch.cat([kept[layer][:, start:].float().expand(tails, -1, -1, -1), new], dim=2)
            for kept, new in ((prefix.keys, key), (prefix.values, value))
        )
        own = own_keys.shape[2]
        contexts = prefix.num_tokens + 1 + torch.arange(tokens, device=rows.device).repeat(tails)
        complete = contexts // page_size

        if setting.is_dense or layer < setting.dense_layers:
            chosen = None
        else:
            missing = -own % page_size
            pages = torch.nn.functional.pad(own_keys, (0, 0, 0, missing)).unflatten(2, (-1, page_size))
            known = None if setting.coverage is None else self._known(layer, query, own_keys, complete)
            scores, counts = self._scores(layer, rows, query, pages, complete, known)
            chosen = self._select(scores, complete, setting, counts)
            kept = (chosen >= 0).float().sum(dim=-1).mean(dim=-1).view(tails, tokens)
            real = torch.arange(tokens, device=rows.device) < step.lengths[:, None]
            step.pages_read.append((kept * real).sum() / real.sum())

        own_logits = torch.einsum("xthgd,xhsd->xthgs", query, own_keys).flatten(0, 1) * scale
        position = start + torch.arange(own, device=rows.device)
        visible = (position < contexts[:, None])[:, None].expand(-1, heads, -1)
        if chosen is not None:
            slot = torch.where(chosen >= shared, chosen - shared, own)
            read = torch.zeros(len(rows), heads, own + 1, dtype=torch.bool, device=rows.device).scatter_(2, slot, True)
            of_page = (position - start) // page_size
            incomplete = (position // page_size == complete[:, None])[:, None]
            visible = visible & (incomplete | read[..., of_page])
        own_logits = own_logits.masked_fill(~visible.unsqueeze(2), -torch.inf)

        if chosen is None:
            shared_keys, shared_values = (kept[layer][:, :start].float() for kept in (prefix.keys, prefix.values))
        else:
            shared_keys, shared_values = (
                kept[layer][:, :start].float().reshape(heads * shared, page_size * head_size)
                for kept in (prefix.keys, prefix.values)
            )
        output = torch.empty_like(rows)
        weights_of_own = torch.empty_like(own_logits)
        per_row = start * query.shape[2] * group if chosen is None else chosen.shape[-1] * heads * page_size * head_size
        for part in self._parts(len(rows), per_row):
            if chosen is None:
                by_head = rows[part].transpose(0, 1).flatten(1, 2)
                logits = (by_head @ shared_keys.transpose(1, 2)).unflatten(1, (-1, group)).transpose(0, 1) * scale
                weights = torch.cat([logits, own_logits[part]], dim=-1).softmax(dim=-1)
                by_head = weights[..., :start].transpose(0, 1).flatten(1, 2)
                output[part] = (by_head @ shared_values).unflatten(1, (-1, group)).transpose(0, 1)
                weights_of_own[part] = weights[..., start:]
            else:
                picked = chosen[part]
                valid = (picked >= 0) & (picked < shared)
                index = torch.where(valid, picked, 0) + shared * torch.arange(heads, device=rows.device)[:, None]
                shape = (index.shape[0] * heads, -1, head_size)
                logits = torch.bmm(rows[part].flatten(0, 1), shared_keys[index].view(shape).transpose(1, 2)) * scale
                logits = logits.masked_fill(~valid.flatten(0, 1).repeat_interleave(page_size, 1)[:, None], -torch.inf)
                width = logits.shape[-1]
                weights = torch.cat([logits, own_logits[part].flatten(0, 1)], dim=-1).softmax(dim=-1)
                picked_values = shared_values[index].view(shape)
                output[part] = torch.bmm(weights[..., :width], picked_values).view_as(output[part])
                weights_of_own[part] = weights[..., width:].view_as(own_logits[part])
        of_own = torch.einsum("xthgs,xhsd->xthgd", weights_of_own.unflatten(0, (tails, tokens)), own_values)
        together: torch.Tensor = output.view_as(of_own).add_(of_own)
        return together.flatten(2, 3)

    def _known(self, layer: int, query: torch.Tensor, own_keys: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
        """Log of what the tokens add to the denominator that are read whatever the query: `[num_rows, heads, group]`.

        Args:
            layer: index.
            query: `[tails, tokens, heads, group, size]`.
            own_keys: `[tails, heads, num_own, size]`, of what follows the document's complete pages.
            complete: `[num_rows]`, complete pages of each row's context.
        """
        step = self._step
        assert step is not None
        setting, keys = step.setting, step.prefix.keys[layer]
        size, tails, tokens = setting.page_size, *query.shape[:2]
        shared = step.prefix.num_tokens // size
        sinks = setting.sink_pages * size
        begin = max(sinks, (shared - setting.recent_pages) * size)
        before = keys[:, begin : shared * size].float().expand(tails, -1, -1, -1)
        newest = torch.einsum("xthgd,xhsd->xthgs", query, torch.cat([before, own_keys], dim=2)).flatten(0, 1)
        position = begin + torch.arange(newest.shape[-1], device=query.device)
        context = step.prefix.num_tokens + 1 + torch.arange(tokens, device=query.device).repeat(tails)
        recent = (complete - setting.recent_pages)[:, None] * size
        hidden = (position < recent) | (position >= context[:, None])
        newest = newest.masked_fill(hidden[:, None, None], -torch.inf)
        first = torch.einsum("xthgd,hsd->xthgs", query, keys[:, :sinks].float()).flatten(0, 1)
        known: torch.Tensor = (torch.cat([first, newest], dim=-1) * query.shape[-1] ** -0.5).logsumexp(dim=-1)
        return known

    def _scores(
        self,
        layer: int,
        rows: torch.Tensor,
        query: torch.Tensor,
        pages: torch.Tensor,
        complete: torch.Tensor,
        known: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[num_rows, num_kv_heads, num_pages]` bfloat16; with `known`, how many pages to read of each row and head."""
        step = self._step
        assert step is not None
        assert step.setting.score is not None
        score, setting = step.setting.score, step.setting
        group = rows.shape[2]
        summary = self._summary(step.prefix, score, setting.page_size)[layer]
        tokens = query.shape[1]
        of_tail = score.score(query.transpose(1, 2).flatten(2, 3), score.summarise(pages))
        of_tail = of_tail.unflatten(2, (tokens, group)).transpose(1, 2).flatten(0, 1)
        parts, counts = [], []
        for part in self._parts(len(rows), summary[0].shape[:-1].numel() * group):
            shared = score.score(rows[part].transpose(0, 1).flatten(1, 2), summary)
            shared = shared.unflatten(1, (-1, group)).transpose(0, 1)
            together = torch.cat([shared, of_tail[part]], dim=-1)
            parts.append(setting.of_group(together, complete[part], rows.shape[-1]))
            if known is not None:
                counts.append(setting.count(together, known[part], parts[-1], complete[part], rows.shape[-1]))
        return torch.cat(parts), torch.cat(counts) if counts else None

    def _parts(self, rows: int, per_row: int) -> Iterator[slice]:
        """Slices of rows that have `per_row` elements each."""
        size = max(self._elements // per_row, 1)
        return (slice(begin, begin + size) for begin in range(0, rows, size))

    def _stress(self, prefix: Prefix, stress: Stress) -> tuple[Prefix, list[Transform]]:
        key = (prefix, stress)
        if key not in self._stressed:
            transforms = [Transform.of(stress, keys, layer) for layer, keys in enumerate(prefix.keys)]
            if stress != "none":
                keys = [transform.keys(keys) for transform, keys in zip(transforms, prefix.keys, strict=True)]
                self._stressed[key] = Prefix(keys, prefix.values), transforms
            else:
                self._stressed[key] = prefix, transforms
            while len(self._stressed) > 1:
                self._stressed.popitem(last=False)
        return self._stressed[key]

    def _summary(self, prefix: Prefix, score: PageScore, page_size: int) -> list[Any]:
        key = (prefix, page_size, score.summary_key)
        if key not in self._summaries:
            summaries = []
            for keys in prefix.keys:
                end = keys.shape[1] // page_size * page_size
                summaries.append(score.summarise(keys[:, :end].float().unflatten(1, (-1, page_size))))
            self._summaries[key] = summaries
            while len(self._summaries) > _SUMMARIES_KEPT:
                self._summaries.popitem(last=False)
        self._summaries.move_to_end(key)
        return self._summaries[key]

    @staticmethod
    def _select(
        scores: torch.Tensor, complete: torch.Tensor, setting: Setting, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        # On a GPU the specification itself runs: the compiled selection is what this measures beside.
        select = reference.select_pages if scores.is_cuda else select_pages
        most = setting.budget_pages if counts is None else int(counts.max())
        pages = select(scores, complete, most, setting.sink_pages, setting.recent_pages, counts)
        return setting.cut(pages, scores, complete)

"""Sparse prefill in torch: tiles of a prompt read the blocks that a rule chooses, answers are decoded after it.

A document is prefilled up to its last whole tile, once for a setting. What is left of it passes with each question and
its right answer as one more batch: the tokens of the prompt in tiles, those of the answer as decode steps. Attention is
causal, so this is what prefilling each prompt by itself gives, and a greedy decode is right if and only if the model's
first choice is the right one at every token of the answer.

Weights and activations are float32, keys and values are rounded to bfloat16 as a cache holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sparse_kernels.page_topk import reference
from torch.nn.functional import pad, scaled_dot_product_attention

from research.prefill.rules import Newest, Setting, Tiles, ZipVL, choose
from research.prefill.summaries import BLOCK, Summary
from research.study.settings import Setting as Policy

_ATTENTION = "prefill"


@dataclass(frozen=True, eq=False)
class Prefilled:
    """The whole tiles of a document after their prefill."""

    keys: list[torch.Tensor]
    """Per layer `[1, num_kv_heads, num_tokens, head_size]` float32 that bfloat16 can hold, with positions."""
    values: list[torch.Tensor]
    """Like `keys`."""
    density: list[float]
    """Per layer: blocks read over blocks before the tiles."""
    loss: float
    """Mean negative log-probability of the tokens of the second half."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole tiles."""
        return self.keys[0].shape[2]


@dataclass(frozen=True)
class Tail:
    """What follows the whole tiles of a document."""

    tokens: Sequence[int]
    prompt_tokens: int
    """How many of them are prefilled; the others are decoded, given the right choice at each step."""


@dataclass(frozen=True)
class Decoded:
    """What the model says after each token of each tail."""

    best: torch.Tensor
    """`[num_tails, longest]` int64: the most probable next token."""
    log_probability: torch.Tensor
    """`[num_tails, longest - 1]` float32: of the tail's own next token."""
    share: list[float] = field(default_factory=list)
    """Of ZipVL, per layer: p over the tokens of the prompt."""


def parts(elements: int, rows: int, per_row: int) -> Iterator[slice]:
    """Slices of rows that have `per_row` elements each, about `elements` in a slice."""
    size = max(elements // max(per_row, 1), 1)
    return (slice(begin, min(begin + size, rows)) for begin in range(0, rows, size))


def attend_tiles(tiles: Tiles, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax attention of each token over the blocks that its tile reads, and its own tile up to itself.

    Args:
        tiles: the queries.
        keys: `[num_prompts, num_kv_heads, num_tokens, head_size]` float32 up to the end of the last tile, anything
            finite where a prompt has no token.
        values: like `keys`.
        chosen: `[num_prompts, num_tiles, num_kv_heads, num_blocks]` bool: blocks before the tile.

    Returns:
        As `tiles.query`.
    """
    query, size = tiles.query, tiles.size
    prompts, heads, group, count, _, head_size = query.shape
    scale = head_size**-0.5
    rows = query.permute(0, 3, 1, 2, 4, 5).reshape(prompts * count * heads, group * size, head_size)

    def own(x: torch.Tensor) -> torch.Tensor:
        mine = x[:, :, tiles.start : tiles.start + count * size].reshape(prompts, heads, count, size, head_size)
        return mine.transpose(1, 2).reshape(prompts * count * heads, size, head_size)

    width = int(chosen.sum(dim=-1).max())
    # A stable sort puts the chosen blocks first, in order.
    index = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :width]
    valid = chosen.gather(-1, index).flatten(0, 2)
    number = keys.shape[2] // BLOCK
    row = torch.arange(prompts, device=query.device)[:, None, None] * heads + torch.arange(heads, device=query.device)
    flat = (row.unsqueeze(-1) * number + index).flatten(0, 2)

    def read(x: torch.Tensor) -> torch.Tensor:
        blocks = x[:, :, : number * BLOCK].reshape(prompts * heads * number, BLOCK * head_size)
        return blocks[flat].view(len(rows), width * BLOCK, head_size)

    logits = torch.bmm(rows, torch.cat([read(keys), own(keys)], dim=1).transpose(1, 2)) * scale
    past, mine = logits.split([width * BLOCK, size], dim=-1)
    past.masked_fill_(~valid.repeat_interleave(BLOCK, dim=1)[:, None], -torch.inf)
    token = torch.arange(size, device=query.device)
    mine.masked_fill_((token > token[:, None]).repeat(group, 1), -torch.inf)
    output = torch.bmm(logits.softmax(dim=-1), torch.cat([read(values), own(values)], dim=1))
    return output.view(prompts, count, heads, group, size, head_size).permute(0, 2, 3, 1, 4, 5)


def expand_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """Keys or values `[num_prompts, num_kv_heads, ...]`, once for each query head."""
    return x.repeat_interleave(group, dim=1)


def group_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[num_prompts, num_query_heads, ...]` to `[num_prompts, num_kv_heads, group, ...]`."""
    grouped: torch.Tensor = x.unflatten(1, (heads, -1))
    return grouped


def attend_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Softmax attention of each token over itself and those before it.

    Args:
        query: `[num_prompts, num_kv_heads, group, num_tokens, head_size]` float32.
        keys: `[num_prompts, num_kv_heads, num_tokens, head_size]` float32.
        values: like `keys`.

    Returns:
        As `query`.
    """
    keys, values = (expand_heads(x, query.shape[2]) for x in (keys, values))
    output: torch.Tensor = scaled_dot_product_attention(query.flatten(1, 2), keys, values, is_causal=True)
    return group_heads(output, query.shape[1])


def attend_visible(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Softmax attention under a mask.

    Args:
        query: `[num_prompts, num_kv_heads, group, num_queries, head_size]` float32.
        keys: `[num_prompts, num_kv_heads, num_tokens, head_size]` float32.
        values: like `keys`.
        visible: bool that expands to `[num_prompts, num_kv_heads, num_queries, num_tokens]`.

    Returns:
        As `query`.
    """
    group = query.shape[2]
    output: torch.Tensor = scaled_dot_product_attention(
        query.flatten(1, 2),
        expand_heads(keys, group),
        expand_heads(values, group),
        attn_mask=expand_heads(visible.expand(*query.shape[:2], -1, -1), group),
    )
    return group_heads(output, query.shape[1])


def policy_reads(query: torch.Tensor, keys: torch.Tensor, position: torch.Tensor, policy: Policy) -> torch.Tensor:
    """Which tokens decode steps read under a page policy.

    Args:
        query: `[num_prompts, num_kv_heads, group, num_queries, head_size]` float32.
        keys: `[num_prompts, num_kv_heads, num_tokens, head_size]` float32 that bfloat16 can hold.
        position: `[num_prompts, num_queries]` int64.
        policy: with a score.

    Returns:
        `[num_prompts, num_kv_heads, num_queries, num_tokens]` bool.
    """
    assert policy.score is not None
    score, size = policy.score, policy.page_size
    prompts, heads, group, count, _ = query.shape
    token = torch.arange(keys.shape[2], device=keys.device)
    pages = pad(keys, (0, 0, 0, -keys.shape[2] % size)).unflatten(2, (-1, size))
    complete = (position + 1) // size
    scores = score.score(query.flatten(2, 3), score.summarise(pages)).unflatten(2, (group, count))
    scores = scores.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [rows, heads, group, pages]
    scores = policy.of_group(scores, complete.flatten(), query.shape[-1])
    chosen = reference.select_pages(
        scores, complete.flatten(), policy.budget_pages, policy.sink_pages, policy.recent_pages
    )
    number = pages.shape[2]
    read = torch.zeros(*chosen.shape[:2], number + 1, dtype=torch.bool, device=keys.device)
    read.scatter_(2, torch.where(chosen < 0, number, chosen), True)
    read = read.view(prompts, count, heads, -1).transpose(1, 2)[..., token // size]
    incomplete = (token // size == complete.unsqueeze(-1)).unsqueeze(1)
    return (read | incomplete) & (token <= position.unsqueeze(-1)).unsqueeze(1)


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of a layer: its number, queries `[prompts, kv_heads, group, tokens, size]`, keys and values
`[prompts, kv_heads, tokens, size]` float32; to an output like the queries."""


class Prefiller:
    """A model that prefills sparsely."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self.device = torch.device(device)
        AttentionInterface.register(_ATTENTION, self._attention)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=_ATTENTION, dtype=torch.float32)
        self._model = model.to(self.device).eval()
        self._attend: Attend | None = None
        self._generator = torch.Generator()
        # What a CPU works on at a time should stay in its cache; a GPU wants all of it.
        self._elements = 1 << 21 if self.device.type == "cpu" else 1 << 29

    def _attention(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        """What transformers calls: `[batch, heads, tokens, size]` in, `[batch, tokens, heads, size]` out."""
        assert self._attend is not None
        grouped = group_heads(query, key.shape[1])
        output = self._attend(module.layer_idx, grouped, key.bfloat16().float(), value.bfloat16().float())
        return output.flatten(1, 2).transpose(1, 2), None

    def _hidden(self, tokens: torch.Tensor, begin: int, attend: Attend) -> torch.Tensor:
        self._attend = attend
        position = begin + torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        hidden: torch.Tensor = self._model.model(tokens, position_ids=position, use_cache=False).last_hidden_state
        self._attend = None
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden).float()
        return logits

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], setting: Setting, seed: int = 0) -> Prefilled:
        """Prefill whole tiles.

        Args:
            tokens: as many as whole tiles hold.
            setting: how.
            seed: of random queries.
        """
        self._generator.manual_seed(seed)
        ids = torch.tensor([list(tokens)], device=self.device)
        all_keys: list[torch.Tensor] = []
        all_values: list[torch.Tensor] = []
        density: list[float] = []

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            all_keys.append(keys)
            all_values.append(values)
            if setting.rule is None:
                density.append(1.0)
                return attend_causal(query, keys, values)
            exists = torch.ones(1, keys.shape[2] // setting.tile, setting.tile, dtype=torch.bool, device=self.device)
            tiles = Tiles(query.unflatten(3, (-1, setting.tile)), exists, 0)
            vectors = self._summarise(setting, keys)
            output, read = self._attend_chosen(setting, tiles, keys, values, vectors)
            density.append(read / (int(tiles.past_blocks.sum()) * keys.shape[1]))
            return output.flatten(3, 4)

        hidden = self._hidden(ids, 0, attend)
        half = ids.shape[1] // 2
        likely = self._logits(hidden[:, half - 1 : -1]).log_softmax(dim=-1).gather(2, ids[:, half:, None])
        return Prefilled(all_keys, all_values, density, -likely.mean().item())

    @torch.inference_mode()
    def decode(
        self, prefilled: Prefilled, tails: Sequence[Tail], setting: Setting, policy: Policy, seed: int = 0
    ) -> Decoded:
        """Prefill the prompts of tails in tiles and decode the rest of them.

        Args:
            prefilled: by `prefill` with the same setting.
            tails: independent requests.
            setting: of the prefill.
            policy: of decoding; one without a score is dense.
            seed: of random queries.
        """
        self._generator.manual_seed(seed)
        ids = self._padded([tail.tokens for tail in tails])
        begin, count, tile = prefilled.num_tokens, ids.shape[1], setting.tile
        prompt = torch.tensor([tail.prompt_tokens for tail in tails], device=self.device)
        token = torch.arange(count, device=self.device)
        in_prompt = token < prompt[:, None]
        missing = -count % tile
        exists = pad(in_prompt, (0, missing)).unflatten(1, (-1, tile))
        decoded = int(prompt.min())
        position = begin + token

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            past = prefilled.keys[layer]
            keys, values = (
                torch.cat([kept[layer].expand(len(tails), -1, -1, -1), new], dim=2)
                for kept, new in ((prefilled.keys, keys), (prefilled.values, values))
            )
            slot = torch.arange(keys.shape[2], device=self.device)
            causal = (slot <= position[:, None])[None, None]
            if setting.rule is None:
                output = attend_visible(query, keys, values, causal)
            else:
                tiles = Tiles(pad(query, (0, 0, 0, missing)).unflatten(3, (-1, tile)), exists, begin)
                wide_keys, wide_values = (pad(x, (0, 0, 0, missing)) for x in (keys, values))
                vectors = self._summarise(setting, past, wide_keys[:, :, begin:])
                output, _ = self._attend_chosen(setting, tiles, wide_keys, wide_values, vectors)
                output = output.flatten(3, 4)[:, :, :, :count]
            steps = query[:, :, :, decoded:]
            if not steps.shape[3]:
                return output
            if policy.is_dense:
                visible = causal[:, :, decoded:]
            else:
                visible = policy_reads(steps, keys, position[decoded:].expand(len(tails), -1), policy)
            answers = attend_visible(steps, keys, values, visible)
            keep = in_prompt[:, None, None, decoded:, None]
            return torch.cat([output[:, :, :, :decoded], output[:, :, :, decoded:].where(keep, answers)], dim=3)

        return Decoded(*self._says(self._hidden(ids, begin, attend), ids))

    @torch.inference_mode()
    def zipvl(self, tokens: Sequence[int], tail: Tail, setting: ZipVL, drop: bool, seed: int = 0) -> Decoded:
        """Prefill a prompt as ZipVL does, and decode what follows it.

        Args:
            tokens: of the prompt before the tail.
            tail: the rest of the prompt, and what is decoded.
            setting: ZipVL's.
            drop: whether decoding reads K[T] only, as published, or everything.
            seed: of random probes.

        Returns:
            As `decode` does of one tail.
        """
        self._generator.manual_seed(seed)
        ids = torch.tensor([[*tokens, *tail.tokens]], device=self.device)
        prompt = len(tokens) + tail.prompt_tokens
        share: list[float] = []
        position = torch.arange(ids.shape[1], device=self.device)

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            probes = setting.probes(prompt, self._generator).to(self.device)
            kept = setting.keep(query[0][:, :, probes], keys[0, :, :prompt], probes)
            share.append(len(kept) / prompt)
            output = torch.zeros_like(query)
            output[:, :, :, kept] = attend_causal(*(x.index_select(-2, kept) for x in (query, keys, values)))
            visible = position <= position[prompt:, None]
            if drop:
                read = (position >= prompt).index_fill(0, kept, True)
                visible = visible & read
            output[:, :, :, prompt:] = attend_visible(query[:, :, :, prompt:], keys, values, visible[None, None])
            return output

        hidden = self._hidden(ids, 0, attend)[:, len(tokens) :]
        return Decoded(*self._says(hidden, ids[:, len(tokens) :]), share)

    def _padded(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = torch.tensor(list(tokens))
        return padded.to(self.device)

    def _says(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(hidden)
        likely = logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logits.argmax(dim=-1).cpu(), likely.cpu()

    @staticmethod
    def _summarise(setting: Setting, *keys: torch.Tensor) -> torch.Tensor | None:
        """Summaries of keys that follow each other; those of one prompt stand for those of all."""
        if setting.rule is None or isinstance(setting.rule, Newest):
            return None
        summary: Summary = setting.rule.summary
        each = [summary.summarise(x.unflatten(2, (-1, summary.page_size))) for x in keys]
        return torch.cat([x.expand(len(each[-1]), *x.shape[1:]) for x in each], dim=2)

    def _attend_chosen(
        self,
        setting: Setting,
        tiles: Tiles,
        keys: torch.Tensor,
        values: torch.Tensor,
        vectors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        """Attention of tiles, and how many blocks they read."""
        rule, query = setting.rule, tiles.query
        prompts, heads, group, count, size, _ = query.shape
        output = torch.empty_like(query)
        read = 0
        # A tile without a block before it has nothing to choose.
        whole = int((tiles.past_blocks == 0).sum())
        if whole:
            part, none = tiles.part(0, whole), torch.zeros(prompts, whole, heads, 0, dtype=torch.bool)
            output[:, :, :, :whole] = attend_tiles(part, keys, values, none.to(self.device))
        width = keys.shape[2] if vectors is None else vectors.shape[2] * vectors.shape[3]
        for some in parts(self._elements, count - whole, prompts * heads * group * size * width):
            part = tiles.part(whole + some.start, whole + some.stop)
            past = part.past_blocks
            blocks = int(past[-1])
            if isinstance(rule, Newest):
                scores = torch.arange(blocks, device=self.device).float().expand(prompts, len(past), heads, -1)
                own = torch.zeros(prompts, len(past), heads, device=self.device)
            else:
                assert rule is not None
                assert vectors is not None
                scores, own = rule.score(part, vectors, self._generator)
            chosen = choose(scores[..., :blocks], own, past, setting.choice)
            read += int(chosen.sum())
            width_read = (int(chosen.sum(dim=-1).max()) + 2) * BLOCK
            per_tile = prompts * heads * max(group * size * width_read, 2 * width_read * query.shape[-1])
            for fine in parts(self._elements // 2, len(past), per_tile):
                begin = whole + some.start + fine.start
                output[:, :, :, begin : begin + fine.stop - fine.start] = attend_tiles(
                    part.part(fine.start, fine.stop), keys, values, chosen[:, fine]
                )
        return output, read

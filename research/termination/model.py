"""A small model whose newest tokens attend as long as a rule says."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.stopping import StopRule, probe_elements
from sparse_kernels.stopping.reference import partial_outputs, stop_blocks

from vllm_sparse_plugin.policies import Selection
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer
from vllm_sparse_plugin.tools.needles import build_questions

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
_ATTENTION = "vllm_sparse_stopping"
_LEAST_DOCUMENT = 4096


@dataclass(frozen=True)
class Question:
    """A prompt and the tokens of its right answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Setting:
    """What the newest tokens read."""

    selection: Selection
    rule: StopRule


@dataclass
class Layer:
    """What a layer's newest tokens did."""

    partial: torch.Tensor
    """`[num_tokens, num_kv_heads, blocks, group_size, head_size]`, see `partial_outputs`."""
    blocks: torch.Tensor
    """`[num_tokens]`, blocks that each token could have read."""
    stop: torch.Tensor
    """`[num_tokens, num_kv_heads]`, blocks that it read."""


class StoppingModel:
    """The model in transformers, in float32; prompts are read densely."""

    def __init__(self, folder: Path) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.setting: Setting | None = None
        self.layers: list[Layer] = []

        def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
            if self.setting is None:
                return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
            grouped = query[0].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3)
            output = self._stop(LayerInputs(grouped, key[0], value[0], kwargs["scaling"]), self.setting)
            return output.flatten(1, 2)[None].to(query.dtype), None

        AttentionInterface.register(_ATTENTION, attend)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=_ATTENTION, dtype=torch.float32
        ).eval()

    def _stop(self, inputs: LayerInputs, setting: Setting) -> torch.Tensor:
        selection, rule = setting.selection, setting.rule
        paged = PagedLayer(inputs, selection)
        lengths = inputs.context_lens
        tokens = QueryTokens(inputs.query, paged.block_table, lengths)
        cache = KVCache(paged.paged_keys, paged.paged_values, paged.statistics)
        num_pages = tokens.num_pages(selection.page_size)
        pages = selection.reading_order(inputs.query, paged.statistics, paged.block_table, num_pages)
        partial = partial_outputs(tokens, cache, pages, Softmax(inputs.scale), rule.block_tokens)
        blocks = -(-(pages[:, 0] >= 0).sum(dim=-1) * selection.page_size // rule.block_tokens)
        least = -(-rule.least_pages * selection.page_size // rule.block_tokens)
        stop = stop_blocks(partial, rule, probe_elements(partial.shape[-1]), least)
        stop = torch.minimum(stop, blocks[:, None])
        self.layers.append(Layer(partial, blocks, stop))
        index = (stop - 1)[:, :, None, None, None].expand(-1, -1, 1, *partial.shape[3:])
        return partial.gather(2, index)[:, :, 0]

    def prefill(self, question: Question) -> Any:
        """The cache of all but the last token of a prompt."""
        self.setting = None
        with torch.inference_mode():
            return self.model(torch.tensor([question.prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values

    def answer(self, question: Question, cache: Any, setting: Setting) -> tuple[bool, list[Layer]]:
        """Whether the model's greedy answer is right, and what each layer did meanwhile."""
        self.setting, self.layers = setting, []
        tokens = [question.prompt[-1], *question.answer[:-1]]
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), past_key_values=copy.deepcopy(cache), use_cache=True).logits
        return logits[0].argmax(dim=-1).tolist() == question.answer, self.layers


def questions(tokenizer: Any, task: str, context_tokens: int, count: int) -> list[Question]:
    """Needle questions; of a context below 4096 tokens, a window of a longer document around the answer."""
    found = []
    for number, question in enumerate(build_questions(tokenizer, task, max(context_tokens, _LEAST_DOCUMENT), count, 0)):
        document, asked = question.parts
        if context_tokens < _LEAST_DOCUMENT:
            characters = int(0.97 * (context_tokens - 64) * len(document) / len(tokenizer.encode(document)))
            # The needle lies at another share of each window.
            start = document.index(question.answer) - characters * (2 * number + 1) // (2 * count)
            start = max(0, min(start, len(document) - characters))
            document = document[start : start + characters]
        answer = tokenizer.encode(f" {question.answer}", add_special_tokens=False)
        found.append(Question(tokenizer.encode(document + asked), answer))
    return found

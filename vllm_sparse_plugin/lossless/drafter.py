"""Drafts with the model itself, in vLLM's first model runner.

A drafting step is a decode step of one token per request, with metadata for sparse attention. It writes keys and values
into blocks that the scheduler has reserved after the known tokens. No prefix hash names these blocks yet, and the
verifying step writes them again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.lossless.pace import DraftPace, Load
from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.names import BACKENDS


class SparseDrafter:
    """The drafter of vLLM's first model runner.

    A draft is the most likely token. vLLM's rejection sampler treats it as a distribution with one outcome, so sampled
    tokens have the same distribution as without drafts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        backend = compat.chosen_backend(vllm_config, BACKENDS)
        assert backend is not None
        rule = resolved(vllm_config, BACKENDS[backend]).draft_rule
        assert rule is not None
        self.vllm_config = vllm_config
        self.rule = rule
        self.watch = PaceWatch(rule.draft_tokens) if rule.is_adaptive else None

    def load_model(self, model: Any) -> None:
        """Takes the model, which also drafts."""
        self.model = model

    def attach(self, runner: Any) -> None:
        """Takes the model runner, which knows the blocks of its requests and outlives this drafter."""
        self.runner = ref(runner)
        # Otherwise the runner would not draft for any request while one is near the longest context. The rule checks
        # each.
        runner.effective_drafter_max_model_len = runner.max_model_len + self.rule.draft_tokens

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts the next tokens.

        Args:
            sampled_token_ids: tokens that the last step has made for each request; empty while its prompt is in
                prefill.
            num_tokens_no_spec: `[max_requests]` int32, the number of known tokens of each request.
            token_ids_cpu: `[max_requests, max_model_len]` int32, the known tokens.
            slot_mappings: unused.

        Returns:
            The drafts of each request; empty for contexts too short to gain.
        """
        runner = self.runner()
        assert runner is not None
        tables = runner.input_batch.block_table.block_tables
        lengths: list[int] = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        wanted: list[int] = []
        for request, sampled in enumerate(sampled_token_ids):
            reserved = min(int(table.num_blocks_per_row[request]) * table.block_size for table in tables)
            wanted.append(self.rule.drafts(lengths[request], reserved, runner.max_model_len) if sampled else 0)
        if self.watch is not None:
            made = {
                name: len(tokens) for name, tokens in zip(runner.input_batch.req_ids, sampled_token_ids, strict=True)
            }
            wanted = self.watch.step(made, wanted, Load.of(lengths), time.perf_counter(), _verified(runner))
        drafts: list[list[int]] = [[] for _ in wanted]
        newest = [int(token_ids_cpu[request, length - 1]) for request, length in enumerate(lengths)]
        by_length = sorted(range(len(wanted)), key=lambda request: -wanted[request])
        for index in range(max(wanted, default=0)):
            # Longer drafts come first, so the rows of a step are the first rows of the step before.
            requests = [request for request in by_length if wanted[request] > index]
            positions = torch.tensor([lengths[request] - 1 + index for request in requests])
            tokens = torch.tensor([newest[request] for request in requests], dtype=torch.int32)
            for request, token in zip(requests, self._step(runner, requests, tokens, positions, index), strict=True):
                newest[request] = token
                drafts[request].append(token)
        return drafts

    def _step(
        self, runner: Any, requests: list[int], tokens: torch.Tensor, positions: torch.Tensor, index: int
    ) -> list[int]:
        """Runs the model for one token of each request, and returns the most likely next tokens.

        Args:
            runner: vLLM's model runner.
            requests: rows of the batch.
            tokens: `[num_requests]` int32.
            positions: `[num_requests]` int64, the positions of `tokens`.
            index: index of the drafted token within the draft.
        """
        count = len(requests)
        start = torch.arange(count + 1, dtype=torch.int32)
        seq_lens = (positions + 1).int()
        metadata: dict[str, Any] = {}
        slots_of_layers: dict[str, torch.Tensor] = {}
        tables = runner.input_batch.block_table.block_tables
        for table, groups in zip(tables, runner.attn_groups, strict=True):
            blocks = table.get_cpu_tensor()[requests]
            block = blocks.gather(1, (positions // table.block_size)[:, None]).squeeze(1)
            slots = block.long() * table.block_size + positions % table.block_size
            common = CommonAttentionMetadata(
                query_start_loc=start,
                query_start_loc_cpu=start,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=blocks,
                slot_mapping=slots,
                positions=positions,
            )
            for group in groups:
                built = group.build_metadata_for_drafting(common, index)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots_of_layers |= dict.fromkeys(group.layer_names, slots)
        with set_forward_context(metadata, self.vllm_config, num_tokens=count, slot_mapping=slots_of_layers):
            hidden = self.model(input_ids=tokens, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        likeliest: list[int] = self.model.compute_logits(hidden).argmax(dim=-1).tolist()
        return likeliest


def _verified(runner: Any) -> list[int | None]:
    """Returns how many drafts of each request of a batch the finished step had; None for structured output, of which
    vLLM cuts drafts that would be rejected."""
    batch = runner.input_batch
    structured = (runner.requests[name].sampling_params.structured_outputs for name in batch.req_ids)
    return [None if form else len(drafts) for form, drafts in zip(structured, batch.spec_token_ids, strict=False)]


class PaceWatch:
    """Reports finished steps to a `DraftPace`, and decides how many tokens each request drafts next."""

    def __init__(self, most: int) -> None:
        """Takes the length of the longest draft."""
        self.pace = DraftPace(range(most + 1))
        self._drafts: dict[str, int] = {}
        self._requests: set[str] = set()
        self._began = 0.0

    def step(
        self,
        made: Mapping[str, int],
        allowed: Sequence[int],
        load: Load,
        now: float,
        verified: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Records a finished step; returns how many tokens to draft for each request.

        Args:
            made: tokens that the step has made for each request; 0 while its prompt is in prefill.
            allowed: the most drafts of each request.
            load: the load of the next step.
            now: time in seconds.
            verified: of each request, how many of its drafts the step had room for; None for all.
        """
        for name, found in zip(made, verified or (), strict=False):
            if found is not None and name in self._drafts:
                self._drafts[name] = min(found, self._drafts[name])
        for name, drafts in self._drafts.items():
            if drafts and made.get(name):
                self.pace.observe_drafts(drafts, made[name] - 1)
        lengths = set(self._drafts.values())
        # Other steps have computed prompts or waited for requests, so their times are not used.
        if len(lengths) == 1 and self._requests == made.keys() and all(made.values()):
            self.pace.observe_step(lengths.pop(), now - self._began, load)
            live.record_gain(self.pace.gain(load))
        if not any(allowed):
            # Times of contexts that are too short do not apply to others.
            self._drafts = {}
            return list(allowed)
        most = self.pace.choose(load)
        wanted = [min(most, each) for each in allowed]
        self._drafts = {name: drafts for name, drafts, each in zip(made, wanted, allowed, strict=True) if each}
        self._requests, self._began = set(made), now
        return wanted

"""Drafts with the model itself, in vLLM's second model runner.

A drafting step is a decode step of one token per request, with metadata for sparse attention. It writes keys and values
into blocks that the scheduler has reserved after the known tokens. No prefix hash names these blocks yet, and the
verifying step writes them again. The inputs and results of a step are device tensors at fixed addresses. One CUDA graph
therefore serves every drafting step with the same number of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import BACKENDS


class SparseSpeculator(DraftModelSpeculator):
    """The drafter of vLLM's second model runner.

    A draft is the most likely token. vLLM's rejection sampler treats it as a distribution with one outcome, so sampled
    tokens have the same distribution as without drafts. Every request has a row of drafts. The row of a request without
    drafts repeats its newest token: `PacedScheduler` does not verify it, other schedulers do.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        backend = compat.chosen_backend(vllm_config, BACKENDS)
        assert backend is not None
        rule = resolved(vllm_config, BACKENDS[backend]).draft_rule
        assert rule is not None
        self.rule = rule
        self.graphs: CudaGraphManager | None = None
        self.reading_graphs: CudaGraphManager | None = None
        """Graphs of steps that read the pages of an earlier step; None if each step chooses pages."""
        # vLLM looks here for layers of a separate draft model.
        self.attn_groups: list[Any] = []
        self.rows = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self.writes = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)

    def load_draft_model(self, target_model: torch.nn.Module, target_attn_layer_names: set[str]) -> torch.nn.Module:
        """Returns the model, which also drafts."""
        return target_model

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Takes the layers of the model, in groups that share a metadata builder, and the block tables."""
        self.kv_cache_config = kv_cache_config
        self.block_tables = block_tables
        self.target_attn_groups = target_attn_groups
        # With `max_model_len` auto, vLLM has lowered it since it made the drafter.
        self.max_model_len = self.vllm_config.model_config.max_model_len
        self.slots = torch.full(
            (len(block_tables.block_sizes), self.max_num_reqs), PAD_SLOT_ID, dtype=torch.int64, device=self.device
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Creates the graph manager of drafting steps if vLLM captures whole decode steps."""
        captures = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if captures else CUDAGraphMode.NONE
        self.graphs = CudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)
        if self.rule.keeps_pages:
            self.reading_graphs = CudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)

    def capture(self) -> None:
        """Captures a drafting step for each number of requests that vLLM captures."""

        def forward_of(reads: bool) -> Callable[[BatchExecutionDescriptor, bool], Callable[[CUDAGraphMode], None]]:
            def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
                rows = desc.num_tokens
                self.block_tables.get_dummy_block_tables(rows)
                nobody = torch.zeros(rows, dtype=torch.int64, device=self.device)
                self._begin(rows, nobody, nobody, nobody.bool())
                metadata = self._metadata(rows, torch.ones(rows, dtype=torch.int32))
                return lambda _: self._step(rows, _of_reading_steps(metadata) if reads else metadata)

            return create_forward_fn

        for reads, graphs in ((False, self.graphs), (True, self.reading_graphs)):
            if graphs is not None:
                graphs.capture(forward_of(reads), progress_bar_desc="Capturing CUDA graphs of drafting steps")

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *others: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Drafts the next tokens.

        Args:
            input_batch: the batch of the model's last step.
            attn_metadata: unused.
            slot_mappings: unused.
            last_hidden_states: unused.
            aux_hidden_states: unused.
            num_sampled: `[num_requests]` int32, tokens that the step has made; 0 while a prompt is in prefill.
            num_rejected: `[num_requests]` int32, drafts of the step that were not accepted.
            last_sampled: `[max_requests, 1]` int64, the newest token, by request number.
            others: unused.
            num_speculative_tokens: how many tokens to draft; None for `draft_tokens`.
            dummy_run: whether the step has no requests.
            more: unused.

        Returns:
            `[num_requests, draft_tokens]` int64; the first `num_speculative_tokens` of a row are drafts.
        """
        count = input_batch.num_reqs
        if dummy_run:
            return self.draft_tokens[:count]
        newest = last_sampled.view(-1)[input_batch.idx_mapping]
        positions = (input_batch.seq_lens[:count] - num_rejected).long()
        wanted = (num_sampled > 0) & (positions + 1 >= self.rule.min_context_tokens)
        lengths = self._lengths(input_batch)
        length = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if not length or not lengths.any():
            self.draft_tokens[:count] = newest[:, None]
            return self.draft_tokens[:count]
        assert self.graphs is not None
        desc = self.graphs.dispatch(count, count, uniform_token_count=1, num_active_loras=0)
        self._begin(desc.num_tokens, newest, positions, wanted)
        # A graph needs no metadata, but building it counts the steps. Built twice, they would count twice.
        metadata = self._metadata(desc.num_tokens, lengths)
        choosing = reading = self.graphs, metadata
        if self.reading_graphs is not None:
            reading = self.reading_graphs, _of_reading_steps(metadata)
        for index in range(length):
            graphs, metadata = choosing if self.rule.chooses_pages(index) else reading
            if desc.cg_mode == CUDAGraphMode.FULL:
                graphs.run_fullgraph(desc)
            else:
                self._step(desc.num_tokens, metadata)
        return self.draft_tokens[:count]

    def _lengths(self, input_batch: InputBatch) -> torch.Tensor:
        """Returns upper bounds of the contexts in the first drafting step: `[num_requests]` int32, 0 for no drafts."""
        count = input_batch.num_reqs
        known = input_batch.seq_lens_cpu_upper_bound[:count]
        finished = known >= torch.from_numpy(input_batch.prefill_len_np[:count])
        lengths: torch.Tensor = (known + 1) * (finished & (known + 1 >= self.rule.min_context_tokens))
        return lengths

    def _begin(self, rows: int, newest: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> None:
        """Writes the inputs of the first drafting step to the device.

        Args:
            rows: requests of a step, padding included.
            newest: `[num_requests]` int64, the newest token of each request, which has no keys yet.
            positions: `[num_requests]` int64, the positions of `newest`.
            wanted: `[num_requests]` bool, whether a request drafts. Others attend to their first token and write
                nothing.
        """
        count, buffers = len(newest), self.input_buffers
        buffers.input_ids[:count] = newest
        buffers.input_ids[count:rows] = 0
        buffers.positions[:count] = positions.clamp(max=self.max_model_len - 1)
        buffers.positions[count:rows] = 0
        buffers.seq_lens[:count] = (positions + 1).masked_fill(~wanted, 1)
        buffers.seq_lens[count:] = 0
        self.writes[:count] = wanted & (positions < self.max_model_len)
        self.writes[count:] = False
        # Padding rows have no tokens.
        torch.clamp(self.rows, max=count, out=buffers.query_start_loc)
        self.draft_tokens[:count] = newest[:, None]
        self.place.zero_()

    def _metadata(self, rows: int, lengths: torch.Tensor) -> dict[str, Any]:
        """Returns the metadata of steps that choose pages, by layer. The values that change between steps are on the
        device.

        Args:
            rows: requests of a step, padding included.
            lengths: `[num_requests]` int32 on the host, upper bounds of the contexts in the first step.
        """
        buffers, starts = self.input_buffers, torch.arange(rows + 1, dtype=torch.int32)
        bound = torch.zeros(rows, dtype=torch.int32)
        bound[: len(lengths)] = lengths
        metadata: dict[str, Any] = {}
        for groups, table, slots in zip(
            self.target_attn_groups, self.block_tables.input_block_tables, self.slots, strict=True
        ):
            common = CommonAttentionMetadata(
                query_start_loc=buffers.query_start_loc[: rows + 1],
                query_start_loc_cpu=starts,
                seq_lens=buffers.seq_lens[:rows],
                seq_lens_cpu_upper_bound=bound,
                num_reqs=rows,
                num_actual_tokens=rows,
                max_query_len=1,
                # A graph holds this number, so it is the longest context.
                max_seq_len=self.max_model_len,
                block_table_tensor=table[:rows],
                slot_mapping=slots[:rows],
                positions=buffers.positions[:rows],
            )
            for group in groups:
                metadata |= dict.fromkeys(group.layer_names, group.build_metadata_for_drafting(common, 0))
        return metadata

    def _step(self, rows: int, metadata: dict[str, Any]) -> None:
        """Drafts one token for each of the first `rows` rows, and writes the inputs of the next step."""
        buffers, writes = self.input_buffers, self.writes[:rows]
        ids, positions, seq_lens = buffers.input_ids[:rows], buffers.positions[:rows], buffers.seq_lens[:rows]
        for table, size, slots in zip(
            self.block_tables.input_block_tables, self.block_tables.block_sizes, self.slots, strict=True
        ):
            blocks = table[:rows].gather(1, (positions // size)[:, None]).squeeze(1).long()
            slots[:rows] = (blocks * size + positions % size).masked_fill(~writes, PAD_SLOT_ID)
        slots_of_layers = build_slot_mappings_by_layer(self.slots[:, :rows], self.kv_cache_config)
        with set_forward_context(metadata, self.vllm_config, num_tokens=rows, slot_mapping=slots_of_layers):
            hidden = self.model(input_ids=ids, positions=positions, inputs_embeds=None, intermediate_tensors=None)
        likeliest = self.model.compute_logits(hidden).argmax(dim=-1)
        # A request that does not draft keeps its newest token.
        ids.copy_(torch.where(writes, likeliest, ids))
        self.draft_tokens[:rows].scatter_(1, self.place.expand(rows, 1), ids[:, None].long())
        # A request that reaches the last position ends there, and must not write beyond it.
        writes &= positions < self.max_model_len - 1
        seq_lens += writes
        positions += writes
        self.place += 1


def _of_reading_steps(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of the steps that read the pages which steps with `metadata` choose, by layer."""
    return {layer: of_layer.of_reading_steps() for layer, of_layer in metadata.items()}

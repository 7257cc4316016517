"""One attention layer of vLLM with its metadata builder, without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.utils import customize_attention_spec

if torch.cpu._is_amx_tile_supported():
    # The Linux kernel grants AMX state per process. vLLM requests it in its workers.
    torch.cpu._init_amx()


@dataclass(frozen=True)
class LayerBatch:
    """The requests of a step, as a model runner describes them to attention."""

    query_start: torch.Tensor
    """`[num_requests + 1]` int32, start of each request's query tokens, and the end of the last."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32, context tokens of each request, query tokens included."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32, physical block ids."""
    slots: torch.Tensor
    """`[num_tokens]` int64, cache slot of each query token's key and value."""
    is_prefilling: torch.Tensor
    """`[num_requests]` bool, whether the prompt was incomplete before the step."""

    def to(self, device: torch.device) -> LayerBatch:
        """Return the batch on a device."""
        parts = {name: part.to(device) for name, part in vars(self).items()}
        return LayerBatch(**parts)

    def common(self) -> CommonAttentionMetadata:
        """Return the batch in the form that vLLM passes to metadata builders."""
        lengths = self.query_start[1:] - self.query_start[:-1]
        return CommonAttentionMetadata(
            query_start_loc=self.query_start,
            query_start_loc_cpu=self.query_start.cpu(),
            seq_lens=self.seq_lens,
            num_reqs=len(self.seq_lens),
            num_actual_tokens=len(self.slots),
            max_query_len=int(lengths.max()),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.block_table,
            slot_mapping=self.slots,
            is_prefilling=self.is_prefilling.cpu(),
        )


@dataclass
class BareLayer:
    """A layer, its metadata builder and its cache specification."""

    layer: Any
    """vLLM's `Attention`."""
    spec: AttentionSpec
    builder: Any
    """Builds a step's metadata and configures the layer."""
    replays: bool = False
    """Whether a step is captured as a CUDA graph. Its output then comes from a replay."""

    @classmethod
    def build(
        cls,
        config: VllmConfig,
        heads: tuple[int, int, int],
        block_size: int,
        layer_index: int = 0,
        device: str = "cpu",
        **attention: Any,
    ) -> BareLayer:
        """Build a layer like the model of an engine does.

        Args:
            config: vLLM's configuration, which names the backend. Its earlier layers are removed.
            heads: number of query heads, number of KV heads, and head size.
            block_size: tokens of a cache block.
            layer_index: index of the layer in its model.
            device: of the layer.
            attention: further arguments of vLLM's `Attention`.
        """
        num_heads, num_kv_heads, head_size = heads
        config.compilation_config.static_forward_context.clear()
        name = f"model.layers.{layer_index}.self_attn.attn"
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(config), torch.device(device):
                layer = Attention(
                    num_heads, head_size, head_size**-0.5, num_kv_heads, cache_config=config.cache_config, prefix=name,
                    **attention,
                )  # fmt: skip
                backend = layer.get_attn_backend()
                spec = customize_attention_spec(backend, layer.get_kv_cache_spec(config))
                # Sliding-window layers may choose smaller blocks. This class has one size.
                spec = replace(spec, block_size=block_size)
                builder = backend.get_builder_cls()(spec, [name], config, torch.device(device))
        finally:
            torch.set_default_dtype(previous)
        return cls(layer, spec, builder)

    @property
    def name(self) -> str:
        """The layer's name."""
        return str(self.layer.layer_name)

    def step(
        self, batch: LayerBatch, cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Write keys and values of a step and attend, like vLLM's model runner.

        Args:
            batch: the requests.
            cache: the layer's KV cache.
            query: `[num_tokens, num_heads, head_size]`.
            key: `[num_tokens, num_kv_heads, head_size]`.
            value: like `key`.

        Returns:
            The output, like `query`, NaN where nothing was written, and the step's metadata.
        """
        device, dtype = cache.device, query.dtype
        query, key, value = (part.to(device) for part in (query, key, value))
        metadata = self.builder.build(0, batch.to(device).common())
        slots = batch.slots.to(device)
        output = torch.full_like(query, torch.nan, dtype=dtype)
        if self.layer.query_quant is not None:
            query = self.layer.query_quant(query.flatten(1), self.layer._q_scale)[0].view(query.shape)

        def attend() -> None:
            self.layer.impl.do_kv_cache_update(self.layer, key, value, cache, slots)
            self.layer.impl.forward(self.layer, query, key, value, cache, metadata, output)

        attend()
        if self.replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attend()
            output.fill_(torch.nan)
            graph.replay()
        return output, metadata

"""One attention layer of vLLM, its metadata builder and its KV cache, driven without a model."""

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from support.paged import dense_attention, garbage
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import customize_attention_spec

from vllm_sparse_plugin.compaction import requests
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import Selection


@functools.cache
def _vllm_config(model: str, backend: str, settings: str, block_size: int) -> VllmConfig:
    return EngineArgs(
        model=model,
        attention_backend=backend,
        additional_config={"sparse_attention": json.loads(settings)} if backend.upper() in BACKENDS else {},
        block_size=block_size,
        enforce_eager=True,
    ).create_engine_config()


@dataclass
class Request:
    """A request whose keys and values the test knows."""

    blocks: list[int]
    """Physical blocks in order."""
    prompt_tokens: int
    keys: torch.Tensor
    """`[computed, num_kv_heads, head_size]`."""
    values: torch.Tensor
    fresh: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Queries of the latest step `[new, num_heads, head_size]`."""
    name: str = field(default_factory=map("request-{}".format, itertools.count()).__next__)


if torch.cpu._is_amx_tile_supported():
    # The kernel grants AMX state per process; vLLM asks for it in its workers.
    torch.cpu._init_amx()


class LayerHarness:
    """Runs steps of a batch through a layer exactly as vLLM's model runner does."""

    def __init__(
        self,
        model: str,
        num_heads: int = 8,
        num_kv_heads: int = 2,
        head_size: int = 64,
        block_size: int = 128,
        num_blocks: int = 40,
        settings: dict | None = None,
        backend: str = "unique",
        isa: str | None = None,
        layer_index: int = 0,
        seed: int = 0,
        **attention: object,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        config = _vllm_config(model, backend, json.dumps(settings or {}, sort_keys=True), block_size)
        config.compilation_config.static_forward_context.clear()
        config.cache_config.num_gpu_blocks = num_blocks
        self.num_heads, self.num_kv_heads, self.head_size, self.block_size = (
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
        )
        name = f"model.layers.{layer_index}.self_attn.attn"
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(config):
                self.layer = Attention(
                    num_heads,
                    head_size,
                    head_size**-0.5,
                    num_kv_heads,
                    cache_config=config.cache_config,
                    prefix=name,
                    **attention,
                )
                self.backend = self.layer.get_attn_backend()
                spec = customize_attention_spec(self.backend, self.layer.get_kv_cache_spec(config))
                # Sliding-window layers may choose smaller blocks; the tests have one size.
                self.spec = replace(spec, block_size=block_size)
                # It is its own model runner, which knows the requests of a step.
                self.requests: dict[str, Request] = {}
                self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[], num_prompt_tokens=np.zeros(0, dtype=int))
                requests.attach(self)
                self.builder = self.backend.get_builder_cls()(self.spec, [name], config, torch.device("cpu"))
        finally:
            torch.set_default_dtype(previous)
        if isa is not None:
            self.use_isa(isa)
        rows = self.spec.num_states
        # vLLM's own kernel multiplies what lies beyond the context by zero: it needs finite memory.
        self.cache = garbage(num_blocks, num_kv_heads, rows, 2 * head_size, generator=self.generator, finite=True)
        self.free = torch.randperm(num_blocks - 1, generator=self.generator).add(1).tolist()
        self.selection: Selection | None = getattr(getattr(self.builder, "sparse", None), "selector", None)

    def use_isa(self, isa: str) -> None:
        """Packs the cache for another instruction set than this machine's best."""
        self.builder.isa = self.layer.isa = self.layer.impl.isa = isa

    def request(self, prompt_tokens: int, shared: Request | None = None, shared_blocks: int = 0) -> Request:
        """A new request; its first `shared_blocks` blocks are another's, as after a prefix-cache hit."""
        hit = shared_blocks * self.block_size
        empty = torch.empty(0, self.num_kv_heads, self.head_size).bfloat16()
        if shared is None:
            return Request([], prompt_tokens, empty, empty)
        return Request(shared.blocks[:shared_blocks], prompt_tokens, shared.keys[:hit], shared.values[:hit])

    def release(self, request: Request) -> None:
        """Frees the blocks as they are: the next owner finds them dirty."""
        self.requests.pop(request.name, None)
        self.free = request.blocks + self.free
        request.blocks = []
        request.keys, request.values = request.keys[:0], request.values[:0]

    def step(self, batch: Sequence[tuple[Request, int]], data: dict[int, tuple] | None = None) -> list[torch.Tensor]:
        """Computes new tokens of each request; returns their outputs `[new, num_heads, head_size]`.

        Args:
            batch: requests and their numbers of new tokens; decodes first, as vLLM orders them.
            data: queries, keys and values by position in the batch instead of random ones.
        """
        queries, keys, values, slots, starts, lens, prefilling = [], [], [], [], [0], [], []
        for index, (request, new) in enumerate(batch):
            computed = len(request.keys)
            while len(request.blocks) * self.block_size < computed + new:
                request.blocks.append(self.free.pop(0))
            if data and index in data:
                query, key, value = data[index]
            else:
                query = torch.randn(new, self.num_heads, self.head_size, generator=self.generator).bfloat16()
                key = torch.randn(new, self.num_kv_heads, self.head_size, generator=self.generator).bfloat16()
                value = torch.randn(new, self.num_kv_heads, self.head_size, generator=self.generator).bfloat16()
            position = torch.arange(computed, computed + new)
            blocks = torch.tensor(request.blocks)
            slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
            request.keys = torch.cat([request.keys, key])
            request.values = torch.cat([request.values, value])
            request.fresh = query
            queries.append(query)
            keys.append(key)
            values.append(value)
            starts.append(starts[-1] + new)
            lens.append(computed + new)
            prefilling.append(computed < request.prompt_tokens)
        width = max(len(request.blocks) for request, _ in batch) + 1
        # Unused columns keep stale ids of other requests.
        table = torch.randint(0, len(self.cache), (len(batch), width), dtype=torch.int32, generator=self.generator)
        for index, (request, _) in enumerate(batch):
            table[index, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        self.input_batch = SimpleNamespace(
            num_reqs=len(batch),
            req_ids=[request.name for request, _ in batch],
            num_prompt_tokens=np.array([request.prompt_tokens for request, _ in batch]),
        )
        self.requests |= {request.name: request for request, _ in batch}
        start = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=start,
                query_start_loc_cpu=start,
                seq_lens=seq_lens,
                num_reqs=len(batch),
                num_actual_tokens=starts[-1],
                max_query_len=max(new for _, new in batch),
                max_seq_len=max(lens),
                block_table_tensor=table,
                slot_mapping=torch.cat(slots),
                is_prefilling=torch.tensor(prefilling),
            ),
        )
        query, key, value = torch.cat(queries), torch.cat(keys), torch.cat(values)
        output = torch.full_like(query, torch.nan)
        self.layer.impl.do_kv_cache_update(self.layer, key, value, self.cache, torch.cat(slots))
        self.layer.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        self.metadata = metadata
        return list(output.split([new for _, new in batch]))

    def dense(self, request: Request, token: int = -1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Dense attention of a token of the latest step, `[num_heads, head_size]`."""
        context = len(request.keys) - len(request.fresh) + range(len(request.fresh))[token] + 1
        window = self.layer.sliding_window
        visible = torch.ones(self.num_kv_heads, context, dtype=torch.bool)
        if window is not None:
            visible[:, : max(0, context - window)] = False
        impl = self.layer.impl
        return dense_attention(
            request.fresh[token].unflatten(0, (self.num_kv_heads, -1)),
            request.keys[:context],
            request.values[:context],
            impl.scale,
            visible,
            impl.sinks,
            impl.logits_soft_cap,
            dtype,
        )

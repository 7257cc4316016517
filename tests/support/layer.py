"""One attention layer of vLLM with its metadata builder and KV cache, without a model."""

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from support.arguments import entered
from support.bare_layer import BareLayer, LayerBatch
from support.paged import dense_attention, garbage
from support.presets import serving
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_sparse_plugin.config import ResolvedConfig, preset_names, resolve
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import Selection
from vllm_sparse_plugin.requests.rows import building

SMALL = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
"""Settings that select pages in short contexts."""


@functools.cache
def _vllm_config(model: str, backend: str, settings: str, block_size: int, kv_cache_dtype: str) -> VllmConfig:
    ours = backend.upper() in BACKENDS or backend in preset_names()
    additional = {"additional_config": {"sparse_attention": json.loads(settings)}} if ours else {}
    return EngineArgs(
        model=model,
        **serving({"attention_backend": backend, **additional}),
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        enforce_eager=True,
    ).create_engine_config()


@dataclass
class Request:
    """A request with known keys and values."""

    blocks: list[int]
    """Physical blocks in order."""
    prompt_tokens: int
    keys: torch.Tensor
    """`[computed, num_kv_heads, head_size]`."""
    values: torch.Tensor
    fresh: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Queries of the latest step `[new, num_heads, head_size]`."""
    name: str = field(default_factory=map("request-{}".format, itertools.count()).__next__)
    arguments: dict[str, object] | None = None
    """Its arguments for the plugin."""
    config: ResolvedConfig | None = None
    """The settings of its server."""

    @property
    def sampling_params(self) -> SimpleNamespace:
        """The sampling parameters in the form of a model runner."""
        return SimpleNamespace(extra_args=entered(self.arguments, self.config))


class LayerHarness:
    """Runs steps of a batch through a layer like vLLM's model runner."""

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
        device: str = "cpu",
        kv_cache_dtype: str = "auto",
        layers_in_block: int = 1,
        **attention: object,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        config = _vllm_config(model, backend, json.dumps(settings or {}, sort_keys=True), block_size, kv_cache_dtype)
        config.cache_config.num_gpu_blocks = num_blocks
        self.num_heads, self.num_kv_heads, self.head_size, self.block_size = (
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
        )
        self.config = resolve(settings, backend) if backend in preset_names() else None
        # It acts as its model runner, which knows the requests of a step.
        self.requests: dict[str, Request] = {}
        self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[], num_prompt_tokens=np.zeros(0, dtype=int))
        heads = num_heads, num_kv_heads, head_size
        with building(self):
            self.bare = BareLayer.build(config, heads, block_size, layer_index, device, **attention)
        self.layer, self.spec, self.builder = self.bare.layer, self.bare.spec, self.bare.builder
        self.backend = self.layer.get_attn_backend()
        if isa is not None:
            self.use_isa(isa)
        rows = self.spec.num_states
        # vLLM's kernel multiplies memory beyond the context by zero, so the memory must be finite.
        shape = num_blocks, layers_in_block, num_kv_heads, rows, 2 * head_size
        memory = garbage(*shape, generator=self.generator, finite=True)
        if self.spec.dtype != memory.dtype:
            memory = memory.nan_to_num().clamp(-448, 448).to(torch.float8_e4m3fn).view(self.spec.dtype)
        # If a block holds several layers, this is the last one.
        self.cache = memory.to(device)[:, -1]
        self.free = torch.randperm(num_blocks - 1, generator=self.generator).add(1).tolist()
        self.selection: Selection | None = getattr(getattr(self.builder, "sparse", None), "selector", None)

    def use_isa(self, isa: str) -> None:
        """Packs the cache for another instruction set than this machine's best."""
        self.builder.isa = self.layer.isa = self.layer.impl.isa = isa

    def request(self, prompt_tokens: int, shared: Request | None = None, shared_blocks: int = 0) -> Request:
        """A new request. Its first `shared_blocks` blocks belong to another request, as after a prefix-cache hit."""
        hit = shared_blocks * self.block_size
        empty = torch.empty(0, self.num_kv_heads, self.head_size).bfloat16()
        if shared is None:
            return Request([], prompt_tokens, empty, empty)
        return Request(shared.blocks[:shared_blocks], prompt_tokens, shared.keys[:hit], shared.values[:hit])

    def release(self, request: Request) -> None:
        """Frees the blocks without clearing them."""
        self.requests.pop(request.name, None)
        self.free = request.blocks + self.free
        request.blocks = []
        request.keys, request.values = request.keys[:0], request.values[:0]

    def fill(self, request: Request, tokens: int) -> None:
        """Writes the first tokens of a request like earlier steps, but without statistics."""
        request.blocks = [self.free.pop(0) for _ in range(-(-tokens // self.block_size))]
        shape = tokens, self.num_kv_heads, self.head_size
        request.keys, request.values = (torch.randn(shape, generator=self.generator).bfloat16() for _ in range(2))
        position, blocks = torch.arange(tokens), torch.tensor(request.blocks)
        slots = blocks[position // self.block_size] * self.block_size + position % self.block_size
        written = (part.to(self.cache.device) for part in (request.keys, request.values))
        self.layer.impl.do_kv_cache_update(self.layer, *written, self.cache, slots.to(self.cache.device))

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
        # Unused columns keep old ids of other requests.
        table = torch.randint(0, len(self.cache), (len(batch), width), dtype=torch.int32, generator=self.generator)
        for index, (request, _) in enumerate(batch):
            table[index, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        self.input_batch = SimpleNamespace(
            num_reqs=len(batch),
            req_ids=[request.name for request, _ in batch],
            num_prompt_tokens=np.array([request.prompt_tokens for request, _ in batch]),
        )
        for request, _ in batch:
            request.config = self.config
            self.requests[request.name] = request
        step = LayerBatch(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            table,
            torch.cat(slots),
            torch.tensor(prefilling),
        )
        output, self.metadata = self.bare.step(step, self.cache, torch.cat(queries), torch.cat(keys), torch.cat(values))
        return list(output.cpu().split([new for _, new in batch]))

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

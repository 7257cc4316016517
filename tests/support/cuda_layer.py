"""Metadata, requests and one step of a layer of the CUDA backend, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from support.arguments import entered
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from vllm_sparse_plugin.attention.cuda import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.policies import EveryPage
from vllm_sparse_plugin.requests.limits import StepBudgets
from vllm_sparse_plugin.requests.rows import BatchRows

HEADS, GROUP, SIZE, BLOCK = 2, 4, 64, 64
"""Groups and heads of the test model, whose kernels other tests compile."""
BUDGET = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
SCALE = 0.2


def common_metadata(query_lens: list[int], seq_lens: list[int], prefilling: list[bool]) -> CommonAttentionMetadata:
    start = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    width = -(-max(seq_lens) // BLOCK)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).view(-1, width).flip(0)
    slots = [
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - new, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(start[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        is_prefilling=torch.tensor(prefilling),
    )


def budgets_of(preset: str, *arguments: dict | None, **settings: object) -> StepBudgets:
    """The budgets of a server with requests that have these arguments."""
    config = resolve(settings if preset == "dense" else BUDGET | settings, preset)
    return StepBudgets(config, asking(*arguments, config=config), 16, torch.device("cpu"))


def plan_of(sparse: ResolvedConfig, **changes: object) -> LayerPlan:
    """The plan of a layer that attends to its whole context."""
    plan = LayerPlan(
        block_size=BLOCK,
        page_size=(sparse.selector or EveryPage()).page_size,
        dense_tokens=sparse.config.min_context_tokens - 1,
        statistics=sparse.statistics_layout(SIZE, 2),
        selector=sparse.selector,
        stop_rule=sparse.stop_rule,
    )
    return replace(plan, **changes)


def start_builder(monkeypatch, plans: dict[str, LayerPlan], compaction: object = None):
    """Makes the metadata builder of an engine whose layers, each named by a letter, have these plans.

    Layers `a` and `c` have 4 query heads, others 8.

    Returns:
        The calls of each warm-up by its name, the layers, and the other arguments of the builder.
    """
    warmed: dict[str, list[tuple]] = {"warm_up_compaction": [], "warm_up_prompts": []}

    def layer_of(heads: int, plan: LayerPlan) -> SimpleNamespace:
        impl = SimpleNamespace(bind=lambda *made: None, plan=plan)
        backend = SimpleNamespace(config=lambda: resolve(None, "dense"), statistics_layout=lambda spec: None)
        return SimpleNamespace(num_heads=heads, head_size=SIZE, num_kv_heads=HEADS, impl=impl, attn_backend=backend)

    def init(self, spec, names, vllm_config, device):
        self.vllm_config, self.device, self.block_size, self.max_cudagraph_size = vllm_config, device, BLOCK, 0

    layers = {name: layer_of(4 if name in "ac" else 8, plan) for name, plan in plans.items()}
    group = SimpleNamespace(plans=plans, counts=[], reads=None, prefill_rule=None, group_sizes=set())
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", init)
    monkeypatch.setattr(
        SparseCUDAMetadataBuilder, "_init_reorder_batch_threshold",
        lambda self, number, **_: setattr(self, "reorder_batch_threshold", number),
    )  # fmt: skip
    monkeypatch.setattr(builder_module, "get_layers_from_vllm_config", lambda *_: layers)
    monkeypatch.setattr(builder_module, "StepLog", mock.Mock())
    monkeypatch.setattr(builder_module, "plan_compaction", lambda *_: compaction)
    monkeypatch.setattr(builder_module, "plan_layers", lambda *_: group)
    for name, calls in warmed.items():
        monkeypatch.setattr(builder_module, name, lambda *given, calls=calls: calls.append(given))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000), scheduler_config=SimpleNamespace(max_num_seqs=16)
    )
    others = object(), config, torch.device("cpu")
    SparseCUDAMetadataBuilder(others[0], list(layers), *others[1:])
    return warmed, layers, others


SCALES = SimpleNamespace(
    _q_scale=torch.ones(1), _k_scale=torch.ones(1), _v_scale=torch.ones(1), layer_name="layer", num_heads=HEADS * GROUP,
    head_size=SIZE,
)  # fmt: skip


def run(layer, builder, common, drafts=False, then=None):
    """One step on a filled cache: output, and the step's metadata.

    `then` takes the query, the new keys and values, the cache and the metadata.
    """
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    blocks = int(common.block_table_tensor.max()) + 1
    in_blocks = layer.plan.statistics is not None and not layer.plan.offloads
    rows = BLOCK + (layer.plan.statistics.rows(BLOCK) if in_blocks else 0)
    cache = torch.full((blocks, HEADS, rows, 2 * SIZE), torch.nan, dtype=torch.bfloat16)
    for request, length in enumerate(common.seq_lens.tolist()):
        position = torch.arange(length)
        slots = common.block_table_tensor[request, position // BLOCK].long() * BLOCK + position % BLOCK
        layer.do_kv_cache_update(SCALES, random(length, HEADS, SIZE), random(length, HEADS, SIZE), cache, slots)
    tokens = common.num_actual_tokens
    new = random(tokens, HEADS, SIZE), random(tokens, HEADS, SIZE)
    layer.do_kv_cache_update(SCALES, *new, cache, common.slot_mapping)
    metadata = builder.build_for_drafting(common, 0) if drafts else builder.build(0, common)
    output = torch.full((tokens, HEADS * GROUP, SIZE), torch.nan, dtype=torch.bfloat16)
    query = random(tokens, HEADS * GROUP, SIZE)
    layer.forward(SCALES, query, *new, cache, metadata, output)
    if then is not None:
        then(query, new, cache, metadata)
    whole = torch.full_like(output, torch.nan)
    FlashAttentionImpl.forward(layer, SCALES, query, *new, cache[:, :, :BLOCK], metadata, whole)
    return output.float(), whole.float(), metadata


KINDS = (None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_budget_tokens": 24}, {"other": 1})


def asking(*arguments: dict | None, config: ResolvedConfig | None = None) -> BatchRows:
    """The rows of vLLM's first model runner, with these arguments of requests to a server with these settings."""
    config = config or resolve(BUDGET, "unique")
    names = [f"request {index}" for index in range(len(arguments))]
    states = [
        SimpleNamespace(sampling_params=SimpleNamespace(extra_args=entered(extra, config, on_gpu=True)))
        for extra in arguments
    ]
    batch = SimpleNamespace(num_reqs=len(names), req_ids=[*names, None])
    rows = BatchRows(runner := Runner(requests=dict(zip(names, states, strict=True)), input_batch=batch))
    rows.runner = runner
    return rows


class Runner(SimpleNamespace):
    """A runner that supports weak references, also as keys."""

    __hash__ = object.__hash__

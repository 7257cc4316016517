"""Records what Triton would compile for an engine on a GPU: at its start, and for its prompts. It needs no GPU.

The argument is a JSON object: `compaction`, a list of the settings of compactions with the number of a layer of 32, and
`prefill`, a list of presets with settings. The output is one line of JSON, an object with a list of the same cases for
each: by whether the cache has 8 bits, the launches of the start, and those of prompts.
"""

import json
import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import triton
from sparse_kernels.batch import Prompts
from sparse_kernels.block_prefill import COUNTERS
from sparse_kernels.block_prefill import api as reading
from sparse_kernels.block_prefill.triton import choose, rows, score, summaries
from sparse_kernels.block_prefill.triton import prefill as blocks
from sparse_kernels.compaction import api as choosing
from sparse_kernels.compaction import triton as compaction
from sparse_kernels.page_statistics import api as writing
from sparse_kernels.page_statistics import triton as write
from sparse_kernels.token_prefill import api as voting
from sparse_kernels.token_prefill import triton as tokens
from sparse_kernels.token_prefill.triton import listed, sums
from triton.backends.compiler import GPUTarget
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl, start_up
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.attention.prefill import PrefillPlan, plan_rounds, round_bounds
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.requests.rows import BatchRows

HEADS, GROUP, SIZE, LONGEST, PROMPTS = 4, 2, 64, 6000, 7
CPU = torch.device("cpu")
KERNELS: list[tuple[ModuleType, tuple[str, ...]]] = [
    (compaction, ("_rank_tokens", "_list_tokens", "_copy_out")),
    (sums, ("_probe_sums", "_join_sums", "_column_sums")),
    (write, ("_write_cache",)),
    (listed, ("_attend_listed",)),
    (summaries, ("_summarise",)),
    (score, ("_block_logits", "_measure")),
    (choose, ("_choose",)),
    (rows, ("_group_queries", "_ungroup_with_sinks")),
]
Launch = tuple[str, ...]
compiled: set[Launch] = set()
"""The kernels that have been launched, each with everything by which Triton compiles it."""


class Driver:
    """A GPU as Triton's compiler sees it."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return CPU


class Launched:
    """Stands for a kernel, and records its launches."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.name, self.bind = name, getattr(module, name).device_caches[0][-1]
        setattr(module, name, self)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **options) -> None:
        compiled.add((self.name, *map(str, self.bind(*arguments, **options)[1:])))


class Runner(SimpleNamespace):
    """A runner that supports weak references, also as keys."""

    __hash__ = object.__hash__


def launch_on_this_machine() -> None:
    """Has tensors of the CPU launch the kernels of a GPU."""
    triton.runtime.driver.set_active(Driver())
    for module, names in KERNELS:
        for name in names:
            Launched(module, name)
    choosing.reference, writing.reference = compaction, write
    voting.reference = SimpleNamespace(
        column_sums=lambda batch, cache, softmax, rows, by_head: sums.attention_sums(batch, cache, softmax, rows),
        token_prefill=lambda *given: tokens.token_prefill(*given, attend=None, scratch=None),
    )
    reading.reference = SimpleNamespace(
        prefill_blocks=lambda batch, cache, softmax, rule, tiles, *given: blocks.prefill_blocks(
            batch, cache, softmax, rule, tiles, lambda of, *_: torch.zeros(GROUP, len(of.queries)), *given
        )
    )
    choosing._QUERIES_AT_ONCE["cpu"] = choosing._QUERIES_AT_ONCE["cuda"]


def recorded() -> list[Launch]:
    """What has been launched since the last call."""
    found = sorted(compiled)
    compiled.clear()
    return found


def make_layer(config: ResolvedConfig, eight_bits: bool, sinks: bool = False) -> tuple[SimpleNamespace, int]:
    """A layer of the backend, and the rows of a block of its cache."""
    block = 256 if eight_bits else 64
    layout = config.statistics_layout(SIZE, 1 if eight_bits else 2)
    impl = object.__new__(SparseCUDAImpl)
    impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv = HEADS * GROUP, HEADS, GROUP
    impl.head_size, impl.scale, impl.logits_soft_cap = SIZE, 0.1, 0.0
    impl.sinks = torch.zeros(HEADS * GROUP) if sinks else None
    prefill = None
    if config.prefill is not None:
        prefill = PrefillPlan(config.prefill.rule(), torch.zeros(HEADS, COUNTERS, dtype=torch.int64))
    page_size = 16 if config.selector is None else config.selector.page_size
    impl.bind(LayerPlan(block, page_size, -1, statistics=layout, selector=config.selector, prefill=prefill))
    scale = torch.ones(1)
    layer = SimpleNamespace(
        _q_scale=scale, _k_scale=scale, _v_scale=scale, layer_name="layer", num_heads=HEADS * GROUP, head_size=SIZE,
        num_kv_heads=HEADS, query_quant=object() if eight_bits else None, impl=impl,
    )  # fmt: skip
    return layer, block + (0 if layout is None else layout.rows(block))


def make_spec(rows_of_block: int, eight_bits: bool) -> SimpleNamespace:
    return SimpleNamespace(num_states=rows_of_block, dtype=torch.uint8 if eight_bits else torch.bfloat16)


MODEL = SimpleNamespace(dtype=torch.bfloat16, max_model_len=LONGEST)


def make_table(block: int) -> torch.Tensor:
    """A table with rows that are not aligned."""
    width = LONGEST // block + 2
    return torch.randint(7, (PROMPTS, width + width % 2 + 1), dtype=torch.int32)


def make_query(num_tokens: int, eight_bits: bool) -> torch.Tensor:
    """Queries as a model projects them, beside keys and values."""
    query = torch.empty(num_tokens, (GROUP + 2) * HEADS, SIZE, dtype=torch.bfloat16)[:, : GROUP * HEADS]
    return query.to(torch.float8_e4m3fn) if eight_bits else query


def steps(draw: random.Random, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompts in chunks as they come: the chunks of each step, and the contexts after it."""
    done = np.zeros(PROMPTS, dtype=np.int32)
    while (done < lengths).any():
        chunks = np.minimum([draw.choice((1, 33, 100, 700, 2048, 8191)) for _ in range(PROMPTS)], lengths - done)
        chunks = np.maximum(chunks, 1)
        done += chunks
        yield chunks, done.copy()


def draw_lengths(draw: random.Random) -> list[int]:
    return [draw.choice((draw.randrange(200, 3000), draw.randrange(3000, LONGEST))) for _ in range(PROMPTS)]


def of_compaction(settings: dict, share: int, eight_bits: bool) -> tuple[list[Launch], list[Launch]]:
    """Launches of the start, and of prompts, with a compaction."""
    config = resolve({"compaction": settings, "min_context_tokens": 0}, "unique")
    layer, rows_of_block = make_layer(config, eight_bits)
    impl = layer.impl
    block = impl.plan.block_size
    lengths = np.zeros(PROMPTS, dtype=np.int32)
    names = {slot: f"request {slot}" for slot in range(PROMPTS)}
    states = SimpleNamespace(
        index_to_req_id=names,
        req_id_to_index={name: slot for slot, name in names.items()},
        prompt_len=SimpleNamespace(np=lengths),
    )
    runner = Runner(req_states=states)
    section = config.compaction
    assert section is not None
    retention = section.retention().of_layers(32)[share]
    rows = BatchRows(runner)
    step = StepCompaction(retention, section.rule(), {"layer": layer}, block, PROMPTS, rows, CPU)
    spec = make_spec(rows_of_block, eight_bits)
    recorded()
    start_up.warm_up_compaction(layer, spec, MODEL, step, CPU)
    assert impl.bound_cache is None
    warm = recorded()
    draw = random.Random(0)
    cache = torch.zeros(7, HEADS, rows_of_block, 2 * SIZE, dtype=spec.dtype)
    table = make_table(block)
    for _ in range(2):
        lengths[:] = draw_lengths(draw)
        step._requests.clear()
        for chunks, done in steps(draw, lengths):
            starts = torch.tensor([0, *chunks]).cumsum(0, dtype=torch.int32)
            num_tokens, ends = int(starts[-1]), torch.from_numpy(done)
            step.condense(
                CommonAttentionMetadata(
                    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=ends, seq_lens_cpu_upper_bound=ends,
                    num_reqs=PROMPTS, num_actual_tokens=num_tokens, max_query_len=int(chunks.max()),
                    max_seq_len=int(done.max()), block_table_tensor=table,
                    slot_mapping=torch.zeros(num_tokens).long(), req_idx=np.arange(PROMPTS),
                )
            )  # fmt: skip
            impl.run_step(layer, make_query(num_tokens, eight_bits), cache, step.observed, lambda: None)
    return warm, recorded()


def of_prefill(preset: str, settings: dict, eight_bits: bool) -> tuple[list[Launch], list[Launch]]:
    """Launches of the start, and of prompts, with a sparse prefill."""
    config = resolve(settings, preset)
    layer, rows_of_block = make_layer(config, eight_bits, sinks=preset in ("zipvl", "unique"))
    impl, spec = layer.impl, make_spec(rows_of_block, eight_bits)
    recorded()
    start_up.warm_up_prompts(layer, spec, MODEL, CPU)
    assert impl.bound_cache is None
    assert not impl.plan.prefill.counters.any()
    warm = recorded()
    draw, table = random.Random(0), make_table(impl.plan.block_size)
    impl.bind_cache(torch.zeros(7, HEADS, rows_of_block, 2 * SIZE, dtype=spec.dtype))
    for chunks, done in steps(draw, np.array(draw_lengths(draw))):
        # Requests that decode come first.
        first = draw.randrange(PROMPTS)
        starts = torch.tensor([0, *chunks[first:]]).cumsum(0, dtype=torch.int32)
        query_lens, longest_of_each = tuple(chunks[first:].tolist()), tuple(done[first:].tolist())
        prompts = Prompts(starts, table[first:], torch.from_numpy(done)[first:], query_lens, longest_of_each)
        rule = impl.plan.prefill.rule
        bounds = round_bounds(prompts, rule, {GROUP}, prompts.num_tokens, LONGEST)
        rounds = plan_rounds(prompts, rule, {GROUP}, bounds)
        query = make_query(first + int(starts[-1]), eight_bits)
        output = torch.empty(query.shape, dtype=torch.bfloat16)
        impl.attend_rounds(layer, query[first:], rounds, output[first:])
    return warm, recorded()


if __name__ == "__main__":
    launch_on_this_machine()
    given = json.loads(sys.argv[1])
    print(
        json.dumps(
            {
                "compaction": [[of_compaction(*case, bits) for bits in (False, True)] for case in given["compaction"]],
                "prefill": [[of_prefill(*case, bits) for bits in (False, True)] for case in given["prefill"]],
            }
        )
    )

"""An engine on a GPU compiles the kernels of compaction at start, and none for a prompt.

The test compares the specialisations of Triton's launches, so it needs no GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CODE = """
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())

from sparse_kernels.compaction import api as choosing, triton as compaction
from sparse_kernels.page_statistics import api as writing, triton as write
from sparse_kernels.token_prefill import api as voting
from sparse_kernels.token_prefill.triton import sums as prefill
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl
from vllm_sparse_plugin.attention.cuda.start_up import warm_up_compaction
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.requests.rows import BatchRows
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import resolve

HEADS, GROUP, SIZE, LONGEST, PROMPTS = 4, 2, 64, 6000, 7
choosing.reference, writing.reference = compaction, write
voting.reference = SimpleNamespace(
    column_sums=lambda batch, cache, softmax, rows, by_head: prefill.attention_sums(batch, cache, softmax, rows)
)
choosing._QUERIES_AT_ONCE["cpu"] = choosing._QUERIES_AT_ONCE["cuda"]
compiled = set()


class Runner(SimpleNamespace):
    pass


class Launched:
    def __init__(self, module, name):
        self.name, self.bind = name, getattr(module, name).device_caches[0][-1]
        setattr(module, name, self)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **options):
        compiled.add((self.name, *map(str, self.bind(*arguments, **options)[1:])))


for module, names in (
    (compaction, ("_rank_tokens", "_list_tokens", "_copy_out")),
    (prefill, ("_probe_sums", "_join_sums", "_column_sums")),
    (write, ("_write_cache",)),
):
    for name in names:
        Launched(module, name)


def launches(settings, share, eight_bits):
    # What kernels of the warm-up, and of prompts, are compiled by.
    config = resolve({"compaction": settings, "min_context_tokens": 0}, "unique")
    layout = config.statistics_layout(SIZE, 1 if eight_bits else 2)
    BLOCK = 256 if eight_bits else 64
    impl = object.__new__(SparseCUDAImpl)
    impl.num_kv_heads, impl.head_size, impl.scale, impl.logits_soft_cap, impl.sinks = HEADS, SIZE, 0.1, 0.0, None
    impl.bind(LayerPlan(BLOCK, config.selector.page_size, -1, statistics=layout, selector=config.selector))
    scale = torch.ones(1)
    layer = SimpleNamespace(
        _q_scale=scale, _k_scale=scale, _v_scale=scale, layer_name="layer", num_heads=HEADS * GROUP, head_size=SIZE,
        query_quant=object() if eight_bits else None, impl=impl,
    )
    lengths = np.zeros(PROMPTS, dtype=np.int32)
    names = {slot: f"request {slot}" for slot in range(PROMPTS)}
    states = SimpleNamespace(
        index_to_req_id=names, req_id_to_index={name: slot for slot, name in names.items()},
        prompt_len=SimpleNamespace(np=lengths),
    )
    runner = Runner(req_states=states)
    section = config.compaction
    retention = section.retention().of_layers(32)[share]
    step = StepCompaction(
        retention, section.rule(), {"layer": layer}, BLOCK, PROMPTS, BatchRows(runner), torch.device("cpu")
    )
    stored = torch.uint8 if eight_bits else torch.bfloat16
    compiled.clear()
    rows = BLOCK + layout.rows(BLOCK)
    layer.impl = impl
    warm_up_compaction(
        layer, SimpleNamespace(num_states=rows, dtype=stored),
        SimpleNamespace(dtype=torch.bfloat16, max_model_len=LONGEST), step, torch.device("cpu"),
    )
    assert impl.bound_cache is None
    warm = set(compiled)
    compiled.clear()
    # Prompts of all lengths, in rows of a table that is not aligned, in chunks as they come.
    draw = random.Random(0)
    cache = torch.zeros(7, HEADS, rows, 2 * SIZE, dtype=stored)
    width = LONGEST // BLOCK + 2
    table = torch.randint(7, (PROMPTS, width + width % 2 + 1), dtype=torch.int32)
    for _ in range(2):
        lengths[:] = [draw.choice((draw.randrange(200, 3000), draw.randrange(3000, LONGEST))) for _ in range(PROMPTS)]
        step._requests.clear()
        done = np.zeros(PROMPTS, dtype=np.int32)
        while (done < lengths).any():
            chunks = np.minimum([draw.choice((1, 33, 100, 700, 2048, 8191)) for _ in range(PROMPTS)], lengths - done)
            chunks = np.maximum(chunks, 1)
            done += chunks
            starts = torch.tensor([0, *chunks]).cumsum(0, dtype=torch.int32)
            tokens, ends = int(starts[-1]), torch.from_numpy(done.copy())
            step.condense(
                CommonAttentionMetadata(
                    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=ends, seq_lens_cpu_upper_bound=ends,
                    num_reqs=PROMPTS, num_actual_tokens=tokens, max_query_len=int(chunks.max()),
                    max_seq_len=int(done.max()), block_table_tensor=table, slot_mapping=torch.zeros(tokens).long(),
                    req_idx=np.arange(PROMPTS),
                )
            )
            projected = torch.empty(tokens, (GROUP + 2) * HEADS, SIZE, dtype=torch.bfloat16)
            query = projected[:, : GROUP * HEADS]
            if eight_bits:
                query = query.to(torch.float8_e4m3fn)
            impl.run_step(layer, query, cache, step.observed, lambda: None)
    return sorted(warm), sorted(compiled)


cases = json.loads(sys.argv[1])
print(json.dumps([[launches(*case, eight_bits) for eight_bits in (False, True)] for case in cases]))
"""
CASES = {
    "snapkv": ({"method": "snapkv"}, 0),
    "a small snapkv": ({"method": "snapkv", "budget_tokens": 256, "min_context_tokens": 0}, 0),
    "a share of snapkv": ({"method": "snapkv", "budget_ratio": 0.2, "window_tokens": 48}, 0),
    "pyramidkv, first layers": ({"method": "pyramidkv"}, 0),
    "pyramidkv, last layers": ({"method": "pyramidkv"}, 31),
    "h2o": ({"method": "h2o"}, 0),
    "zipvl": ({"method": "zipvl", "budget_ratio": 0.5}, 0),
}
"""Settings of every method with kernels, and a layer out of 32."""


@pytest.fixture(scope="module")
def launches() -> dict[str, list]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [sys.executable, "-c", CODE, json.dumps(list(CASES.values()))]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_prompt_is_compacted_by_kernels_that_are_compiled_at_the_start(launches, case: str, eight_bits: bool) -> None:
    warm, launched = ({tuple(launch) for launch in found} for found in launches[case][eight_bits])
    assert len({name for name, *_ in launched}) == 7
    assert launched <= warm

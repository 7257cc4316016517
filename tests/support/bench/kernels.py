"""A small geometry, a timer without a GPU, and kernels that the tests of the kernel benchmark run."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sparse_kernels.batch import QueryTokens
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import select_pages
from sparse_kernels.sparse_attention import attend_pages

from bench.kernels import runner
from bench.kernels.cases import DecodeCase, Geometry
from bench.kernels.providers import Op, Provider
from bench.kernels.workload import Workload

SMALL = Geometry(num_kv_heads=2, head_size=32, k=8, dense_tokens=512)
CPU = torch.device("cpu")


class FakeTimer:
    """Call n takes 10 * n microseconds: 10, 20, 30, ..."""

    def record(self, call: Callable[[], Any]) -> Any:
        call()
        return SimpleNamespace(replay=call)

    def measure(self, recordings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {"cold": {"median_us": 10.0 * age}, "warm": {"median_us": 5.0 * age}}
            for age, name in enumerate(recordings, start=1)
        }


def run(ops, plan, workload, seconds_left=lambda: 1.0):
    emitted: list[dict[str, Any]] = []
    rows = runner.Runner(ops, workload, FakeTimer(), emitted.append, seconds_left).run(plan)
    assert emitted == rows
    return rows


def provider(name, prepare, check=lambda inputs, calls: [call() for call in calls.values()], load=lambda: None):
    return Provider(name, load, lambda loaded, inputs: prepare(inputs), check)


def scoring(inputs):
    return lambda: score(inputs)


def op_of(*providers):
    return {"score": Op(Workload.decode_inputs, providers)}


PLAN = [("score", DecodeCase(1, 512, 2))]


def score(inputs):
    return score_pages(inputs.grouped_query, inputs.statistics, inputs.block_table, inputs.num_pages, 0.75)


def decode(inputs, drop=0):
    pages = select_pages(score(inputs), inputs.num_pages, 8, 1, 1)
    pages[..., 3 : 3 + drop] = -1
    return attend(inputs, pages)


def attend(inputs, pages):
    table, lens = inputs.block_table.long(), inputs.seq_lens.long()
    return attend_pages(QueryTokens(inputs.grouped_query, table, lens), inputs.cache, pages.long(), inputs.softmax)


def loads(each):
    try:
        each.load()
    except (ImportError, AttributeError):
        return False
    return True


def flash_attention(
    q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, return_softmax_lse=False, **others
):
    """The parts of vLLM's FlashAttention that prefill uses."""
    assert (others["causal"], others["fa_version"], return_softmax_lse) == (True, 3, False)
    for index, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[index : index + 2].tolist()
        if first == last:
            continue
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].float() for x in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * softmax_scale
        position = torch.arange(length - (last - first), length)
        logits = logits.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), values).to(out.dtype)
    return out

"""Which batches of lossless mode vLLM's own manager of CUDA graphs has a graph of whole decode steps for."""

from types import SimpleNamespace

import pytest
import torch
from support.engines import MODEL
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

import vllm_sparse_plugin
from vllm_sparse_plugin import compat
from vllm_sparse_plugin.config import DraftRule, resolve
from vllm_sparse_plugin.lossless.graphs import plan_decode_graphs
from vllm_sparse_plugin.lossless.notices import lossless_notices

NINES = [9, 72, 144, 153, 216, 576]
WIDTHS = {"fixed": (1, 9), "adaptive": (1, 3, 5, 7, 9)}
PIECES = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture
def manage(monkeypatch):
    """Makes vLLM's manager for some requests, sizes and lengths, as in an engine on a GPU after its capture."""
    vllm_sparse_plugin.register()
    monkeypatch.setattr(
        cudagraph_utils.CudaGraphManager, "_init_candidates", cudagraph_utils.CudaGraphManager._init_candidates
    )
    compat.hook_decode_graphs(plan_decode_graphs)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    monkeypatch.setattr(type(current_platform), "is_device_capability_family", lambda self, capability: False)

    def configure(requests, sizes=None, length="fixed", mode=PIECES, **arguments):
        lossless = {"draft_tokens": 8, "draft_length": length}
        config = EngineArgs(
            model=str(MODEL),
            attention_backend="unique",
            additional_config={"sparse_attention": {"lossless": lossless}},
            max_model_len=4096,
            max_num_seqs=requests,
            max_num_batched_tokens=8192,
        ).create_engine_config()
        compilation = config.compilation_config
        compilation.cudagraph_mode, compilation.cudagraph_capture_sizes = mode, sizes and list(sizes)
        compilation.max_cudagraph_capture_size = None
        monkeypatch.setattr(type(compilation), "post_init_cudagraph_sizes", lambda self: None)
        config._set_cudagraph_sizes()
        for name, value in arguments.items():
            setattr(config.speculative_config, name, value)
        return config

    def manager(config, width=9, mode=PIECES):
        made = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, width)
        made._graphs_captured = True
        return made

    return SimpleNamespace(configure=configure, manager=manager)


def outside(manager, width, requests):
    """Numbers of requests whose steps of a width run outside of full graphs."""
    found = []
    for count in range(1, requests + 1):
        graph = manager.dispatch(count, count * width, width, 0)
        if graph.cg_mode != CUDAGraphMode.FULL:
            found.append(count)
        else:
            assert graph.uniform_token_count == width
            assert graph.num_reqs >= count
    return found


@pytest.mark.parametrize("length", WIDTHS)
@pytest.mark.parametrize("sizes", [None, NINES], ids=["default sizes", "multiples of nine"])
@pytest.mark.parametrize("requests", [1, 10, 64])
def test_every_batch_has_a_graph_for_each_length_of_a_draft(manage, requests, sizes, length):
    config = manage.configure(requests, sizes, length)
    manager = manage.manager(config)
    largest = config.compilation_config.max_cudagraph_capture_size
    for width in WIDTHS[length]:
        beyond = list(range(largest // width + 1, requests + 1))
        assert outside(manager, width, requests) == beyond
    # Drafting steps have one token of each request.
    assert outside(manage.manager(config, 1, CUDAGraphMode.FULL_DECODE_ONLY), 1, requests) == []


def test_graphs_are_captured_once_and_the_largest_first(manage):
    manager = manage.manager(manage.configure(24, NINES, "adaptive"))
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    assert {
        graph for found in manager._candidates.values() for graph in found if graph.cg_mode == CUDAGraphMode.FULL
    } == set(graphs)
    assert len(set(graphs)) == len(graphs)
    tokens = [graph.num_tokens for graph in graphs]
    assert tokens == sorted(tokens, reverse=True)
    # vLLM compiles for the sizes that it knows.
    pieces = manager._capture_descs[CUDAGraphMode.PIECEWISE]
    assert [graph.num_tokens for graph in pieces] == sorted(NINES, reverse=True)
    assert manager.dispatch(3, 20, None, 0).num_tokens == 72
    assert manager.decode_query_len == 9
    assert manager.compilation_config.cudagraph_capture_sizes == NINES


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_without_graphs_of_whole_steps_nothing_changes(manage, mode):
    manager = manage.manager(manage.configure(24, NINES, mode=mode), mode=mode)
    assert CUDAGraphMode.FULL not in manager._capture_descs
    assert outside(manager, 9, 24) == list(range(1, 25))


def test_other_drafts_are_planned_by_vllm(manage):
    manager = manage.manager(manage.configure(24, NINES, model="another"))
    assert outside(manager, 1, 24) == list(range(1, 25))


def test_what_has_no_graph_is_said_in_one_sentence(manage):
    settings = resolve({"lossless": {}}, "unique")
    assert lossless_notices(manage.configure(56), settings) == []
    assert lossless_notices(manage.configure(64, mode=CUDAGraphMode.PIECEWISE), settings) == []
    assert lossless_notices(manage.configure(64), resolve(None, "unique")) == []
    assert lossless_notices(manage.configure(64), settings) == [
        "max_cudagraph_capture_size: 512 holds 56 requests of 8 drafts each; larger batches (max_num_seqs is 64) "
        "verify that many drafts outside of CUDA graphs; set it to 576, or lower max_num_seqs or draft_tokens."
    ]


def test_a_step_has_no_drafts_or_the_longest_or_a_quarter_of_them_if_lengths_adapt():
    assert DraftRule(8, 0).step_lengths == (0, 8)
    assert [DraftRule(drafts, 0, is_adaptive=True).step_lengths for drafts in (8, 5, 1)] == [
        (0, 2, 4, 6, 8), (0, 1, 2, 3, 5), (0, 1)
    ]  # fmt: skip

"""The drafter of vLLM's second model runner, on a CPU: the model is a formula, blocks have no attention."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu import model_runner, spec_decode

import vllm_sparse_plugin
from vllm_sparse_plugin.compat import GPU_DRAFTING_METHOD
from vllm_sparse_plugin.lossless.speculator import SparseSpeculator

VOCABULARY, BLOCK, LONGEST, SHORTEST, DRAFTS = 64, 16, 256, 100, 3
SETTINGS = {"lossless": {"draft_tokens": DRAFTS, "min_context_tokens": SHORTEST}, "min_context_tokens": 0}
PAD = -1


class Formula(torch.nn.Module):
    """A model whose next token depends on the newest token and its position; it records its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def forward(self, input_ids, positions, inputs_embeds, intermediate_tensors):
        context = get_forward_context()
        (slots,), (metadata,) = context.slot_mapping.values(), context.attn_metadata.values()
        assert torch.equal(slots, metadata.slot_mapping)
        self.steps.append(
            SimpleNamespace(
                tokens=input_ids.tolist(),
                positions=positions.tolist(),
                slots=slots.tolist(),
                seq_lens=metadata.seq_lens.tolist(),
                starts=metadata.query_start_loc.tolist(),
                table=metadata.block_table_tensor.data_ptr(),
                index=metadata.index,
            )
        )
        return successor(input_ids.long(), positions)

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden, VOCABULARY).float()


def successor(token, position):
    return (token * 7 + position) % VOCABULARY


class Group:
    """A group of layers that uses vLLM's metadata of the batch."""

    layer_names = ("layer",)

    def __init__(self):
        self.built = []

    def build_metadata_for_drafting(self, common, draft_index):
        self.built.append(common)
        common.index = draft_index
        common.of_reading_steps = lambda: SimpleNamespace(**vars(common) | {"index": 1})
        return common


class Graphs:
    """Replays captured graphs, for even numbers of requests."""

    def __init__(self):
        self.captured, self.replayed = {}, []

    def capture(self, create_forward_fn, progress_bar_desc):
        for rows in (2, 4):
            desc = SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_tokens=rows)
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            self.captured[rows] = create_forward_fn(desc, warmup=False)

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras):
        rows = next((rows for rows in self.captured if rows >= num_reqs), None)
        mode = CUDAGraphMode.NONE if rows is None else CUDAGraphMode.FULL
        return SimpleNamespace(cg_mode=mode, num_tokens=rows or num_reqs)

    def run_fullgraph(self, desc):
        self.replayed.append(desc.num_tokens)
        self.captured[desc.num_tokens](CUDAGraphMode.NONE)


@pytest.fixture(scope="module")
def config():
    """The configuration of an engine on a CPU, with the name of drafting on a GPU."""
    from support.engines import MODEL

    vllm_sparse_plugin.register()
    config = EngineArgs(
        model=str(MODEL),
        attention_backend="unique",
        additional_config={"sparse_attention": SETTINGS | {"selection": {"budget_tokens": 64}}},
        max_model_len=LONGEST,
        max_num_seqs=4,
        enforce_eager=True,
    ).create_engine_config()
    config.speculative_config.method = GPU_DRAFTING_METHOD
    return config


@pytest.fixture
def speculator(config):
    made = spec_decode.init_speculator(config, torch.device("cpu"), None)
    assert isinstance(made, SparseSpeculator)
    made.load_model(Formula())
    width = LONGEST // BLOCK
    tables = SimpleNamespace(
        block_sizes=[BLOCK],
        input_block_tables=[torch.randperm(4 * width, generator=torch.Generator().manual_seed(3)).int().view(4, width)],
        get_dummy_block_tables=lambda rows: None,
    )
    kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
    made.set_attn(None, kv_cache_config, tables, None, [[Group()]])
    made.graphs = Graphs()
    return made


def propose(speculator, seq_lens, sampled, rejected, prefill_lens=None, **changes):
    """Drafts after a step of requests with numbers 3, 2, 1, 0 and newest tokens 13, 12, 11, 10."""
    count = len(seq_lens)
    batch = SimpleNamespace(
        num_reqs=count,
        idx_mapping=torch.arange(3, 3 - count, -1),
        seq_lens=torch.tensor(seq_lens + [0] * (4 - count), dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        prefill_len_np=np.array(prefill_lens or [1] * count, dtype=np.int32),
    )
    nothing = (None, None, None, None)
    numbers = (torch.tensor(each, dtype=torch.int32) for each in (sampled, rejected))
    newest = torch.arange(10, 14).view(4, 1)
    return speculator.propose(batch, *nothing, *numbers, newest, None, None, None, **changes)


def chain(token, position):
    drafts = []
    for _ in range(DRAFTS):
        token, position = int(successor(torch.tensor(token), position)), position + 1
        drafts.append(token)
    return drafts


@pytest.mark.parametrize("captured", [False, True])
def test_each_step_continues_the_one_before_it_behind_what_was_accepted(speculator, captured):
    if captured:
        speculator.capture()
        speculator.model.steps.clear()
    table = speculator.block_tables.input_block_tables[0]
    drafts = propose(speculator, [150, 121, 130], [4, 1, 3], [0, 3, 1])
    assert drafts.tolist() == [chain(13, 150), chain(12, 118), chain(11, 129)]
    steps = speculator.model.steps
    assert speculator.graphs.replayed == ([4] * DRAFTS if captured else [])
    assert len(steps) == DRAFTS
    padding = [0] if captured else []
    for index, step in enumerate(steps):
        positions = [150 + index, 118 + index, 129 + index]
        assert step.positions == positions + padding
        assert step.seq_lens == [position + 1 for position in positions] + padding
        slots = [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in enumerate(positions)]
        assert step.slots == slots + [PAD] * len(padding)
        assert step.starts == [0, 1, 2, 3] + [3] * len(padding)
        assert step.table == table.data_ptr()


def test_prompts_that_go_on_and_short_contexts_write_nothing_and_repeat_their_newest_token(speculator):
    # The second request is in the middle of its prompt, the third one is short, the last one has just become long.
    drafts = propose(speculator, [150, 140, SHORTEST - 2, SHORTEST - 1], [1, 0, 1, 1], [0] * 4, [1, 200, 1, 1])
    assert drafts.tolist() == [chain(13, 150), [12] * DRAFTS, [11] * DRAFTS, chain(10, SHORTEST - 1)]
    for index, step in enumerate(speculator.model.steps):
        assert [slot == PAD for slot in step.slots] == [False, True, True, False]
        assert step.seq_lens == [151 + index, 1, 1, SHORTEST + index]
    (group,) = speculator.target_attn_groups[0]
    assert [common.seq_lens_cpu_upper_bound.tolist() for common in group.built] == [[151, 0, 0, SHORTEST]]


def test_nothing_runs_for_steps_that_draft_for_nobody(speculator):
    assert propose(speculator, [50, 150], [1, 0], [0, 0], [1, 200]).tolist() == [[13] * DRAFTS, [12] * DRAFTS]
    propose(speculator, [150], [1], [0], dummy_run=True)
    assert speculator.model.steps == []


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("score_every", "indices"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (8, [0, 1, 1])])
def test_some_steps_read_the_pages_of_an_earlier_one(speculator, captured, score_every, indices):
    speculator.rule = replace(speculator.rule, score_every=score_every)
    speculator.reading_graphs = Graphs() if score_every > 1 else None
    if captured:
        speculator.capture()
        speculator.model.steps.clear()
    assert propose(speculator, [150, 121], [1, 1], [0, 0]).tolist() == [chain(13, 150), chain(12, 121)]
    assert [step.index for step in speculator.model.steps] == indices
    # Building counts the keys that the steps read, so it happens once for a draft, and twice for each captured graph.
    (group,) = speculator.target_attn_groups[0]
    assert len(group.built) == 1 + (captured * 4 * (2 if score_every > 1 else 1))
    if captured:
        assert len(speculator.graphs.replayed) == indices.count(0)
        assert score_every == 1 or len(speculator.reading_graphs.replayed) == indices.count(1)


@pytest.mark.parametrize("length", [0, 2])
def test_a_step_may_draft_less(speculator, length):
    drafts = propose(speculator, [150, 121], [1, 1], [0, 0], num_speculative_tokens=length)
    assert drafts[:, :length].tolist() == [chain(13, 150)[:length], chain(12, 121)[:length]]
    assert len(speculator.model.steps) == length


def test_nothing_is_written_behind_the_longest_context(speculator):
    drafts = propose(speculator, [LONGEST - 2, LONGEST - 1, LONGEST], [1, 1, 1], [0, 0, 0])
    first, second = chain(13, LONGEST - 2)[:2], chain(12, LONGEST - 1)[0]
    assert drafts.tolist() == [[*first, first[1]], [second] * DRAFTS, [11] * DRAFTS]
    steps = speculator.model.steps
    assert all(max(step.positions) < LONGEST for step in steps)
    assert [[slot != PAD for slot in step.slots] for step in steps] == [
        [True, True, False], [True, False, False], [False, False, False]
    ]  # fmt: skip


def test_nothing_is_written_behind_a_longest_context_that_vllm_has_lowered(config, monkeypatch):
    """With `max_model_len` auto, vLLM lowers it to what fits in memory, after it has made the drafter."""
    made, width = spec_decode.init_speculator(config, torch.device("cpu"), None), SHORTEST // BLOCK
    monkeypatch.setattr(config.model_config, "max_model_len", width * BLOCK)
    made.load_model(Formula())
    tables = SimpleNamespace(block_sizes=[BLOCK], input_block_tables=[torch.arange(4 * width).int().view(4, width)])
    kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
    made.set_attn(None, kv_cache_config, tables, None, [[Group()]])
    made.rule = replace(made.rule, min_context_tokens=1)
    made.graphs = Graphs()
    propose(made, [width * BLOCK - 1, 50], [1, 1], [0, 0])
    assert [[slot != PAD for slot in step.slots] for step in made.model.steps] == [[True, True]] + [[False, True]] * 2


def test_another_draft_is_left_to_vllm(config, monkeypatch):
    assert model_runner.init_speculator is spec_decode.init_speculator
    monkeypatch.setattr(config.speculative_config, "model", "another")
    monkeypatch.setattr(config.speculative_config, "method", "suffix")
    with pytest.raises(NotImplementedError):
        spec_decode.init_speculator(config, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("mode", "captures"),
    [("FULL_AND_PIECEWISE", True), ("FULL_DECODE_ONLY", True), ("PIECEWISE", False), ("NONE", False)],
)
def test_steps_are_captured_where_vllm_captures_whole_decode_steps(speculator, monkeypatch, mode, captures):
    made = []
    monkeypatch.setattr(
        "vllm_sparse_plugin.lossless.speculator.CudaGraphManager",
        lambda config, device, mode, decode_query_len: made.append((mode, decode_query_len)),
    )
    expected = (CUDAGraphMode.FULL_DECODE_ONLY if captures else CUDAGraphMode.NONE, 1)
    speculator.init_cudagraph_manager(CUDAGraphMode[mode])
    assert made == [expected]
    speculator.rule = replace(speculator.rule, score_every=2)
    speculator.init_cudagraph_manager(CUDAGraphMode[mode])
    assert made == [expected] * 3

"""The last token of a prompt in a step of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.cuda_layer import Runner, common_metadata
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.requests.rows import BatchRows


@pytest.mark.parametrize("kind", [DefaultModelState, MambaHybridModelState])
def test_the_last_token_of_a_prompt_attends_densely_in_every_model(builder, kind):
    """State-space layers run it like a decoded token, and vLLM's metadata says the same to all layers."""
    common = common_metadata([1, 1], [400, 300], [False, True])
    state = object.__new__(kind)
    state.supports_mm_inputs, state._align_mode, state.recoverssm = False, False, None
    state.vllm_config = SimpleNamespace(num_speculative_tokens=0)
    runner = Runner(req_states=SimpleNamespace(), model_state=state)
    compat.runners._note_requests(runner)
    builder.rows = BatchRows(runner)
    group = SimpleNamespace(
        get_metadata_builder=lambda number: SimpleNamespace(supports_update_block_table=False),
        kv_cache_spec=None, layer_names=["layer"], build_metadata=lambda common, number: builder.build(0, common),
    )  # fmt: skip
    batch = SimpleNamespace(
        num_reqs=2, num_tokens=2, query_start_loc=common.query_start_loc, max_query_len=None, prompt_lens=None,
        query_start_loc_np=common.query_start_loc_cpu.numpy(), num_scheduled_tokens=np.ones(2, dtype=np.int32),
        seq_lens=common.seq_lens, seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound, positions=None,
        dcp_local_seq_lens=None, dcp_local_seq_lens_cpu_upper_bound=None, pcp=None, fast_prefill=None,
        idx_mapping_np=np.arange(2), is_prefilling_np=np.array([False, True]),
        prefill_runs_as_decode_np=np.array([False, True]),
    )  # fmt: skip
    metadata = state.prepare_attn(
        batch, CUDAGraphMode.NONE, (common.block_table_tensor,), common.slot_mapping[None], [[group]],
        SimpleNamespace(kv_cache_groups=[None]),
    )  # fmt: skip
    (decode,) = metadata["layer"].decode
    assert decode.dense.tolist() == [False, True]
    # A step of drafts is not one of these requests.
    (decode,) = builder.build(0, common.replace(is_prefilling=None)).decode
    assert not decode.dense.any()

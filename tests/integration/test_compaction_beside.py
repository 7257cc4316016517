"""Compaction beside layers that keep their own blocks: tiny models with random weights in whole engines.

Nightly tests compact every family.
"""

import pytest
from support.admission import engine_config, refusal
from support.engines import in_fresh_process
from support.families.beside import run_beside_layers_of_other_kinds
from support.families.table import FAMILIES

from vllm_sparse_plugin.admission import admit
from vllm_sparse_plugin.names import BACKENDS

H2O = {"method": "h2o", "every": 32}
SNAPKV = {"method": "snapkv", "window_tokens": 16, "every": 32}


@pytest.mark.parametrize(
    ("family", "compaction", "blocks", "length"),
    [
        ("gpt_oss", SNAPKV, 60, 500),
        ("lfm2", H2O, 60, 500),
    ],
)
def test_layers_of_the_whole_context_give_blocks_back_and_others_keep_theirs(family, compaction, blocks, length):
    found = in_fresh_process(run_beside_layers_of_other_kinds, family, compaction, blocks, length)
    assert found["short"] == found["dense"]
    assert len({token for answer in found["dense"] for token in answer}) > 5
    # Each request is asked twice.
    assert found["vllm_sparse_blocks_freed_sum"] >= 4 * len(found["crowd"])
    assert found["vllm:kv_cache_usage_perc"] == 0
    # Reading a freed block would change answers.
    assert found["again"] == found["crowd"]


def test_a_hybrid_compacts_without_prefix_caching(tmp_path):
    FAMILIES["lfm2"].write(tmp_path)
    given = {
        "attention_backend": "snapkv", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512,
    }  # fmt: skip
    admit(engine_config(str(tmp_path), **given, enable_prefix_caching=False), BACKENDS)
    expected = (
        "sparse_attention.compaction: got Lfm2ForCausalLM with state-space layers and prefix caching, allowed with "
        "attention backend snapkv: null"
    )
    assert refusal(str(tmp_path), **given, enable_prefix_caching=True) == expected

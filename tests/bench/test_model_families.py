"""Special models in whole engines: learned sinks, chunks, shared caches, state-space layers.

`python -m bench.robustness families` runs every family with every preset. Each of these families can fail differently.
"""

import pytest
from support.bench.families import run_family, start_with_layers_of_their_own
from support.engines import collect_in_fresh_process, in_fresh_process

from bench.robustness.families.cells import OK

WAYS = "unique", "every page"
COMPACTING = "snapkv", "evicting h2o", "evicting r_kv"


def test_a_family_keeps_the_tokens_that_the_reference_keeps():
    cells = collect_in_fresh_process(run_family, "gpt_oss", COMPACTING)
    assert [(cell.way, cell.status, cell.reason) for cell in cells] == [(way, OK, "") for way in COMPACTING]


@pytest.mark.parametrize("family", ["gpt_oss", "llama_4", "gemma_3n", "qwen3_next"])
def test_a_family_decodes_what_dense_attention_and_the_reference_do(family):
    cells = collect_in_fresh_process(run_family, family, WAYS)
    assert [(cell.way, cell.status, cell.reason) for cell in cells] == [(way, OK, "") for way in WAYS]
    assert all(cell.judged_steps for cell in cells)


@pytest.mark.parametrize(("layers", "is_refused"), [(8, True), (7, False)])
def test_a_model_none_of_whose_layers_takes_the_backend_is_refused(layers, is_refused):
    sentence = (
        "model: got LlamaForCausalLM with attention backends of its own, allowed with attention backend unique: models "
        "that take the chosen backend in place of CPU_ATTN"
    )
    said = in_fresh_process(start_with_layers_of_their_own, "unique", layers)
    assert said == (sentence if is_refused else None)

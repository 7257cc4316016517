"""Models that vLLM builds in other ways, in whole engines: learned sinks, chunks, shared caches, state-space layers.

`python -m bench.robustness families` runs every family with every preset. These families break in ways of their own.
"""

import pytest
from support.engines import collect_in_fresh_process

from bench.robustness.families.cells import OK
from bench.robustness.families.engines import run_family

WAYS = "unique", "every page"


@pytest.mark.parametrize("family", ["gpt_oss", "llama_4", "gemma_3n", "qwen3_next"])
def test_a_family_decodes_what_dense_attention_and_the_reference_do(family):
    cells = collect_in_fresh_process(run_family, family, WAYS)
    assert [(cell.way, cell.status, cell.reason) for cell in cells] == [(way, OK, "") for way in WAYS]
    assert all(cell.judged_steps for cell in cells)

"""Whole engines with drafts, whose layers attend densely and sparsely.

`python -m bench.families run` tries EAGLE, EAGLE-3 and MTP on a CPU in the same way.
"""

import pytest
import torch
from support.engines import in_fresh_process
from support.families import try_speculation

from bench.families.table import DRAFT_MODEL, EAGLE, EAGLE_3, MTP

HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="draft models are refused on a GPU")
def test_a_draft_model_changes_no_answer_and_keeps_its_statistics():
    assert in_fresh_process(try_speculation, DRAFT_MODEL) == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [EAGLE, EAGLE_3, MTP])
def test_a_draft_changes_no_answer_and_keeps_its_statistics_on_a_gpu(name):
    assert in_fresh_process(try_speculation, name) == []

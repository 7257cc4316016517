"""Whole engines with drafts whose layers attend densely or sparsely.

`python -m bench.robustness families` tries EAGLE, EAGLE-3 and MTP on a CPU in the same way.
"""

import pytest
import torch
from support.engines import collect_in_fresh_process

from bench.robustness.families.speculation import faults_of
from bench.robustness.families.table import DRAFT_MODEL, EAGLE, EAGLE_3, MTP

HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="draft models are refused on a GPU")
def test_a_draft_model_changes_no_answer_and_keeps_its_statistics():
    assert collect_in_fresh_process(faults_of, DRAFT_MODEL) == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [EAGLE, EAGLE_3, MTP])
def test_a_draft_changes_no_answer_and_keeps_its_statistics_on_a_gpu(name):
    assert collect_in_fresh_process(faults_of, name) == []

"""Every family of models in every way of attention, and the features that change which steps write statistics."""

import pytest
import torch
from support.engines import collect_in_fresh_process, in_fresh_process
from support.families.engines import outcomes
from support.families.features import SPECULATORS, draft_faults, prefix_faults
from support.families.multimodal import MODALITIES, modality_faults
from support.families.table import FAMILIES, WAYS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("key", FAMILIES)
def test_a_family_attends_as_dense_attention_and_the_reference_do(key):
    if key in ("jamba", "minimax_m2") and not HAS_GPU:
        pytest.skip("vLLM's CPU build cannot run it")
    expected = {way: "refused" if way in FAMILIES[key].refuses else "ok" for way in WAYS}
    assert in_fresh_process(outcomes, key, list(WAYS)) == expected


@pytest.mark.parametrize("key", ["qwen3_next", "lfm2"])
def test_a_cached_prefix_of_a_hybrid_includes_its_state_and_statistics(key):
    assert collect_in_fresh_process(prefix_faults, key) == []


@pytest.mark.parametrize("method", SPECULATORS)
def test_drafts_change_no_answer_and_keep_their_statistics(method):
    if method == "draft_model" and HAS_GPU:
        pytest.skip("the plugin refuses draft models on a GPU")
    assert collect_in_fresh_process(draft_faults, method) == []


@pytest.mark.parametrize("modality", MODALITIES)
def test_images_and_sounds_are_attended_as_dense_attention_and_the_reference_do(modality):
    assert collect_in_fresh_process(modality_faults, modality) == []

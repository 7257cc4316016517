"""Special models in whole engines: learned sinks, chunks, shared caches, state-space layers, images.

Nightly tests run every family with every way of attention. Each of these can fail differently.
"""

import pytest
import torch
from support.engines import collect_in_fresh_process, in_fresh_process
from support.families.beside import start_with_layers_of_their_own
from support.families.engines import outcomes
from support.families.features import draft_faults
from support.families.multimodal import modality_faults


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("gpt_oss", ["unique", "every page", "snapkv", "evicting h2o", "sinkrouter"]),
        ("llama_4", ["unique", "every page"]),
        ("gemma_3n", ["unique", "every page"]),
        ("qwen3_next", ["unique", "every page"]),
    ],
)
def test_a_family_decodes_what_dense_attention_and_the_reference_do(family, ways):
    # With as many heads to a KV head as the test model has, it runs the compiled kernels of other engines.
    expected = {way: "refused" if way == "sinkrouter" else "ok" for way in ways}
    assert in_fresh_process(outcomes, family, ways, 8) == expected


def test_images_are_attended_as_dense_attention_and_the_reference_do():
    assert collect_in_fresh_process(modality_faults, "image") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="draft models are refused on a GPU")
def test_a_draft_model_changes_no_answer_and_keeps_its_statistics():
    assert collect_in_fresh_process(draft_faults, "draft_model") == []


@pytest.mark.parametrize(("layers", "is_refused"), [(8, True), (7, False)])
def test_a_model_none_of_whose_layers_takes_the_backend_is_refused(layers, is_refused):
    sentence = (
        "model: got LlamaForCausalLM with attention backends of its own, allowed with attention backend unique: models "
        "that take the chosen backend in place of CPU_ATTN"
    )
    said = in_fresh_process(start_with_layers_of_their_own, "unique", layers)
    assert said == (sentence if is_refused else None)

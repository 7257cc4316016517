"""A whole engine with an image model, and images as messages of OpenAI's chat API.

`python -m bench.robustness families` tests an audio model in the same way.
"""

import torch
from support.engines import collect_in_fresh_process

from bench.robustness.families.multimodal import faults_of, kept_by_modality
from bench.robustness.families.table import IMAGES


def test_images_are_attended_as_dense_attention_and_the_reference_do():
    assert collect_in_fresh_process(faults_of, IMAGES) == []


def test_important_tokens_are_counted_by_modality_over_the_layers_of_a_prompt(tmp_path):
    (tmp_path / "config.json").write_text('{"image_token_id": 7}', encoding="utf-8")
    layers = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 0, 1]]).bool()
    other_prompt = torch.ones(4, dtype=torch.bool)
    shares = kept_by_modality([layers[0], other_prompt, layers[1]], [3, 7, 7, 4, 5], tmp_path)
    assert {name: round(share, 4) for name, share in shares.items()} == {"text": 0.6667, "other": 0.25}

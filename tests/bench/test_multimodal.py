"""A whole engine with an image model, and images as messages of OpenAI's chat API.

`python -m bench.robustness families` tests an audio model in the same way.
"""

from support.engines import collect_in_fresh_process

from bench.robustness.families.multimodal import faults_of
from bench.robustness.families.table import IMAGES


def test_images_are_attended_as_dense_attention_and_the_reference_do():
    assert collect_in_fresh_process(faults_of, IMAGES) == []

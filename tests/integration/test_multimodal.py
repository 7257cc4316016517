"""A whole engine with a model that sees, and images as messages of OpenAI's chat API.

`python -m bench.families run` tries a model that hears in the same way.
"""

from support.engines import in_fresh_process
from support.families import try_modality

from bench.families.table import IMAGES


def test_images_are_attended_as_dense_attention_and_the_reference_do():
    assert in_fresh_process(try_modality, IMAGES) == []

"""Families with the heads of the test model, and models whose layers bring another attention backend."""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from support.engines import MODEL

from bench.robustness.families.cells import Cell
from bench.robustness.families.engines import FamilyRun
from bench.robustness.families.table import FAMILIES


def run_family(key: str, ways: Sequence[str]) -> Iterator[Cell]:
    """Serves a family with several ways of attention. With as many heads to a KV head as the test model has, it runs
    the compiled kernels of other engines."""
    family = FAMILIES[key]
    family = replace(family, changes={**family.changes, "num_attention_heads": 8})
    with tempfile.TemporaryDirectory() as folder:
        yield from map(FamilyRun(family, Path(folder)).cell, ways)


def start_with_layers_of_their_own(backend: str, layers: int) -> str | None:
    """Starts an engine whose first layers use vLLM's attention backend; returns the error of the start."""
    from vllm import LLM
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from vllm_sparse_plugin.errors import ConfigurationError

    make = Attention.__init__

    @functools.wraps(make)
    def make_layer(layer: Attention, *args: object, prefix: str = "", **kwargs: object) -> None:
        own = {"attn_backend": CPUAttentionBackend} if extract_layer_index(prefix) < layers else {}
        make(layer, *args, prefix=prefix, **kwargs | own)

    Attention.__init__ = make_layer
    try:
        LLM(str(MODEL), attention_backend=backend, max_model_len=2048, enforce_eager=True, load_format="dummy")
    except ConfigurationError as error:
        return str(error)
    return None

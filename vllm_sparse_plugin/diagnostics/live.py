"""Quality of the selections of a running server: which steps are measured, and how it reaches `/metrics`.

Workers are other processes than the one that serves `/metrics`. They add to files in the format of prometheus_client's
multi-process mode; the process that the user starts makes the folder before it starts them, and reads it when it is
asked. Where vLLM itself runs in that mode (several API servers), its folder is used and it reads the files.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from sparse_kernels.paging import PagedTensor

from vllm_sparse_plugin.diagnostics.quality import measure

_VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_OUR_FOLDER = "SPARSE_PLUGIN_METRICS_DIR"
_METRICS = {
    "mass": ("vllm_sparse_attention_mass", "Share of the attention weight that is on tokens read, by sampled steps."),
    "recall": ("vllm_sparse_page_recall", "Share of the pages of largest attention weight that are read."),
    "cosine": ("vllm_sparse_output_cosine", "Cosine of the outputs of sparse and dense attention."),
}
"""By field of `Quality`: a summary's name and help; its `_sum` over its `_count` is the mean."""

_TRAVERSAL = (
    ("vllm_sparse_traversal_blocks", "Blocks that attention visited before it stopped, by token.", 1, 0),
    ("vllm_sparse_kv_read_share", "Tokens read (sum) of those in the context (count), where it may stop.", 2, 3),
)
"""A summary's name and help, and the columns of `count_visits` that are its `_sum` and its `_count`."""
_SECONDS_BETWEEN_WRITES = 1.0


def expose() -> None:
    """Makes what workers add visible at `/metrics`; to be called before they start. Idempotent."""
    if _VLLM_FOLDER in os.environ or _OUR_FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="vllm-sparse-metrics-")
    os.environ[_OUR_FOLDER] = folder
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    MultiProcessCollector(REGISTRY, path=folder)


@functools.cache
def _file(folder: str) -> MmapedDict:
    # The first part of the name is the type of the metrics in it.
    return MmapedDict(str(Path(folder) / f"summary_vllm-sparse-{os.getpid()}.db"))


class StepSampler:
    """Says which query token of which decode step is measured."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0

    def pick(self, num_tokens: int) -> int | None:
        """Index of the query token of this step to be measured, if one is: another in every sampled step.

        Args:
            num_tokens: query tokens that decode in this step.
        """
        if not self.every or not num_tokens:
            return None
        self.steps += 1
        sample, rest = divmod(self.steps, self.every)
        return None if rest else sample % num_tokens


class LayerQuality:
    """Measures sampled tokens of one attention layer."""

    def __init__(self, layer: int, first_kv_head: int) -> None:
        self.layer = layer
        self.first_kv_head = first_kv_head

    def record(
        self,
        query: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        block_table: torch.Tensor,
        context_len: int,
        pages: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        softcap: float,
    ) -> None:
        """Compares one token's selection with dense attention and adds the result to the metrics.

        Args:
            query: `[1, num_kv_heads, group_size, head_size]`.
            keys: the cached keys.
            values: the cached values.
            block_table: `[max_blocks]` integer, physical blocks of the token's request.
            context_len: tokens it attends to, itself included.
            pages: `[1, num_kv_heads, k]` integer, the complete pages it reads, -1 for none.
            scale: factor of the logits.
            sinks: learned sink logits `[num_query_heads]`.
            softcap: as in `measure`.
        """
        page = torch.arange(-(-context_len // keys.page_size), device=query.device)
        blocks = block_table.long()[page // keys.pages_per_block]
        heads = torch.arange(keys.num_kv_heads, device=query.device)[:, None]
        own_keys, own_values = (
            paged.gather(blocks, heads, page % keys.pages_per_block).flatten(1, 2)[:, :context_len]
            for paged in (keys, values)
        )
        context_lens = torch.tensor([context_len], device=query.device)
        quality = measure(query, own_keys, own_values, context_lens, pages, keys.page_size, scale, sinks, softcap)
        for field, (metric, text) in _METRICS.items():
            for head, value in enumerate(getattr(quality, field)[0].tolist()):
                labels = [str(self.layer), str(self.first_kv_head + head)]
                for suffix, amount in (("_sum", value), ("_count", 1.0)):
                    file, key = _entry(metric, suffix, labels, text)
                    file.write_value(key, file.read_value(key)[0] + amount, time.time())


class Traversal:
    """How far attention that may stop reads: counters on the device, and their way to the metrics.

    Kernels add to the counters. Now and then they are copied to the host, behind the step that is running and without
    waiting for it; what has arrived is written when a later step begins.
    """

    def __init__(self, layers: list[int], first_kv_head: int, num_kv_heads: int, device: torch.device) -> None:
        self.layers = layers
        self.first_kv_head = first_kv_head
        shape = len(layers), num_kv_heads, 4
        self.counters = torch.zeros(shape, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.copied: torch.cuda.Event | None = None
        self.written = -math.inf

    def publish(self) -> None:
        """To be called when a step begins."""
        now = time.monotonic()
        if self.copied is not None:
            if self.copied.query():
                self.copied = None
                self._write()
        elif now - self.written >= _SECONDS_BETWEEN_WRITES:
            self.written = now
            self.arrived.copy_(self.counters, non_blocking=True)
            if self.counters.is_cuda:
                self.copied = torch.cuda.Event()
                self.copied.record()
            else:
                self._write()

    def _write(self) -> None:
        for layer, heads in zip(self.layers, self.arrived.tolist(), strict=True):
            for head, counted in enumerate(heads):
                labels = [str(layer), str(self.first_kv_head + head)]
                for metric, text, *columns in _TRAVERSAL:
                    for suffix, column in zip(("_sum", "_count"), columns, strict=True):
                        file, key = _entry(metric, suffix, labels, text)
                        file.write_value(key, float(counted[column]), time.time())


def _entry(metric: str, suffix: str, labels: list[str], text: str) -> tuple[MmapedDict, str]:
    """The file of this process and the key of a number in it."""
    folder = os.environ.get(_VLLM_FOLDER) or os.environ[_OUR_FOLDER]
    return _file(folder), mmap_key(metric, metric + suffix, ["layer", "kv_head"], labels, text)

"""Counts what a running server reads, keeps, skips and drafts, and publishes the counts at `/metrics`.

Workers and the server of `/metrics` are different processes. Workers add to files in the format of prometheus_client's
multi-process mode. The process that the user starts creates their folder first, and reads the files on each request. If
vLLM itself runs in that mode (several API servers), its folder is used, and vLLM reads the files.

Metrics never stop an engine. Numbers that cannot be published are dropped, and the log reports this once. Examples are
a full disk, and a worker on another machine than the folder.
"""

from __future__ import annotations

import atexit
import errno
import functools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from sparse_kernels.block_prefill import SHARE_UNITS

from vllm_sparse_plugin.config.account import LayerKeys, Lengths
from vllm_sparse_plugin.metrics.dropping import dropping

_VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_OUR_FOLDER = "SPARSE_PLUGIN_METRICS_DIR"
_COPIED_TO_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Comma-separated names that vLLM copies to Ray's workers, which do not inherit the environment."""
_READ_SHARE = "vllm_sparse_kv_read_share"
_READ_SHARE_TEXT = (
    "Keys read (sum) of the positions in the context (count) by decoding tokens that leave something out or, with "
    "compaction, by all of them, of groups that are not skipped; layer and kv_head are empty where all read alike."
)


class Ratio(NamedTuple):
    """A summary whose sum and count are columns of the kernels' counts, see `DeviceCounts`."""

    name: str
    text: str
    sum_column: int
    count_column: int
    units: float = 1
    """The unit of the sum is 1 / `units`."""


HOST_READS = Ratio(
    "vllm_sparse_host_reads", "Pages that decode steps read from host memory (sum) of those read (count).", 1, 0
)
SKIPPED = (Ratio("vllm_sparse_group_skipped", "Share of the KV groups of decoding tokens that routing skips.", 0, 1),)
"""Summaries of `GroupRouting.counts`."""
READS = (
    Ratio("vllm_sparse_blocks_read", "Blocks that attention read before it stopped, by token.", 1, 0),
    Ratio(_READ_SHARE, _READ_SHARE_TEXT, 2, 3),
)
"""Summaries of `stopping.count_reads`."""
_DENSITY_TEXT = (
    "Blocks read (sum) of those in the past of tiles of prompts (count) or, with zipvl, important tokens of the "
    "contexts of their chunks."
)
_PAIRS_TEXT = (
    "Pairs of a query and a key that attention of prompts with zipvl computes (sum), and those of dense attention "
    "(count)."
)
_FREED_TEXT = (
    "Blocks that running requests have given back (sum), and the block tables that have given some back (count); a "
    "request that resumes after a preemption has new tables."
)
_KEPT_TEXT = (
    "Keys that the cache keeps (sum) of the positions in the context (count) of decoding tokens, where compaction may "
    "give some back."
)
_GAIN_TEXT = (
    "How many times faster tokens come than without drafts (sum), as steps of adaptive lossless mode estimate it."
)
_MASS_TEXT = "Estimated share of the attention weight of tiles of prompts that is on the blocks they chose to read."
_DENSITY = Ratio("vllm_sparse_prefill_density", _DENSITY_TEXT, 0, 1)
BLOCK_READS = (_DENSITY, Ratio("vllm_sparse_prefill_mass", _MASS_TEXT, 2, 3, SHARE_UNITS))
"""Summaries of `PrefillPlan.counters` where tiles choose key blocks."""
TOKEN_READS = (_DENSITY, Ratio("vllm_sparse_prefill_pairs", _PAIRS_TEXT, 2, 3))
"""Summaries of `PrefillPlan.counters` where layers choose important tokens."""
COUNTED_STEPS = 16
"""Steps between two copies of the kernels' counts."""
_FIRST_BYTES = 1 << 16
"""Size of a new file, as in prometheus_client."""


_made_folder: str | None = None
"""The folder of metrics that this process created."""


def host_reads(page_bytes: int) -> tuple[Ratio, ...]:
    """Returns the summaries of `LayerPlan.host_reads`, for pages whose keys and values have `page_bytes` bytes."""
    text = "Bytes that decode steps read from host memory (sum), and the pages that they read (count)."
    return HOST_READS, Ratio("vllm_sparse_host_bytes", text, 1, 0, 1 / page_bytes)


def expose() -> None:
    """Publishes the workers' numbers at `/metrics`. Call it before workers start. Idempotent.

    A worker uses the folder of the process that started it. A program with an engine may start a server, which inherits
    the program's folder. Nothing would read that folder for the server, so the server creates another one.
    """
    is_worker = multiprocessing.parent_process() is not None
    folder = os.environ.get(_OUR_FOLDER)
    if os.environ.get(_VLLM_FOLDER) or (folder is not None and (is_worker or folder == _made_folder)):
        return
    with dropping("there are none"):
        _make_folder()


def _make_folder() -> None:
    global _made_folder
    folder = _made_folder = tempfile.mkdtemp(prefix="vllm-sparse-metrics-")
    os.environ[_OUR_FOLDER] = folder
    names = [name for name in os.environ.get(_COPIED_TO_RAY, "").split(",") if name.strip() not in ("", _OUR_FOLDER)]
    os.environ[_COPIED_TO_RAY] = ",".join([*names, _OUR_FOLDER])
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    MultiProcessCollector(REGISTRY, path=folder)


class ReservedFile(MmapedDict):
    """The file of one process. Its bytes are reserved before they are mapped.

    prometheus_client maps a sparse file. If the disk is full, a write to such a page ends the process with SIGBUS,
    which cannot be caught.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file.

        Raises:
            OSError: if the disk has no room for it.
        """
        with path.open("ab") as file:
            if not os.fstat(file.fileno()).st_size:
                try:
                    _reserve(file.fileno(), 0, _FIRST_BYTES)
                except OSError:
                    # A partial file would be taken for a complete one.
                    path.unlink()
                    raise
        super().__init__(str(path))

    def _init_value(self, key: str) -> None:
        """Makes room for a key and its value; see `MmapedDict`."""
        # The length of the key, the padded key, and two numbers.
        end = self._used + 4 + len(key.encode()) + 8 + 16
        if end > self._capacity:
            # The file doubles its size.
            _reserve(self._f.fileno(), 0, max(2 * self._capacity, end))
        super()._init_value(key)


def _reserve(file: int, begin: int, size: int) -> None:
    """Reserves bytes of a file.

    Raises:
        OSError: if the disk has no room for them.
    """
    try:
        os.posix_fallocate(file, begin, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # This file system cannot reserve bytes. Written bytes have room.
        missing = begin + size - os.fstat(file).st_size
        os.pwrite(file, bytes(max(missing, 0)), os.fstat(file).st_size)


@functools.cache
def _file(folder: str, process: int) -> ReservedFile:
    """Returns the file of a process. A forked worker inherits the file of its parent, which goes on writing it."""
    # The file name begins with the type of its metrics.
    return ReservedFile(Path(folder) / f"summary_vllm-sparse-{process}.db")


class DeviceCounts:
    """Counts of kernels for the KV heads of some layers, published without waiting for the device."""

    def __init__(
        self, layers: Sequence[tuple[int, range]], metrics: Sequence[Ratio], columns: int, device: torch.device
    ) -> None:
        """Takes index and KV heads of each layer (numbered over all workers) and the metrics of the counts."""
        self.metrics = metrics
        self.labels = [[str(layer), str(head)] for layer, heads in layers for head in heads]
        counts = torch.zeros(len(self.labels), columns, dtype=torch.int64, device=device)
        self.of_layers = counts.split([len(heads) for _, heads in layers])
        """`[num_kv_heads, columns]` int64 of each layer; kernels add to it."""
        self._counts = counts
        # While a model is built, torch's default device may be the GPU.
        self._copied = torch.zeros(counts.shape, dtype=torch.int64, device="cpu", pin_memory=counts.is_cuda)
        self._event = torch.cuda.Event() if counts.is_cuda else None
        self._known = torch.zeros(counts.shape, dtype=torch.int64, device="cpu")
        self._steps = 0
        self.positions_per_key: Callable[[], float] = lambda: 1.0
        """See `ContextReads.positions_per_key`."""
        self._per_key = 1.0
        """The positions for each key of the copied counts."""
        _COUNTING.add(self)

    def totals(self) -> dict[str, tuple[float, int]]:
        """Returns sum and count of each metric by name, over all heads, up to now. It waits for the device."""
        columns = self._counts.sum(dim=0).tolist()
        return {
            ratio.name: (columns[ratio.sum_column] / ratio.units, columns[ratio.count_column]) for ratio in self.metrics
        }

    def step(self) -> None:
        """Runs once per step: at intervals, copies the counts and adds the increase to the metrics.

        Values at `/metrics` are up to twice `COUNTED_STEPS` steps old.
        """
        self._steps += 1
        if self._steps % COUNTED_STEPS:
            return
        with dropping("what was counted is not published"):
            self._publish()

    def _publish(self) -> None:
        if self._event is None or self._event.query():
            new = self._copied - self._known
            self._known.copy_(self._copied)
            for labels, counted in zip(self.labels, new.tolist() if new.any() else (), strict=False):
                for metric, text, sum_column, count_column, units in self.metrics:
                    if counted[count_column]:
                        count = counted[count_column] * (self._per_key if metric == _READ_SHARE else 1)
                        _add(metric, text, counted[sum_column] / units, count, labels)
            self._copied.copy_(self._counts, non_blocking=True)
            # These counts are published later, when later steps have other positions.
            self._per_key = self.positions_per_key()
            if self._event is not None:
                self._event.record()


_COUNTING: WeakSet[DeviceCounts] = WeakSet()
"""All counts of this process that are in use."""


def count_totals() -> dict[str, tuple[float, int]]:
    """Returns sum and count of every metric counted by kernels of this process, by name. It waits for the device."""
    totals: dict[str, tuple[float, int]] = {}
    for counts in _COUNTING:
        for name, (amount, count) in counts.totals().items():
            amount_before, count_before = totals.get(name, (0.0, 0))
            totals[name] = amount_before + amount, count_before + count
    return totals


class BatchLengths(Protocol):
    """The parts of vLLM's `CommonAttentionMetadata` that are on the host."""

    seq_lens_cpu_upper_bound: torch.Tensor | None
    """`[num_requests]`, tokens of each request's context; with asynchronous speculation an upper bound."""
    query_start_loc_cpu: torch.Tensor
    """`[num_requests + 1]`, where each request's query tokens begin."""
    is_prefilling: torch.Tensor | None
    """`[num_requests]` bool, requests whose prompt is not finished."""


LogOfStep = Callable[[Lengths, Lengths], None]
"""Takes of every step, `[num_requests]` each, tokens read by the decoding tokens of each request, and tokens of their
contexts, those included that read everything; 0 for prompts."""


class ContextReads:
    """How much of its context a decoding token reads and the cache keeps, as far as lengths on the host say it."""

    def __init__(self, keys: LayerKeys, by_length: bool = True) -> None:
        """Takes the account of the layers, and whether lengths alone say what is read."""
        self.keys = keys
        self.by_length = by_length
        self._steps = 0
        self._kept = self._positions = 0

    def step(
        self,
        batch: BatchLengths,
        longest_query: int | None,
        budgets: Lengths | None = None,
        log: LogOfStep | None = None,
        left_out: Lengths | None = None,
    ) -> None:
        """Runs once per step: adds every `COUNTED_STEPS`-th step to the metrics.

        Args:
            batch: the step's requests as attention sees them, without what compaction has given back.
            longest_query: most query tokens of a request that decodes; None for 1.
            budgets: `[num_requests]`, pages that each request reads; None for those of the settings.
            log: what logs each request; None where nobody asks for it.
            left_out: `[num_requests]`, positions of each that `batch` leaves out; None for none.
        """
        self._steps += 1
        is_counted = self._steps % COUNTED_STEPS == 0
        seq_lens, is_prefilling = batch.seq_lens_cpu_upper_bound, batch.is_prefilling
        if seq_lens is None or (log is None and not is_counted and self.by_length):
            return
        query_lens = np.diff(batch.query_start_loc_cpu.numpy())[: len(seq_lens)]
        lens = seq_lens.numpy()[: len(query_lens)]
        decodes = (query_lens > 0) & (query_lens <= (longest_query or 1))
        if is_prefilling is not None:
            # It may omit requests that are padding.
            prompts = is_prefilling.numpy()[: len(decodes)]
            decodes[: len(prompts)] &= ~prompts
        read, read_sparsely, sparse, positions, kept = np.zeros((5, len(lens)), dtype=np.int64)
        evicts = self.keys.retention is not None
        requested = None if budgets is None else budgets[: len(lens)]
        for later_tokens in range(int(query_lens[decodes].max(initial=0))):
            counts = decodes & (query_lens > later_tokens)
            seen = np.where(counts, lens - later_tokens, 0)
            contexts = seen if left_out is None else np.where(counts, seen + left_out[: len(seen)], 0)
            # Where positions roll, attention sees the whole context, of which the cache keeps a part.
            keeps = self.keys.kept(0, contexts) if self.keys.rolls else seen
            reads = self.keys.read(contexts, keeps, requested)
            read += reads
            positions += contexts
            selects = keeps > self.keys.dense_tokens
            self._kept += int(keeps[selects].sum())
            self._positions += int(contexts[selects].sum())
            kept += keeps
            # Layers of other budgets may keep less of a request of which these keep all.
            counted = evicts | (reads < contexts)
            sparse += np.where(counted, contexts, 0)
            read_sparsely += np.where(counted, reads, 0)
        if log is not None:
            log(read, positions)
        if not is_counted:
            return
        if self.by_length and sparse.any():
            _add(_READ_SHARE, _READ_SHARE_TEXT, int(read_sparsely.sum()), int(sparse.sum()))
        if evicts and positions.any():
            _add("vllm_sparse_kept_share", _KEPT_TEXT, int(kept.sum()), int(positions.sum()))

    def positions_per_key(self) -> float:
        """Returns the positions of contexts for each key that the cache keeps of them, of the tokens since the last
        call: kernels count the keys that are kept."""
        ratio = self._positions / self._kept if self._kept else 1.0
        self._kept = self._positions = 0
        return ratio


def count_freed_blocks(freed: int, is_first: bool) -> None:
    """Adds blocks that a running request gives back to the metrics.

    Args:
        freed: how many.
        is_first: whether it gives some back for the first time.
    """
    _add("vllm_sparse_blocks_freed", _FREED_TEXT, freed, int(is_first))


def record_gain(gain: float) -> None:
    """Adds the speedup of lossless mode over decoding without drafts, as estimated by a step, to the metrics."""
    _add("vllm_sparse_lossless_gain", _GAIN_TEXT, gain, 1)


def _add(metric: str, text: str, amount: float, count: float, labels: Sequence[str] = ("", "")) -> None:
    """Adds to the sum and count of a metric in the folder. Numbers that cannot be added are dropped.

    Args:
        metric: its name.
        text: its help text.
        amount: added to the sum.
        count: added to the count.
        labels: layer and KV head; empty if the metric has no such labels.
    """
    with dropping("they are not published"):
        file = _file(os.environ.get(_VLLM_FOLDER) or os.environ[_OUR_FOLDER], os.getpid())
        sum_key, count_key = (
            mmap_key(metric, metric + suffix, ["layer", "kv_head"], list(labels), text) for suffix in ("_sum", "_count")
        )
        # This makes room for both. A sum without its count would grow into a wrong mean.
        before = {key: file.read_value(key)[0] for key in (sum_key, count_key)}
        file.write_value(sum_key, before[sum_key] + amount, time.time())
        file.write_value(count_key, before[count_key] + count, time.time())

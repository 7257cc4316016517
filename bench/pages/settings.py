"""Blocks about the configuration and its presets."""

from __future__ import annotations

import json

from sparse_kernels.page_statistics import StatisticsLayout

from bench.common.pages import Block, table, wrap
from bench.pages.quality import MIXES, mix_file
from vllm_sparse_plugin.config import ResolvedConfig, describe_fields, preset_names, resolve
from vllm_sparse_plugin.tools.eval.results import read_results

_CONTEXT = 16384
_HEAD_SIZE = 128


def configuration() -> Block:
    """Every field of the configuration."""
    entries = [
        wrap(f"- **`{name}`** ({allowed}; default `{_value(default)}`). {text}", "  ")
        for name, allowed, default, text in describe_fields()
    ]
    return Block("\n".join(entries))


def _value(default: object) -> str:
    return default if isinstance(default, str) else json.dumps(default, default=str)


def _read(resolved: ResolvedConfig, share: float) -> str:
    """What decode steps read of the cache, or of what is kept in it."""
    if resolved.lossless is not None:
        return f"all, drafts {share:.1%}"
    return "all that is kept" if share == 1 and resolved.config.compaction is not None else f"{share:.1%}"


def presets() -> Block:
    """Every preset: what a decode step reads with it, and how it answers needles."""
    rows, sources = [], []
    for preset in preset_names():
        resolved = resolve(None, preset)
        values = resolved.selection.model_dump(by_alias=True)
        by_data = resolved.routing is not None or resolved.config.stopping is not None
        share = resolved.selection.kv_read_share(_CONTEXT, _HEAD_SIZE)
        right = "-"
        if preset in MIXES:
            sources.append(mix_file(preset))
            scores = [result.score for result in read_results(sources[-1]).results.values()]
            right = f"{sum(scores):.0f}/{len(scores)}"
        rows.append(
            [
                f"`{preset}`",
                f"`{values['policy']}`",
                *(str(values.get(name, "-")) for name in ("page_size", "budget_tokens", "statistics")),
                "yes" if resolved.routing is not None else "no",
                "yes" if resolved.config.stopping is not None else "no",
                "yes" if resolved.config.prefill is not None else "no",
                "depends on the text" if by_data else _read(resolved, share),
                right,
            ]
        )
    headings = ["preset", "policy", "page", "budget", "statistics", "skips groups", "stops early", "sparse prefill"]
    measured = [f"KV read at {_CONTEXT:,} tokens", "needles right at 4,096"]
    return Block(table([*headings, *measured], rows), sources)


def statistics_memory() -> Block:
    """What page statistics take of a cache, by policy and format."""
    rows = []
    for preset, formats in (
        ("unique", ("quarters", "sketch", "int8", "fp8", "bf16")),
        ("quest", ("int8", "bf16")),
        ("infllm", ("int8", "bf16")),
    ):
        for statistics in formats:
            selection = resolve({"selection": {"statistics": statistics}}, preset).selection
            cells = []
            for itemsize in (2, 1):
                layout = selection.statistics_layout(_HEAD_SIZE, itemsize)
                assert isinstance(layout, StatisticsLayout)
                cells += [f"{layout.memory_overhead:.2%}", str(layout.unit_tokens)]
            rows.append([f"`{preset}`", f"`{statistics}`", *cells])
    headings = ["policy", "statistics", "16-bit cache: on top", "blocks of", "8-bit cache: on top", "blocks of"]
    return Block(table(headings, rows))

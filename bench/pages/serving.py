"""Blocks about the speed of engines and servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_rows, read_run

H200 = RESULTS / "h200"
FEW_CLIENTS = H200 / "serve" / "few_clients.jsonl"
MANY_CLIENTS = tuple(H200 / "serve" / f"{name}.jsonl" for name in ("flash_attn", "unique"))
ADAPTIVE = H200 / "lossless" / "adaptive.jsonl"
_REUSE = H200 / "lossless" / "score_every.jsonl"
_MAIN, _MAIN_H100 = (RESULTS / machine / "decode" / "main.jsonl" for machine in ("h200", "h100"))
"""Decode steps of FlashAttention 3 and of the default."""
_KEPT = RESULTS / "h100" / "lossless" / "smollm2.jsonl"
"""Right drafts of a real model."""
_ANCHORS = [H200 / "decode-anchors" / f"{name}.jsonl" for name in ("main", "every3_heads")]
"""Decode steps of FlashAttention 3, and of a selection that a third of the layers make."""
_DECODES = (
    ("bf16", "quarters", "flash_attn", "unique"),
    ("bf16", "int8", "flash_attn", "unique_int8"),
    ("fp8, noise", "int8", "flash_attn_fp8_cache", "unique_fp8_cache"),
    ("fp8, noise", "quarters", "flash_attn_1m", "unique_1m"),
)
"""KV cache, page statistics, and the result files of dense and sparse decode steps."""

Steps = dict[tuple[int, int], Row]
"""Measured decode steps by context and batch."""


def read_steps(path: Path, variant: str | None = None, one_token: bool = False) -> Steps:
    """The measured decode steps of a result file, or of one variant in it, by context and batch.

    With `one_token` those that decode one token all the time, which select alike; else the others.
    """
    return {
        (row["context_tokens"], row["batch"]): row
        for row in read_run(path).rows
        if row.get("ms_per_token") and variant in (None, row.get("variant"))
        if bool(row.get("one_token")) == one_token
    }


def _pair_rows(dense_path: Path, sparse_path: Path) -> list[list[str]]:
    """Rows of the steps that both files have, with the ratio of times."""
    dense = read_steps(dense_path)
    rows = []
    for (context, batch), line in read_steps(sparse_path).items():
        if (context, batch) in dense:
            before, now = dense[context, batch]["ms_per_token"], line["ms_per_token"]
            rows.append([f"{context:,}", str(batch), f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}"])
    return rows


def decode_gpu() -> Block:
    """Time per token on a GPU by context and batch, measured on one host within minutes, and with anchor layers."""
    context, batch = max(read_steps(_MAIN))
    before, now = (
        read_steps(path, variant)[context, batch]["ms_per_token"]
        for path, variant in zip(_ANCHORS, ("flash_attn", "unique"), strict=True)
    )
    text = wrap(
        f"With anchor layers {batch} requests of {context:,} tokens took {now:.2f} ms in another run, and densely "
        f"{before:.2f}.", "",
    )  # fmt: skip
    return Block(f"{_default_steps(_MAIN)}\n\n{text}", [_MAIN, *_ANCHORS])


def decode_h100() -> Block:
    """The same table on an H100, with batches that fit its memory."""
    return Block(_default_steps(_MAIN_H100), [_MAIN_H100])


def _default_steps(path: Path) -> str:
    """A table of steps of FlashAttention 3 and of the default."""
    dense, sparse = (read_steps(path, variant) for variant in ("flash_attn", "unique"))
    rows = []
    for (context, batch), row in dense.items():
        before, now = row["ms_per_token"], sparse[context, batch]["ms_per_token"]
        rows.append([f"{context:,}", str(batch), f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}x"])
    return table(["context", "requests", "FlashAttention 3", "`unique`", "ratio"], rows)


def decode_steps() -> Block:
    """Time per token on a GPU by context, requests, KV cache and page statistics."""
    lines, sources, shown = [], [], set[tuple[str, ...]]()
    for cache, record, *names in _DECODES:
        paths = [H200 / "decode" / f"{name}.jsonl" for name in names]
        sources += paths
        for context, batch, *times in _pair_rows(*paths):
            # A step that was measured after prompts is labelled.
            step = (context, batch, cache.partition(",")[0], record)
            if step not in shown:
                shown.add(step)
                lines.append([context, batch, cache, record, *times])
    headings = ["context", "requests", "KV cache", "statistics", "FlashAttention 3, ms", "`unique`, ms", "ratio"]
    return Block(table(headings, lines), sources)


def loads() -> Block:
    """Time per token of batches of unlike requests, by server. Each server was measured with its rival in one run.

    If files repeat a load, the last one counts.
    """
    lines: dict[tuple[str, ...], list[str]] = {}
    sources: dict[tuple[str, ...], Path] = {}
    for path, times in _load_files():
        for (length, load), found in times.items():
            if "unique" not in found:
                continue
            dense, sparse = found["flash_attn"], found["unique"]
            server = _machine(path), f"{length:,}", _described(load)
            sources[server] = path
            lines[server] = [*server, f"{dense:.2f}", f"{sparse:.2f}", f"{dense / sparse:.2f}"]
    headings = ["GPU", "`max_model_len`", "requests", "FlashAttention 3, ms", "`unique`, ms", "ratio"]
    return Block(table(headings, list(lines.values())), list(dict.fromkeys(sources.values())))


def loads_of_presets() -> Block:
    """Time per token of other presets as a share of dense attention's, measured on the same host."""
    runs = list(_load_files())
    found_names = (name for _, times in runs for found in times.values() for name in found)
    names = [name for name in dict.fromkeys(found_names) if name not in ("flash_attn", "unique")]
    lines, sources = [], []
    for path, times in runs:
        for (length, load), found in times.items():
            if not found.keys().isdisjoint(names):
                dense = found["flash_attn"]
                shares = [f"{found[name] / dense:.2f}" if name in found else "" for name in names]
                lines.append([_machine(path), f"{length:,}", _described(load), f"{dense:.2f}", *shares])
                sources.append(path)
    headings = ["GPU", "`max_model_len`", "requests", "FlashAttention 3, ms", *(f"`{name}`" for name in names)]
    return Block(table(headings, lines), list(dict.fromkeys(sources)))


def _load_files() -> Iterator[tuple[Path, dict[tuple[int, str], dict[str, float]]]]:
    """Yields each file of `loads` with the times of variants by `max_model_len` and load."""
    for path in sorted(RESULTS.glob("*/loads/*.jsonl")):
        times: dict[tuple[int, str], dict[str, float]] = {}
        for row in read_run(path).rows:
            if row.get("ms_per_token"):
                times.setdefault((row["max_model_len"], row["load"]), {})[row["variant"]] = row["ms_per_token"]
        yield path, times


def _machine(path: Path) -> str:
    return path.parts[-3].upper()


def _described(load: str) -> str:
    """Describes the requests of a load: `8x32K+1x128K:dense` is `8 of 32K, 1 of 128K (dense)`."""
    parts = []
    for part in load.split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        parts.append(f"{count} of {context}{f' ({argument})' if argument else ''}")
    return ", ".join(parts)


def decode_routed() -> Block:
    """Time per token with and without routing, of dense attention and of `unique`."""
    pairs = (
        ("FlashAttention 3", "`sinkrouter`", "flash_attn", "sinkrouter"),
        ("FlashAttention 3", "`sinkrouter`", "flash_attn_512k", "sinkrouter_512k"),
        ("`unique`", "`unique`, routed", "unique", "unique_routed"),
    )
    rows, sources = [], []
    for before, after, *names in pairs:
        paths = [H200 / "routing" / f"{name}.jsonl" for name in names]
        for context, batch, without, routed, ratio in _pair_rows(*paths):
            rows.append([context, batch, f"{before}: {without}", f"{after}: {routed}", ratio])
        sources += paths
    return Block(table(["context", "requests", "not routed, ms", "routed, ms", "ratio"], rows), sources)


def decode_stopping() -> Block:
    """Time per token of attention that stops at a depth or never, compared with dense attention."""
    paths = {name: H200 / "stopping" / f"{name}.jsonl" for name in ("flash_attn", "stops", "vain")}
    steps = {name: read_steps(path) for name, path in paths.items()}
    rule = next(iter(steps["stops"].values()))["additional_config"]["sparse_attention"]["termination"]
    intervals, block_tokens, parts = rule["patience"] + 1, rule["block_tokens"], []
    for context, batch in steps["stops"]:
        if context > intervals * block_tokens:
            dense, stops, vain = (found[context, batch]["ms_per_token"] for found in steps.values())
            parts.append(
                f"{batch} requests of {context:,} tokens take {dense:.2f} ms per token with FlashAttention 3. With "
                f"`art` they take {stops:.2f} ms if it stops after {intervals} intervals of {block_tokens} tokens, "
                f"and {vain:.2f} ms if it never stops."
            )
    return Block(wrap(" ".join(parts), ""), list(paths.values()))


def lossless_adaptive() -> Block:
    """Time per token of lossless mode with adaptive drafts, by context, batch and set acceptance, compared with dense
    decoding; and the cost of the mode without drafts."""
    found = _drafted(ADAPTIVE)
    parts = [_lossless_table([each for each in found if each[0]["tokens_per_step"] > 1])]
    if undrafted := [(row, row["ms_per_token"] / dense) for row, dense in found if row["tokens_per_step"] == 1]:
        times = [ratio for _, ratio in undrafted]
        reach = f"{min(times):.2f} to {max(times):.2f}"
        longest = max(row["context_tokens"] for row, _ in undrafted)
        parts.append(f"Without drafts (contexts of {longest:,} tokens) a token takes {reach} times as long as densely.")
    return Block("\n\n".join(parts), [ADAPTIVE])


def lossless_reuse() -> Block:
    """Lossless mode whose drafts choose pages in every step, or seldom, by set acceptance."""
    lines: dict[float, list[str]] = {}
    settings = []
    for row, before in _drafted(_REUSE):
        ratio = before / row["ms_per_token"]
        lines.setdefault(row["acceptance"], []).append(f"{row['ms_per_token']:.2f} ({ratio:.2f}x)")
        settings.append(row["score_every"])
    heads = [f"`score_every` {steps}, ms per token" for steps in dict.fromkeys(settings)]
    return Block(table(["acceptance", *heads], [[str(rate), *cells] for rate, cells in lines.items()]), [_REUSE])


def lossless_kept() -> Block:
    """The share of right drafts of a real model, if drafts choose pages in every step or seldom."""
    rows = [row for row in read_run(_KEPT).rows if row["drafted"]]
    steps = list(dict.fromkeys(row["score_every"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(row["kind"], []).append(f"{row['accepted'] / row['drafted']:.3f}")
    heads = ["SmolLM2-135M, 8K", *(f"`score_every` {each}" for each in steps)]
    return Block(table(heads, [[kind, *cells] for kind, cells in lines.items()]), [_KEPT])


def _drafted(path: Path) -> list[tuple[Row, float]]:
    """The rows of lossless mode in order, each with the time per token of dense decoding in milliseconds."""
    rows = [row for row in read_run(path).rows if "ms_per_token" in row]
    dense = {(row["context_tokens"], row["batch"]): row["ms_per_token"] for row in rows if row["draft_tokens"] is None}
    drafted = [row for row in rows if row["draft_tokens"] is not None]
    drafted.sort(key=lambda row: (row["context_tokens"], row["batch"], row["acceptance"] or 0))
    return [(row, dense[row["context_tokens"], row["batch"]]) for row in drafted]


def _lossless_table(found: list[tuple[Row, float]]) -> str:
    lines = []
    for row, before in found:
        cells = f"{row['tokens_per_step']:.2f}", f"{before:.2f}", f"{row['ms_per_token']:.2f}"
        loads = f"{row['context_tokens']:,}", str(row["batch"]), str(row["acceptance"])
        lines.append([*loads, *cells, f"{before / row['ms_per_token']:.2f}"])
    headings = ["context", "requests", "acceptance", "tokens per step", "FlashAttention 3, ms per token"]
    return table([*headings, "lossless, ms per token", "ratio"], lines)


def serve_prefill() -> Block:
    """A server with long prompts, with dense and with sparse prefill."""
    path = H200 / "serve" / "unique_prefill.jsonl"
    by_load: dict[tuple[int, int], dict[str, Row]] = {}
    for line in read_run(path).rows:
        by_load.setdefault((line["input_tokens"], line["concurrency"]), {})[line["variant"]] = line
    rows = []
    for (tokens, concurrency), here in by_load.items():
        dense, sparse = (here[name] for name in ("flash_attn", "unique_prefill"))
        cells = (f"{dense[key] / 1e3:,.2f} / {sparse[key] / 1e3:,.2f}" for key in ("ttft_ms_median", "tpot_ms_median"))
        speeds = [line["output_tokens_per_second"] for line in (dense, sparse)]
        gain = f"{speeds[0]:.1f} / {speeds[1]:.1f} ({speeds[1] / speeds[0]:.2f}x)"
        rows.append([f"{tokens:,}", str(concurrency), *cells, gain])
    headings = ["prompts of", "concurrency", "first token, s", "per output token, s", "output tokens per s"]
    return Block(table(headings, rows), [path])


def serving() -> Block:
    """A server under load by cached tokens, clients and backend. If files repeat a row, the first one counts."""
    found: dict[tuple[str, int, str], Row] = {}
    for row in read_rows([FEW_CLIENTS, *MANY_CLIENTS]):
        found.setdefault((row["workload"], row["concurrency"], row["variant"]), row)
    lines = []
    for (workload, concurrency, variant), row in sorted(found.items(), key=lambda item: item[0][:2]):
        dense = found[workload, concurrency, "flash_attn"]["output_tokens_per_second"]
        speed = row["output_tokens_per_second"]
        numbers = f"{row['ttft_ms_median']:,.0f}", f"{row['tpot_ms_median']:.2f}", f"{speed:.1f} ({speed / dense:.2f}x)"
        lines.append([f"{row['prefix_tokens']:,}", str(concurrency), f"`{variant}`", *numbers])
    headings = ["tokens cached", "clients", "backend", "first token, ms", "ms per token", "tokens per s"]
    return Block(table(headings, lines), [FEW_CLIENTS, *MANY_CLIENTS])

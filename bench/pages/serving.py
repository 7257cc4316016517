"""Blocks about the speed of engines and servers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.common.pages import Block, link, table, wrap
from bench.common.results import RESULTS, Row, read_run
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.config.schema import SAMPLED_STEPS

H200 = RESULTS / "h200"
FEW_CLIENTS = H200 / "serve" / "few_clients.jsonl"
ADAPTIVE = tuple(H200 / "lossless" / f"{name}.jsonl" for name in ("short", "adaptive", "adaptive_12"))
METER = [H200 / "meter" / f"every_{steps}.jsonl" for steps in (0, SAMPLED_STEPS)]
"""Decode steps of which none is measured, and one in so many."""
_CPU = RESULTS / "cpu-2core" / "decode" / "all.jsonl"
_THREADS = RESULTS / "cpu-2core" / "threads"
_WEIGHT_BYTES = 2 * (32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256)
"""Read for every token, of Llama-3.1-8B's shape: all matrices but the embedding."""

Steps = dict[tuple[int, int], Row]
"""Measured decode steps by context and batch."""


def read_steps(path: Path) -> Steps:
    """The measured decode steps of a result file, by context and batch."""
    return {(row["context_tokens"], row["batch"]): row for row in read_run(path).rows if row.get("ms_per_token")}


def _pair_rows(dense_path: Path, sparse_path: Path) -> list[list[str]]:
    """Rows of the steps that were measured both ways, and how many times as long the first takes."""
    dense = read_steps(dense_path)
    rows = []
    for (context, batch), line in read_steps(sparse_path).items():
        if (context, batch) in dense:
            before, now = dense[context, batch]["ms_per_token"], line["ms_per_token"]
            rows.append([f"{context:,}", str(batch), f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}"])
    return rows


def _pair(dense: Path, sparse: Path) -> Block:
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`unique`, ms per token", "ratio"]
    return Block(table(headings, _pair_rows(dense, sparse)), [sparse, dense])


def meter() -> Block:
    """What measuring one token of every step adds to the time per token, and so what one step in 1,024 adds."""
    folder = RESULTS / "cpu-2core" / "meter"
    without, every_step = folder / "every_0.jsonl", folder / "every_1.jsonl"
    found, lines = read_steps(every_step), []
    for (context, batch), line in read_steps(without).items():
        before, measured = line["ms_per_token"], found[context, batch]["ms_per_token"]
        share = (measured - before) / before / SAMPLED_STEPS
        lines.append([f"{context:,}", f"{before:.2f}", f"{measured:.2f}", f"{100 * share:.3f} %"])
    headings = ["context", "not measured, ms per token", "every step measured", "by default, one step in 1,024"]
    return Block(table(headings, lines), [without, every_step])


def meter_gpu() -> Block:
    """What measuring one token of one step in 1,024 adds to the time per token on a GPU."""
    without, sampled = map(read_steps, METER)
    lines = []
    for (context, batch), line in without.items():
        before, measured = line["ms_per_token"], sampled[context, batch]["ms_per_token"]
        cells = f"{before:.3f}", f"{measured:.3f}", f"{measured / before - 1:+.2%}"
        lines.append([f"{context:,}", str(batch), *cells])
    tokens = min(line["new_tokens"] for line in sampled.values())
    text = (
        f"On a GPU, with the shape of {read_run(METER[0]).about['model']}, `sample_every` 0 and {SAMPLED_STEPS:,}. A "
        f"time is the median of means over {tokens:,} tokens:"
    )
    headings = ["context", "requests", "not measured, ms per token", f"one step in {SAMPLED_STEPS:,}", "more"]
    return Block(f"{wrap(text, '')}\n\n{table(headings, lines)}", METER)


def decode_gpu() -> Block:
    """Time per token on a GPU by context and batch."""
    return _pair(H200 / "decode" / "flash_attn.jsonl", H200 / "decode" / "unique.jsonl")


def decode_newer() -> Block:
    """Time per token on a GPU under the newest version of vLLM."""
    folder = H200 / "decode-newer-vllm"
    return _pair(folder / "flash_attn.jsonl", folder / "unique.jsonl")


def decode_batches() -> Block:
    """More contexts and batches on a GPU, of a cache that is filled with noise."""
    return _pair(H200 / "decode" / "flash_attn_noise.jsonl", H200 / "decode" / "unique_noise.jsonl")


def decode_more() -> Block:
    """Time per token with int8 means, in a bf16 and in an fp8 cache."""
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`unique`, int8 means, ms per token", "ratio"]
    parts, sources = [], []
    for title, dense, sparse in (
        ("bf16 cache:", "flash_attn", "unique_int8"),
        ("fp8 cache:", "flash_attn_fp8_cache", "unique_fp8_cache"),
        ("fp8 cache, a million tokens:", "flash_attn_1m", "unique_1m"),
    ):
        paths = [H200 / "decode" / f"{name}.jsonl" for name in (dense, sparse)]
        parts += [title, table(headings, _pair_rows(*paths))]
        sources += paths
    return Block("\n\n".join(parts), sources)


def decode_routed() -> Block:
    """Time per token with routed groups, and what the bytes would allow."""
    bandwidth_path = H200 / "kernels" / "stop.jsonl"
    bandwidth = read_run(bandwidth_path).about["read_bandwidth_gb_s"] / 1e3
    rows, sources = [], []
    for suffix in ("", "_512k"):
        dense_path, routed_path = (H200 / "routing" / f"{name}{suffix}.jsonl" for name in ("flash_attn", "sinkrouter"))
        steps = read_steps(routed_path)
        for cells in _pair_rows(dense_path, routed_path):
            line = steps[int(cells[0].replace(",", "")), int(cells[1])]
            layers, skipping = _skipped(line["additional_config"])
            kv = line["kv_gib"] * 2**30
            dense, routed = _WEIGHT_BYTES + kv, _WEIGHT_BYTES + kv * (1 - skipping / layers)
            rows.append([*cells, f"{dense / routed:.2f}", f"{routed / line['ms_per_token'] / 1e9:.2f}"])
        sources += [routed_path, dense_path]
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`sinkrouter`, ms per token", "ratio"]
    sparse = [H200 / "routing" / f"{name}.jsonl" for name in ("unique", "unique_routed")]
    parts = [
        table([*headings, "ratio of bytes", "`sinkrouter` reads, TB/s"], rows),
        f"A kernel that only reads gets {bandwidth:.2f} TB/s of this memory ({link('data', bandwidth_path)}). "
        "The same in front of `unique`:",
        table(["context", "requests", "`unique`, ms per token", "routed", "ratio"], _pair_rows(*sparse)),
    ]
    return Block("\n\n".join(parts), [*sources, *sparse, bandwidth_path])


def _skipped(additional_config: dict[str, Any]) -> tuple[int, float]:
    """Layers, and the sum over layers of the share of KV heads that forced thresholds skip."""
    routing = additional_config["sparse_attention"]["routing"]
    dense = Routing.model_validate(routing).dense_layers
    heads = [[threshold <= -1 for threshold in layer] for layer in routing["threshold"]]
    return len(heads), sum(sum(layer) / len(layer) for layer in heads[dense:])


def decode_stopping() -> Block:
    """Time per token of attention that stops at a depth, tests in vain, or cannot stop."""
    names = ("stops", "vain", "endless", "flash_attn")
    paths = {name: H200 / "stopping" / f"{name}.jsonl" for name in names}
    steps = {name: read_steps(path) for name, path in paths.items()}
    rows = []
    for context, batch in steps["stops"]:
        stops, vain, endless, dense = (steps[name][context, batch]["ms_per_token"] for name in names)
        cells = f"{dense:.2f}", f"{endless:.2f}", f"{vain:.2f} ({vain / endless - 1:+.1%})"
        rows.append([f"{context:,}", str(batch), *cells, f"{stops:.2f} ({endless / stops - 1:+.0%} tokens per s)"])
    rule = next(iter(steps["stops"].values()))["additional_config"]["sparse_attention"]["termination"]
    stop = f"stops after {rule['patience'] + 1} blocks of {rule['block_tokens']}"
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`art` that cannot stop", "tests in vain"]
    return Block(table([*headings, stop], rows), list(paths.values()))


def lossless_adaptive() -> Block:
    """Time per token of lossless mode with drafts as long as pays, by context, batch and the acceptance that was set,
    beside dense decoding; and what the mode takes where it does not draft."""
    found = [each for path in ADAPTIVE for each in _drafted(path)]
    parts = [_lossless_table(found)]
    if times := [row["ms_per_token"] / dense for row, dense in found if row["tokens_per_step"] == 1]:
        reach = f"{min(times):.3f} to {max(times):.3f}"
        parts.append(f"Where nothing was drafted, a token takes {reach} times as long as with dense decoding.")
    return Block("\n\n".join(parts), list(ADAPTIVE))


def _drafted(path: Path) -> list[tuple[Row, float]]:
    """The rows of lossless mode in order, each with the milliseconds per token of dense decoding."""
    rows = [row for row in read_run(path).rows if "ms_per_token" in row]
    dense = {(row["context_tokens"], row["batch"]): row["ms_per_token"] for row in rows if row["draft_tokens"] is None}
    drafted = [row for row in rows if row["draft_tokens"] is not None]
    drafted.sort(key=lambda row: (row["context_tokens"], row["batch"], row["acceptance"] or 0))
    return [(row, dense[row["context_tokens"], row["batch"]]) for row in drafted]


def _lossless_table(found: list[tuple[Row, float]]) -> str:
    lines = []
    for row, before in found:
        cells = f"{row['tokens_per_step']:.2f}", f"{before:.2f}", f"{row['ms_per_token']:.2f}"
        loads = f"{row['context_tokens']:,}", str(row["batch"]), str(row["draft_tokens"]), str(row["acceptance"])
        lines.append([*loads, *cells, f"{before / row['ms_per_token']:.2f}"])
    headings = ["context", "requests", "drafts up to", "acceptance", "tokens a step", "FlashAttention 3, ms per token"]
    return table([*headings, "lossless, ms per token", "ratio"], lines)


def serve_gpu() -> Block:
    """A server under load."""
    paths = {name: H200 / "serve" / f"{name}.jsonl" for name in ("flash_attn", "unique")}
    by_load: dict[tuple[str, int], dict[str, Row]] = {}
    for name, path in paths.items():
        for line in read_run(path).rows:
            by_load.setdefault((line["workload"], line["concurrency"]), {})[name] = line
    rows = []
    for (workload, concurrency), here in by_load.items():
        if len(here) == len(paths):
            cells = (
                f"{here['flash_attn'][key]:,.{digits}f} / {here['unique'][key]:,.{digits}f}"
                for key, digits in (("ttft_ms_median", 0), ("tpot_ms_median", 2), ("output_tokens_per_second", 1))
            )
            rows.append([workload.replace("_", " "), str(concurrency), *cells])
    headings = ["prompts of 32K", "concurrency", "first token, ms", "per output token, ms", "output tokens per s"]
    return Block(table(headings, rows), list(paths.values()))


def serve_prefill() -> Block:
    """A server under long prompts, with dense and with sparse prefill."""
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


def serve_few_clients() -> Block:
    """A server under few clients, whose prompts have a beginning in common or not."""
    found = {(row["workload"], row["concurrency"], row["variant"]): row for row in read_run(FEW_CLIENTS).rows}
    lines = []
    for (workload, concurrency, variant), row in sorted(found.items(), key=lambda item: item[0][:2]):
        dense = found[workload, concurrency, "flash_attn"]["output_tokens_per_second"]
        speed = row["output_tokens_per_second"]
        prompts = f"{row['input_tokens']:,}, {row['prefix_tokens']:,} of them shared"
        numbers = f"{row['ttft_ms_median']:,.0f}", f"{row['tpot_ms_median']:.2f}", f"{speed:.1f} ({speed / dense:.2f}x)"
        lines.append([prompts, str(concurrency), f"`{variant}`", *numbers])
    text = (
        "One client and a few, in a run of its own. Prompts have nothing in common, or a beginning that is in the "
        "prefix cache; then there is little to prefill:"
    )
    headings = ["tokens of a prompt", "concurrency", "backend", "first token, ms", "per output token, ms"]
    return Block(f"{wrap(text, '')}\n\n{table([*headings, 'output tokens per s'], lines)}", [FEW_CLIENTS])


def decode_cpu() -> Block:
    """Time per token on a CPU by context."""
    times: dict[int, dict[str, float]] = {}
    for line in read_run(_CPU).rows:
        if "backend" in line:
            per_token = statistics.median(line["seconds_per_token"]) * 1e3
            times.setdefault(line["context_tokens"], {})[line["backend"]] = per_token
    rows = [
        [f"{context:,}", f"{ms['dense']:.2f}", f"{ms['unique']:.2f}", f"{ms['dense'] / ms['unique']:.2f}"]
        for context, ms in times.items()
    ]
    return Block(table(["context", "dense, ms per token", "`unique`, ms per token", "dense / unique"], rows), [_CPU])


def threads_cpu() -> Block:
    """Prefill and decoding on a CPU, and the cores that they keep busy."""
    paths = {"": _THREADS / "torchs_threads.jsonl", ", kernels on threads of their own": _THREADS / "one_thread.jsonl"}
    rows = []
    for note, path in paths.items():
        by_backend: dict[str, list[Row]] = {}
        for line in read_run(path).rows:
            by_backend.setdefault(line["backend"], []).append(line)
        for backend, lines in by_backend.items():
            prefill, prefill_cores, decode, decode_cores = (
                statistics.median(line[name] for line in lines)
                for name in ("prefill_seconds", "prefill_cores", "decode_seconds_per_token", "decode_cores")
            )
            times = f"{prefill:.2f}", f"{prefill_cores:.2f}", f"{decode * 1e3:.1f}", f"{decode_cores:.2f}"
            rows.append([f"`{backend}`{note}", f"{lines[0]['context_tokens']:,}", *times])
    headings = ["backend", "prompt", "prefill, s", "cores busy", "decoding, ms per token", "cores busy"]
    return Block(table(headings, rows), list(paths.values()))


def operations() -> Block:
    """Where the time of a sparse layer goes on a CPU."""
    by_context = {
        line["context_tokens"]: line["operation_seconds"] for line in read_run(_CPU).rows if "operation_seconds" in line
    }
    names = list(next(iter(by_context.values())))
    rows = [[name, *(f"{medians[name] * 1e6:.0f}" for medians in by_context.values())] for name in names]
    headings = ["µs per layer and token at a context of", *(f"{context:,}" for context in by_context)]
    return Block(table(headings, rows), [_CPU])

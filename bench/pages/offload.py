"""Blocks about offloading: times of decode steps and of first tokens, and the pages read from host memory."""

from __future__ import annotations

import statistics

from bench.common.options import size_text
from bench.common.pages import Block, table
from bench.common.results import RESULTS, Row, read_run, read_runs
from bench.pages.serving import read_steps

FOLDER = RESULTS / "h200" / "offload"
STEPS = {
    "FlashAttention 3, all in GPU memory": FOLDER / "flash_attn.jsonl",
    "`unique`, all in GPU memory": FOLDER / "unique.jsonl",
    "`unique_offload`, room for all pages": FOLDER / "copies_100.jsonl",
    "`unique_offload`, `hot_pages` 4": FOLDER / "copies_4.jsonl",
    "`unique_offload`, `hot_pages` 0": FOLDER / "no_copies.jsonl",
    "`unique_offload`, `hot_pages` 0, 512 tokens, noise": FOLDER / "no_hits.jsonl",
}
"""Result files of decode steps."""
FIRST_TOKENS = {
    "dense": [FOLDER / f"first_token_{name}.jsonl" for name in ("unique", "offload")],
    "sparse": [FOLDER / f"first_token_{name}.jsonl" for name in ("sparse", "sparse_offload")],
}
"""Result files by the attention of a prompt: keys and values on the GPU, and offloaded."""
HOST_READS = FOLDER / "host_reads.jsonl"
LONG = tuple(FOLDER / f"noise_{name}.jsonl" for name in ("16", "1m"))
"""Decode steps of more contexts than the GPU has room for, over noise."""
RESIDENT = FOLDER / "noise_resident.jsonl"
"""The same where keys and values are on the GPU."""
CONVERSATIONS = {
    "FlashAttention 3": FOLDER / "again_dense.jsonl",
    "FlashAttention 3 with vLLM's KV offloading": FOLDER / "again_vllm.jsonl",
    "`unique_offload`": FOLDER / "again_offload.jsonl",
}
"""Clients that return to their prompts, with a cache for two prompts on the GPU."""
LOOKUP = FOLDER / "lookup.jsonl"
"""Answers of a model whose right answers are known."""


def steps() -> Block:
    """Times of decode steps, and the share of their pages that came over the bus."""
    lines, batches = [], (1, 6)
    for name, path in STEPS.items():
        variant = "unique_offload" if "offload" in name else None
        found = read_steps(path, variant, one_token=True)
        rows = {batch: row for (context, batch), row in found.items() if context == 1 << 17}
        cells = []
        for batch in batches:
            row = rows.get(batch, {})
            share = row.get("host_read_share")
            cells.append(f"{row['ms_per_token']:.2f}" if row else "-")
            cells.append("-" if share is None else f"{share:.0%}")
        lines.append([name, *cells])
    heads = ["keys and values"]
    for batch in batches:
        heads += [f"{batch} x 128K, ms", "from the host"]
    return Block(table(heads, lines), list(STEPS.values()))


def first_tokens() -> Block:
    """Times to first token, with and without a prefix hit."""
    lines = []
    for attention, paths in FIRST_TOKENS.items():
        base, other = (
            {
                (row["measurement"], row["context_tokens"]): row
                for row in read_run(path).rows
                if row["attention_backend"] != "FLASH_ATTN"
            }
            for path in paths
        )
        for (measurement, context), row in base.items():
            hit = f", {row['cached_tokens']:,} of them cached" if measurement == "prefix_hit" else ""
            seconds, slower = row["seconds_median"], other[measurement, context]["seconds_median"]
            cells = f"{seconds:.2f}", f"{slower:.2f}", f"{slower / seconds:.2f}"
            lines.append([f"{size_text(context)}{hit}", attention, *cells])
    heads = ["prompt", "attention", "on the GPU, s", "offloaded, s", "ratio"]
    return Block(table(heads, lines), [path for paths in FIRST_TOKENS.values() for path in paths])


def host_reads() -> Block:
    """The share of pages from the host on real texts, by budget and copies."""
    found = read_run(HOST_READS).rows
    longest: dict[str, int] = {}
    for row in found:
        kind = row["text"].partition(",")[0]
        longest[kind] = max(longest.get(kind, 0), row["prompt_tokens"])
    rows = [row for row in found if row["prompt_tokens"] in longest.values()]
    copies = sorted({row["copies_tokens"] for row in rows})
    shares = {(row["text"], row["budget_tokens"], row["copies_tokens"]): row["host_read_share"] for row in rows}
    lines = []
    for text, tokens, budget in dict.fromkeys(
        (row["text"], row["prompt_tokens"], row["budget_tokens"]) for row in rows
    ):
        cells = [shares.get((text, budget, size)) for size in copies]
        kind = text.partition(",")[0]
        lines.append([kind, f"{tokens:,}", f"{budget:,}", *("-" if cell is None else f"{cell:.1%}" for cell in cells)])
    return Block(
        table(["text", "tokens", "budget", *(f"{size:,} tokens of copies" for size in copies)], lines), [HOST_READS]
    )


def long() -> Block:
    """Times of decode steps whose keys and values do not fit the GPU."""
    rows = [row for path in (RESIDENT, *LONG) for row in read_run(path).rows if "ms_per_token" in row]
    lines = []
    for row in rows:
        requests, milliseconds, offloads = row["batch"], row["ms_per_token"], "host_read_share" in row
        if row["one_token"] or not (offloads or (row["variant"], requests) == ("flash_attn", 2)):
            continue
        load = f"{requests} x {size_text(row['context_tokens'])}" + (
            "" if offloads else ", FlashAttention 3, on the GPU"
        )
        share, speed = f"{row['host_read_share']:.0%}" if offloads else "-", f"{1e3 * requests / milliseconds:,.0f}"
        lines.append([load, f"{row['kv_gib']:,.0f}", f"{milliseconds:.2f}", share, speed])
    heads = ["requests", "keys and values, GiB", "ms per token", "from the host", "tokens per s"]
    return Block(table(heads, lines), [RESIDENT, *LONG])


def conversations() -> Block:
    """Throughput of clients that ask again about contexts of 128K."""
    found = {name: read_run(path).rows[-1] for name, path in CONVERSATIONS.items()}
    base = next(iter(found.values()))["output_tokens_per_second"]
    lines = []
    for name, row in found.items():
        tokens = row["output_tokens_per_second"]
        lines.append([name, str(row["running_most"]), f"{tokens:,.0f}", f"{tokens / base:.1f}x"])
    heads = ["attention", "requests at once", "output tokens per s", "ratio"]
    return Block(table(heads, lines), list(CONVERSATIONS.values()))


def lookup() -> Block:
    """Right answers to questions about whole contexts; empty if not measured."""
    if not LOOKUP.exists():
        return Block("")
    groups: dict[tuple[str, int, int, float], list[Row]] = {}
    for row in (row for run in read_runs(LOOKUP) for row in run.rows):
        groups.setdefault((row["variant"], row["requests"], row["context_tokens"], row["kv_gib"]), []).append(row)
    lines = []
    for (variant, requests, context, gib), rows in groups.items():
        right = sum(row["answer"] == row["right_answer"] for row in rows)
        # The first questions wait for each other's prompts.
        times = [row["ms_per_token"] for row in rows if row["needle"]]
        shares = [row["host_read_share"] for row in rows if "host_read_share" in row]
        share = f"{statistics.mean(shares):.0%}" if shares else "-"
        load = f"{requests} x {size_text(context)}"
        lines.append(
            [f"`{variant}`", load, f"{gib:,.0f}", f"{right} of {len(rows)}", f"{statistics.median(times):.2f}", share]
        )
    about = "Needles from the start to the end of contexts, asked of a model with constructed weights:"
    heads = ["attention", "requests", "keys and values, GiB", "right answers", "ms per token", "from the host"]
    return Block(f"{about}\n\n{table(heads, lines)}", [LOOKUP])

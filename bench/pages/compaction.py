"""Blocks about caches that keep a part of a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run

SOAK = RESULTS / "h200" / "compaction" / "soak_10000.jsonl"
_NOTHING = "Nothing yet."
_PARTS = 5
"""Of a text, whose perplexity is shown."""
_ASKED = {"inside": "the question ends the prompt", "behind": "the question comes behind the prompt"}


def answers() -> Block:
    """Right answers by model, place of the question, context, budget and method."""
    paths, of_models = _files("answers"), defaultdict[str, list[Row]](list)
    for path in paths:
        run = read_run(path)
        of_models[run.about["model"]] += run.rows
    parts = []
    for model, rows in of_models.items():
        for asked, says in _ASKED.items():
            here = [row for row in rows if row["question"] == asked]
            parts += [f"**{model}, {says}**", _answers_table(here)]
    return Block("\n\n".join(parts), paths)


def users() -> Block:
    """Requests that run at once, and throughput, by cache, clients and variant."""
    paths = _files("capacity")
    rows = [row for path in paths for row in read_run(path).rows]
    rows.sort(key=lambda row: (row["cache_tokens"] or float("inf"), row["concurrency"], row["input_tokens"]))
    lines = [
        [
            "all there is" if row["cache_tokens"] is None else f"{row['cache_tokens']:,}",
            f"{row['concurrency']}", f"{row['input_tokens']:,} + {row['output_tokens']:,}", f"`{row['variant']}`",
            _measured(row), _at_once(row), f"{row['output_tokens_per_second']:,.0f}",
            f"{row['tpot_ms_median']:.1f}" if "tpot_ms_median" in row else "-", f"{row['preemptions']}",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["tokens of cache", "clients", "tokens of a request", "backend", "measured", "at once",
                "tokens per second", "ms per token", "preemptions"]  # fmt: skip
    return Block("\n\n".join([table(headings, lines), *_unbound(rows)]), paths) if paths else Block(_NOTHING)


def _measured(row: Row) -> str:
    """What a row is of: all requests from the first to the last, or some time of a server that is asked without end."""
    seconds, lead = row.get("window_seconds"), row.get("lead_seconds")
    return "all requests" if seconds is None else f"{seconds:.0f} s, after {lead:.0f} s"


def _at_once(row: Row) -> str:
    most, mean = row["running_most"], row.get("running_mean")
    return f"{most}" if mean is None else f"{most} ({mean:.1f} on average)"


def _unbound(rows: Sequence[Row]) -> Iterator[str]:
    """Sentences about loads all of whose requests run at once with dense attention, too."""
    loads: dict[tuple[object, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        load = tuple(row[key] for key in ("cache_tokens", "concurrency", "input_tokens", "output_tokens"))
        load += ("window_seconds" in row,)
        loads[load][row["variant"]] = row
    for found in loads.values():
        dense = found.pop("dense", None)
        if found and dense and dense["running_most"] == dense["concurrency"]:
            speed = "output_tokens_per_second"
            ratios = ((name, row[speed] / dense[speed]) for name, row in found.items())
            times = ", ".join(f"{ratio:.3f} times as many with `{name}`" for name, ratio in ratios)
            clients = f"Where dense attention runs all {dense['concurrency']} requests at once, too"
            yield wrap(f"{clients}, tokens per second are {times}.", "")


def soak() -> Block:
    """What many requests have left of a server whose cache shrinks."""
    end = read_run(SOAK).rows[-1]
    text = (
        f"`python -m bench.soak` asked a server for {end['answers'] + end['hung_up']:,} answers, by {end['clients']} "
        f"clients and within {end['seconds'] / 60:.0f} minutes. {end['hung_up']:,} were given up, {len(end['faults'])} "
        f"failed; requests were preempted {end['preemptions']:,.0f} times. At the end {end['requests_running']:.0f} "
        f"requests ran, and {end['kv_cache_usage']:.1%} of the cache was in use."
    )
    return Block(wrap(text, ""), [SOAK])


def times() -> Block:
    """What compactions take of a prefill and of requests that decode meanwhile."""
    paths = _files("time")
    lines = [
        [
            f"{row['context_tokens']:,}", f"`{row['variant']}`", f"{row['prefill_seconds']:.3f} s",
            f"{row['step_ms']:.1f} ms", f"{row['compaction_ms']:.1f} ms", f"{row['share_of_prefill']:.1%}",
            f"{row['pause_in_steps']:.2f}", f"{row['first_time']['prefill_seconds']:.2f} s",
        ]
        for path in paths
        for row in read_run(path).rows
    ]  # fmt: skip
    headings = ["prompt", "backend", "prefill", "a step", "steps behind it, beyond later ones", "of prefill",
                "longest pause, in steps", "prefill of the first prompt"]  # fmt: skip
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def identical() -> Block:
    """How many answers are those of dense attention where the budget holds the whole prompt."""
    paths, lines = _files("identical"), []
    for path in paths:
        run = read_run(path)
        for row in run.rows:
            same = f"{row['identical']} of {row['prompts']}"
            lines.append([f"`{row['variant']}`", run.machine, same, f"{row['answer_tokens']}"])
    headings = ["backend", "on", "same answers", "tokens of an answer"]
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def streams() -> Block:
    """Perplexity of a long text that is read through a window, by model and window."""
    paths, lines = _files("stream"), []
    for path in paths:
        run = read_run(path)
        for row in run.rows:
            parts, size = row["perplexity"], row["part_tokens"]
            shown = sorted({round(index * (len(parts) - 1) / (_PARTS - 1)) for index in range(_PARTS)})
            cells = [f"{parts[index]:.3g}, to {(index + 1) * size:,}" for index in shown]
            cells += ["-"] * (_PARTS - len(cells))
            lines.append([run.about.get("model", "-"), row["window"], f"{row['cache_tokens']:,}", *cells])
    headings = ["model", "window", "tokens of it", "perplexity of the first part", *["of a later one"] * (_PARTS - 1)]
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def _files(study: str) -> list[Path]:
    """Result files of any machine; those of a study may be several."""
    return sorted(RESULTS.glob(f"*/compaction/{study}_*.jsonl"))


def _answers_table(rows: list[Row]) -> str:
    dense = {row["context_tokens"]: row for row in rows if row["method"] == "dense"}
    found = {(row["context_tokens"], row["share"], row["setting"]): row for row in rows if row["method"] != "dense"}
    settings = list(dict.fromkeys(setting for *_, setting in found))
    lines = []
    for context, share in sorted({(context, share) for context, share, _ in found}, key=lambda key: (key[0], -key[1])):
        of_methods = (found.get((context, share, setting)) for setting in settings)
        cells = (_right(row) if row else "-" for row in (dense[context], *of_methods))
        lines.append([f"{context:,}", f"1/{1 / share:.0f}", *cells])
    names = (setting.replace("unique", "`unique`, equal bytes") for setting in settings)
    return table(["context", "kept", "dense", *names], lines)


def _right(row: Row) -> str:
    answered = "".join(row["right"].values())
    return f"{answered.count('1')}/{len(answered)}"

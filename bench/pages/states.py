"""Blocks about the fuzz of a layer's state, and the soak and the storm of a server."""

from __future__ import annotations

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, read_run

FUZZ = RESULTS / "cpu-2core" / "fuzz" / "states.jsonl"
SOAKS = {
    "a CPU of 2 cores": RESULTS / "cpu-2core" / "soak" / "needle-8m.jsonl",
    "an H200": RESULTS / "h200" / "soak" / "needle-8m.jsonl",
}
"""Result files by the server's device."""
STORMS = {
    "a CPU of 2 cores": RESULTS / "cpu-2core" / "storm",
    "an H200": RESULTS / "h200" / "storm",
}
"""Folders of result files by the server's device."""
_COUNTED = {
    "steps": "steps",
    "requests": "requests",
    "hits": "prefix hits",
    "preemptions": "preemptions",
    "aborts": "aborts",
    "rejected": "rejected drafts",
    "pages": "pages compared",
    "judged_rows": "outputs compared",
}
"""Headings by column of a result file."""


def fuzz() -> Block:
    """Seeds, steps, events and faults, by policy."""
    rows = read_run(FUZZ).rows
    counts = [f"{sum(row[column] for row in rows):,}" for column in _COUNTED]
    faults = sum(bool(row["fault"]) for row in rows)
    policies = ", ".join(f"`{policy}`" for policy in dict.fromkeys(row["policy"] for row in rows))
    found = table(["seeds", *_COUNTED.values(), "faults"], [[str(len(rows)), *counts, str(faults)]])
    return Block(f"{found}\n\n{wrap(f'Policies: {policies}.', '')}", [FUZZ])


def soak() -> Block:
    """Answers of a server to its clients, and its state at the end."""
    lines = []
    for place, path in SOAKS.items():
        end = read_run(path).rows[-1]
        lines.append([
            place, str(end["clients"]), f"{end['seconds'] / 60:.0f}", f"{end['answers']:,}", f"{end['hung_up']:,}",
            str(end["parted"]), str(end["largest_gap"]), str(len(end["faults"])), f"{end['kv_cache_usage']:.0%}",
        ])  # fmt: skip
    names = [
        "server", "clients", "minutes", "answers", "given up", "parted", "by at most, nats", "faults",
        "cache in use at the end",
    ]  # fmt: skip
    return Block(table(names, lines), list(SOAKS.values()))


def storm() -> Block:
    """Answers of servers to well-behaved clients beside hostile ones, and the state of the servers at the end."""
    lines, sources = [], []
    for place, folder in STORMS.items():
        for path in sorted(folder.glob("*.jsonl")):
            (row,) = read_run(path).rows
            phases = [row[name] for name in ("quiet_again", "storm")]
            times = " / ".join(f"{phase['ms_per_token_median']:.0f}" for phase in phases)
            changed = (f"{phase['changed_too_far']:,} of {phase['answers']:,}" for phase in phases)
            lines.append([
                place, row["backend"], str(row["clients"]), str(row["hostile_clients"]), f"{row['minutes']:g}",
                f"{sum(row['requests'].values()):,}", *changed, times, f"{row['ratio_median']:.1f}",
                str(row["preemptions"]), str(len(row["faults"])),
            ])  # fmt: skip
            sources.append(path)
    names = [
        "server", "backend", "clients", "hostile", "minutes", "hostile requests", "changed without", "changed with",
        "ms per token", "ratio", "preemptions", "faults",
    ]  # fmt: skip
    return Block(table(names, lines), sources)

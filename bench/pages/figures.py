"""Figures of the pages, drawn from result files."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common.options import size_text
from bench.common.results import ROOT
from bench.pages import arms, frontier
from bench.pages.prefill import DENSE, engines, prefill_files, read_times
from bench.pages.serving import H200, read_steps
from vllm_sparse_plugin.tools.eval.noise import SHARES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "figures"
_VERSION = re.compile(rb"Matplotlib v([\w.]+)")


def _decode() -> Figure:
    """Decode time per token of dense and of sparse attention, by context and batch."""
    from matplotlib.figure import Figure

    folder, names = H200 / "decode", ("flash_attn", "unique")
    computed, noise = ([read_steps(folder / f"{name}{suffix}.jsonl") for name in names] for suffix in ("", "_noise"))
    shared = [dense.keys() & sparse.keys() for dense, sparse in (computed, noise)]
    steps = sorted(shared[0] | shared[1])
    # A step that was measured after prompts is labelled.
    times = [
        [(after if step in shared[0] else filled)[step]["ms_per_token"] for step in steps]
        for after, filled in zip(computed, noise, strict=True)
    ]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(steps))
    for offset, label, colour, heights in zip(
        (-0.2, 0.2), ("FlashAttention 3", "unique"), ("#9aa5b1", "#3f51b5"), times, strict=True
    ):
        axes.bar([place + offset for place in places], heights, 0.4, label=label, color=colour)
    for place, dense, sparse in zip(places, *times, strict=True):
        axes.text(place, max(dense, sparse), f"{dense / sparse:.1f}x", ha="center", va="bottom", fontsize=9)
    labels = [f"{size_text(step[0])}\nx {step[1]}{'' if step in shared[0] else '*'}" for step in steps]
    axes.set_xticks(places, labels)
    axes.set_xlabel("context in tokens x requests (*: from a cache filled with noise, the others from prompts)")
    axes.set_ylabel("ms per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle("Decoding with the shape of Llama-3.1-8B on one H200", fontsize=11)
    return figure


def draw_prefill() -> Figure:
    """Time to first token by context, with the largest measured step size."""
    from matplotlib.figure import Figure

    measured = read_times(prefill_files(), "first_token", "chunk_tokens", "context_tokens")
    largest = max(chunk for chunk, _ in measured)
    times = {context: found for (chunk, context), found in measured.items() if chunk == largest}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(engines(measured)):
        contexts = [context for context, found in times.items() if name in found]
        seconds = [times[context][name]["seconds_median"] for context in contexts]
        colour = "#9aa5b1" if name == DENSE else f"C{index}"
        axes.plot(contexts, seconds, "o-", ms=4, color=colour, label=name.replace("`", ""))
        for context, here in zip(contexts, seconds, strict=True):
            if name != DENSE and DENSE in times[context]:
                ratio = f"{times[context][DENSE]['seconds_median'] / here:.1f}x"
                axes.annotate(ratio, (context, here), (0, -12), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(times), [size_text(context) for context in times])
    axes.minorticks_off()
    axes.set_xlabel(f"tokens of the prompt, in steps of {size_text(largest)}")
    axes.set_ylabel("seconds to the first token")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle("Prefill with the shape of Llama-3.1-8B on one H200", fontsize=11)
    return figure


def draw_frontier() -> Figure:
    """Time per token of the largest batch of each context, and agreement with dense attention, by budget."""
    from matplotlib.figure import Figure

    times, kept = frontier.read_times(), frontier.read_kept()
    largest = dict(sorted(times[None]))
    budgets = [*sorted({*kept, *(budget for budget in times if budget)}), None]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for context, batch in largest.items():
        found = {
            place: times[budget][context, batch]["ms_per_token"]
            for place, budget in enumerate(budgets)
            if (context, batch) in times.get(budget, {})
        }
        dense = found.pop(len(budgets) - 1)
        (line,) = left.plot(list(found), list(found.values()), "o-", ms=4, label=f"{batch} x {size_text(context)}")
        left.plot(len(budgets) - 1, dense, "s", ms=5, color=line.get_color())
    for offset, name in zip((-0.1, 0, 0.1), SHARES, strict=True):
        shares = {place + offset: kept[budget][name] for place, budget in enumerate(budgets) if budget in kept}
        values = [share.value for share in shares.values()]
        errors = zip(*((share.value - share.low, share.high - share.value) for share in shares.values()), strict=True)
        right.errorbar(list(shares), values, list(errors), fmt="o-", ms=4, capsize=2, label=name)
    right.set_ylim(0.8, 1.01)  # dense attention has no interval; an interval may go beyond 1
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    left.set_ylabel("ms per token, Llama-3.1-8B's shape")
    right.set_ylabel("kept of dense attention, needle-8m")
    for axes, shown in ((left, budgets), (right, budgets[:-1])):
        axes.set_xticks(range(len(shown)), [f"{budget:,}" if budget else "dense" for budget in shown])
        axes.set_xlabel("budget, tokens")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle("What a budget costs on one H200, and what it keeps", fontsize=11)
    return figure


FIGURES: dict[Path, Callable[[], Figure]] = {FOLDER / "decode.svg": _decode, frontier.FIGURE: draw_frontier}
"""The function that draws each figure, for figures with results."""
if prefill_files():
    FIGURES[FOLDER / "prefill.svg"] = draw_prefill
if arms.arm_files():
    FIGURES[ROOT / arms.FIGURE] = arms.draw_arms


def draw(make: Callable[[], Figure]) -> bytes:
    """A figure as SVG, the same bytes every time."""
    import matplotlib as mpl

    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "vllm_sparse_plugin"}):
        make().savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def is_current(path: Path, content: bytes) -> bool:
    """Whether a file shows the drawn figure. A file from another version of matplotlib counts as current."""
    if not path.exists():
        return False
    written = path.read_bytes()
    return written == content or _VERSION.findall(written) != _VERSION.findall(content)

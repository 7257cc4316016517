"""Blocks and a figure about arms of training on a pretrained model, from the results of `research.training`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.common.arms import (
    BEFORE,
    PLAIN,
    RECIPE_HEADINGS,
    SIGNED,
    Cell,
    Items,
    Recipe,
    by_recipe,
    changes,
    estimate_text,
    losses,
    mean_text,
    questions,
    recipe_lines,
    weights_text,
)
from bench.common.options import size_text
from bench.common.pages import Block, table
from bench.common.results import RESULTS, Row, read_rows, read_run
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = RESULTS / "h200" / "training-arms"
RECIPES = RESULTS / "h200" / "training-recipes"
DRAFTS = tuple(RESULTS / "h200" / "training-drafts" / f"{name}.jsonl" for name in ("before", "after"))
"""The drafts of `bench.quality lossless`, before and after a training for 128 tokens."""
FIGURE = "docs/figures/training.svg"
"""The figure of `draw_arms`."""
_NOTHING = "Nothing has been measured on a GPU yet."
_DENSE, _SOFT, _HARD, _BOTH = "dense", "soft", "hard", "soft-hard"
_WIDE = 512
"""The budget before training that a trained small budget should reach."""


class _Claim(NamedTuple):
    """A claim that one result is better than another."""

    text: str
    better: Cell
    other: Cell


def arm_files() -> list[Path]:
    """The result files of `research.training run`; empty if not measured."""
    return sorted(FOLDER.glob("*.jsonl"))


def arms() -> Block:
    """Each arm: RULER, the loss of text and changed tokens, dense and at two budgets."""
    files = arm_files()
    if not files:
        return Block(_NOTHING)
    rows, budget = read_rows(files), _trained_budget(files)
    found = [(questions(rows), PLAIN), (losses(rows), SIGNED), (changes(rows), "{:+.1%}")]
    columns = [(0, None), (0, _WIDE), (0, budget), (1, None), (1, budget), (2, budget)]
    lines = []
    for arm, rank in dict.fromkeys((cell.arm, cell.lora_rank) for cell in found[1][0]):
        cells = [mean_text(found[part][0].get(Cell(arm, rank, tokens)), found[part][1]) for part, tokens in columns]
        lines.append([arm, "" if arm == BEFORE else weights_text(rank), *cells])
    headings = [
        "arm", "weights", "RULER, dense", f"{_WIDE} tokens", f"{budget} tokens", "nats of text, dense",
        f"{budget} tokens", f"changed tokens, {budget}",
    ]  # fmt: skip
    return Block(f"{table(headings, lines)}\n\n![Training curves, and quality by budget](repository:{FIGURE})", files)


def claims() -> Block:
    """What the arms say about claims, for RULER and for text."""
    files = arm_files()
    if not files:
        return Block("")
    rows, budget = read_rows(files), _trained_budget(files)
    scores, nats = questions(rows), losses(rows)
    lines = []
    for rank in dict.fromkeys(cell.lora_rank for cell in nats if cell.arm != BEFORE):
        for claim in _claims(rank, budget):
            pair = claim.better, claim.other
            if all(cell in nats for cell in pair):
                answered = _judged(_minus(scores, *pair)) if all(cell in scores for cell in pair) else ["", "open"]
                # Less loss is better.
                read = _judged(_minus(nats, *reversed(pair)))
                lines.append([claim.text, weights_text(rank), *answered, *read])
    headings = ["claim", "weights", "more RULER", "so it is", "fewer nats of text", "so it is"]
    return Block(table(headings, lines), files)


def _claims(rank: int, budget: int) -> list[_Claim]:
    def trained(arm: str, tokens: int | None = budget) -> Cell:
        return Cell(arm, rank, tokens)

    return [
        _Claim("the soft mask is better than the hard mask", trained(_SOFT), trained(_HARD)),
        _Claim("hard steps after soft ones are better than soft ones alone", trained(_BOTH), trained(_SOFT)),
        *(
            _Claim(f"the mask `{arm}` is better than training without", trained(arm), trained(_DENSE))
            for arm in (_SOFT, _HARD, _BOTH)
        ),
        _Claim("sparse attention is better than dense after dense training", trained(_BOTH), trained(_DENSE, None)),
        *(
            _Claim(f"`{arm}` with {budget} tokens is better than {_WIDE} before", trained(arm), Cell(BEFORE, 0, _WIDE))
            for arm in (_SOFT, _HARD, _BOTH, "taught-hard", "taught-soft")
        ),
    ]


def recipes() -> Block:
    """RULER and the loss of text after trainings of other ranks, rates and steps; empty if not measured."""
    files = sorted(RECIPES.glob("*.jsonl"))
    if not files:
        return Block("")
    rows = read_rows(files)
    headings = ["rank", "rate", "steps", "nats of text, dense", f"{_trained_budget(files)} tokens"]
    return Block("\n\n".join([
        table(RECIPE_HEADINGS, recipe_lines(rows)),
        "Recipes that differ in one setting, the second minus the first, paired by text; less is better:",
        table(headings, _differences(rows, _trained_budget(files))),
    ]), files)  # fmt: skip


def _differences(rows: Sequence[Row], budget: int) -> list[list[str]]:
    """The loss of each recipe minus that of one with another rank, rate or number of steps."""
    measured, lines = by_recipe(rows), []
    nats = {
        recipe: {cell.budget_tokens: values for cell, values in found.items() if cell.arm != BEFORE}
        for recipe, found in ((each, losses([*measured[BEFORE], *measured[each]])) for each in measured)
        if isinstance(recipe, Recipe)
    }
    for first, second in combinations(nats, 2):
        changed = [one != other for one, other in zip(first, second, strict=True)]
        if sum(changed) == 1:
            names = [
                f"{one} to {other}" if is_changed else f"{one}"
                for one, other, is_changed in zip(first, second, changed, strict=True)
            ]
            cells = [
                mean_text([b - a for a, b in zip(nats[first][tokens], nats[second][tokens], strict=True)], SIGNED)
                for tokens in (None, budget)
            ]
            lines.append([*names, *cells])
    return lines


def drafts() -> Block:
    """The share of right drafts by the training's state, kind of text, context and budget; empty if not measured."""
    if not all(path.exists() for path in DRAFTS):
        return Block("")
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in (row for path in DRAFTS for row in read_run(path).rows if row["drafted"]):
        key = f"{row['budget_tokens']}", row["kind"], size_text(row["context_tokens"])
        found.setdefault(key, []).append(f"{row['accepted'] / row['drafted']:.3f}")
    lines = [[*key, *shares] for key, shares in found.items()]
    return Block(table(["budget of drafts", "text", "context", "before", "after"], lines), DRAFTS)


def draw_arms() -> Figure:
    """The held-out loss during training, and RULER and the loss of text by budget."""
    from matplotlib.figure import Figure

    rows = [row for row in read_rows(arm_files()) if row["lora_rank"] == 0]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    steps, scores, texts = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["arm"] for row in rows))
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    for name in names:
        curve: dict[int, list[float]] = {}
        for row in rows:
            if row["arm"] == name and "served_loss" in row:
                curve.setdefault(row["step"], []).append(row["served_loss"])
        if curve:
            means = [sum(values) / len(values) for values in curve.values()]
            steps.plot(list(curve), means, "o-", ms=3, color=colours[name], label=name)
    for axes, items, title in (
        (scores, questions(rows), "RULER"), (texts, losses(rows), "nats of text, minus dense before"),
    ):  # fmt: skip
        budgets = sorted({cell.budget_tokens for cell in items if cell.budget_tokens})
        shown = [*budgets, None]
        for name in names:
            cells = {place: items.get(Cell(name, 0, tokens)) for place, tokens in enumerate(shown)}
            found = {place: estimate_amount(values) for place, values in cells.items() if values}
            values = [each.value for each in found.values()]
            errors = list(
                zip(*((each.value - each.low, each.high - each.value) for each in found.values()), strict=True)
            )
            axes.errorbar(list(found), values, errors, fmt="o-", ms=3, capsize=2, color=colours[name], label=name)
        axes.set_xticks(range(len(shown)), [str(tokens or "dense") for tokens in shown])
        axes.set_xlabel("budget, tokens")
        axes.set_title(title, fontsize=10)
    steps.set_xlabel("step")
    steps.set_title("held-out loss with the trained budget, nats", fontsize=10)
    scores.legend(frameon=False, fontsize=8)
    for axes in (steps, scores, texts):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _trained_budget(files: Sequence[Path]) -> int:
    return int(read_run(files[0]).about["budget_tokens"])


def _minus(items: Items, first: Cell, second: Cell) -> Estimate:
    return estimate_amount([a - b for a, b in zip(items[first], items[second], strict=True)])


def _judged(difference: Estimate) -> list[str]:
    verdict = "confirmed" if difference.low > 0 else "refuted" if difference.high < 0 else "open"
    return [estimate_text(difference, SIGNED), verdict]

"""Blocks about answers: needles, evaluations, calibration, and comparisons of selections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run
from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.eval.statistics import Difference, Estimate, estimate_difference, estimate_mean

_H200 = RESULTS / "h200"
_CPU = RESULTS / "cpu-2core"
TUNED = _CPU / "tune" / "needle-8m.jsonl"
LOOK_ALIKES = {budget: _CPU / "served" / f"look_alikes_{budget}.jsonl" for budget in (512, 2048)}
_WEIGHTS = _CPU / "page-scores" / "smollm2_lambda.jsonl"
_WEIGHTED = {
    "mean": "0 (mean alone)",
    "unique-bf16-0.5": "0.5",
    "unique-bf16": "1",
    "unique-bf16-1.5": "1.5",
    "unique-bf16-2.0": "2",
    "oracle": "true weight (a bound)",
}
"""Statistics and the lambda of their score."""
CALIBRATED = {score: RESULTS / "h200" / "calibrate" / f"smollm2-135m_{score}.jsonl" for score in ("mean", "max", "min")}
"""Calibrations of a pretrained model by the score of a KV group."""
CALIBRATIONS = {
    "W": _CPU / "calibrate" / "witness-6m.jsonl",
    "N": _CPU / "calibrate" / "needle-8m.jsonl",
    "S": CALIBRATED["mean"],
    "G": RESULTS / "h200" / "calibrate" / "gemma-3-270m_mean.jsonl",
}
"""Calibrations of models with many, few and some sink groups, by the letter of the model."""
_WITNESS_MIXES = {
    "dense": "with `dense`",
    "sinkrouter": "with `sinkrouter`",
    "unique": "with `unique`",
    "unique_routed": "with `unique` and routing",
}
"""Files of witness-6m, and their names in the text."""


def mix_file(name: str) -> Path:
    """The results of a preset or a mix."""
    return _CPU / "mixes" / f"{name}.jsonl"


def share_right(answers: list[Row], **where: Any) -> str:
    """The share of right answers among rows with the given values of columns."""
    correct = [answer["correct"] for answer in answers if all(answer[key] == value for key, value in where.items())]
    return f"{sum(correct)}/{len(correct)}" if correct else "-"


def look_alikes() -> Block:
    """The task that fails with a small budget."""
    small, large = (read_run(path).rows for path in LOOK_ALIKES.values())
    rows = []
    for context in sorted({answer["context_tokens"] for answer in small}):
        here = {"context_tokens": context}
        unique = [share_right(answers, backend="unique", **here) for answers in (small, large)]
        rows.append([f"{context:,}", share_right(small, backend="dense", **here), *unique])
    headings = ["context", "dense", *(f"{budget:,} tokens" for budget in LOOK_ALIKES)]
    return Block(table(headings, rows), list(LOOK_ALIKES.values()))


def deviation_weights() -> Block:
    """The attention weight that the selected pages hold, by lambda, page size and budget."""
    masses: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in read_run(_WEIGHTS).rows:
        if row["rule"] == "budget":
            found = masses.setdefault((row["page_size"], row["target"]), {})
            found.setdefault(row["statistics"], []).append(row["mass"])
    lines = []
    for kind, name in _WEIGHTED.items():
        cells = (f"{sum(found[kind]) / len(found[kind]):.3f}" for found in masses.values())
        lines.append([name, *cells])
    headings = (f"pages of {size}, {budget:,} tokens" for size, budget in masses)
    return Block(table(["lambda", *headings], lines), [_WEIGHTS])


_DRAFT_TOKENS = 8
"""The number of draft tokens in the table."""


def lossless_answers() -> Block:
    """The share of right drafts in lossless mode, and whether its tokens equal those of dense decoding."""
    files = {name: _H200 / "lossless" / f"{name.replace('-', '_')}.jsonl" for name in ("needle-8m", "witness-6m")}
    lines, rows = [], []
    for model, path in files.items():
        found = [row for row in read_run(path).rows if row["draft_tokens"] == _DRAFT_TOKENS]
        context = max(row["context_tokens"] for row in found)
        rows += found
        for budget in sorted({row["budget_tokens"] for row in found}):
            here = [row for row in found if (row["budget_tokens"], row["context_tokens"]) == (budget, context)]
            for kind, chosen in _kinds(here):
                lines.append([model, f"{context:,}", kind, f"{budget:,}", *_drafted(chosen)])
    headings = ["model", "context", "prompts", "budget", "same answers", "accepted", "tokens per step"]
    leads = [lead for row in rows for _, _, lead in row["parted"]]
    answers = sum(row["prompts"] for row in rows)
    verdict = (
        f"Over all contexts {len(leads)} of {answers:,} answers differ from dense decoding. Each differs first at a "
        f"tie: two tokens within {max(leads, default=0):.3f} in log probability."
    )
    return Block(f"{table(headings, lines)}\n\n{wrap(verdict, '')}", list(files.values()))


def _kinds(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows of all needle tasks together, then rows of code and of text."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"] if row["kind"] in ("code", "text") else "needles", []).append(row)
    yield from by_kind.items()


def _drafted(rows: Sequence[Row]) -> list[str]:
    """Cells about drafts: equal answers, accepted share, tokens per step."""
    prompts, parted = sum(row["prompts"] for row in rows), sum(len(row["parted"]) for row in rows)
    drafts, drafted, accepted = (sum(row[name] for row in rows) for name in ("drafts", "drafted", "accepted"))
    return [f"{prompts - parted}/{prompts}", f"{accepted / drafted:.3f}", f"{1 + accepted / drafts:.2f}"]


def interval(found: Estimate | Difference, sign: str = "") -> str:
    """A number and its interval."""
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def _evaluated(paths: Sequence[Path]) -> list[list[str]]:
    """Rows of files of `vllm-sparse eval` with the same items; the first file is dense."""
    files = [read_results(path) for path in paths]
    dense = files[0].results
    rows = []
    for file in files:
        scores = [result.score for result in file.results.values()]
        mean = estimate_mean(scores)
        cells = [file.label, f"{sum(scores):.0f}/{mean.count}", interval(mean)]
        if file is files[0]:
            cells.append("")
        else:
            gap = estimate_difference([dense[item].score for item in file.results], scores)
            cells.append(interval(gap, "+"))
        rows.append(cells)
    return rows


_TRAINED = {
    _CPU: {"before": "before", "after": "after"},
    _H200: {
        "before_dense": "before, dense", "before": "before", "after": "after", "after_dense": "after, dense",
    },
}  # fmt: skip
"""Files of a model before and after its training, and their names in the table."""


def trained_served() -> Block:
    """Needles decoded from the question, through vLLM, before and after training the model for its budget."""
    lines: list[list[str]] = []
    sources: list[Path] = []
    for folder, names in _TRAINED.items():
        paths = [folder / "trained" / f"needle-8m_{name}.jsonl" for name in names]
        where = "an H200" if folder == _H200 else "a CPU"
        for name, (_, right, _, gap) in zip(names.values(), _evaluated(paths), strict=True):
            lines.append([where, name, right, gap])
        sources += paths
    return Block(table(["served on", "model", "right", "minus the first row of the machine, paired"], lines), sources)


def calibrated_sweep() -> Block:
    """Sink groups found, and tokens right, by the share that is skipped and by the score of a group."""
    lines: list[list[str]] = []
    for score, path in CALIBRATED.items():
        (line,) = read_run(path).rows
        if not lines:
            dense, asked = (sum(row[key] for row in line["rows"]) for key in ("dense_tokens_right", "tokens"))
            lines.append(["none", "0%", "", "", f"{dense / asked:.1%}"])
        for row in line["sweep"]:
            shares = (f"{row[name]:.0%}" for name in ("skip_ratio", "precision", "recall"))
            lines.append([f"`{score}`", *shares, f"{row['tokens_right'] / row['tokens']:.1%}"])
    headings = ["score", "skipped", "of them sink groups", "sink groups skipped", "tokens right"]
    return Block(table(headings, lines), list(CALIBRATED.values()))


def calibrated() -> Block:
    """Results of `vllm-sparse calibrate` for models with many, few and some sink groups."""
    paths, rows = list(CALIBRATIONS.values()), []
    for run in map(read_run, paths):
        (line,) = run.rows
        skipped, precision, recall = line["detection"]
        tokens = [sum(row[key] for row in line["rows"]) for key in ("dense_tokens_right", "routed_tokens_right")]
        asked = sum(row["tokens"] for row in line["rows"])
        shares = (f"{share:.1%}" for share in (line["sink_groups"], skipped, precision, recall))
        right = (f"{count / asked:.1%}" for count in tokens)
        verdict = "yes" if line["verdict"][0] else "no"
        rows.append([run.about["model"], *shares, f"{line['auprc']:.3f}", *right, verdict])
    headings = ["model", "sink groups", "skipped", "of them sink groups", "sink groups skipped", "AUPRC"]
    calibration = table([*headings, "tokens right, dense", "routed", "recommended"], rows)
    served = [_CPU / "witness" / f"{name}.jsonl" for name in _WITNESS_MIXES]
    right_served = [cells[1] for cells in _evaluated(served)]
    answered = ", ".join(f"{right} {name}" for right, name in zip(right_served, _WITNESS_MIXES.values(), strict=True))
    text = f"Through vLLM, witness-6m answers {answered}."
    return Block(f"{calibration}\n\n{wrap(text, '')}", [*paths, *served])

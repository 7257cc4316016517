"""Blocks about answers: needles, evaluations, calibration, and how selections compare."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run
from bench.pages.prefill import prefill_in_short
from vllm_sparse_plugin.config import describe_policies, resolve
from vllm_sparse_plugin.tools.eval.report import read_shares
from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.eval.statistics import Difference, Estimate, estimate_difference, estimate_mean
from vllm_sparse_plugin.tools.eval.tuning import MEASURES

_H200 = RESULTS / "h200"
_CPU = RESULTS / "cpu-2core"
TUNED, TUNED_WITNESS = (_CPU / "tune" / f"{model}.jsonl" for model in ("needle-8m", "witness-6m"))
LOOK_ALIKES = {budget: _CPU / "served" / f"look_alikes_{budget}.jsonl" for budget in (512, 2048)}
NEWER = "newer-vllm"
"""In the name of a study that was made with the newer of two versions."""
_HEAD_SIZE = 64
"""Of needle-8m."""
_EVALUATED = ["right", "share (95 %)", "minus dense, paired"]
_WITNESS_MIXES = ("dense", "sinkrouter", "unique", "unique_routed", "sinkrouter_art")
MIXES = (
    "dense", "unique", "unique_art", "unique_routed", "unique_routed_art", "quest", "quest_art", "mean", "infllm",
    "streaming_llm", "sinkrouter", "art", "sinkrouter_art",
)  # fmt: skip
"""Presets, and mixes of them, that answered the same questions."""


def mix_file(name: str) -> Path:
    """The results of a preset or a mix."""
    return _CPU / "mixes" / f"{name}.jsonl"


def share_right(answers: list[Row], **where: Any) -> str:
    """How many answers of some rows are right, of those whose columns have some values."""
    correct = [answer["correct"] for answer in answers if all(answer[key] == value for key, value in where.items())]
    return f"{sum(correct)}/{len(correct)}" if correct else "-"


def needles() -> Block:
    """Needles asked of a server: dense attention, `unique`, and the negative control."""
    path, control_path = (_CPU / "served" / f"{name}.jsonl" for name in ("unique", "streaming_llm"))
    answers, control = read_run(path).rows, read_run(control_path).rows
    selection = resolve(None, "unique").selection
    contexts = sorted({answer["context_tokens"] for answer in answers})

    def cells(**where: Any) -> list[str]:
        both = [share_right(answers, backend=backend, **where) for backend in ("dense", "unique")]
        return [*both, share_right(control, backend="streaming_llm", **where)]

    rows = []
    for context in contexts:
        share = f"{selection.kv_read_share(context, _HEAD_SIZE):.1%}"
        rows += [
            [task, f"{context:,}", *cells(task=task, context_tokens=context), share]
            for task in dict.fromkeys(answer["task"] for answer in answers)
        ]
    rows += [
        ["**all**", f"{context:,}", *(f"**{cell}**" for cell in cells(context_tokens=context)), ""]
        for context in contexts
    ]
    headings = ["task", "context", "dense", "`unique`", "newest 512 tokens", "KV read by `unique`"]
    return Block(table(headings, rows), [path, control_path])


def answers_in_short() -> Block:
    """The first token of a long prompt, needles at the longest context, and ordinary text, in one sentence each."""
    path, control_path = (_CPU / "served" / f"{name}.jsonl" for name in ("unique", "streaming_llm"))
    answers = [*read_run(path).rows, *(row for row in read_run(control_path).rows if row["backend"] != "dense")]
    longest = max(answer["context_tokens"] for answer in answers)
    share = resolve(None, "unique").selection.kv_read_share(longest, _HEAD_SIZE)

    def right(backend: str) -> str:
        return share_right(answers, backend=backend, context_tokens=longest).replace("/", " of ")

    default, wide = _next_tokens()
    prefill = prefill_in_short()
    text = (
        f"{prefill.text} The small model needle-8m answers {right('unique')} needle questions over {longest:,} tokens "
        f"with `unique`, which reads {share:.1%} of the KV cache. It answers {right('dense')} with dense attention, "
        f"and {right('streaming_llm')} with the newest 512 tokens alone. Over ordinary text of 4,096 tokens it expects "
        f"the same next token as with dense attention at {default.agreement.value:.1%} of the positions with the "
        f"default budget of 512 tokens ({default.nats_lost.value:+.3f} nats a token), and at "
        f"{wide.agreement.value:.1%} with 2,048."
    )
    return Block(wrap(text, ""), [*prefill.sources, path, control_path, *_NEXT_TOKEN_FILES])


def versions_gpu() -> Block:
    """Needles answered on a GPU under each version of vLLM."""
    paths = [
        [_H200 / study / f"{name}.jsonl" for name in ("dense", "512")] for study in ("needles", f"needles-{NEWER}")
    ]
    rows = []
    for files in paths:
        runs = [read_run(path) for path in files]
        right = (f"{sum(row['score'] == 1 for row in run.rows)}/{len(run.rows)}" for run in runs)
        rows.append([str(runs[0].about["versions"]["vllm"]), *right])
    return Block(table(["vLLM", "dense", "`unique`, 512 tokens"], rows), [path for files in paths for path in files])


def look_alikes() -> Block:
    """The task that a small budget loses."""
    small, large = (read_run(path).rows for path in LOOK_ALIKES.values())
    rows = []
    for context in sorted({answer["context_tokens"] for answer in small}):
        here = {"context_tokens": context}
        unique = [share_right(answers, backend="unique", **here) for answers in (small, large)]
        rows.append([f"{context:,}", share_right(small, backend="dense", **here), *unique])
    headings = ["context", "dense", "`unique`, 512 tokens", "`unique`, 2048 tokens (preset `unique_wide`)"]
    return Block(table(headings, rows), list(LOOK_ALIKES.values()))


def accuracy_gpu() -> Block:
    """Needles answered on a GPU by statistics and budget."""
    names = ("quarters", "means", "means_16", "fp8_16", "lambda_075")
    paths = {name: _H200 / "accuracy" / f"{name}.jsonl" for name in names}
    contexts = (4096, 8192, 16384, 32768)
    counts: dict[str, dict[int, list[int]]] = {}
    for name, path in paths.items():
        # Dense attention was asked again in most runs, with the same answers.
        known = set(counts.get("dense", {}))
        for row in read_run(path).rows:
            setting, context = row["setting"], row["context_tokens"]
            if setting == "dense" and context in known:
                continue
            if setting != "dense" and name == names[-1]:
                setting += ", lambda 0.75"
            count = counts.setdefault(setting, {}).setdefault(context, [0, 0, 0])
            count[0] += row["correct"]
            count[1] += row["questions"]
            count[2] += 1
    tasks = max(count[2] for by_context in counts.values() for count in by_context.values())
    rows = []
    for setting, by_context in counts.items():
        complete = {context: count for context, count in by_context.items() if count[2] == tasks}
        cells = (f"{complete[c][0]}/{complete[c][1]}" if c in complete else "-" for c in contexts)
        if complete:
            rows.append([setting, *cells])
    headings = ["statistics and pages of 8", *(f"{context:,}" for context in contexts)]
    return Block(table(headings, rows), list(paths.values()))


def lossless() -> Block:
    """How many drafts of lossless mode are right on a CPU, and whether its tokens are those of dense decoding."""
    files = (("needle-8m", "needle_8m_more"), ("needle-8m", "needle_8m"), ("witness-6m", "witness_6m"))
    return _lossless([(model, _CPU / "lossless" / f"{name}.jsonl") for model, name in files])


def lossless_answers_gpu() -> Block:
    """The same on a GPU."""
    files = (("needle-8m", "needle_8m"), ("witness-6m", "witness_6m"))
    return _lossless([(model, RESULTS / "h200" / "lossless" / f"{name}.jsonl") for model, name in files])


def _lossless(files: Sequence[tuple[str, Path]]) -> Block:
    """Of the result files of models."""
    lines, rows = [], []
    for model, path in files:
        found = [row for row in read_run(path).rows if row["draft_tokens"] is not None]
        rows += found
        keys = ("budget_tokens", "draft_tokens", "context_tokens")
        for values in dict.fromkeys(tuple(row[key] for key in keys) for row in found):
            here = [row for row in found if tuple(row[key] for key in keys) == values]
            for kind, chosen in _kinds(here):
                lines.append([model, *(f"{value:,}" for value in values), kind, *_drafted(chosen)])
    headings = ["model", "budget", "draft", "context", "prompts", "same tokens", "accepted", "first draft",
                "last draft", "tokens a step"]  # fmt: skip
    leads = [lead for row in rows for _, _, lead in row["parted"]]
    answers = sum(row["prompts"] for row in rows)
    verdict = f"All {answers:,} answers are those of dense decoding."
    if leads:
        verdict = (
            f"Of {answers:,} answers {len(leads)} part from those of dense decoding, each at a tie: there the token of "
            f"dense\ndecoding is ahead by at most {max(leads):.3f} in log probability."
        )
    return Block(f"{table(headings, lines)}\n\n{verdict}", [path for _, path in files])


def _kinds(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows of needle tasks together, and those of code and of text."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"] if row["kind"] in ("code", "text") else "needles", []).append(row)
    yield from by_kind.items()


def _drafted(rows: Sequence[Row]) -> list[str]:
    """Cells about drafts: same tokens, accepted, at the first and at the last place, tokens a step."""
    prompts, parted = sum(row["prompts"] for row in rows), sum(len(row["parted"]) for row in rows)
    drafts, drafted, accepted = (sum(row[name] for row in rows) for name in ("drafts", "drafted", "accepted"))
    first, *_, last = (sum(counts) for counts in zip(*(row["accepted_by_place"] for row in rows), strict=True))
    shares = (accepted / drafted, first / drafts, last / drafts)
    return [f"{prompts - parted}/{prompts}", *(f"{share:.3f}" for share in shares), f"{1 + accepted / drafts:.2f}"]


def formats() -> Block:
    """How the selections of a step compare with those of true attention, by the format of statistics."""
    paths = {kind: _CPU / "diagnose" / f"{kind}.jsonl" for kind in ("quarters", "int8", "bf16", "fp8")}
    rows = []
    for kind, path in paths.items():
        lines = read_run(path).rows
        for budget in (512, 256, 128, 64):
            here = [line for line in lines if line["budget_tokens"] == budget]
            cells = (f"{statistics.mean(line[name] for line in here):.3f}" for name in ("mass", "recall", "cosine"))
            rows.append([kind, str(budget), *cells])
    headings = ["statistics", "budget, tokens", "attention weight read", "best pages read", "output cosine"]
    return Block(table(headings, rows), list(paths.values()))


def interval(found: Estimate | Difference, sign: str = "") -> str:
    """A number and its interval."""
    return f"{found.value:{sign}.3f} ({found.low:{sign}.3f} to {found.high:{sign}.3f})"


def _evaluated(paths: Sequence[Path]) -> list[list[str]]:
    """Rows of files of `vllm-sparse eval` about the same items, the first of them dense."""
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


def served() -> Block:
    """Needles decoded from the question, through vLLM, by budget."""
    parts, sources = [], []
    for folder, where in ((_CPU, "4,096 tokens on a CPU"), (_H200, "16,384 tokens on an H200")):
        paths = [folder / "needles" / f"{label}.jsonl" for label in ("dense", "512", "128", "64")]
        parts.append(table([f"budget, {where}", *_EVALUATED], _evaluated(paths)))
        sources += paths
    return Block("\n\n".join(parts), sources)


_TRAINED = {"before": "before", "after": "after"}
_TRAINED_AND_DENSE = {"before_dense": "before, dense"} | _TRAINED | {"after_dense": "after, dense"}
"""Files of a model before and after its training, and what the tables call them."""


def trained_served() -> Block:
    """Needles decoded from the question, through vLLM, by a model before and after it was trained for its budget."""
    parts, sources = [], []
    for folder, where, names in ((_CPU, "a CPU", _TRAINED), (_H200, "an H200", _TRAINED_AND_DENSE)):
        paths = [folder / "trained" / f"needle-8m_{name}.jsonl" for name in names]
        headings = [f"training, on {where}", *_EVALUATED[:-1], "minus the first, paired"]
        rows = [[heading, *cells] for heading, (_, *cells) in zip(names.values(), _evaluated(paths), strict=True)]
        parts.append(table(headings, rows))
        sources += paths
    return Block("\n\n".join(parts), sources)


NEXT_TOKENS = {
    "dense": "dense",
    "unique512": "`unique`, 512 tokens (default)",
    "unique2048": "`unique`, 2048 tokens",
}
"""Runs over the same text, dense attention first, and what the table calls them."""


class _NextTokens(NamedTuple):
    """How the next tokens of a text under a selection compare with those of dense attention."""

    agreement: Estimate
    overlap: Estimate
    nats_lost: Estimate


_NEXT_TOKEN_FILES = [_CPU / "next-tokens" / f"{name}.jsonl" for name in NEXT_TOKENS]


def _next_tokens() -> list[_NextTokens]:
    """Returns what the runs after the first, which is dense, show."""
    dense, *others = (read_results(path) for path in _NEXT_TOKEN_FILES)
    found = []
    for file in others:
        pairs = [(dense.results[name], result) for name, result in file.results.items()]
        agreement, overlap = (
            estimate_mean([MEASURES[name](before, after) for before, after in pairs])
            for name in ("agreement", "overlap")
        )
        lost = estimate_mean([after.score - before.score for before, after in pairs])
        found.append(_NextTokens(agreement, overlap, lost))
    return found


def next_tokens() -> Block:
    """What text shows and needles do not: how often the next token is dense attention's, by budget."""
    rows = [
        [heading, interval(found.agreement), interval(found.overlap), interval(found.nats_lost, "+")]
        for found, heading in zip(_next_tokens(), list(NEXT_TOKENS.values())[1:], strict=True)
    ]
    headings = ["decode steps", "same most likely token (95 %)", "overlap, at least (95 %)", "nats lost a token (95 %)"]
    return Block(table(headings, rows), _NEXT_TOKEN_FILES)


def tuned() -> Block:
    """What `vllm-sparse tune` finds on source code: every setting by every measure."""
    rows, files = [], [TUNED, TUNED_WITNESS]
    for run in map(read_run, files):
        for row in run.rows:
            cells = (interval(Estimate(**row[measure])) for measure in MEASURES)
            rows.append([run.about["model"], row["setting"], f"{row['kv_read_share']:.1%}", *cells])
    headings = ["model", "settings", "KV read", "agreement (95 %)", "overlap, at least", "likelihood"]
    return Block(table(headings, rows), files)


def mixes() -> Block:
    """Needles decoded from the question under every preset, and under mixes of them."""
    paths = [mix_file(name) for name in MIXES]
    departures = [
        wrap(f"- `{name}`: {departure}", "  ")
        for name, _, departure in describe_policies()
        if departure and name in MIXES
    ]
    parts = [
        table(["preset or mix", *_EVALUATED], _evaluated(paths)),
        "Where the policies leave their papers:",
        "\n".join(departures),
    ]
    return Block("\n\n".join(parts), paths)


def stopped_answers() -> Block:
    """Needles decoded from the question under `art`, at long contexts, with the share of the KV cache that was read."""
    paths = sorted((_CPU / "art").glob("*.jsonl"))
    rows = []
    for path in paths:
        file = read_results(path)
        shares = read_shares(list(file.results.values()))
        for place, share in shares.items():
            task, context = place
            answers = [r for r in file.results.values() if (r.task, r.context_tokens) == place]
            if not answers:  # all tasks together
                continue
            of_answers = [r.kv_read_share for r in answers if r.kv_read_share is not None]
            right = f"{sum(r.score for r in answers):.0f}/{len(answers)}"
            reach = f"{min(of_answers):.1%} to {max(of_answers):.1%}"
            rows.append([file.settings["model"], file.label, f"{context:,}", task, right, f"{share:.1%}", reach])
    headings = ["model", "attention", "context", "task", "right", "KV cache read", "by answer"]
    return Block(table(headings, rows), paths)


def calibrated() -> Block:
    """What `vllm-sparse calibrate` says of a model with sink groups and of one without, and answers with both."""
    paths = [_CPU / "calibrate" / f"{model}.jsonl" for model in ("witness-6m", "needle-8m")]
    rows = []
    for run in map(read_run, paths):
        (line,) = run.rows
        skipped, precision, recall = line["detection"]
        answers = [sum(row[key] for row in line["rows"]) for key in ("dense_answers_right", "routed_answers_right")]
        asked = sum(row["answers"] for row in line["rows"])
        shares = (f"{share:.1%}" for share in (line["sink_groups"], skipped, precision, recall))
        right = (f"{count}/{asked}" for count in answers)
        verdict = "yes" if line["verdict"][0] else "no"
        rows.append([run.about["model"], *shares, f"{line['auprc']:.3f}", *right, verdict])
    headings = ["model", "sink groups", "skipped", "of them sink groups", "sink groups skipped", "AUPRC"]
    calibration = table([*headings, "dense", "routed", "recommended"], rows)
    mixed = [_CPU / "witness" / f"{name}.jsonl" for name in _WITNESS_MIXES]
    answers_table = table(["witness-6m through vLLM, from the question", *_EVALUATED], _evaluated(mixed))
    return Block(f"{calibration}\n\n{answers_table}", [*paths, *mixed])


def first_values() -> Block:
    """How large the value is that the zero of a skipped group stands for, by layer, and answers by skip ratio."""
    paths = sorted((_CPU / "calibrate").glob("*_16k.jsonl"))
    layers, ratios = [], []
    for run in map(read_run, paths):
        (line,) = run.rows
        model = run.about["model"]
        for row in line["layers"]:
            shares = (f"{row[key]:.1%}" for key in ("skipped", "sink_groups"))
            sizes = (f"{row[key]:.2f}" for key in ("first_value", "first_value_largest"))
            layers.append([model, str(row["layer"]), *shares, *sizes])
        for row in line["sweep"]:
            tokens = f"{row['tokens_right'] / row['tokens']:.1%}"
            shares = (f"{row[key]:.1%}" for key in ("skip_ratio", "skipped", "precision", "recall"))
            ratios.append([model, *shares, f"{row['answers_right']}/{row['answers']}", tokens])
        dense = (sum(row[key] for row in line["rows"]) for key in ("dense_answers_right", "answers"))
        tokens_right, tokens = (sum(row[key] for row in line["rows"]) for key in ("dense_tokens_right", "tokens"))
        ratios.append([model, "dense", "0.0%", "", "", "/".join(map(str, dense)), f"{tokens_right / tokens:.1%}"])
    by_layer = table(["model", "layer", "skipped", "sink groups", "value of token 0, mean", "largest"], layers)
    headings = ["model", "asked for", "skipped", "of them sink groups", "sink groups skipped", "answers", "tokens"]
    return Block(f"{by_layer}\n\n{table(headings, ratios)}", paths)

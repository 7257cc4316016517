"""Blocks about a pretrained model, from the results of `research.real`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, model_of, read_rows, read_run
from bench.pages.serving import read_steps
from bench.pages.sinks import ESSAYS, whole_texts
from vllm_sparse_plugin.config.stopping import Stopping
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_excess, estimate_mean, estimate_ratio

_REAL = RESULTS / "h200" / "real"
ADAPTIVE = sorted((RESULTS / "h100" / "real").glob("adaptive_*.jsonl"))
"""Adaptive and fixed numbers of important tokens."""
DECODE, PREFILL, ROUTING, RULER = (_REAL / f"{name}.jsonl" for name in ("decode_8k", "prefill", "routing", "ruler"))
SERVED_UNIQUE, SERVED_EVERY, SERVED_POLICIES, SERVED_BACKENDS = (
    _REAL / f"served_{name}.jsonl" for name in ("unique", "every", "policies", "backends")
)
"""Served text, each file with dense attention in other batches."""
EVICTING_GEMMA = _REAL / "served_evicting_gemma.jsonl"
EVICTING_GEMMA_MORE = RESULTS / "h100" / "real" / "served_evicting_gemma.jsonl"
"""The same on another host, with larger budgets and the published form."""
OTHERS_GEMMA = [_REAL / f"served_{name}_gemma.jsonl" for name in ("paper", "routed")]
"""The same texts with published forms of backends, and routed as calibrated."""
FORTY_TEXTS, FORTY_ANSWERS = _REAL / "forty_served.jsonl", _REAL / "forty_ruler.jsonl"
"""Two fifths of the cache: H2O and StreamingLLM keep them, SinkRouter reads them."""
CONTRIBUTIONS = _REAL / "contributions.jsonl"
SERVED_GEMMA = _REAL / "served_backends_gemma.jsonl"
ART_ANSWERS, ART_TEXTS = (RESULTS / "h200" / "stopping" / f"{name}.jsonl" for name in ("answers", "texts"))
"""ART alone and over eviction: `bench.quality ruler` and `served`."""
ANCHOR_TIMES = RESULTS / "h200" / "decode-anchors"
ANSWERS = _REAL / "answers.jsonl", _REAL / "answers_more.jsonl"
_NOISE, DENSE = "noise", "dense"
"""Arms: dense attention in float32, and dense attention."""
_DECODED = 128
"""Tokens of a text that are decoded."""
_PAGE_TOKENS = 8
_CODE, _TEXT_TOKENS = "code", 7680
STATISTICS = {
    "quarters4_wider": "`quarters`",
    "keys2_best": "all keys of a page in 2 bits",
    "quarters4": "quarters, half the step",
    "mean8_deviation": "`int8`",
    "oracle": "true attention weight (a bound)",
}
FORMS = {
    "zipvl": "`zipvl_paper`: tau 0.975",
    "rows": "all tokens attend to important ones",
    "rows_local64": "`zipvl`: and to the newest 64; tau 0.975",
    "rows_local64_90": "the same, tau 0.9",
}
ADAPTIVE_ARMS = tuple(f"{others}_{tau}" for others in ("attend", "zero") for tau in (0.95, 0.975, 0.99))
AS_SERVED = "attend_0.975"
"""The form of backend `zipvl`."""
RULES = {
    "pool25": "`snapkv`: `pool_tokens` 25",
    "pool13": "`pool_tokens` 13",
    "snapkv": "`snapkv_paper`: `pool_tokens` 5",
    "pyramid25": "`pyramidkv`: `pool_tokens` 25",
    "pyramid": "`pyramidkv_paper`: `pool_tokens` 5",
    "h2o": "`h2o`",
    "answer25": "votes of the answer itself (a bound)",
}
ROUTES = {
    "cosine": "cosine of query and first key (SinkRouter)",
    "mass_before_sink": "weight of the first token in the step before",
    "static": "fixed groups",
    "energy_before": "output norm in the step before",
    "mass_sink": "weight of the first token (a bound)",
    "energy": "output norm (a bound)",
}
_KEPT = 0.25
"""Share of a prompt that is kept."""
_ANSWERED = 0.2
"""Score of a task of RULER that dense attention answers. Less tells nothing of a selection."""
SETTINGS = {
    "unique-1024": "`unique`",
    "unique-2048": "`unique_wide`",
}
TEXTS = {
    "essay_7700": "essays of 7,700 tokens",
    "code_7700": "code of 7,700 tokens",
}
GEMMA_TEXTS = {
    "essay_8000": "essays of 8,000 tokens",
    "essay_16000": "essays of 16,000 tokens",
    "code_16000": "code of 16,000 tokens",
}
FORTY = {
    "h2o+compaction.budget_ratio=0.4": "`h2o`, `budget_ratio` 0.4",
    "streaming_llm-1632": "`streaming_llm`, 1,632 tokens",
    **{
        f"sinkrouter+config=smollm2-135m_{score}.yaml+routing.accept=not_recommended": f"`sinkrouter`, `{score}`"
        for score in ("mean", "max", "min")
    },
}
_FORTY_TEXTS = {"essay_4096": "essays", "code_4096": "code"}
GEMMA_KINDS = {text: text for text in ("essays, 8K", "essays, 16K", "code, 8K", "code, 16K")}
POLICIES = ("unique", "unique_paper", "quest", "mean", "infllm", "streaming_llm")
_AGAIN = "dense-again"
PLANS = {
    "unique-1024": ("1,024", "every layer", "main"),
    "unique-1024-every2": ("1,024", "every 2nd", "equal_every2_1024"),
    "unique-2048": ("2,048", "every layer", None),
    "unique-2048-every2": ("2,048", "every 2nd", "equal_every2"),
    "unique-2048-placed15": ("2,048", "15 of 30, placed, heads paired", None),
    "unique-2048-every3": ("2,048", "every 3rd", "equal_every3"),
    "unique-2048-placed10": ("2,048", "10 of 30, placed, heads paired", "every3_heads"),
}
"""Served settings: budget, anchors, and the file with the times of as many anchors."""
_INTERVAL = "64"
"""Tokens of a test interval of most arms."""
_TAU = float(Stopping.model_fields["scale_tolerance"].default)
_IN_SHORT = (_TAU, 1e-3)
"""Tolerances in the short table of ART."""
_SMALL = ("0.2", None), ("0.2", "votes")
"""Kept shares and orders of reading in the short table of ART."""


def decode() -> Block:
    """Changed next tokens by statistics and budget."""
    rows = [row for row in _rows(DECODE) if (row.get("kind"), row.get("context_tokens")) == (ESSAYS, _TEXT_TOKENS)]
    noise = {row["text"]: row["agreement"] for row in rows if row["arm"] == _NOISE}
    budgets = sorted({row["pages"] for row in rows if "pages" in row})
    lines = []
    for arm, name in STATISTICS.items():
        kept = (
            {row["text"]: row["agreement"] for row in rows if (row["arm"], row.get("pages")) == (arm, pages)}
            for pages in budgets
        )
        lines.append([name, *(_excess(noise, each) for each in kept)])
    return Block(table(["statistics", *(f"{pages * _PAGE_TOKENS:,} tokens" for pages in budgets)], lines), [DECODE])


def prefill() -> Block:
    """ZipVL's forms: next tokens of dense attention, and operations."""
    lines = [[name, _interval(prefill_share(arm)), f"{operations(arm):.0%}"] for arm, name in FORMS.items()]
    return Block(
        table(["form", "next tokens of dense, over dense in float32", "operations of attention"], lines), [PREFILL]
    )


def prefill_share(arm: str) -> Estimate:
    """The next tokens of dense attention that stay after a form of ZipVL's prefill, over those in float32."""
    return _over_noise(_rows(PREFILL), [row for row in _rows(PREFILL) if row["arm"] == arm])


def operations(arm: str) -> float:
    """The operations of attention in a form of ZipVL's prefill, over those of dense prefill."""
    return _mean(row["attention_flops"] for row in _rows(PREFILL) if row["arm"] == arm)


def adaptive() -> Block:
    """ZipVL's important tokens: adaptive numbers beside fixed ones of the same mean, and by layer and kind of text."""
    lines = []
    for arm in ADAPTIVE_ARMS:
        free, fixed = (adaptive_rows(arm, choice) for choice in ("adaptive", "fixed"))
        if not fixed:
            continue
        gain = estimate_excess([row["agreement"] for row in free], [row["agreement"] for row in fixed], _DECODED)
        kept = (f"{adaptive_share(arm, choice):.3f}" for choice in ("adaptive", "fixed"))
        right = (f"{adaptive_answers(arm, choice):.2f}" for choice in ("adaptive", "fixed"))
        others, _, tau = arm.partition("_")
        lines.append(
            [f"`{others}`, {tau}", f"{_mean(row['kept'] for row in free):.0%}", *kept,
             f"{gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}]", *right]
        )  # fmt: skip
    headings = ["`others`, `tau`", "kept", "next tokens, adaptive", "fixed", "gain", "RULER, adaptive", "fixed"]
    layers, kinds = adaptive_layers(), adaptive_kinds()
    of_kinds = ", ".join(f"{share:.0%} of {kind}" for kind, share in kinds.items())
    count = len(adaptive_rows(AS_SERVED, "adaptive"))
    text = (
        f"{count} texts and questions. At 0.975, `zipvl` keeps {of_kinds}, and {min(layers):.0%} to {max(layers):.0%} "
        "by layer."
    )
    return Block("\n\n".join([table(headings, lines), wrap(text, "")]), ADAPTIVE)


def adaptive_rows(arm: str, choice: str) -> list[Row]:
    """The rows of an arm of the study and a choice of its tokens."""
    rows = read_rows(ADAPTIVE)
    return [row for row in rows if (row["arm"], row.get("choice")) == (arm, choice) and "kept" in row]


def adaptive_share(arm: str, choice: str) -> float:
    """The next tokens of dense attention that stay, over those in float32."""
    return _over_noise(read_rows(ADAPTIVE), adaptive_rows(arm, choice)).value


def adaptive_answers(arm: str, choice: str) -> float:
    """The RULER score over that of dense attention."""
    rows = read_rows(ADAPTIVE)
    dense = {row["text"]: row["score"] for row in rows if row["arm"] == DENSE and "score" in row}
    found = [row for row in adaptive_rows(arm, choice) if "score" in row]
    return estimate_ratio([row["score"] for row in found], [dense[row["text"]] for row in found]).value


def adaptive_layers() -> list[float]:
    """The share of important tokens of each layer with `zipvl`, the mean of all texts and questions."""
    return list(map(_mean, zip(*(row["kept_by_layer"] for row in adaptive_rows(AS_SERVED, "adaptive")), strict=True)))


def adaptive_kinds() -> dict[str, float]:
    """The share of important tokens of each kind of text with `zipvl`."""
    rows = adaptive_rows(AS_SERVED, "adaptive")
    return {
        name: _mean(row["kept"] for row in rows if row["kind"] == kind)
        for kind, name in (("prose", "prose"), ("code", "code"), ("ruler", "RULER"))
    }


def answers() -> Block:
    """Eviction rules: RULER over dense attention."""
    rows = _answer_rows()
    lines = []
    for arm, name in RULES.items():
        survive = [row["survive"] for row in rows if row["arm"] == arm and "survive" in row]
        lines.append([name, _interval(_kept_answers(rows, arm)), f"{_mean(survive):.2f}"])
    return Block(table(["rule", "RULER score over dense", "heads that keep a whole answer"], lines), list(ANSWERS))


def kept_answers(arm: str) -> Estimate:
    """The RULER score of an eviction rule over that of dense attention."""
    return _kept_answers(_answer_rows(), arm)


def _answer_rows() -> list[Row]:
    """Rows of answers from a share of the prompt. If files repeat a row, the first one counts."""
    rows: dict[tuple[str, str], Row] = {}
    for row in read_rows(ANSWERS):
        if "score" in row and row["ratio"] in (_KEPT, 1.0):
            rows.setdefault((row["arm"], row["name"]), row)
    return list(rows.values())


def _kept_answers(rows: Sequence[Row], arm: str) -> Estimate:
    dense = {row["name"]: row["score"] for row in rows if row["arm"] == DENSE}
    found = [row for row in rows if row["arm"] == arm]
    return estimate_ratio([row["score"] for row in found], [dense[row["name"]] for row in found])


def routing() -> Block:
    """Routing rules: next tokens of dense attention by share of skipped groups."""
    kept = {name: kept_by_share(arm) for arm, name in ROUTES.items()}
    shares = kept[next(iter(kept))]
    count = max(each.count for found in kept.values() for each in found.values())
    lines = [
        [name, *(_interval(each) + _counted(each.count, count) for each in found.values())]
        for name, found in kept.items()
    ]
    shown = table(["rule", *(f"{share:.0%} skipped" for share in shares)], lines)
    return Block(f"{shown}\n\n{count} texts.", [ROUTING])


def kept_by_share(arm: str) -> dict[float, Estimate]:
    """The next tokens of dense attention that a routing rule keeps, over those in float32, by skipped share."""
    rows = [row for row in _rows(ROUTING) if "agreement" in row]
    shares = sorted({row["share"] for row in rows if "share" in row})
    found = ([row for row in rows if (row["arm"], row.get("share")) == (arm, share)] for share in shares)
    return {share: _over_noise(rows, each) for share, each in zip(shares, found, strict=True)}


def served() -> Block:
    """What vLLM decodes of essays with `unique`, beside dense attention in other batches."""
    rows = _rows(SERVED_UNIQUE)
    again = _agreements(rows, _AGAIN)
    lines = [["dense attention in other batches", f"{_mean(again.values()):.1%}", "", ""]]
    for setting, name in SETTINGS.items():
        found = _agreements(rows, setting)
        nats = _mean(row["nll"] for row in rows if row["setting"] == setting)
        lines.append([name, f"{_mean(found.values()):.1%}", _excess(again, found), f"{nats:.3f}"])
    headings = ["setting", "same next token as dense", "changed beyond dense in other batches", "more nats per token"]
    return Block(table(headings, lines), [SERVED_UNIQUE])


def policies() -> Block:
    """What vLLM decodes of texts with each policy and budget, beside dense attention in other batches."""
    rows, lines = _rows(SERVED_POLICIES), []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        if setting == _AGAIN:
            continue
        name, budget = setting.rsplit("-", 1)
        shares = (row["kv_read_share"] for row in rows if (row["setting"], row["text"]) == (setting, "essay_7700"))
        cells = [_percent(changed_in(SERVED_POLICIES, setting, text)) for text in TEXTS]
        lines.append(
            (int(budget), POLICIES.index(name), [f"`{name}`", f"{int(budget):,}", f"{_mean(shares):.1%}", *cells])
        )
    noise = [
        1 - _mean(row["agreement"] for row in rows if (row["setting"], row["text"]) == (_AGAIN, text)) for text in TEXTS
    ]
    dense = ["dense in other batches: all changes", "", "", *(f"{share:.1%}" for share in noise)]
    headings = ["policy", "tokens", "KV read", *TEXTS.values()]
    return Block(table(headings, [dense, *(line for *_, line in sorted(lines))]), [SERVED_POLICIES])


def backends() -> Block:
    """What vLLM decodes of texts with the other backends, beside dense attention in other batches."""
    return _backends([SERVED_BACKENDS], TEXTS)


def backends_gemma() -> Block:
    """The same with Gemma 3 270M."""
    return _backends([SERVED_GEMMA], GEMMA_TEXTS)


def evicting_gemma() -> Block:
    """The same with Gemma 3 270M under eviction."""
    return _backends([EVICTING_GEMMA], GEMMA_KINDS)


def evicting_gemma_more() -> Block:
    """The same with larger budgets and the published form of SnapKV, from another host."""
    return _backends([EVICTING_GEMMA_MORE], GEMMA_KINDS, ("snapkv-2048", "snapkv_paper"))


def others_gemma() -> Block:
    """The same with published forms of other backends, and with routing."""
    return _backends(OTHERS_GEMMA, GEMMA_KINDS)


def forty() -> Block:
    """Eviction, windows and routing at two fifths of the cache: changed next tokens, and RULER."""
    texts, answers = _rows(FORTY_TEXTS), _rows(FORTY_ANSWERS)
    (context,) = {row["context_tokens"] for row in answers}
    dense = _interval(ruler_score(answers, DENSE, context))
    lines = [["dense attention", "100%", "100%", *("-" for _ in _FORTY_TEXTS), dense]]
    for setting, name in FORTY.items():
        shares = [row for row in texts if row["setting"] == setting]
        cells = (f"{_mean(row[share] for row in shares):.0%}" for share in ("key_kept_share", "kv_read_share"))
        changes = (changed_in(FORTY_TEXTS, setting, text) for text in _FORTY_TEXTS)
        score = _interval(ruler_score(answers, setting, context))
        lines.append([name, *cells, *map(_percent, changes), score])
    headings = ["backend", "keys kept", "read", *(f"{kind} changed" for kind in _FORTY_TEXTS.values()), "RULER"]
    return Block(table(headings, lines), [FORTY_TEXTS, FORTY_ANSWERS])


def changed_in(path: Path, setting: str, text: str) -> Estimate:
    """The share of next tokens of a kind of text that a setting changes beyond noise, by a file of served texts."""
    found = [row for row in _rows(path) if row["text"] == text]
    return _estimate_excess(_agreements(found, _AGAIN), _agreements(found, setting))


def contributions() -> Block:
    """Tokens of large contribution that an order by weight misses, and the error of the output."""
    rows = _rows(CONTRIBUTIONS)
    context = max(row["context_tokens"] for row in rows)
    lines = []
    for count in sorted({row["tokens"] for row in rows}):
        cells = [f"{count:,}"]
        for kind in (ESSAYS, _CODE):
            found = contribution_rows(context, count, kind)
            cells += [f"{_mean(row['missed'] for row in found):.1%}"]
            cells += [f"{_mean(row[f'{order}_error'] for row in found):.3f}" for order in ("weight", "contribution")]
        lines.append(cells)
    columns = "missed", "error by weight", "by contribution"
    headings = [f"{kind}: {column}" for kind in (ESSAYS, _CODE) for column in columns]
    return Block(table(["tokens", *headings], lines), [CONTRIBUTIONS])


def contribution_rows(context: int, count: int, kind: str) -> list[Row]:
    """The layers of the texts of a kind and length, with some number of best tokens."""
    rows = whole_texts([row for row in _rows(CONTRIBUTIONS) if row["tokens"] == count])
    return [row for row in rows if (row["context_tokens"], row["kind"]) == (context, kind)]


def _backends(paths: Sequence[Path], texts: Mapping[str, str], settings: Sequence[str] = ()) -> Block:
    """The share of next tokens that each setting, or some of them, changes, by kind of text."""
    runs, lines = {path: _rows(path) for path in paths}, []
    evicts = any(row["key_kept_share"] < 1 for rows in runs.values() for row in rows)
    for path, rows in runs.items():
        for setting in dict.fromkeys(row["setting"] for row in rows):
            if setting == _AGAIN or (settings and setting not in settings):
                continue
            first = [row for row in rows if row["setting"] == setting and row["text"] == next(iter(texts))]
            kept = [f"{_mean(row['key_kept_share'] for row in first):.0%}"] if evicts else []
            cells = [_percent(changed_in(path, setting, text)) for text in texts]
            lines.append([*_named(setting), *kept, *cells])
    headings = ["backend", "tokens", *(["keys kept"] if evicts else []), *texts.values()]
    return Block(table(headings, lines), paths)


def anchors() -> Block:
    """Anchor layers: changed next tokens that vLLM decodes, and time per token."""
    lines, sources = [], [SERVED_UNIQUE, SERVED_EVERY]
    for setting, (budget, layers, name) in PLANS.items():
        rows = next(rows for rows in map(_rows, sources[:2]) if any(row["setting"] == setting for row in rows))
        cells = ["", ""]
        if name is not None:
            path = ANCHOR_TIMES / f"{name}.jsonl"
            steps = read_steps(path, "unique")
            found = (steps.get(step) for step in ((32_768, 24), (131_072, 6)))
            cells = ["" if step is None else f"{step['ms_per_token']:.2f}" for step in found]
            sources.append(path)
        lines.append([budget, layers, _excess(_agreements(rows, _AGAIN), _agreements(rows, setting)), *cells])
    headings = ["tokens", "layers that choose", "changed beyond dense", "ms, 24 x 32K", "ms, 6 x 128K"]
    return Block(table(headings, lines), sources)


def in_short() -> Block:
    """The loss of the default on a pretrained model, in a paragraph."""
    asked, decoded = _rows(RULER), _rows(SERVED_UNIQUE)
    scores = []
    for context in sorted({row["context_tokens"] for row in asked}):
        found = [ruler_score(asked, setting, context) for setting in ("unique", DENSE)]
        means = [f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in found]
        scores.append(f"{means[0]} at {context:,} tokens (dense: {means[1]})")
    more = _excess(_agreements(decoded, _AGAIN), _agreements(decoded, "unique-1024"))
    text = (
        f"SmolLM2-135M-Instruct on essays of 7,600 tokens: `unique` changes {more} of the next tokens beyond those "
        f"that dense attention changes in other batches. Its RULER score, questions decoded, is {' and '.join(scores)}."
    )
    return Block(wrap(text, ""), [SERVED_UNIQUE, RULER])


def ruler() -> Block:
    """RULER, answered by vLLM: the tasks that dense attention answers at the shortest context, and the mean of all."""
    rows = _rows(RULER)
    contexts = sorted({row["context_tokens"] for row in rows})
    tasks = dict.fromkeys(row["task"] for row in rows)
    answered = [task for task in tasks if ruler_score(rows, DENSE, contexts[0], task).value >= _ANSWERED]
    lines = []
    for task in [*answered, None]:
        means = (ruler_score(rows, setting, context, task) for context in contexts for setting in (DENSE, "unique"))
        cells = (f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}]" for mean in means)
        lines.append([f"`{task}`" if task else f"all {len(tasks)} tasks", *cells])
    headings = [f"{context:,}, {setting}" for context in contexts for setting in ("dense", "`unique`")]
    return Block(table(["task", *headings], lines), [RULER])


def ruler_policies() -> Block:
    """The mean RULER score of each backend, answered by vLLM, of the questions of a context that all have answered.

    If files repeat a row, the last one counts. A run that is out of time has answered the first tasks alone.
    """
    files = sorted(RULER.parent.glob(f"{RULER.stem}*.jsonl"))
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in read_rows(files):
        found.setdefault((row["context_tokens"], row["setting"]), {})[row["id"]] = row["score"]
    contexts, settings = sorted({context for context, _ in found}), list(dict.fromkeys(name for _, name in found))
    headings, columns = [], []
    for context in contexts:
        of_setting = {name: found[context, name] for name in settings if (context, name) in found}
        asked = set[str]().union(*of_setting.values())
        first, *others = of_setting.values()
        shared = [question for question in first if all(question in scores for scores in others)]
        some = "" if len(shared) == len(asked) else f" ({len(shared)} of {len(asked)} questions)"
        headings.append(f"{context:,}{some}")
        columns.append({name: [scores[each] for each in shared] for name, scores in of_setting.items()})
    lines = []
    for setting in settings:
        means = (estimate_mean(column[setting]) if column.get(setting) else None for column in columns)
        cells = ("" if mean is None else f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}]" for mean in means)
        lines.append([*_named(setting), *cells])
    return Block(table(["backend", "tokens", *headings], lines), files)


class Arm(NamedTuple):
    """What a setting of `bench.quality` keeps, and how it reads it."""

    backend: str
    kept: str = ""
    """Share of a prompt that is kept, as the setting gives it."""
    order: str | None = None
    """What decode steps read first; None if they never stop."""
    tau: float = _TAU
    interval: str = _INTERVAL
    """Tokens between two stop tests."""

    @classmethod
    def of(cls, setting: str) -> Arm:
        """The arm of a setting's name. Dense attention may stop, too: the backend `art`."""
        backend, *fields = setting.split("+")
        values = dict(field.split("=", 1) for field in fields)
        stops = backend == "art" or any(name.startswith("stopping.") for name in values)
        return cls(
            DENSE if backend in ("art", _AGAIN) else backend,
            values.get("compaction.budget_ratio", ""),
            values.get("stopping.dense_order", "newest") if stops else None,
            float(values.get("stopping.scale_tolerance", _TAU)),
            values.get("stopping.block_tokens", "auto") if stops else _INTERVAL,
        )

    @property
    def name(self) -> str:
        """The name in a table, behind that of the cache."""
        if self.order is None:
            return f"`{self.backend}`"
        details = [
            *(["preset"] if self.interval != _INTERVAL else []),
            *([f"by {self.order}"] if self.order != "newest" else []),
            *([f"tau {self.tau:g}"] if self.tau != _TAU else []),
        ]
        return ", ".join(["`art`" if self.backend == DENSE else "and `art`", *details])


def art() -> Block:
    """ART alone and over a small cache in its better order: keys read, answers, and next tokens that change."""
    return _stopped(
        lambda arm: arm.tau in _IN_SHORT if arm.backend == DENSE else arm[1:3] in _SMALL and arm.tau == _TAU
    )


def art_in_full() -> Block:
    """The same for every arm. Answers of fewer than a third of the questions are left out."""
    return _stopped(lambda arm: True)


def _stopped(is_shown: Callable[[Arm], bool]) -> Block:
    rows = {path: _rows(path) for path in (ART_ANSWERS, ART_TEXTS)}
    arms = dict.fromkeys(filter(is_shown, (Arm.of(row["setting"]) for path in rows for row in rows[path])))
    caches = dict.fromkeys(arm[:2] for arm in arms)
    lines, (asked, read) = [], (len(_of_arm(of_file, Arm(DENSE))) for of_file in rows.values())
    for arm in (arm for cache in caches for arm in arms if arm[:2] == cache):
        answers, texts = (_of_arm(of_file, arm) for of_file in rows.values())
        shares = (
            f"{_mean(row[name] for row in texts or answers):.1%}" for name in ("key_kept_share", "key_read_share")
        )
        if arm == Arm(DENSE):
            noise = 1 - _mean(row["agreement"] for row in texts)
            cells = [f"score {_mean(row['score'] for row in answers):.3f}", f"noise {noise:.1%}"]
        else:
            cells = [
                _interval(art_answered(arm)) + _counted(len(answers), asked) if 3 * len(answers) >= asked else "",
                _percent(_art_changed(rows[ART_TEXTS], arm)) + _counted(len(texts), read) if texts else "",
            ]
        lines.append([arm.name, *shares, *cells])
    model = str(model_of([*rows]))
    headings = [model, "keys kept", "keys read", "answers over dense", "next tokens changed"]
    return Block(table(headings, lines), [*rows])


def _counted(rows: int, all_rows: int) -> str:
    """The number of rows of a run that was out of time. Such a run has the first tasks or texts alone."""
    return "" if rows == all_rows else f", {rows} of {all_rows}"


def art_answered(arm: Arm) -> Estimate:
    """The score of the answers of an arm over that of dense attention."""
    dense, found = (
        {row["id"]: row["score"] for row in _of_arm(_rows(ART_ANSWERS), each)} for each in (Arm(DENSE), arm)
    )
    return estimate_ratio(list(found.values()), [dense[item] for item in found])


def _art_changed(rows: Sequence[Row], arm: Arm) -> Estimate:
    """The share of next tokens that an arm changes beyond noise."""
    noise, found = ({row["id"]: row["agreement"] for row in _of_arm(rows, each)} for each in (Arm(DENSE), arm))
    return _estimate_excess(noise, found)


def preset_art(path: Path) -> tuple[float, float]:
    """The share of next tokens that the preset `art` changes beyond noise, and the share of the keys that it reads."""
    rows, arm = _rows(path), Arm.of("art")
    return _art_changed(rows, arm).value, _mean(row["key_read_share"] for row in _of_arm(rows, arm))


def _of_arm(rows: Sequence[Row], arm: Arm) -> list[Row]:
    return [row for row in rows if Arm.of(row["setting"]) == arm]


def _named(setting: str) -> list[str]:
    """The backend of a setting and the tokens that it reads or keeps, in a table."""
    backend, routed, _ = setting.partition("+config=")
    if routed:
        return [f"`{backend}`", "calibrated"]
    backend, _, tokens = setting.partition("-")
    return [f"`{backend}`", f"{int(tokens):,}" if tokens else "all" if setting == DENSE else "preset"]


def _agreements(rows: Sequence[Row], setting: str) -> dict[str, float]:
    """The agreement of each text that was served."""
    return {row["id"]: row["agreement"] for row in rows if row["setting"] == setting}


def ruler_score(rows: Sequence[Row], setting: str, context: int, task: str | None = None) -> Estimate:
    """The mean score of a setting, of one task or of all."""
    return estimate_mean(
        [
            row["score"]
            for row in rows
            if (row["setting"], row["context_tokens"]) == (setting, context) and task in (None, row["task"])
        ]
    )


def changed(setting: str) -> Estimate:
    """The share of next tokens that `unique` changes beyond dense attention in other batches, by its setting."""
    rows = _rows(SERVED_UNIQUE)
    return _estimate_excess(_agreements(rows, _AGAIN), _agreements(rows, setting))


def _excess(noise: Mapping[str, float], kept: Mapping[str, float]) -> str:
    """The share of next tokens that change beyond noise, with its interval; agreements by text."""
    return _percent(_estimate_excess(noise, kept))


def _estimate_excess(noise: Mapping[str, float], kept: Mapping[str, float]) -> Estimate:
    return estimate_excess([noise[text] for text in kept], list(kept.values()), _DECODED)


def _over_noise(rows: Sequence[Row], found: Sequence[Row]) -> Estimate:
    """Agreements over those of dense attention in float32, of the texts that have both."""
    noise = {row["text"]: row["agreement"] for row in rows if row["arm"] == _NOISE}
    found = [row for row in found if row["text"] in noise]
    return estimate_ratio([row["agreement"] for row in found], [noise[row["text"]] for row in found])


def _percent(share: Estimate) -> str:
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _interval(share: Estimate) -> str:
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _rows(path: Path) -> list[Row]:
    return read_run(path).rows


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)

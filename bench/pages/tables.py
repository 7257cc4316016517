"""The tables of the pages, as data: files, lines and columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bench.common.options import size_text
from bench.pages import settings
from bench.pages.claims import CLAIMS
from bench.pages.labels import budget_of, text_of
from bench.pages.numbers import (
    ABOUT,
    AGAIN,
    FILE,
    MACHINE,
    Number,
    Rows,
    answered,
    beside,
    changed,
    chosen,
    items,
    kept_answers,
    last,
    lost,
    mean,
    ratio,
    recorded,
    score,
    stayed,
    tally,
    total,
)  # fmt: skip
from bench.pages.render import INTERVAL, PERCENT, Cell, Line, Lines, Name, Spec, Table, named
from vllm_sparse_plugin.tools.eval.statistics import Estimate

_TIMES, _GAIN = "{v:.2f}x", "({v:.2f}x)"
_SIGNED = "{v:+.3f} [{low:+.3f}, {high:+.3f}]"


def _is_dense(variant: str) -> bool:
    return variant.startswith("flash_attn")


def _is_unique(variant: str) -> bool:
    return variant.partition(":")[0] == "unique"


def _budget(**where: Any) -> Number:
    """The budget of the last row, in tokens."""
    return last(lambda row: int(budget_of(row).removesuffix(" tokens").replace(",", "") or 0) or None, **where)


def _ms(**where: Any) -> Number:
    """Milliseconds per token of the last row, with the least and the most of its repeats."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        found = [row for row in chosen(rows, where) if "ms_per_token" in row]
        if not found:
            return None
        row: dict[str, Any] = {"repeats": 1, **found[-1]}
        low, high = (
            row[name]
            if (name := f"ms_per_token_{end}") in row
            else row.get(f"ms_per_token_{share}", row["ms_per_token"])
            for end, share in (("min", "p20"), ("max", "p80"))
        )
        return Estimate(row["ms_per_token"], low, high, row["repeats"])

    return number


def _decode(files: tuple[str, ...], form: str = "{v:.2f}", mixed: bool = True) -> Table:
    """Decode steps of `unique` beside FlashAttention 3: GPU, budget and cache are those of the file."""
    dense, ours = _ms(variant=_is_dense), _ms(variant=_is_unique)
    return Table(
        files,
        {
            "GPU": named(MACHINE),
            "requests": lambda row: _loads(row.get("load") or f"{row['batch']}x{size_text(row['context_tokens'])}"),
            "cache": lambda row: f"{'bf16' if row['kv_cache_dtype'] == 'auto' else row['kv_cache_dtype']}, "
            f"{text_of(dict(row)).partition(',')[0]}",
        },
        {
            "budget": Cell(_budget(variant=_is_unique), "{v:,.0f}"), "new tokens": Cell(last("new_tokens"), "{v:.0f}"),
            "FlashAttention 3, ms": Cell(dense, form), "`unique`, ms": Cell(ours, form),
            "ratio": Cell(ratio(dense, ours), _TIMES),
        },
        where={} if mixed else {"load": lambda load: "+" not in load},
        order=lambda names: (names[2], _largest(names[1])),
    )  # fmt: skip


def _largest(load: str) -> tuple[int, ...]:
    """Sorts described loads by their longest context and the requests in it."""
    parts = re.findall(r"(\d+) of (\d+)K", load)
    return max((int(context), len(parts), int(count)) for count, context in parts)


def _is_unlike(load: str) -> bool:
    """Whether a load has what the table of decode steps has not: mixed, dense, very short or very long requests."""
    return bool(re.search(r"^(?!16x32K\+1x128K).*([+:]|x(1K|200|700K)$)", load))


def _loads(load: str) -> str:
    """Describes the requests of a load: `8x32K+1x128K:dense` is `8 of 32K, 1 of 128K (dense)`."""
    parts = []
    for part in load.split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        parts.append(f"{count} of {context}{f' ({argument})' if argument else ''}")
    return ", ".join(parts)


def _prompt(row: Mapping[str, Any]) -> str:
    cached = f", {round(row['cached_tokens'] / 1024)}K of them cached" if row["measurement"] == "prefix_hit" else ""
    return f"{row['context_tokens']:,}{cached}"


def _first_token(variant: str) -> Number:
    return last("seconds_median", variant=variant)


def _served(files: tuple[str, ...], texts: Mapping[str, str], kept: str, heading: str) -> Table:
    """Next tokens that change, by setting and kind of text."""

    def backend(row: Mapping[str, Any]) -> str | None:
        name = str(row["setting"])
        return None if name == AGAIN else f"`{name.partition('-')[0]}`"

    def tokens(row: Mapping[str, Any]) -> str:
        found = str(row["setting"]).partition("-")[2]
        return f"{int(found):,}" if found.isdigit() else "preset"

    first = next(iter(texts))
    cells = {name: Cell(changed(text=text), PERCENT) for text, name in texts.items()}
    columns = {heading: Cell(mean(kept, text=first), "{v:.0%}"), **cells}
    return Table(files, {"backend": backend, "tokens": tokens}, columns)


def _ruler_name(row: Mapping[str, Any]) -> str:
    name, _, tokens = str(row["setting"]).partition("-")
    return f"`{name}`, {int(tokens):,}" if tokens else f"`{name}`"


def _budget_line(row: Mapping[str, Any]) -> str:
    if "section" in row:
        return f"{row['section']['selection']['budget_tokens']:,}"
    return budget_of(dict(row)).removesuffix(" tokens") or "dense"


def _step_of(context: int, batch: int) -> Cell:
    return Cell(_ms(context_tokens=context, batch=batch))


_ANCHORED = {
    "unique-1024": "1,024, every layer", "unique-1024-every2": "1,024, every 2nd layer",
    "unique-2048": "2,048, every layer", "unique-2048-every2": "2,048, every 2nd layer",
    "unique-2048-placed15": "2,048, 15 of 30 layers, placed, heads paired",
    "unique-2048-every3": "2,048, every 3rd layer",
    "unique-2048-placed10": "2,048, 10 of 30 layers, placed, heads paired",
}  # fmt: skip
_ANCHOR_TIMES = {
    "main": "unique-1024", "equal_every2_1024": "unique-1024-every2", "equal_every2": "unique-2048-every2",
    "equal_every3": "unique-2048-every3", "every3_heads": "unique-2048-placed10",
}  # fmt: skip


def _anchored(row: Mapping[str, Any]) -> str | None:
    if "setting" in row:
        return _ANCHORED.get(row["setting"])
    return _ANCHORED[_ANCHOR_TIMES[row[FILE]]] if row["variant"] == "unique" else None


_STATISTICS = {
    "quarters4_wider": "`quarters`", "keys2_best": "all keys of a page in 2 bits", "mean8_deviation": "`int8`",
    "oracle": "true attention weight (a bound)",
}  # fmt: skip
_RULES = {
    "pool25": "`snapkv`: `pool_tokens` 25", "pool13": "`pool_tokens` 13", "snapkv": "`snapkv_paper`: `pool_tokens` 5",
    "pyramid25": "`pyramidkv`: `pool_tokens` 25", "pyramid": "`pyramidkv_paper`: `pool_tokens` 5", "h2o": "`h2o`",
    "answer25": "votes of the answer itself (a bound)",
}  # fmt: skip
_WINDOWS = {
    "dense": "all tokens", "window": "the newest 1,024", "window_sinks": "the first 4, the newest 1,020",
    "window_word": "“the” four times before the text, the newest 1,020",
}  # fmt: skip
_OFFLOADED = {
    "flash_attn": "FlashAttention 3, all in GPU memory", "unique": "`unique`, all in GPU memory",
    "copies_100": "`unique_offload`, room for all pages", "copies_4": "`unique_offload`, `hot_pages` 4",
}  # fmt: skip
_RETURNING = {
    "again_dense": "FlashAttention 3", "again_vllm": "FlashAttention 3 with vLLM's KV offloading",
    "again_offload": "`unique_offload`",
}  # fmt: skip
_SHORT = "+stopping.block_tokens=64+min_context_tokens=0"
_FIFTH = "+compaction.budget_ratio=0.2"
_STOPPED = {
    f"art{_SHORT}": "`art`, intervals of 64", "art": "`art`, preset",
    f"art{_SHORT}+stopping.scale_tolerance=1e-3": "`art`, intervals of 64, tau 0.001",
    f"snapkv{_FIFTH}": "`snapkv`", f"snapkv{_FIFTH}{_SHORT}+stopping.dense_order=votes": "`snapkv` and `art`, by votes",
    f"pyramidkv{_FIFTH}": "`pyramidkv`",
    f"pyramidkv{_FIFTH}{_SHORT}+stopping.dense_order=votes": "`pyramidkv` and `art`, by votes",
}  # fmt: skip
_FORMS = {
    "zipvl": "`zipvl_paper`: tau 0.975", "rows": "all tokens attend to important ones",
    "rows_local64": "`zipvl`: and to the newest 64; tau 0.975", "rows_local64_90": "the same, tau 0.9",
}  # fmt: skip
_FORTY = {
    "dense": "dense attention", "h2o+compaction.budget_ratio=0.4": "`h2o`, `budget_ratio` 0.4",
    "streaming_llm-1632": "`streaming_llm`, 1,632 tokens",
    **{f"sinkrouter+config=smollm2-135m_{score}.yaml+routing.accept=not_recommended": f"`sinkrouter`, `{score}`, forced"
       for score in ("mean", "max", "min")},
}  # fmt: skip
_BEFORE = {"arm": "before", "part": "text", "budget_tokens": None}


def _right(key: str) -> Number:
    """The share of right tokens of a calibration."""
    return last(lambda row: sum(each[key] for each in row["rows"]) / sum(each["tokens"] for each in row["rows"]))


def _detected(place: int) -> Cell:
    return Cell(last(lambda row: row["detection"][place]), "{v:.1%}")


def _nats(kind: str, context: int) -> Cell:
    return Cell(mean("nats", kind=kind, context_tokens=context))


def _kernel(provider: str) -> Number:
    return last("warm.median_us", provider=provider)


def _count(rows: Rows, _: Rows) -> Estimate:
    return Estimate(len(rows), len(rows), len(rows), len(rows))


def _machine(name: str) -> Name:
    return lambda row: f"{row[MACHINE]}, {row[name]}" if name in row else None


def _gain(load: str, unit: str, files: tuple[str, ...], dense: Number, plugin: Number, settings: str, form: str,
          faster: bool = True) -> Line:  # fmt: skip
    """A line about a gain: a time falls, a rate grows."""
    gain = ratio(dense, plugin) if faster else ratio(plugin, dense)
    cells = (load, unit, f"{{dense.value:{form}}}", f"{{plugin.value:{form}}}", settings, "{gain.value:.1f}x")
    return Line(files, cells, {"dense": dense, "plugin": plugin, "gain": gain})


_WIDE = ("h200/frontier/decode_dense", "h200/frontier/decode_2048")
_FP8 = ("h200/decode/flash_attn_fp8_cache", "h200/decode/unique_fp8_cache")
_CAPACITY = ("h200/compaction/capacity_window",)
_CROWD = "256 clients, prompts of 16,384 tokens, answers of 2,048, cache of 134,000"


def _pair(column: str, dense: Any, plugin: Any, **where: Any) -> tuple[Number, Number]:
    return last(column, variant=dense, **where), last(column, variant=plugin, **where)


_GAINS = Lines(
    ["load on one H200", "unit", "dense", "plugin", "settings", "gain"],
    [
        *(_gain(f"{batch} x 131,072 tokens, random keys", "ms per token", _WIDE,
                *_pair("ms_per_token", _is_dense, _is_unique, context_tokens=131072, batch=batch), "`unique_wide`",
                ".1f")
          for batch in (1, 6)),
        _gain("12 x 131,072 tokens, random keys", "ms per token", _FP8,
              *_pair("ms_per_token", _is_dense, _is_unique, batch=12), "`unique`, 512 tokens, both with an fp8 cache",
              ".1f"),
        _gain(_CROWD, "requests at once", _CAPACITY, *_pair("running_mean", "dense", "snapkv"), "`snapkv`", ".1f",
        False),
        _gain(_CROWD, "output tokens per s", _CAPACITY, *_pair("output_tokens_per_second", "dense", "snapkv"),
              "`snapkv`", ",.0f", False),
        _gain("1 prompt of 131,072 tokens", "s to the first token", ("h200/prefill/chunks_8k",),
              *_pair("seconds_median", "flash_attn", "unique_prefill", context_tokens=131072,
              measurement="first_token"),
              "`unique_prefill`", ".1f"),
    ],
)  # fmt: skip

TABLES: Mapping[str, Spec] = {
    "configuration": settings.configuration,
    "statistics-memory": settings.statistics_memory,
    **CLAIMS,
    "decode-gpu": _decode(("h200/decode/served",), mixed=False),
    "decode-h100": _decode(("h100/decode/main",)),
    "decode-steps": _decode(
        ("h200/decode/served", *_FP8, "h200/decode/flash_attn_1m", "h200/decode/unique_1m"),
        "{v:.2f} [{low:.2f}, {high:.2f}]",
    ),
    "recipe-gains": _GAINS,
    "loads": Table(
        ("h100/loads/server*", "h200/loads/server*"),
        {"GPU": named(MACHINE), "`max_model_len`": named("max_model_len", form="{:,}"),
         "requests": lambda row: _loads(row["load"])},
        {"FlashAttention 3, ms": Cell(_ms(variant=_is_dense)), "`unique`, ms": Cell(_ms(variant=_is_unique)),
         "ratio": Cell(ratio(_ms(variant=_is_dense), _ms(variant=_is_unique)))},
        where={"ms_per_token": lambda value: value is not None, "load": _is_unlike},
    ),
    "prefill-gpu": Table(
        ("h200/prefill/chunks_*",),
        {"prompt": _prompt, "tokens of a step": named("chunk_tokens", form="{:,}")},
        {"FlashAttention 3, s": Cell(_first_token("flash_attn")),
         "`unique_prefill`, s": (Cell(_first_token("unique_prefill")),
                                 Cell(ratio(_first_token("flash_attn"), _first_token("unique_prefill")), _GAIN))},
        where={"measurement": ("first_token", "prefix_hit"), "seconds_median": lambda value: value is not None},
        order=lambda names: (len(names[0]), names[0], len(names[1])),
    ),
    "serving": Table(
        ("h200/serve/few_clients", "h200/serve/unique_prefill"),
        {"prompt": named("input_tokens", form="{:,}"), "cached": named("prefix_tokens", form="{:,}"),
         "clients": named("concurrency"), "backend": named("variant", form="`{}`")},
        {"first token, ms": Cell(last("ttft_ms_median"), "{v:,.0f}"), "ms per token": Cell(last("tpot_ms_median")),
         "tokens per s": (
             Cell(last("output_tokens_per_second"), "{v:.1f}"),
             Cell(ratio(last("output_tokens_per_second"),
                        beside(last("output_tokens_per_second"), ("input_tokens", "prefix_tokens", "concurrency", FILE),
                               variant="flash_attn")), _GAIN))},
        order=lambda names: (len(names[0]), names[0], len(names[1]), int(names[2]), names[3]),
    ),
    "frontier": Table(
        ("h200/frontier/decode_*", "cpu-2core/tune/needle-8m"),
        {"budget": _budget_line},
        {"32 x 8K, ms": _step_of(8192, 32), "24 x 32K, ms": _step_of(32768, 24), "6 x 128K, ms": _step_of(131072, 6),
         "same next token, needle-8m": Cell(recorded("agreement"), "{v:.3f} [{low:.3f}, {high:.3f}]")},
        order=lambda names: 0 if names[0] == "dense" else int(names[0].replace(",", "")),
    ),
    "readme-answers": Lines(
        ["SmolLM2-135M, `unique`", "value", "beside dense attention"],
        [
            Line(("h200/real/served_unique",), ("next tokens of essays of 7,600 tokens that change", "{more.value:.1%}"
                 " [{more.low:.1%}, {more.high:.1%}]", "beyond what it changes in other batches"),
                 {"more": changed(setting="unique-1024")}),
            *(Line(("h200/real/ruler",), (f"RULER score, {context:,} tokens, question decoded",
                   "{own.value:.3f} [{own.low:.3f}, {own.high:.3f}]",
                   "{dense.value:.3f} [{dense.low:.3f}, {dense.high:.3f}]"),
                   {"own": score(setting="unique", context_tokens=context),
                    "dense": score(setting="dense", context_tokens=context)})
              for context in (4096, 7900)),
        ],
    ),
    "real-policies": Table(
        ("h200/real/served_policies",),
        {"policy": lambda row: None if row["setting"] == AGAIN else f"`{row['setting'].partition('-')[0]}`",
         "tokens": lambda row: None if row["setting"] == AGAIN else f"{int(row['setting'].partition('-')[2]):,}"},
        {"KV read": Cell(mean("kv_read_share", text="essay_7700"), "{v:.1%}"),
         "essays of 7,700 tokens": Cell(changed(text="essay_7700"), PERCENT),
         "code of 7,700 tokens": Cell(changed(text="code_7700"), PERCENT)},
        order=lambda names: (int(names[1].replace(",", "")), names[0]),
    ),
    "real-ruler-policies": Table(
        ("h200/real/ruler*",),
        {"backend, tokens": _ruler_name},
        {"score, 4,096 tokens": Cell(score(context_tokens=4096), INTERVAL),
         "over dense": Cell(answered(context_tokens=4096)),
         "7,900 tokens, over dense": Cell(answered(context_tokens=7900), INTERVAL)},
    ),
    "real-backends": _served(("h200/real/served_backends",), {
        "essay_7700": "essays of 7,700 tokens", "code_7700": "code of 7,700 tokens",
    }, "key_kept_share", "keys kept"),
    "real-backends-gemma": _served(("h200/real/served_backends_gemma",), {
        "essay_8000": "essays of 8,000 tokens", "essay_16000": "of 16,000", "code_16000": "code of 16,000",
    }, "kv_read_share", "KV read"),
    "real-anchors": Table(
        ("h200/real/served_unique", "h200/real/served_every", "h200/decode-anchors/*"),
        {"tokens, layers that choose": _anchored},
        {"changed beyond dense": Cell(changed(setting=lambda value: value is not None), PERCENT),
         "ms, 24 x 32K": _step_of(32768, 24), "ms, 6 x 128K": _step_of(131072, 6)},
        order=lambda names: list(_ANCHORED.values()).index(names[0]),
    ),
    "real-decode": Table(
        ("h200/real/decode_8k",), {"statistics": named("arm", _STATISTICS)},
        {f"{pages * 8:,} tokens": Cell(lost(pages=pages), PERCENT) for pages in (64, 128, 192, 256)},
        where={"kind": "prose", "context_tokens": 7680},
        order=lambda names: list(_STATISTICS.values()).index(names[0]),
    ),
    "real-answers": Table(
        ("h200/real/answers_more", "h200/real/answers"), {"rule": named("arm", _RULES)},
        {"RULER score over dense": Cell(kept_answers(), INTERVAL),
         "heads that keep a whole answer": Cell(mean("survive"))},
        where={"ratio": (0.25, 1.0), "score": lambda value: value is not None},
        order=lambda names: list(_RULES.values()).index(names[0]),
    ),
    "compaction-turns": Table(
        ("cpu-2core/compaction/turns_*",), {"backend": named("variant", form="`{}`")},
        {turn: Cell(tally("right", "questions", turn=turn), "{v:.0f}/{n}")
         for turn in ("first", "second", "second, protected", "second, a new request")},
    ),
    "compaction-decoding": Table(
        ("h200/compaction/decoding_8b",),
        {"backend or method": named("variant", {"dense": "`dense`", "snapkv": "`snapkv`", "h2o": "`h2o`"})},
        {"requests at once": Cell(last("running_mean"), "{v:.0f}"),
         "output tokens per s": Cell(last("output_tokens_per_second"), "{v:,}"),
         "median step, ms": Cell(last("step_ms_median"), "{v:.1f}"),
         "99th percentile": Cell(last("step_ms_p99"), "{v:.0f}"), "longest": Cell(last("step_ms_max"), "{v:.0f}")},
    ),
    "real-windows": Table(
        ("cpu-2core/real/sinks",), {"each token reads": named("arm", _WINDOWS)},
        {"essays, 2,048 tokens": _nats("prose", 2048), "code, 2,048 tokens": _nats("code", 2048),
         "essays, 7,680 tokens": _nats("prose", 7680)},
        where={"nats": lambda value: value is not None},
    ),
    "offload-steps": Table(
        ("h200/offload/flash_attn", "h200/offload/unique", "h200/offload/copies_*"),
        {"keys and values": named(FILE, _OFFLOADED)},
        {f"{batch} x 128K, ms": Cell(_ms(batch=batch)) for batch in (1, 6)}
        | {f"from the host, {batch}": Cell(last("host_read_share", batch=batch), "{v:.0%}") for batch in (1, 6)},
        where={"context_tokens": 131072, "one_token": True},
    ),
    "offload-conversations": Table(
        ("h200/offload/again_dense", "h200/offload/again_vllm", "h200/offload/again_offload"),
        {"attention": named(FILE, _RETURNING)},
        {"requests at once": Cell(last("running_most"), "{v:.0f}"),
         "output tokens per s": Cell(last("output_tokens_per_second"), "{v:,.0f}"),
         "ratio": Cell(ratio(last("output_tokens_per_second"),
                             beside(last("output_tokens_per_second"), **{FILE: "again_dense"})), "{v:.1f}x")},
    ),
    "real-art": Table(
        ("h200/stopping/answers", "h200/stopping/texts"), {"backend": named("setting", _STOPPED)},
        {"keys kept": Cell(mean("key_kept_share", **{FILE: "texts"}), "{v:.1%}"),
         "keys read": Cell(mean("key_read_share", **{FILE: "texts"}), "{v:.1%}"),
         "answers over dense": Cell(answered(**{FILE: "answers"}), INTERVAL),
         "next tokens changed": Cell(changed(**{FILE: "texts"}), PERCENT)},
        order=lambda names: list(_STOPPED.values()).index(names[0]),
    ),
    "training-arms": Table(
        ("h200/training-arms/*",), {"arm": named("arm")},
        {**{f"RULER, {budget or 'dense'}": Cell(items("scores", part="questions", budget_tokens=budget), INTERVAL)
            for budget in (None, 512, 128)},
         **{f"nats of text, {budget or 'dense'}": Cell(items("losses", _BEFORE, part="text", budget_tokens=budget),
                                                       _SIGNED) for budget in (None, 128)}},
    ),
    "real-prefill": Table(
        ("h200/real/prefill",), {"form": named("arm", _FORMS)},
        {"next tokens of dense, over dense in float32": Cell(stayed(), INTERVAL),
         "operations of attention": Cell(mean("attention_flops"), "{v:.0%}")},
    ),
    "calibrated": Table(
        ("cpu-2core/calibrate/witness-6m", "cpu-2core/calibrate/needle-8m", "h200/calibrate/smollm2-135m_mean",
         "h200/calibrate/gemma-3-270m_mean"),
        {"model": named("model")},
        {"sink groups": Cell(last("sink_groups"), "{v:.1%}"), "skipped": _detected(0),
        "of them sink groups": _detected(1),
         "sink groups skipped": _detected(2), "AUPRC": Cell(last("auprc"), "{v:.3f}"),
         "tokens right, dense": Cell(_right("dense_tokens_right"), "{v:.1%}"),
         "routed": Cell(_right("routed_tokens_right"), "{v:.1%}")},
    ),
    "real-forty": Table(
        ("h200/real/forty_ruler", "h200/real/forty_served"), {"backend": named("setting", _FORTY)},
        {"keys kept": Cell(mean("key_kept_share", text="essay_4096"), "{v:.0%}"),
         "read": Cell(mean("kv_read_share", text="essay_4096"), "{v:.0%}"),
         "essays changed": Cell(changed(text="essay_4096"), PERCENT),
         "code changed": Cell(changed(text="code_4096"), PERCENT), "RULER": Cell(score(), INTERVAL)},
    ),
    "lossless-adaptive": Table(
        ("h200/lossless/adaptive",),
        {"context": named("context_tokens", form="{:,}"), "requests": named("batch"),
        "acceptance": named("acceptance")},
        {"tokens per step": Cell(last("tokens_per_step")),
         "FlashAttention 3, ms per token": Cell(beside(_ms(), ("context_tokens", "batch"), variant="flash_attn")),
         "lossless, ms per token": Cell(_ms()),
         "ratio": Cell(ratio(beside(_ms(), ("context_tokens", "batch"), variant="flash_attn"), _ms()))},
        where={"ms_per_token": lambda value: value is not None, "context_tokens": (32768, 131072)},
        order=lambda names: (len(names[0]), int(names[1]), float(names[2])),
    ),
    "fuzz": Table(
        ("cpu-2core/fuzz/states",), {"machine": named(MACHINE)},
        {"seeds": Cell(_count, "{v}")} | {
            heading: Cell(total(column), "{v:,.0f}") for heading, column in {
                "steps": "steps", "requests": "requests", "prefix hits": "hits", "preemptions": "preemptions",
                "aborts": "aborts", "rejected drafts": "rejected", "pages compared": "pages",
                "outputs compared": "judged_rows"}.items()
        } | {"faults": Cell(total(lambda row: bool(row["fault"])), "{v:.0f}")},
    ),
    "soak": Table(
        ("*/soak/needle-8m", "h100/soak/evicting"), {"machine, clients": _machine("clients")},
        {"minutes": Cell(last(lambda row: row["seconds"] / 60), "{v:.0f}"), "answers": Cell(last("answers"), "{v:,}"),
         "given up": Cell(last("hung_up"), "{v:,}"), "parted at a tie": Cell(last("parted"), "{v}"),
         "faults": Cell(last(lambda row: len(row["faults"])), "{v}"),
         "cache in use at the end": Cell(last("kv_cache_usage"), "{v:.0%}")},
    ),
    "storm": Table(
        ("*/storm/*",),
        {"machine, backend": _machine("backend"), "clients": named("clients"), "hostile": named("hostile_clients"),
         "minutes": named("minutes", form="{:g}")},
        {"hostile requests": Cell(last(lambda row: sum(row["requests"].values())), "{v:,}"),
         "changed": Cell(last("storm.changed_too_far"), "{v}"), "of answers": Cell(last("storm.answers"), "{v:,}"),
         "ms per token, without": Cell(last("quiet_again.ms_per_token_median"), "{v:.0f}"),
         "with": Cell(last("storm.ms_per_token_median"), "{v:.0f}"),
         "faults": Cell(last(lambda row: len(row["faults"])), "{v}")},
    ),
    "kernels-default": Table(
        ("h200/kernels/leveled", "h200/kernels/one_head"),
        {"context": lambda row: size_text(row["case"]["context"]), "requests": named("case.batch"),
         "KV heads": lambda row: str(row[ABOUT]["geometry"]["num_kv_heads"])},
        {"`unique`, µs": Cell(_kernel("unique"), "{v:.1f}"),
         "FlashAttention 3": (Cell(_kernel("FlashAttention 3"), "{v:.1f}"),
                              Cell(ratio(_kernel("FlashAttention 3"), _kernel("unique")), "({v:.1f}x)"))},
        where={"op": "decode", "case.format": "int4", "case.group": 4, "case.tokens": 1},
    ),
}  # fmt: skip
"""The specification of each block."""

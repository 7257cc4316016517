"""Numbers of the papers beside those measured here. What was run here is derived from the result files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.pages.numbers import (
    FILE,
    Number,
    Rows,
    answered,
    changed,
    items,
    kept_answers,
    last,
    mean,
    ratio,
    score,
    stayed,
    total,
)  # fmt: skip
from bench.pages.render import Line, Lines
from vllm_sparse_plugin.tools.eval.statistics import Estimate

_HEADINGS = ("result", "paper", "here", "what was run here", "verdict and difference")
_ESSAYS, _LAYERS = {"kind": "prose", "context_tokens": 7680, "arm": "layer"}, {"layer": lambda layer: layer >= 12}
_ARMS = ("h200/training-arms/*",)
_KERNELS = ("h200/kernels/all",)
_STEPS = ("h200/decode/{}", "h200/decode-newer-vllm/{}", "h200/frontier/decode_{}")
_ADAPTIVE, _ZERO = ("h100/real/adaptive_attend",), ("h100/real/adaptive_zero",)
_STOP, _SMALL = "h200/kernels/stop", "+stopping.block_tokens=64+min_context_tokens=0"
_TERMINATION = ("cpu-2core/termination/needle-8m",)
_SINKS, _REAL = ("cpu-2core/real/sinks",), "h200/real/{}"


def _claim(result: str, paper: str, here: str, verdict: str, files: Sequence[str],
           where: Mapping[str, Any] | None = None, **numbers: Number) -> Line:  # fmt: skip
    return Line(files, (result, paper, here, "{setting}", verdict), numbers, where or {})


def _missing(result: str, paper: str, reason: str) -> Line:
    return Line((), (result, paper, "not measured", "", reason))


def _time(provider: str, op: str, case: str, heat: str = "warm") -> Number:
    return last(f"{heat}.median_us", provider=provider, op=op, case_name=case)


def _over(provider: str, rival: str, op: str, case: str, heat: str = "warm", less: float = 0.0) -> Number:
    return ratio(_time(rival, op, case, heat), _time(provider, op, case, heat), less)


def _share(**where: Any) -> Number:
    """The share of right answers of rows that have a digit for each."""
    return ratio(total(lambda row: row["right"], **where), total(lambda row: row["questions"], **where))


def _layers(column: str, **where: Any) -> Number:
    """A sum over the layers of a stop test, for each row of a head."""
    heads = total(lambda row: sum(layer["rows"] for layer in row["layers"]), **where)
    return ratio(total(lambda row: sum(layer[column] for layer in row["layers"]), **where), heads)


def _level(column: str) -> Number:
    where = {"arm": "level", "level": 0.8}
    return ratio(total(lambda row: row["queries"] * row[column], **where), total("queries", **where))


def _step(variant: str, context: int, batch: int, **where: Any) -> Number:
    return last("ms_per_token", variant=lambda name: name.startswith(variant), context_tokens=context, batch=batch,
                **where)  # fmt: skip


def _faster(context: int, batch: int, rival: str = "flash_attn", ours: str = "unique") -> Number:
    return ratio(_step(rival, context, batch), _step(ours, context, batch))


def _scores(arm: str, budget: int | None) -> Number:
    return items("scores", part="questions", arm=arm, budget_tokens=budget)


def _chosen(choice: str, arm: str = "attend_0.975") -> Number:
    return stayed(arm=arm, choice=choice)


def _first_token(name: str, variant: str) -> Number:
    return last("seconds_median", variant=variant, **{FILE: name})


_UNIQUE = (
    _claim("Table 1: LongBench Pro, 1,024 / 512 tokens", "36.72 / 36.58 of 37.70",
           "{a.value:.1%} / {b.value:.1%} of next tokens change", "other measure",
           (_REAL.format("served_policies"),), {"setting": ("dense-again", "unique_paper-1024", "unique_paper-512"),
           "text": "essay_7700"}, a=changed(setting="unique_paper-1024"), b=changed(setting="unique_paper-512")),
    _claim("the same, `unique` (quarters)", "-", "{a.value:.1%} / {b.value:.1%} / {c.value:.1%} change",
           "half of the published form's loss", (_REAL.format("served_policies"),),
           {"setting": ("dense-again", "unique-2048", "unique-1024", "unique-512"), "text": "essay_7700"},
           a=changed(setting="unique-2048"), b=changed(setting="unique-1024"), c=changed(setting="unique-512")),
    _claim("Table 2: RULER 32K, 512 tokens (1.6%)", "90.78 of 93.15",
           "`unique_paper` {a.value:.3f}, `unique` {b.value:.3f} of {c.value:.3f}",
           "confirms, with 25% of the context read",
           (_REAL.format("ruler"),), {"setting": ("dense", "unique", "unique_paper-1024"), "context_tokens": 4096},
           a=score(setting="unique_paper-1024"), b=score(setting="unique"), c=score(setting="dense")),
    _claim("Table 2: Quest, InfLLM, UNIQUE", "84.14, 73.30, 90.78 of 93.15",
           "{a.value:.1%}, {b.value:.1%}, {c.value:.1%} of next tokens change",
           "confirms the order",
           (_REAL.format("served_policies"),), {"setting": ("dense-again", "quest-512", "infllm-512",
           "unique_paper-512"),
           "text": "essay_7700"},
           a=changed(setting="quest-512"), b=changed(setting="infllm-512"), c=changed(setting="unique_paper-512")),
    _missing("Table 2: InfLLM-v2, DSA", "see the paper", "not implemented; trained models only"),
    _claim("Table 2: H2O, 512 tokens", "56.00 of 93.15", "{a.value:.2f} of dense", "confirms: it loses most",
           (_REAL.format("answers_more"),), {"arm": ("dense", "h2o"), "ratio": (0.25, 1.0),
           "score": lambda value: value is not None}, a=kept_answers(arm="h2o")),
    _claim("Table 3: trained with the mask, 512 tokens", "37.25 of 36.55",
           "hard {a.value:.2f}, soft {b.value:.2f}, no mask {c.value:.2f}; dense {d.value:.2f}",
           "contradicts: without a mask most", _ARMS,
           {"part": "questions", "arm": ("dense", "hard", "soft"), "budget_tokens": (512, None)},
           a=_scores("hard", 512), b=_scores("soft", 512), c=_scores("dense", 512), d=_scores("dense", None)),
    _claim("Table 7: soft, hard mask", "17.89, 18.32 (errors)", "{a.value:.3f}, {b.value:.3f} answered",
           "contradicts: the hard mask is not worse", _ARMS,
           {"part": "questions", "arm": ("hard", "soft"), "budget_tokens": 128}, a=_scores("soft", 128),
           b=_scores("hard", 128)),
    _missing("Tables 4, 5: speech, error", "18.60, trained 17.89; dense 18.25", "no speech model"),
    *(_claim("Table 6: without, with deviation", "19.11, 18.60 (errors)",
             "{a.value:.1%}, {b.value:.1%} of next tokens change", verdict, (_REAL.format(name),),
             {"setting": ("dense-again", f"mean-{budget}", f"unique_paper-{budget}"), "text": text},
             a=changed(setting=f"mean-{budget}"), b=changed(setting=f"unique_paper-{budget}"))
      for verdict, name, budget, text in (
          ("confirms", "served_policies", 512, "essay_7700"),
          ("contradicts: the mean alone loses less", "served_backends_gemma", 1024, "essay_8000"))),
    _claim("Table 8: fused score, 8K, 128K", "39, 342 µs (1.73x, 1.46x)",
           "{a.value:.0f}, {b.value:.0f} µs ({c.value:.2f}x, {d.value:.2f}x)",
           "confirms; commit 627b4b9", _KERNELS,
           {"op": "score", "case_name": ("32q1s8K g4 bf16", "32q1s128K g4 bf16")},
           a=_time("unique", "score", "32q1s8K g4 bf16"), b=_time("unique", "score", "32q1s128K g4 bf16"),
           c=_over("unique", "three launches", "score", "32q1s8K g4 bf16"),
           d=_over("unique", "three launches", "score", "32q1s128K g4 bf16")),
    _claim("Table 9: top-k, 1K, 16K (FlashInfer; torch)", "13, 22 µs (2.0x, 1.4x; 2.4x, 4.6x)",
           "{a.value:.1f}, {b.value:.1f} µs ({c.value:.1f}x, {d.value:.1f}x; {e.value:.1f}x, {f.value:.1f}x)",
           "confirms; ranks, no radix", _KERNELS,
           {"op": "topk", "case_name": ("256 x 1K", "256 x 16K")},
           a=_time("unique", "topk", "256 x 1K"), b=_time("unique", "topk", "256 x 16K"),
           **{name: _over("unique", rival, "topk", f"256 x {pages}") for name, rival, pages in (
               ("c", "flashinfer.top_k_page_table_transform", "1K"), ("d", "flashinfer.top_k_page_table_transform",
               "16K"),
               ("e", "torch.topk", "1K"), ("f", "torch.topk", "16K"))}),
    _claim("Fig. 2: attention over FlashInfer, 128K", "11.4x", "{a.value:.1f}x (`quarters`), {b.value:.1f}x (`int8`)",
           "confirms; commit 627b4b9", _KERNELS, {"op": "decode", "case_name": ("32q1s128K g4", "32q1s128K g4 int8")},
           a=_over("unique", "FlashInfer", "decode", "32q1s128K g4"),
           b=_over("unique", "FlashInfer", "decode", "32q1s128K g4 int8")),
    *(_claim("Fig. 3: decode step, 128K", "at least 5.3x", "{a.value:.1f}x at 6 x 128K", verdict, files,
             {"context_tokens": 131072, "batch": 6, "variant": ("flash_attn", "unique")},
             a=_faster(131072, 6))
      for verdict, files in (
          ("confirms with the paper's budget", tuple(_STEPS[2].format(name) for name in ("dense", "512"))),
          ("below it with the default budget", ("h200/decode/served",)))),
)  # fmt: skip
_SINKROUTER = (
    _claim("Table 1: largest weight beside 0.8", "0.0195 (ratio 51) at 16K", "{a.value:.4f} (ratio {b.value:.0f})",
           "confirms: one token holds most weight", _SINKS, {"kind": "prose", "context_tokens": 7680, "arm": "level"},
           a=_level("largest_other"), b=_level("ratio")),
    _claim("Fig. 1: norm of the first value", "near 0", "{a.value:.2f}, others {b.value:.2f}, layers 12 to 29",
           "smaller, not near 0; layers 0 to 11 have no sink", _SINKS, _ESSAYS | _LAYERS,
           a=mean("first_value_norm"), b=mean("value_norm")),
    _claim("Fig. 2: norm of the first key", "below others", "{a.value:.2f}, others {b.value:.2f}, layers 12 to 29",
           "confirms", _SINKS, _ESSAYS | _LAYERS, a=mean("first_key_norm"), b=mean("key_norm")),
    _claim("Fig. 3: keys of BOS", "compact cluster", "cosine with queries {a.value:.2f}, layers 12 to 29",
           "other measure", _SINKS, _ESSAYS | _LAYERS, a=mean("query_cosine")),
    _claim("Fig. 9: writes of sink heads, of others", "smaller, less aligned",
           "{a.value:.3f}, {b.value:.3f}; aligned {c.value:.2f}, {d.value:.2f}", "confirms", _SINKS,
           _ESSAYS | {"sink_write": lambda value: value is not None}, a=mean("sink_write"), b=mean("other_write"),
           c=mean("sink_alignment"), d=mean("other_alignment")),
    _claim("Table 2: LongBench, 60% skipped", "49.89 of 50.58",
    "{a.value:.3f} of {b.value:.3f} answered, {c.value:.0%} read",
           "confirms, on a model that was trained to have sinks", ("cpu-2core/witness/sinkrouter",
           "cpu-2core/witness/dense"),
           a=score(**{FILE: "sinkrouter"}), b=score(**{FILE: "dense"}), c=mean("kv_read_share",
           **{FILE: "sinkrouter"})),
    _claim("Table 2: H2O, StreamingLLM, it, 40%", "50.61, 32.82, 49.89 of 50.58",
           "{a.value:.2f}, {b.value:.2f}, {c.value:.2f} of {d.value:.2f}; {e.value:.0%} read",
           "contradicts", (_REAL.format("forty_ruler"),), {"setting": lambda name:
           name in ("dense", "h2o+compaction.budget_ratio=0.4", "streaming_llm-1632") or "_mean.yaml" in name},
           a=score(setting="h2o+compaction.budget_ratio=0.4"), b=score(setting="streaming_llm-1632"),
           c=score(setting=lambda name: "_mean" in name), d=score(setting="dense"),
           e=mean("kv_read_share", setting=lambda name: "_mean" in name)),
    _claim("Fig. 5: accuracy by skipped share", "flat, then falls",
           "{a.value:.2f}, {b.value:.2f}, {c.value:.2f} of next tokens stay at 5%, 10%, 20%",
           "contradicts: it falls from the start", (_REAL.format("routing"),), {"arm": ("noise", "cosine"),
           "agreement": lambda value: value is not None}, a=stayed(arm="cosine", share=0.05),
           b=stayed(arm="cosine", share=0.1), c=stayed(arm="cosine", share=0.2)),
    _missing("Tables 3, 4, 5: InfiniteBench; images", "53.47 of 53.43; 53.82 of 54.05; 32.89 of 33.14", "no data"),
    _claim("Figs. 6, 7: step, 512K", "2.03x", "{a.value:.2f}x", "below the paper; rival FlashAttention 3",
           ("h200/routing/flash_attn_512k", "h200/routing/sinkrouter_512k"), None,
           a=_faster(524288, 1, "flash_attn", "sinkrouter")),
    _claim("Fig. 8: skipped share by task, length", "60% held by a cubic", "{a.value:.0%} to {b.value:.0%}", "confirms",
           ("h200/calibrate/smollm2-135m_mean",), None,
           a=last(lambda row: min(each["skipped"] for each in row["rows"])),
           b=last(lambda row: max(each["skipped"] for each in row["rows"]))),
    *(_claim("Fig. 10: AUPRC of the cosine", "0.773", "{a.value:.3f}", verdict, (file,), None, a=last("auprc"))
      for verdict, file in (
          ("confirms; trained for sinks", "cpu-2core/calibrate/witness-6m"),
          ("contradicts", "h200/calibrate/smollm2-135m_mean"),
          ("contradicts", "h200/calibrate/gemma-3-270m_mean"))),
    _claim("Fig. 11: sinks among skipped", "most", "{a.value:.0%} at 10% skipped", "half",
           (_REAL.format("routing"),), {"arm": "cosine", "share": 0.1}, a=mean("precision")),
)  # fmt: skip


def _art(tau: str) -> str:
    return f"art{_SMALL}" + (f"+stopping.scale_tolerance={tau}" if tau else "")


_VOTES = f"snapkv+compaction.budget_ratio=0.2{_SMALL}+stopping.dense_order=votes"
_ART = (
    *(_claim("Tables 1, 7: LongBench; time per token", "45.74 of 46.29; 1.16x",
             "{a.value:.1%} of next tokens change; {b.value:.1%} read",
             "no test: it does not stop", (_REAL.format(name),),
             {"setting": ("dense-again", "art")}, a=changed(setting="art"), b=mean("key_read_share", setting="art"))
      for name in ("served_backends", "served_backends_gemma")),
    _claim("Table 2: NIAH 32K", "78.65 of 99.34", "{a.value:.2f} of dense; {b.value:.1%} read",
    "confirms the loss; tests every 64 tokens",
           ("h200/stopping/answers",), {"setting": ("dense", _art(""))}, a=answered(setting=_art("")),
           b=mean("key_read_share", setting=_art(""))),
    _claim("Table 2: SnapKV, with ART", "95.68 of 99.37", "{a.value:.2f} of dense, with ART {b.value:.2f}",
           "no test: ART reads {c.value:.1%} of {d.value:.1%}, so it does not stop",
           ("h200/stopping/answers",), {"setting": ("dense", "snapkv+compaction.budget_ratio=0.2", _VOTES)},
           a=answered(setting="snapkv+compaction.budget_ratio=0.2"), b=answered(setting=_VOTES),
           c=mean("key_read_share", setting=_VOTES), d=mean("key_kept_share", setting=_VOTES)),
    _claim("Table 3: without scale, direction, patience", "19.34, 43.87, 41.54 (45.74)",
           "{a.value:.2f}, {b.value:.2f}, {c.value:.2f} ({d.value:.2f}) at tau 1e-3",
           "confirms, but for direction", _TERMINATION, {"order": "newest first"},
           a=_share(rule="no scale test"), b=_share(rule="no direction test, 0.001"),
           c=_share(rule="no patience, 0.001"), d=_share(rule="whole, 0.001")),
    _claim("Table 4: probe agrees, 8K", "99.88%", "{a.value:.1%}", "contradicts; all layers", _TERMINATION,
           {"scale": 1e-5, "context_tokens": 8192},
           a=ratio(total(lambda row: sum(each["decisions"] - each["early"] - each["late"] for each in row["layers"])),
                   total(lambda row: sum(each["decisions"] for each in row["layers"])))),
    *(_claim("Table 6: cost of the tests", "1.3%", "{a.value:.0%}, {b.value:.0%}, {c.value:.0%} at 8K, 32K, 128K",
             verdict, (_STOP,), {"case.batch": batch}, **{
                 name: _over("sinkrouter, not routed", "art that never stops", "stop", f"{batch}q1s{context} g4",
                 "cold", 1)
                 for name, context in (("a", "8K"), ("b", "32K"), ("c", "128K"))})
      for batch, verdict in ((1, "contradicts with 1 request; over no stop rule"), (32,
      "near it with 32; over no stop rule"))),
    _claim("Fig. 4: error by loaded share", "falls fast", "{a.value:.4f} after {b.value:.0%}", "one point",
    _TERMINATION,
           {"order": "newest first", "rule": "whole, 1e-05"}, a=_layers("error_sum"), b=_layers("share_sum")),
    _claim("Fig. 5: throughput", "up to 1.20x", "{a.value:.2f}x; {b.value:.2f}x if it never stops",
           "a bound: models here do not stop by themselves",
           ("h200/stopping/flash_attn", "h200/stopping/stops", "h200/stopping/vain"), {"context_tokens": 32768},
           a=ratio(_step("flash_attn", 32768, 8), _step("art", 32768, 8, **{FILE: "stops"})),
           b=ratio(_step("flash_attn", 32768, 8), _step("art", 32768, 8, **{FILE: "vain"}))),
    _claim("Fig. 6: tau 1e-4, paper's 46.0 without", "44.71",
           "{a.value:.2f} of dense at 1e-4, {b.value:.2f} at 1e-3; {c.value:.0%}, {d.value:.0%} read",
           "contradicts: most answers are lost", ("h200/stopping/answers",),
           {"setting": ("dense", _art("1e-4"), _art("1e-3"))}, a=answered(setting=_art("1e-4")),
           b=answered(setting=_art("1e-3")), c=mean("key_read_share", setting=_art("1e-4")),
           d=mean("key_read_share", setting=_art("1e-3"))),
    _claim("Fig. 8: gain by length", "grows", "{a.value:.1f}x, {b.value:.1f}x, {c.value:.1f}x at 8K, 32K, 128K",
           "a bound: the data make heads stop", (_STOP,), {"case.batch": 32}, **{
               name: _over("art", "FlashAttention 3", "stop", f"32q1s{context} g4", "cold")
               for name, context in (("a", "8K"), ("b", "32K"), ("c", "128K"))}),
    _claim("Fig. 1: key scores miss outputs", "most", "{a.value:.0%}, {b.value:.0%} of the best 64, 1,024 missed",
           "few are missed", (_REAL.format("contributions"),), {"kind": "prose", "context_tokens": 7680},
           a=mean("missed", tokens=64), b=mean("missed", tokens=1024)),
)  # fmt: skip
_ZIPVL = (
    _claim("Table 1: VQAv2, tau 0.975", "80.4 of 80.9",
    "`zipvl_paper` {a.value:.2f}, `zipvl` {b.value:.2f} of next tokens",
           "contradicts for the published form on text", (_REAL.format("prefill"),), {"arm": ("noise", "zipvl",
           "rows_local64")}, a=stayed(arm="zipvl"), b=stayed(arm="rows_local64")),
    _claim("Table 2: operations; cache", "-82.3%; -57.9%", "`zipvl_paper` {a.value:.0%} left, `zipvl` {b.value:.0%}",
           "less is saved on text; the cache was kept", (_REAL.format("prefill"),), {"arm": ("zipvl", "rows_local64")},
           a=mean("attention_flops", arm="zipvl"), b=mean("attention_flops", arm="rows_local64")),
    *(_claim("Table 3: adaptive, fixed ratio", "52.4, 51.1", "{a.value:.3f}, {b.value:.3f}", verdict, files,
             {"arm": ("noise", arm), "choice": (None, "adaptive", "fixed")}, a=_chosen("adaptive", arm),
             b=_chosen("fixed", arm))
      for verdict, files, arm in (("confirms, published form", _ZERO, "zero_0.975"),
                                  ("`zipvl` does not need it", _ADAPTIVE, "attend_0.975"))),
    _missing("Table 3: in a quantized cache", "54.06, 53.75", "nothing was quantized"),
    *(_claim("Table 4: first token, 128K", "20.57 of 48.01 s (2.3x)",
    "{a.value:.2f} of {b.value:.2f} s ({c.value:.2f}x)",
             verdict, (f"h200/prefill/{name}",), {"context_tokens": 131072}, a=_first_token(name, "zipvl"),
             b=_first_token(name, "flash_attn"), c=ratio(_first_token(name, "flash_attn"), _first_token(name, "zipvl")))
      for verdict, name in (("contradicts: no gain, `zipvl_paper`, chunks of 8K", "zipvl_paper"),
                            ("no gain, `zipvl`, chunks of 8K", "zipvl"))),
    _claim("Table 4: throughput, 16K", "2.8x", "{a.value:,.0f} of {b.value:,.0f} tokens/s ({c.value:.1f}x)",
           "confirms; 42% of the tokens kept, few answers ended in the window", ("h200/compaction/capacity_zipvl",),
           None,
           a=last("output_tokens_per_second", variant=lambda name: name != "dense"),
           b=last("output_tokens_per_second", variant="dense"),
           c=ratio(last("output_tokens_per_second", variant=lambda name: name != "dense"),
                   last("output_tokens_per_second", variant="dense"))),
    _claim("Figs. 5, A: smaller tau", "falls below 0.97", "{a.value:.2f}, {b.value:.2f}, {c.value:.2f}, `zipvl`",
           "falls slowly", (_REAL.format("prefill"),), {"arm": ("noise", "rows_local64", "rows_local64_95",
           "rows_local64_90")}, a=stayed(arm="rows_local64"), b=stayed(arm="rows_local64_95"),
           c=stayed(arm="rows_local64_90")),
    *(_claim("Table A: hybrid, newest, random probes", "52.6, 52.4, 6.3 of 54.8",
             "{a.value:.3f}, {b.value:.3f}, {c.value:.3f}", verdict, files, {"arm": ("noise", arm), "choice": (None,
             "fixed",
             "newest rows", "random rows")}, a=_chosen("fixed", arm), b=_chosen("newest rows", arm),
             c=_chosen("random rows", arm))
      for verdict, files, arm in (("published form, fixed share", _ZERO, "zero_0.975"),
                                  ("`zipvl`, fixed share", _ADAPTIVE, "attend_0.975"))),
    *(_claim("Table B: normalised, accumulated score", "52.64, 52.40", "{a.value:.3f}, {b.value:.3f}", verdict, files,
             {"arm": ("noise", arm), "choice": (None, "fixed", "ranked by sums")}, a=_chosen("fixed", arm),
             b=_chosen("ranked by sums", arm))
      for verdict, files, arm in (("published form, fixed share", _ZERO, "zero_0.975"),
                                  ("`zipvl`, fixed share", _ADAPTIVE, "attend_0.975"))),
    _claim("Figs. 3, 4: ratio by layer", "varies", "{a.value:.0%} to {b.value:.0%}", "confirms", _ADAPTIVE,
           {"arm": "attend_0.975", "choice": "adaptive"}, a=lambda rows, every: _by_layer(rows)[0],
           b=lambda rows, every: _by_layer(rows)[-1]),
    _claim("Table C: probe and choice, 16K", "0.95 s of 3.48", "{a.value:.2f} + {b.value:.2f} of {c.value:.2f} ms",
           "one layer", ("h200/kernels/tokens",), {"case.context": 16384},
           **{name: last(lambda row: row["cold"]["median_us"] / 1e3, provider=provider) for name, provider in (
               ("a", "part: probe"), ("b", "part: choice"), ("c", "FlashAttention 3"))}),
)  # fmt: skip


def _by_layer(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The mean kept share of each layer, as numbers."""
    shares = [row["kept_by_layer"] for row in rows if "kept_by_layer" in row]
    means = [mean("share")([{"share": each} for each in layer], []) for layer in zip(*shares, strict=True)]
    return sorted(filter(None, means), key=lambda found: found.value)


def _perplexity(arm: str) -> Number:
    """The perplexity of the mean loss."""

    def number(rows: Rows, every: Rows) -> Estimate | None:
        found = mean("nats", arm=arm)(rows, every)
        if found is None:
            return None
        value = math.exp(found.value)
        return Estimate(value, value, value, found.count)

    return number


_STREAMING = (
    _claim("perplexity: dense, window, 4 sinks", "6, above 1,000, below 7",
    "{a.value:.1f}, {b.value:.1f}, {c.value:.1f}",
           "confirms; window of 1,024", _SINKS, {"kind": "prose", "context_tokens": 7680,
           "arm": ("dense", "window", "window_sinks")},
           a=_perplexity("dense"), b=_perplexity("window"), c=_perplexity("window_sinks")),
    _claim("“the” four times as sinks", "most of the gain", "{a.value:.1f}", "confirms", _SINKS,
           {"kind": "prose", "context_tokens": 7680, "arm": "window_word"}, a=_perplexity("window_word")),
    *(_claim("at 64K: without, with sinks", "-", "{a.value:.1f}, {b.value:.1f}", verdict, (f"h200/compaction/{name}",),
    None,
             a=last(lambda row: row["perplexity"][-1], window="no sinks"),
             b=last(lambda row: row["perplexity"][-1], window="sinks, true positions"))
      for name, verdict in (("stream_witness-6m", "confirms; tiny model with trained sinks"),
                            ("stream_needle-8m", "tiny model with few sinks"))),
    _claim("heat map: first tokens", "bright stripe", "{a.value:.0%} of the weight, layers 12 to 29", "confirms",
    _SINKS,
           _ESSAYS | _LAYERS, a=mean("mass")),
    _missing("H2O throughput; step at 64K, dense, Quest", "29x; 6.2, 3.2 ms (computed)", "no OPT; other GPU"),
)  # fmt: skip
_RIVALS = (
    _claim("Vortex (2606.06453): throughput, Qwen3-1.7B, H200", "3.46x",
           "{a.value:.1f}x, {b.value:.1f}x, {c.value:.1f}x with 1, 8, 24 requests", "decode steps alone",
           ("h200/decode/qwen3",), None, a=_faster(32768, 1), b=_faster(32768, 8), c=_faster(32768, 24)),
    _claim("Kascade (2512.16391): decode attention, H100", "4.1x",
    "{a.value:.1f}x at 8 x 32K, {b.value:.1f}x at 32 x 128K",
           "every layer selects", ("h200/kernels/leveled",), {"case_name": ("8q1s32K g4", "32q1s128K g4")},
           a=_over("unique", "FlashAttention 3", "decode", "8q1s32K g4"),
           b=_over("unique", "FlashAttention 3", "decode", "32q1s128K g4")),
    _claim("Kascade: prefill", "2.2x", "{a.value:.2f}x", "first token", ("h200/prefill/chunks_8k",),
           {"context_tokens": 131072, "measurement": "first_token"},
           a=ratio(last("seconds_median", variant="flash_attn"), last("seconds_median", variant="unique_prefill"))),
    _claim("SPIN (2604.26837): throughput, host memory", "1.66x to 5.66x",
           "{a.value:.1f}x; {b.value:.1f}x of vLLM's offloading", "returning clients", ("h200/offload/again_*",), None,
           **{name: ratio(last("output_tokens_per_second", **{FILE: "again_offload"}),
                          last("output_tokens_per_second", **{FILE: rival}))
              for name, rival in (("a", "again_dense"), ("b", "again_vllm"))}),
    _claim("R-KV: requests, throughput", "2.56x, 1.32x", "{a.value:.1f}x requests, {b.value:.1f}x tokens per s",
           "eviction by `snapkv`", ("h200/compaction/window_decoding_8b",), {"variant": ("dense", "snapkv")},
           **{name: ratio(last(column, variant="snapkv"), last(column, variant="dense"))
              for name, column in (("a", "running_mean"), ("b", "output_tokens_per_second"))}),
)  # fmt: skip
CLAIMS = {
    f"reproduction-{name}": Lines(_HEADINGS, claims)
    for name, claims in (
        ("unique", _UNIQUE), ("sinkrouter", _SINKROUTER), ("art", _ART), ("zipvl", _ZIPVL),
        ("streaming-llm", _STREAMING), ("rivals", _RIVALS),
    )
}  # fmt: skip
"""Papers and what was measured here, by block."""

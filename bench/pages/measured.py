"""Values of this project for the claims of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench.common.arms import Cell, questions
from bench.common.options import size_text
from bench.common.results import RESULTS, Row, read_rows, read_run
from bench.pages import compaction, kernels, offload, prefill, quality, real, serving, sinks
from bench.pages.arms import arm_files
from vllm_sparse_plugin.tools.eval.results import read_results

_H200, _CPU = RESULTS / "h200", RESULTS / "cpu-2core"
_PAGE_SCORES = _H200 / "page-scores" / "all.jsonl"
_TERMINATION = _CPU / "termination" / "needle-8m.jsonl"
_KERNELS = _H200 / "kernels" / "all.jsonl"
_QWEN3 = _H200 / "decode" / "qwen3.jsonl"
_TEXT_TOKENS = 7680
"""Tokens of the texts that show the first token."""
_LEVEL = 0.8
"""Weight on the first token in SinkRouter's table."""
_NEWEST_FIRST = "newest first"
_MODELS = {"smollm2-135m": "S", "needle-8m": "N"}
_STOPPED = real.Arm(real.DENSE, order="newest"), real.Arm("snapkv", "0.2"), real.Arm("snapkv", "0.2", "votes")
"""ART alone, SnapKV, and both."""


class Found(NamedTuple):
    """A measured value and its result files."""

    text: str
    paths: Sequence[Path]


def changed_tokens() -> Found:
    """Next tokens that change beyond noise, with 2,048 and with 1,024 tokens."""
    cells = (real.changed(f"unique-{budget}").value for budget in (2048, 1024))
    return Found(f"S: {' / '.join(f'{cell:.1%}' for cell in cells)} of next tokens change", [real.SERVED_UNIQUE])


def ruler() -> Found:
    """RULER scores at the shorter context."""
    rows = read_run(real.RULER).rows
    sparse, dense = (100 * real.ruler_score(rows, setting, 4096).value for setting in ("unique", "dense"))
    return Found(f"S, 1,024 tokens: {sparse:.1f} of {dense:.1f}", [real.RULER])


def policies() -> Found:
    """Needles answered by Quest, InfLLM and UNIQUE."""
    paths = [quality.mix_file(name) for name in ("quest", "infllm", "unique")]
    right = (sum(result.score for result in read_results(path).results.values()) for path in paths)
    counts = (f"{count:.0f}" for count in right)
    return Found(f"N: {', '.join(counts)} of {len(read_results(paths[0]).results)}", paths)


def trained() -> Found:
    """RULER scores after training with the hard mask, and of dense attention after dense training."""
    budget, (hard, dense) = _arm_scores(("hard", True), ("dense", False))
    return Found(f"S, {budget} tokens: {hard:.2f} of {dense:.2f} RULER", arm_files())


def _arm_scores(*arms: tuple[str, bool]) -> tuple[int, list[float]]:
    """The budget of the trained arms, and the mean RULER score of arms with this budget or densely; all weights."""
    budget, scores = int(read_run(arm_files()[0]).about["budget_tokens"]), questions(read_rows(arm_files()))
    return budget, [mean(scores[Cell(arm, 0, budget if sparse else None)]) for arm, sparse in arms]


def deviation() -> Found:
    """Needles answered by the mean alone, and with the deviation."""
    shares = [_share([row for row in read_run(_PAGE_SCORES).rows if _is_plain(row, kind)]) for kind in _SCORES]
    return Found(f"N: {shares[0]:.3f}, {shares[1]:.3f} right", [_PAGE_SCORES])


_SCORES = ("mean-int8", "unique-int8-1")


def masks() -> Found:
    """RULER scores after training with the soft and with the hard mask."""
    budget, (soft, hard) = _arm_scores(("soft", True), ("hard", True))
    return Found(f"S, {budget} tokens: {soft:.2f}, {hard:.2f} RULER", arm_files())


def fused_score() -> Found:
    """Times of the fused score and of three launches, by the mean and deviation in 16 bits."""
    times = kernels.read_times(_KERNELS)
    cells, ratios = [], []
    for context in ("8K", "128K"):
        found = times["score", f"32q1s{context} g4 bf16"]
        ours, launches = (found[name]["warm"]["median_us"] for name in ("unique", "three launches"))
        cells.append(f"{ours:.0f}")
        ratios.append(f"{launches / ours:.2f}x")
    return Found(f"{', '.join(cells)} µs ({', '.join(ratios)})", [_KERNELS])


def top_k() -> Found:
    """Times of the top-k of 256 rows."""
    times = kernels.read_times(_KERNELS)
    cells, rivals = [], {"flashinfer": list[str](), "torch": list[str]()}
    for pages in ("1K", "16K"):
        found = {name: row["warm"]["median_us"] for name, row in times["topk", f"256 x {pages}"].items()}
        cells.append(f"{found['unique']:.1f}")
        for rival, ratios in rivals.items():
            best = min(time for name, time in found.items() if name.startswith(rival))
            ratios.append(f"{best / found['unique']:.1f}x")
    text = f"{', '.join(cells)} µs ({', '.join(rivals['flashinfer'])}; {', '.join(rivals['torch'])})"
    return Found(text, [_KERNELS])


def attention_kernel() -> Found:
    """Attention of a decode step over FlashInfer, by statistics."""
    times, ratios = kernels.read_times(_KERNELS), []
    for name in ("", " int8"):
        found = times["decode", f"32q1s128K g4{name}"]
        ratios.append(found["FlashInfer"]["warm"]["median_us"] / found["unique"]["warm"]["median_us"])
    return Found(f"{ratios[0]:.1f}x (`quarters`), {ratios[1]:.1f}x (`int8`)", [_KERNELS])


def end_to_end() -> Found:
    """Decode steps over dense attention, in all committed pairs with 512 tokens."""
    names = (
        ("decode", "flash_attn", "unique"),
        ("decode-newer-vllm", "flash_attn", "unique"),
        ("frontier", "decode_dense", "decode_512"),
    )
    ratios, paths = [], []
    for folder, *pair in names:
        files = [_H200 / folder / f"{name}.jsonl" for name in pair]
        dense, sparse = (serving.read_steps(path)[131072, 6]["ms_per_token"] for path in files)
        ratios.append(dense / sparse)
        paths += files
    return Found(f"{min(ratios):.1f}x to {max(ratios):.1f}x at 6 x 128K", paths)


def small_model_steps() -> Found:
    """Decode steps of a model with the shape of Qwen3-1.7B over dense attention."""
    ratios = []
    for (context, batch), dense in serving.read_steps(_QWEN3, "flash_attn").items():
        sparse = serving.read_steps(_QWEN3, "unique")[context, batch]
        ratios.append(f"{dense['ms_per_token'] / sparse['ms_per_token']:.1f}x at {batch} x {size_text(context)}")
    return Found(", ".join(ratios), [_QWEN3])


def attention_over_dense() -> Found:
    """Attention of a decode step over FlashAttention 3, with the default budget."""
    times, ratios = kernels.read_times(kernels.LEVELED), []
    for case in ("8q1s32K", "32q1s128K"):
        found = times["decode", f"{case} g4"]
        ratio = found["FlashAttention 3"]["warm"]["median_us"] / found["unique"]["warm"]["median_us"]
        ratios.append(f"{ratio:.1f}x at {case.replace('q1s', ' x ')}")
    return Found(", ".join(ratios), [kernels.LEVELED])


def returning_clients() -> Found:
    """Throughput of clients that return to their prompts, over dense attention and over vLLM's KV offloading."""
    rates = [read_run(path).rows[-1]["output_tokens_per_second"] for path in offload.CONVERSATIONS.values()]
    dense, offloading, ours = rates
    text = f"{ours / dense:.1f}x; {ours / offloading:.1f}x of vLLM's offloading"
    return Found(text, list(offload.CONVERSATIONS.values()))


def evicting_users() -> Found:
    """Requests at once and throughput of eviction while decoding, over dense attention."""
    rows = {row["variant"]: row for row in read_run(compaction.WINDOW).rows}
    dense, kept = rows["dense"], rows["snapkv"]
    users, rate = (kept[name] / dense[name] for name in ("running_mean", "output_tokens_per_second"))
    return Found(f"{users:.1f}x requests, {rate:.1f}x tokens per s", [compaction.WINDOW])


def other_weights() -> Found:
    """The largest weight of another token, and its ratio."""
    largest, ratio = (sinks.level_mean(_LEVEL, _TEXT_TOKENS, column) for column in ("largest_other", "ratio"))
    return Found(f"S: {largest:.4f} (ratio {ratio:.0f})", [sinks.SINKS])


def value_norm() -> Found:
    """Norms of the values of the first token and of the others."""
    return _norms("value")


def key_norm() -> Found:
    """Norms of the keys of the first token and of the others."""
    return _norms("key")


def query_cosine() -> Found:
    """The cosine of queries and the first key."""
    cosine = sinks.mean_of(sinks.layer_rows(_TEXT_TOKENS), "query_cosine")
    return Found(f"S: cosine with queries {cosine:.2f}", [sinks.SINKS])


def writes() -> Found:
    """What heads with and without a sink add to the residual stream, and how it is aligned."""
    rows = [row for row in sinks.layer_rows(_TEXT_TOKENS) if "sink_write" in row]
    size, alignment = (
        [sinks.mean_of(rows, f"{heads}_{what}") for heads in ("sink", "other")] for what in ("write", "alignment")
    )
    text = f"S: {size[0]:.3f}, {size[1]:.3f}; aligned {alignment[0]:.2f}, {alignment[1]:.2f}"
    return Found(text, [sinks.SINKS])


def routed_answers() -> Found:
    """Needles answered by witness-6m with and without routing."""
    paths = [_CPU / "witness" / f"{name}.jsonl" for name in ("sinkrouter", "dense")]
    return Found(f"W: {' of '.join(map(_right, paths))}", paths)


def routed_texts() -> Found:
    """Next tokens that stay, by the share of skipped groups."""
    kept = real.kept_by_share("cosine")
    tokens = ", ".join(f"{each.value:.2f}" for each in kept.values())
    shares = ", ".join(f"{share:.0%}" for share in kept)
    return Found(f"S: {tokens} at {shares}", [real.ROUTING])


def evicted_answers() -> Found:
    """Needles of witness-6m and needle-8m with a quarter of the prompt, by H2O."""
    path = real.ANSWERS[0]
    return Found(f"S: {real.kept_answers('h2o').value:.2f} of dense RULER", [path])


def routed_steps() -> Found:
    """Decode steps at 512K tokens over dense attention."""
    paths = [_H200 / "routing" / f"{name}.jsonl" for name in ("flash_attn_512k", "sinkrouter_512k")]
    dense, routed = (serving.read_steps(path)[524288, 1]["ms_per_token"] for path in paths)
    return Found(f"{dense / routed:.2f}x", paths)


def cosine_finds() -> Found:
    """The AUPRC of the cosine."""
    cells = (f"{letter}: {read_run(path).rows[0]['auprc']:.3f}" for letter, path in quality.CALIBRATIONS.items())
    return Found(", ".join(cells), list(quality.CALIBRATIONS.values()))


def skipped_by_task() -> Found:
    """The share of groups that thresholds of a length skip, by length and task."""
    path = quality.CALIBRATED["mean"]
    skipped = [row["skipped"] for row in read_run(path).rows[0]["rows"]]
    return Found(f"S: {min(skipped):.0%} to {max(skipped):.0%}", [path])


def forty() -> Found:
    """RULER with two fifths of the cache: H2O, StreamingLLM, SinkRouter, dense attention."""
    rows = read_run(real.FORTY_ANSWERS).rows
    *cells, dense = (
        f"{real.ruler_score(rows, setting, 4096).value:.2f}" for setting in (*list(real.FORTY)[:3], real.DENSE)
    )
    return Found(f"S, RULER: {', '.join(cells)} of {dense}", [real.FORTY_ANSWERS])


def missed_contributions() -> Found:
    """The share of the tokens of largest contribution that an order by weight misses."""
    shares = (
        mean(row["missed"] for row in real.contribution_rows(_TEXT_TOKENS, count, sinks.ESSAYS)) for count in (64, 1024)
    )
    return Found(f"S: {', '.join(f'{share:.0%}' for share in shares)} of best 64, 1,024 missed", [real.CONTRIBUTIONS])


def evicting_throughput() -> Found:
    """Tokens per second of dense attention and of ZipVL's prefill and eviction."""
    path = compaction.CAPACITY_ZIPVL
    dense, evicting = (row["output_tokens_per_second"] for row in read_run(path).rows)
    return Found(f"{evicting:,.0f} of {dense:,.0f} tokens/s ({evicting / dense:.1f}x)", [path])


def probe_time() -> Found:
    """The time of the probe and of the choice in one layer of a prompt of 16K, and of dense attention."""
    providers = kernels.read_times(kernels.TOKENS)["tokens", "1q16Ks16K g4"]
    names = "part: probe", "part: choice", kernels.RIVALS[0]
    probe, choice, dense = (kernels.cold_ms(providers, name) for name in names)
    return Found(f"{probe:.2f} + {choice:.2f} of {dense:.2f} ms", [kernels.TOKENS])


def skipped_sinks() -> Found:
    """The share of sink groups among skipped groups."""
    rows = [row for row in read_run(real.ROUTING).rows if (row["arm"], row.get("share")) == ("cosine", 0.1)]
    return Found(f"S, 10% skipped: {sinks.mean_of(rows, 'precision'):.0%}", [real.ROUTING])


def stopped_answers() -> Found:
    """Scores of answers over those of dense attention: ART alone, SnapKV, and both."""
    alone, base, both = (f"{real.art_answered(arm).value:.2f}" for arm in _STOPPED)
    model = _MODELS[read_run(real.ART_ANSWERS).about["model"]]
    return Found(f"{model}: {alone} of dense; `snapkv` {base}, with ART {both}", [real.ART_ANSWERS])


def stopped_texts() -> Found:
    """Next tokens that change beyond noise under the preset `art`, and the share of the keys that it reads."""
    paths = [real.SERVED_BACKENDS, real.SERVED_GEMMA]
    changed, read = (
        ", ".join(f"{value:.1%}" for value in values) for values in zip(*map(real.preset_art, paths), strict=True)
    )
    return Found(f"S, Gemma: {changed} of next tokens change, {read} read", paths)


def ablation() -> Found:
    """Needles answered without each part of the rule."""
    rules = "no scale test", "no direction test, 0.001", "no patience, 0.001", "whole, 0.001"
    *without, whole = (_stopped(_NEWEST_FIRST, rule)[0] for rule in rules)
    return Found(f"N, tau 1e-3: {', '.join(without)} ({whole})", [_TERMINATION])


def probe() -> Found:
    """Decisions in which the probe agrees with the whole output."""
    layers = [
        layer
        for row in read_run(_TERMINATION).rows
        if (row.get("scale"), row["context_tokens"]) == (1e-5, 8192)
        for layer in row["layers"]
    ]
    wrong = sum(layer["early"] + layer["late"] for layer in layers)
    return Found(f"N: {1 - wrong / sum(layer['decisions'] for layer in layers):.1%}", [_TERMINATION])


def stop_tests() -> Found:
    """The cost of the stop tests with one request and with many."""
    costs = {batch: kernels.stop_costs(batch) for batch in (1, 32)}
    cells = (f"{min(found):.0%} to {max(found):.0%} with {batch}" for batch, found in costs.items())
    return Found(f"{', '.join(cells)} requests", [kernels.STOP])


def loaded_share() -> Found:
    """What stopped heads read, and their error."""
    _, share, error = _stopped(_NEWEST_FIRST, "whole, 1e-05")
    return Found(f"N: {error:.4f} after {share:.0%}", [_TERMINATION])


def stopped_steps() -> Found:
    """Decode steps of attention that is forced to stop, and that never stops, over dense attention."""
    paths = [_H200 / "stopping" / f"{name}.jsonl" for name in ("flash_attn", "stops", "vain")]
    dense, stops, vain = (serving.read_steps(path)[32768, 8]["ms_per_token"] for path in paths)
    return Found(f"8 x 32K: {dense / stops:.2f}x; without a stop {dense / vain:.2f}x", paths)


def tolerances() -> Found:
    """Needles answered with larger tolerances."""
    cells = (_stopped(_NEWEST_FIRST, rule) for rule in ("whole, 0.001", "whole, 0.1"))
    return Found(f"N: {', '.join(cell[0] for cell in cells)} at 1e-3, 0.1", [_TERMINATION])


def stopped_lengths() -> Found:
    """Attention that may stop over dense attention, by context, with 32 requests."""
    gains = ", ".join(f"{gain:.1f}x" for gain in kernels.stop_gains(32))
    return Found(f"{gains} at 8K, 32K, 128K", [kernels.STOP])


def prefill_forms() -> Found:
    """Next tokens that stay after ZipVL's prefill."""
    published, served = (real.prefill_share(form).value for form in ("zipvl", "rows_local64"))
    return Found(f"S: {published:.2f} of next tokens; `zipvl` {served:.2f}", [real.PREFILL])


def prefill_operations() -> Found:
    """Operations that ZipVL's prefill leaves out."""
    published, served = (1 - real.operations(form) for form in ("zipvl", "rows_local64"))
    return Found(f"S: -{published:.0%} operations; `zipvl` -{served:.0%}; cache kept", [real.PREFILL])


def prefill_taus() -> Found:
    """Next tokens that stay by tau."""
    cells = (real.prefill_share(f"rows_local64{tau}").value for tau in ("", "_95", "_90"))
    return Found(f"S, `zipvl`: {', '.join(f'{cell:.2f}' for cell in cells)} at .975, .95, .9", [real.PREFILL])


def fixed_ratio() -> Found:
    """Next tokens that stay with adaptive and with fixed numbers of important tokens."""
    return _important_tokens("adaptive", "fixed")


def probe_rows() -> Found:
    """Next tokens that stay at a fixed share, by the rows that vote."""
    return _important_tokens("fixed", "newest rows", "random rows")


def ranked_tokens() -> Found:
    """Next tokens that stay at a fixed share, if tokens are ranked by means and by sums."""
    return _important_tokens("fixed", "ranked by sums")


def _important_tokens(*choices: str) -> Found:
    cells = (f"{real.adaptive_share(real.AS_SERVED, choice):.3f}" for choice in choices)
    return Found(f"S, `zipvl`: {', '.join(cells)}", real.ADAPTIVE)


def ratio_by_layer() -> Found:
    """The share of important tokens by layer."""
    layers = real.adaptive_layers()
    return Found(f"S, `zipvl`: {min(layers):.0%} to {max(layers):.0%}", real.ADAPTIVE)


def first_token() -> Found:
    """The time to the first token under ZipVL's prefill, as published and as served."""
    (dense, published), served = map(_first_tokens, ("zipvl_paper", "zipvl"))
    times = f"{published:.2f} of {dense:.2f} s ({dense / published:.2f}x)"
    return Found(f"{times}; `zipvl` {served[0] / served[1]:.2f}x", list(prefill.ZIPVL.values()))


def _first_tokens(form: str) -> list[float]:
    """Seconds of dense attention and of a form of ZipVL's prefill."""
    times = prefill.read_times([prefill.ZIPVL[form]], "first_token", "context_tokens", "chunk_tokens")
    (found,) = times.values()
    return [found[name]["seconds_median"] for name in prefill.engines(times)]


def sparse_first_token() -> Found:
    """The time to the first token with sparse prefill over dense attention, in steps of 8,192 tokens."""
    paths = prefill.prefill_files()
    found = prefill.read_times(paths, "first_token", "context_tokens", "chunk_tokens")[131072, 8192]
    dense, sparse = (found[name]["seconds_median"] for name in (prefill.DENSE, "`unique_prefill`"))
    return Found(f"{dense / sparse:.2f}x", paths)


def window_loss() -> Found:
    """Perplexity of all tokens, of a window, and of a window with sinks."""
    cells = (f"{sinks.perplexity(arm, _TEXT_TOKENS):.1f}" for arm in ("dense", "window", "window_sinks"))
    return Found(f"S: {', '.join(cells)}", [sinks.SINKS])


def window_word() -> Found:
    """Perplexity with a word four times before the text."""
    return Found(f"S: {sinks.perplexity('window_word', _TEXT_TOKENS):.1f}", [sinks.SINKS])


def streams() -> Found:
    """Perplexity at the end of 64K tokens, without and with sinks."""
    paths = [_H200 / "compaction" / f"stream_{model}.jsonl" for model in ("witness-6m", "needle-8m")]
    cells = []
    for name, path in zip("WN", paths, strict=True):
        found = {row["window"]: row["perplexity"][-1] for row in read_run(path).rows}
        cells.append(f"{name}: {found['no sinks']:.1f}, {found['sinks, true positions']:.1f}")
    return Found("; ".join(cells), paths)


def first_weight() -> Found:
    """The mean weight on the first token."""
    weight = sinks.mean_of(sinks.layer_rows(_TEXT_TOKENS), "mass")
    return Found(f"S: {weight:.0%} of the weight", [sinks.SINKS])


def _norms(what: str) -> Found:
    rows = sinks.layer_rows(_TEXT_TOKENS)
    first, others = (sinks.mean_of(rows, name) for name in (f"first_{what}_norm", f"{what}_norm"))
    return Found(f"S: {first:.2f}, others {others:.2f}", [sinks.SINKS])


def _is_plain(row: Row, kind: str) -> bool:
    """Whether a row of page scores has pages of 8, 512 tokens and no variant of the kind."""
    place = row["setting"], row["context_tokens"], "look_alikes" in row
    return place == (f"{kind}/p8/b512", 16384, False)


def _right(path: Path) -> str:
    """Right answers of an evaluation."""
    results = read_results(path).results
    return f"{sum(result.score for result in results.values()):.0f}/{len(results)}"


def _share(rows: Sequence[Row]) -> float:
    """The share of right answers of rows with a digit for each answer."""
    answers = "".join(
        row["right"] if isinstance(row["right"], str) else "".join(row["right"].values()) for row in rows
    )  # fmt: skip
    return answers.count("1") / len(answers)


def _stopped(order: str, rule: str) -> tuple[str, float, float]:
    """Right answers under a rule of the stop test, the share of blocks that was read, and the error."""
    rows = [row for row in read_run(_TERMINATION).rows if (row.get("order"), row.get("rule")) == (order, rule)]
    layers = [layer for row in rows for layer in row["layers"]]
    heads = sum(layer["rows"] for layer in layers)
    share, error = (sum(layer[name] for layer in layers) / heads for name in ("share_sum", "error_sum"))
    return f"{sum(row['right'] for row in rows)}/{sum(row['questions'] for row in rows)}", share, error

"""Writes the measured and generated parts of README.md: every number there comes from a file in bench/results/.

python bench/update_readme.py [--check]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_sparse_plugin.config import describe_fields, resolve
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.eval.results import read_results
from vllm_sparse_plugin.eval.statistics import estimate_difference, estimate_mean

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
HEAD_SIZE = 64
"""Of needle-8m."""


def _lines(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run, *rest = (json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines())
    return run, rest


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _provenance(name: str, run: dict[str, Any]) -> str:
    hardware = ", ".join(
        str(run["hardware"][name]) for name in ("gpu", "processor", "cores") if name in run["hardware"]
    )
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    return f"`{run['command']}`, {run['date'][:10]}; {hardware} cores; {versions}; [data](bench/results/{name})."


def _matching(answers: list[dict[str, Any]], where: dict[str, Any]) -> list[dict[str, Any]]:
    return [answer for answer in answers if all(answer[key] == value for key, value in where.items())]


def _accuracies(answers: list[dict[str, Any]], **where: Any) -> str:
    correct = [answer["correct"] for answer in _matching(answers, where)]
    return f"{sum(correct)}/{len(correct)}" if correct else "-"


def needles() -> str:
    """The table of the main job, and the negative control under it."""
    run, answers = _lines("needles_unique.jsonl")
    control_run, control = _lines("needles_streaming_llm.jsonl")
    selection = resolve(None, "unique").selection
    rows = []
    for context in sorted({answer["context_tokens"] for answer in answers}):
        for task in dict.fromkeys(answer["task"] for answer in answers):
            here = {"task": task, "context_tokens": context}
            cells = [_accuracies(answers, backend=backend, **here) for backend in ("dense", "unique")]
            newest = _accuracies(control, backend="streaming_llm", **here)
            share = f"{selection.kv_read_share(context, HEAD_SIZE):.1%}"
            rows.append([task, f"{context:,}", *cells, newest, share])
    for context in sorted({answer["context_tokens"] for answer in answers}):
        cells = [_accuracies(answers, backend=backend, context_tokens=context) for backend in ("dense", "unique")]
        newest = _accuracies(control, backend="streaming_llm", context_tokens=context)
        rows.append(["**all**", f"{context:,}", *(f"**{cell}**" for cell in (*cells, newest)), ""])
    headings = ["task", "context", "dense", "`unique`", "newest 512 tokens", "KV read by `unique`"]
    sources = [_provenance("needles_unique.jsonl", run), _provenance("needles_streaming_llm.jsonl", control_run)]
    return "\n\n".join([_table(headings, rows), *sources])


def look_alikes() -> str:
    """The task that a small budget loses."""
    run, small = _lines("needles_look_alikes_512.jsonl")
    large_run, large = _lines("needles_look_alikes_2048.jsonl")
    rows = []
    for context in sorted({answer["context_tokens"] for answer in small}):
        here = {"context_tokens": context}
        unique = [_accuracies(answers, backend="unique", **here) for answers in (small, large)]
        rows.append([f"{context:,}", _accuracies(small, backend="dense", **here), *unique])
    table = _table(["context", "dense", "`unique`, 512 tokens", "`unique`, 2048 tokens (preset `unique_wide`)"], rows)
    sources = [
        _provenance("needles_look_alikes_512.jsonl", run),
        _provenance("needles_look_alikes_2048.jsonl", large_run),
    ]
    return "\n\n".join([table, *sources])


def decode() -> str:
    """Time per token by context."""
    run, found = _lines("decode_cpu.jsonl")
    times: dict[int, dict[str, float]] = {}
    for line in found:
        if "backend" in line:
            per_token = statistics.median(line["seconds_per_token"]) * 1e3
            times.setdefault(line["context_tokens"], {})[line["backend"]] = per_token
    rows = [
        [f"{context:,}", f"{ms['dense']:.2f}", f"{ms['unique']:.2f}", f"{ms['dense'] / ms['unique']:.2f}"]
        for context, ms in times.items()
    ]
    headings = ["context", "dense, ms per token", "`unique`, ms per token", "dense / unique"]
    return f"{_table(headings, rows)}\n\n{_provenance('decode_cpu.jsonl', run)}"


def _steps(name: str) -> tuple[dict[str, Any], dict[tuple[int, int], dict[str, Any]]]:
    """The run, and its measured rows by context and batch."""
    run, lines = _lines(name)
    return run, {(line["context_tokens"], line["batch"]): line for line in lines if line.get("ms_per_token")}


def _decode_pair(
    dense_name: str, sparse_name: str, rival: str = "FlashAttention 3: the same with `--variant flash_attn`"
) -> tuple[list[list[str]], str]:
    """Rows of a dense and a sparse result file, and where they come from."""
    (_, dense), (run, sparse) = _steps(dense_name), _steps(sparse_name)
    rows = []
    for (context, batch), line in sparse.items():
        if (context, batch) in dense:
            before, now = dense[context, batch]["ms_per_token"], line["ms_per_token"]
            rows.append([f"{context:,}", str(batch), f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}"])
    return rows, f"{_provenance(sparse_name, run)} {rival}; [data](bench/results/{dense_name})."


def decode_gpu() -> str:
    """Time per token on a GPU by context and batch."""
    rows, source = _decode_pair("decode_h200_flash_attn.jsonl", "decode_h200_unique.jsonl")
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`unique`, ms per token", "ratio"]
    return "\n\n".join([_table(headings, rows), source])


def decode_batches() -> str:
    """More contexts and batches on a GPU, of a cache that is filled with noise."""
    rows, source = _decode_pair("decode_h200_noise_flash_attn.jsonl", "decode_h200_noise_unique.jsonl")
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`unique`, ms per token", "ratio"]
    return "\n\n".join([_table(headings, rows), source])


def decode_routed() -> str:
    """Time per token with routed groups, and what the bytes would allow."""
    parts = []
    rows = []
    reading = "kernels_h200_stop.jsonl"
    bandwidth = _lines(reading)[0]["read_bandwidth_gb_s"] / 1e3
    for name in ("routing", "routing_512k"):
        files = f"decode_h200_{name}_flash_attn.jsonl", f"decode_h200_{name}_sinkrouter.jsonl"
        found, source = _decode_pair(*files)
        _, steps = _steps(files[1])
        for cells in found:
            line = steps[int(cells[0].replace(",", "")), int(cells[1])]
            (layers, skipping) = _skipped(line["additional_config"])
            kv = line["kv_gib"] * 2**30
            dense, routed = _WEIGHT_BYTES + kv, _WEIGHT_BYTES + kv * (1 - skipping / layers)
            rows.append([*cells, f"{dense / routed:.2f}", f"{routed / line['ms_per_token'] / 1e9:.2f}"])
        parts.append(source)
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`sinkrouter`, ms per token", "ratio"]
    table = _table([*headings, "ratio of bytes", "`sinkrouter` reads, TB/s"], rows)
    bare = (
        f"A kernel that only reads gets {bandwidth:.2f} TB/s of this memory ([data](bench/results/{reading})). "
        "The same in front of `unique`:"
    )
    files = "decode_h200_routing_unique_alone.jsonl", "decode_h200_routing_unique.jsonl"
    found, source = _decode_pair(*files, "Not routed: the same without `--skip-ratio`")
    headings = ["context", "requests", "`unique`, ms per token", "routed", "ratio"]
    return "\n\n".join([table, *parts, bare, _table(headings, found), source])


_WEIGHT_BYTES = 2 * (32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256)
"""Read for every token, of Llama-3.1-8B's shape: all matrices but the embedding."""


def _skipped(additional_config: dict[str, Any]) -> tuple[int, float]:
    """Layers, and the sum over layers of the share of KV heads that forced thresholds skip."""
    routing = additional_config["sparse_attention"]["routing"]
    dense = Routing.model_validate(routing).dense_layers
    heads = [[threshold <= -1 for threshold in layer] for layer in routing["threshold"]]
    return len(heads), sum(sum(layer) / len(layer) for layer in heads[dense:])


def decode_more() -> str:
    """The same with int8 means, in a bf16 and in an fp8 cache."""
    parts = []
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`unique`, int8 means, ms per token", "ratio"]
    for title, dense, sparse in (
        ("bf16 cache:", "decode_h200_flash_attn.jsonl", "decode_h200_int8.jsonl"),
        ("fp8 cache:", "decode_h200_fp8_flash_attn.jsonl", "decode_h200_fp8_unique.jsonl"),
    ):
        rows, source = _decode_pair(dense, sparse)
        parts += [title, _table(headings, rows), source]
    return "\n\n".join(parts)


def serve_gpu() -> str:
    """A server under load."""
    found = {name: _lines(f"serve_h200_{name}.jsonl") for name in ("flash_attn", "unique")}
    by_load: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for name, (_, lines) in found.items():
        for line in lines:
            by_load.setdefault((line["workload"], line["concurrency"]), {})[name] = line
    rows = []
    for (workload, concurrency), here in by_load.items():
        if len(here) == len(found):
            cells = (
                f"{here['flash_attn'][key]:,.{digits}f} / {here['unique'][key]:,.{digits}f}"
                for key, digits in (("ttft_ms_median", 0), ("tpot_ms_median", 2), ("output_tokens_per_second", 1))
            )
            rows.append([workload.replace("_", " "), str(concurrency), *cells])
    headings = ["prompts of 32K", "concurrency", "first token, ms", "per output token, ms", "output tokens per s"]
    sources = [_provenance(f"serve_h200_{name}.jsonl", run) for name, (run, _) in found.items()]
    return "\n\n".join([_table(headings, rows), *sources])


def _kernels(name: str) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, dict[str, Any]]]]:
    """The run, and its rows by operation and case, and by provider."""
    run, found = _lines(name)
    times: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found:
        times.setdefault((row["op"], row["case_name"]), {})[row["provider"]] = row
    return run, times


def routing_gpu() -> str:
    """Attention of routed groups beside dense attention, and what asking costs."""
    run, times = _kernels("kernels_h200_route.jsonl")
    rows = []
    for batch in (1, 4, 8, 32):
        for context in ("8K", "32K", "128K", "512K"):
            case = f"{batch}q1s{context} g4"
            routed, selected = times["route", case], times["route_unique", case]
            us = {
                name: found["cold"]["median_us"]
                for name, found in (*routed.items(), ("selected", selected["unique, routed"]))
            }
            own, dense, alone = us["sinkrouter"], us["FlashAttention 3"], selected["unique"]["cold"]["median_us"]
            asking = us["sinkrouter, nothing skipped"] / us["sinkrouter, not routed"] - 1
            cells = f"{own:.0f}", f"{dense:.0f} ({dense / own:.2f}x)", f"{asking:+.1%}"
            rows.append([case.removesuffix(" g4"), *cells, f"{alone:.0f} / {us['selected']:.0f}"])
    headings = ["requests and context", "routed, µs", "FlashAttention 3", "cost of asking", "`unique` / routed, µs"]
    return "\n\n".join([_table(headings, rows), _provenance("kernels_h200_route.jsonl", run)])


def calibrated() -> str:
    """What `vllm-sparse calibrate` says of a model with sink groups and of one without, and answers with both."""
    rows, sources = [], []
    for name in ("calibrate_witness.jsonl", "calibrate_needle.jsonl"):
        run, (found,) = _lines(name)
        skipped, precision, recall = found["detection"]
        answers = [sum(row[key] for row in found["rows"]) for key in ("dense_answers_right", "routed_answers_right")]
        asked = sum(row["answers"] for row in found["rows"])
        shares = (f"{share:.1%}" for share in (found["sink_groups"], skipped, precision, recall))
        right = f"{answers[0]}/{asked}", f"{answers[1]}/{asked}"
        rows.append([run["model"], *shares, f"{found['auprc']:.3f}", *right, "yes" if found["verdict"][0] else "no"])
        sources.append(_provenance(name, run))
    headings = ["model", "sink groups", "skipped", "of them sink groups", "sink groups skipped", "AUPRC"]
    table = _table([*headings, "dense", "routed", "recommended"], rows)
    found_rows, source = _evaluated([f"eval_witness_{name}.jsonl" for name in _WITNESS_MIXES])
    mixes = _table(["witness-6m through vLLM, from the question", *_EVALUATED], found_rows)
    return "\n\n".join([table, *sources, mixes, source])


def stop_gpu() -> str:
    """Attention that stops beside attention that looks and never stops, and that cannot stop."""
    run, found = _lines("kernels_h200_stop.jsonl")
    cases = list(dict.fromkeys(row["case_name"] for row in found))
    us = {(row["case_name"], row["provider"]): row["cold"]["median_us"] for row in found}
    rows = []
    for case in cases:
        art, looking, plain, split, dense = (
            us[case, name]
            for name in (
                "art", "art that never stops", "art, endless patience", "sinkrouter, not routed", "FlashAttention 3",
            )
        )  # fmt: skip
        cells = f"{art:.0f}", f"{looking:.0f}", f"{plain:.0f}", f"{looking / plain - 1:+.1%}", f"{split:.0f}"
        rows.append([case.removesuffix(" g4"), *cells, f"{dense:.0f} ({dense / art:.2f}x)"])
    headings = ["requests and context", "`art`, µs", "looks, never stops", "patience without end", "cost of looking"]
    table = _table([*headings, "our split attention", "FlashAttention 3"], rows)
    return "\n\n".join([table, _provenance("kernels_h200_stop.jsonl", run)])


def decode_stopping() -> str:
    """Time per token of attention that stops at a depth, looks in vain, or cannot stop."""
    names = ("stops", "vain", "endless", "flash_attn")
    runs = {name: _steps(f"decode_h200_art_{name}.jsonl") for name in names}
    run, steps = runs["stops"]
    rows = []
    for context, batch in steps:
        stops, vain, endless, dense = (runs[name][1][context, batch]["ms_per_token"] for name in names)
        cells = f"{dense:.2f}", f"{endless:.2f}", f"{vain:.2f} ({vain / endless - 1:+.1%})"
        rows.append([f"{context:,}", str(batch), *cells, f"{stops:.2f} ({endless / stops - 1:+.0%} tokens per s)"])
    rule = next(iter(steps.values()))["additional_config"]["sparse_attention"]["termination"]
    stop = f"stops after {rule['patience'] + 1} blocks of {rule['block_tokens']}"
    headings = ["context", "requests", "FlashAttention 3, ms per token", "`art` that cannot stop", "looks in vain"]
    sources = ", ".join(f"[{name}](bench/results/decode_h200_art_{name}.jsonl)" for name in names)
    table = _table([*headings, stop], rows)
    return f"{table}\n\n{_provenance('decode_h200_art_stops.jsonl', run)} All: {sources}."


def kernels_gpu() -> str:
    """A decode step, selection and scoring beside their rivals on a GPU."""
    run, times = _kernels("kernels_h200.jsonl")

    def line(op: str, case: str, rivals: list[str]) -> list[str]:
        here = times[op, case]
        own = here["unique"]["warm"]["median_us"]
        others = (here[rival]["warm"]["median_us"] for rival in rivals)
        return [case, f"{own:.1f}", *(f"{other:.1f} ({other / own:.1f}x)" for other in others)]

    rivals = ["flashinfer.top_k", "torch.topk"]
    cases = [f"{rows} x {pages}" for rows in (8, 64, 256) for pages in ("1K", "4K", "16K", "64K")]
    topk = _table(["rows x pages, k = 64", "ours, µs", *rivals], [line("topk", case, rivals) for case in cases])
    scores = [line("score", f"{case} g4 int8", ["three launches"]) for case in ("1q1s128K", "8q1s32K", "32q1s128K")]
    for cells, case in zip(scores, ("1q1s128K", "8q1s32K", "32q1s128K"), strict=True):
        cells.append(f"{times['score', f'{case} g4 int8']['unique']['share_of_read_bandwidth']['warm']:.0%}")
    headings = ["requests and context, int8 means", "ours, µs", "three launches", "of read bandwidth"]
    named = (f"{batch}q1s{context} g4" for batch in (1, 8, 32) for context in ("2K", "8K", "32K", "128K", "512K"))
    whole = [found_row for case in named if (found_row := _whole_decode(times, case))]
    ours = ("`unique`, quarters, µs", "`unique`, int8, µs")
    decodes = _table(["requests and context", *ours, "FlashAttention 3", "FlashInfer"], whole)
    return "\n\n".join([decodes, topk, _table(headings, scores), _provenance("kernels_h200.jsonl", run)])


def _whole_decode(times: dict[tuple[str, str], dict[str, dict[str, Any]]], case: str) -> list[str] | None:
    """Cache write, statistics, scores, selection and attention beside dense attention; None if it was not measured."""
    quarters, means = (times.get(("decode", name), {}) for name in (case, f"{case} int8"))
    if not all("warm" in found.get("unique", {}) for found in (quarters, means)):
        return None
    own, small = (found["unique"]["warm"]["median_us"] for found in (quarters, means))
    cells = [case.removesuffix(" g4"), f"{own:.1f}", f"{small:.1f}"]
    for rival in ("FlashAttention 3", "FlashInfer"):
        both = [found.get(rival, {}).get("warm", {}).get("median_us") for found in (quarters, means)]
        cells.append(
            "-" if None in both else f"{both[0]:.1f} ({both[0] / own:.1f}x), {both[1]:.1f} ({both[1] / small:.1f}x)"
        )
    return cells


def accuracy_gpu() -> str:
    """Needles answered on a GPU by budget."""
    names = [f"accuracy_h200_{name}.jsonl" for name in ("quarters", "means", "means_16", "fp8_16", "lambda_075")]
    runs = [_lines(name) for name in names]
    contexts = (4096, 8192, 16384, 32768)
    counts: dict[str, dict[int, list[int]]] = {}
    for name, (_, found) in zip(names, runs, strict=True):
        # Dense attention was asked again in most runs, with the same answers.
        known = set(counts.get("dense", {}))
        for row in found:
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
    rows = [
        [
            name,
            *(
                f"{here[0]}/{here[1]}" if (here := by_context.get(context)) and here[2] == tasks else "-"
                for context in contexts
            ),
        ]
        for name, by_context in counts.items()
    ]
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    sources = [_provenance(name, run) for name, (run, _) in zip(names, runs, strict=True)]
    return "\n\n".join([_table(["statistics and pages of 8", *(f"{c:,}" for c in contexts)], rows), *sources])


def formats() -> str:
    """How the selections of a step compare with those of true attention, by the format of statistics."""
    rows: list[list[str]] = []
    run: dict[str, Any] = {}
    for kind in ("quarters", "int8", "bf16", "fp8"):
        run, found = _lines(f"diagnose_{kind}.jsonl")
        for budget in (512, 256, 128, 64):
            here = [line for line in found if line["budget_tokens"] == budget]
            cells = (f"{statistics.mean(line[name] for line in here):.3f}" for name in ("mass", "recall", "cosine"))
            rows.append([kind, str(budget), *cells])
    table = _table(["statistics", "budget, tokens", "attention weight read", "best pages read", "output cosine"], rows)
    return "\n\n".join([table, _provenance("diagnose_fp8.jsonl", run)])


def _evaluated(names: list[str]) -> tuple[list[list[str]], str]:
    """Rows of files of `vllm-sparse eval` about the same items, the first of them dense, and where they come from."""
    files = [read_results(RESULTS / name) for name in names]
    dense = files[0].results
    rows = []
    for file in files:
        scores = [result.score for result in file.results.values()]
        mean = estimate_mean(scores)
        cells = [file.label, f"{sum(scores):.0f}/{mean.count}", f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"]
        if file is files[0]:
            cells.append("")
        else:
            gap = estimate_difference([dense[item].score for item in file.results], scores)
            cells.append(f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})")
        rows.append(cells)
    run, _ = _lines(names[-1])
    others = ", ".join(f"[{file.label}](bench/results/{name})" for file, name in zip(files, names, strict=True))
    return rows, f"{_provenance(names[-1], run)} All: {others}."


_EVALUATED = ["right", "share (95 %)", "minus dense, paired"]


def served() -> str:
    """Needles decoded from the question, through vLLM."""
    parts = []
    for name, where in (("cpu", "4,096 tokens on a CPU"), ("h200", "16,384 tokens on an H200")):
        rows, source = _evaluated([f"eval_{name}_{label}.jsonl" for label in ("dense", "512", "128", "64")])
        parts += [_table([f"budget, {where}", *_EVALUATED], rows), source]
    return "\n\n".join(parts)


_WITNESS_MIXES = ("dense", "sinkrouter", "unique", "unique_routed", "sinkrouter_art")
_MIXES = (
    "dense", "unique", "unique_art", "unique_routed", "unique_routed_art", "quest", "quest_art", "mean", "infllm",
    "streaming_llm", "sinkrouter", "art", "sinkrouter_art",
)  # fmt: skip


def mixes() -> str:
    """Needles decoded from the question under every preset, and under mixes of them."""
    rows, source = _evaluated([f"eval_mix_{name}.jsonl" for name in _MIXES])
    return "\n\n".join([_table(["preset or mix", *_EVALUATED], rows), source])


def operations() -> str:
    """Where the time of a sparse layer goes."""
    _, found = _lines("decode_cpu.jsonl")
    by_context = {line["context_tokens"]: line["operation_seconds"] for line in found if "operation_seconds" in line}
    names = list(next(iter(by_context.values())))
    rows = [[name, *(f"{medians[name] * 1e6:.0f}" for medians in by_context.values())] for name in names]
    return _table(["µs per layer and token at a context of", *(f"{context:,}" for context in by_context)], rows)


def configuration() -> str:
    """The configuration schema."""
    rows = [[f"`{name}`", allowed, f"`{default}`", text] for name, allowed, default, text in describe_fields()]
    return _table(["field", "allowed", "default", "meaning"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "needles": needles,
    "look-alikes": look_alikes,
    "decode": decode,
    "decode-gpu": decode_gpu,
    "decode-batches": decode_batches,
    "decode-routed": decode_routed,
    "decode-more": decode_more,
    "serve-gpu": serve_gpu,
    "kernels-gpu": kernels_gpu,
    "routing-gpu": routing_gpu,
    "calibrated": calibrated,
    "stop-gpu": stop_gpu,
    "decode-stopping": decode_stopping,
    "accuracy-gpu": accuracy_gpu,
    "formats": formats,
    "served": served,
    "mixes": mixes,
    "operations": operations,
    "configuration": configuration,
}


def rendered(text: str) -> str:
    """README text with every generated part as it should be."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: generated by bench/update_readme.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{part()}\n{end}{after}"
    return text


def main(
    check: Annotated[bool, typer.Option("--check", help="Only say whether README.md is up to date.")] = False,
) -> None:
    """Rewrite the generated parts of README.md."""
    text = README.read_text(encoding="utf-8")
    if check:
        sys.exit(0 if rendered(text) == text else "README.md is out of date: run python bench/update_readme.py")
    README.write_text(rendered(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

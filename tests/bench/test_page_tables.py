"""Tables and figures of the generated pages."""

import json
import re
from pathlib import Path

import pytest
from support.bench.pages import ABOUT, write_run

from bench.common.results import read_run
from bench.pages import (
    compaction,
    figures,
    frontier,
    kernels,
    offload,
    prefill,
    quality,
    real,
    recipes,
    selection,
    serving,
    sinks,
    states,
    training,
)
from vllm_sparse_plugin import notices
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError


def measured_prefill(variant: str, measurement: str, context: int, seconds: float, **columns) -> dict:
    backends = {"dense": "FLASH_ATTN", "flash_attn": "FLASH_ATTN"}
    return {
        "variant": variant,
        "attention_backend": backends.get(variant, variant.upper()),
        "kv_cache_dtype": "auto",
        "additional_config": None,
        "chunk_tokens": 8192,
        "measurement": measurement,
        "context_tokens": context,
        "requests": 1,
        "seconds_median": seconds,
        **columns,
    }


SPARSER = {"sparse_attention": {"prefill": {"density": 0.05}}}
RATES = {"total_tokens_per_second": 20000.0, "output_tokens_per_second": 78.125}


@pytest.fixture
def prefill_results(tmp_path, monkeypatch) -> list[Path]:
    """Two files of engines, as `bench.serving prefill` writes them."""
    monkeypatch.setattr(prefill, "FOLDER", tmp_path / "prefill")
    row = measured_prefill
    skipped = row("dense", "first_token", 65536, 0.0) | {"skipped": "the time limit was reached"}
    del skipped["seconds_median"]
    dense = write_run(
        tmp_path / "prefill" / "chunks_8k.jsonl",
        row("dense", "first_token", 131072, 12.0),
        row("dense", "first_token", 8192, 0.25),
        skipped,
        row("dense", "prefix_hit", 131072, 6.0, cached_tokens=98304),
        row("dense", "load", 32768, 50.0, **RATES | {"requests": 32}),
    )
    sparse = write_run(
        tmp_path / "prefill" / "chunks_8k_sparse.jsonl",
        row("unique_prefill", "first_token", 8192, 0.25),
        row("unique_prefill", "first_token", 131072, 5.0),
        row("unique_prefill", "first_token", 131072, 4.0),
        row("unique_prefill", "first_token", 131072, 3.0, additional_config=SPARSER),
        row("unique_prefill", "prefix_hit", 131072, 2.0, cached_tokens=98304),
    )
    return [dense, sparse]


def test_the_time_to_first_token_is_a_table_of_contexts_and_engines(prefill_results):
    block = prefill.prefill_gpu()
    assert block.sources == prefill_results
    assert block.text.splitlines() == [
        "| prompt | tokens of a step | FlashAttention 3, s | `unique_prefill`, s | `unique_prefill`, density 0.05, s |",
        "|---|---|---|---|---|",
        "| 8,192 | 8,192 | 0.25 | 0.25 (1.00x) | - |",
        "| 131,072 | 8,192 | 12.00 | 4.00 (3.00x) | 3.00 (4.00x) |",
        "| 131,072, 98,304 of them cached | 8,192 | 6.00 | 2.00 (3.00x) | - |",
        "",
        "| prompts at once | tokens of a step | FlashAttention 3, tokens/s |",
        "|---|---|---|",
        "| 32 x 32,768 | 8,192 | 20,000 / 78.1 |",
    ]


def test_the_figure_of_prefill_has_a_line_for_each_engine(prefill_results):
    pytest.importorskip("matplotlib")
    (axes,) = figures.draw_prefill().axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "FlashAttention 3": [[8192, 0.25], [131072, 12]],
        "unique_prefill": [[8192, 0.25], [131072, 4]],
        "unique_prefill, density 0.05": [[131072, 3]],
    }
    assert [text.get_text() for text in axes.texts] == ["1.0x", "3.0x", "4.0x"]


def test_published_zipvl_stands_beside_the_dense_attention_of_its_own_file_alone(prefill_results, monkeypatch):
    path = prefill_results[0].with_name("zipvl.jsonl")
    monkeypatch.setattr(prefill, "ZIPVL", {"zipvl_paper": path})
    times = {"flash_attn": 10.0, "zipvl": 12.5}
    write_run(path, *(measured_prefill(name, "first_token", 131072, seconds) for name, seconds in times.items()))
    block = prefill.zipvl_gpu()
    assert block.sources == [path]
    assert block.text.splitlines()[-1] == "| `zipvl_paper` | 8,192 |  | 12.50 (0.80x) |"
    one_chunk = path.with_name("one_chunk.jsonl")
    sparse = measured_prefill("zipvl", "first_token", 32768, 2.0) | {"prefill_density": 0.424}
    write_run(one_chunk, measured_prefill("flash_attn", "first_token", 32768, 3.0), sparse)
    block = prefill.zipvl_gpu()
    assert block.sources == [path, one_chunk]
    assert block.text.splitlines()[0] == "| form | tokens of a step | kept | 32,768, s | 131,072, s |"
    assert block.text.splitlines()[2:] == [
        "| `zipvl_paper` | 8,192 |  | - | 12.50 (0.80x) |", "| `zipvl` | 8,192 | 42% | 2.00 (1.50x) | - |"
    ]  # fmt: skip
    assert prefill.prefill_gpu().sources == prefill_results


def test_an_engine_with_an_8_bit_cache_is_compared_with_dense_attention_over_one(tmp_path, monkeypatch):
    monkeypatch.setattr(prefill, "FOLDER", tmp_path)
    fp8 = {"kv_cache_dtype": "fp8"}
    write_run(
        tmp_path / "chunks_8k.jsonl",
        measured_prefill("flash_attn", "first_token", 32768, 10.0),
        measured_prefill("flash_attn", "first_token", 32768, 8.0, **fp8),
        measured_prefill("unique_prefill", "first_token", 32768, 4.0, **fp8) | {"variant": "unique_prefill:fp8"},
    )
    assert prefill.prefill_gpu().text.splitlines()[-1] == "| 32,768 | 8,192 | 10.00 | 8.00 | 4.00 (2.00x) |"


def test_what_was_not_measured_is_an_empty_block(tmp_path, monkeypatch):
    monkeypatch.setattr(prefill, "FOLDER", tmp_path)
    made = prefill.prefill_gpu()
    assert (made.text, list(made.sources)) == ("", [])


def test_training_is_compared_with_the_strongest_dense_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "FOLDER", tmp_path)
    assert training.passes().text == training.steps().text == "Nothing has been measured on a GPU yet."

    def timed(name, tokens, ms, **more):
        times = {
            part: {"median_ms": ms * share} for part, share in (("forward", 0.25), ("backward", 0.75), ("both", 1))
        }
        return {"pass": name, "context_tokens": tokens, "peak_mib": tokens / 64} | times | more

    masked = {"budget_tokens": 512, "statistics": "quarters"}
    rows = [
        timed("soft", 8192, 12.0, **masked), timed("flash", 8192, 8.0), timed("cudnn", 8192, 6.0),
        timed("hard", 16384, 10.0, **masked), {"pass": "cudnn", "context_tokens": 16384, "failed": "out of memory"},
    ]  # fmt: skip
    write_run(tmp_path / "passes.jsonl", *rows)
    # Without a dense pass at 16K there is no comparison for the hard mask.
    assert " ".join(training.passes().text.split()) == (
        "Time of one layer's attention, forward and backward, over that of dense attention: with the soft mask 2.00 at "
        "8K."
    )

    settings = {"lora_rank": 16, "sequence_tokens": 32768, "rows_per_step": 1}
    about = ABOUT | {"model": "llama-3.1-8b", "settings": settings}
    step = {"loss": 11.8, "processes": 2, "layers": None, "gpu_memory_gib": 61.25}
    steps = [
        step | {"temperature": temperature, "tokens_per_second": speed}
        for temperature, speed in ((1.0, 900.0), (0.5, 2000.0), (None, 100.0), (None, 2500.0))
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, [about, *steps])))
    assert training.steps().text.splitlines()[2] == "| 1 x 32K | rank 16 | 2 | 2,000 | 2,500 | 61.2 |"


def test_what_compaction_takes_and_gives_is_measured_or_not_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "RESULTS", tmp_path)
    for block in (compaction.users(), compaction.times(), compaction.identical(), compaction.streams()):
        assert (block.text, list(block.sources)) == ("Nothing yet.", [])
    load = {
        "input_tokens": 16384, "output_tokens": 2048, "concurrency": 64, "running_most": 8,
        "output_tokens_per_second": 700.4, "preemptions": 3,
    }  # fmt: skip
    folder = tmp_path / "h200" / "compaction"
    write_run(
        folder / "capacity_dense.jsonl",
        load | {"variant": "dense", "cache_tokens": None, "running_most": 50},
        load | {"variant": "dense", "cache_tokens": 134000},
    )
    # A window of a run is not compared with whole runs.
    timed = load | {"window_seconds": 59.6, "variant": "dense", "cache_tokens": 134000}
    write_run(folder / "capacity_window.jsonl", timed)
    assert compaction.users().text.splitlines()[2:] == [
        "| 134,000 tokens | 64 | `dense` | 8 | 700 |",
        "| no limit | 64 | `dense` | 50 | 700 |",
    ]
    took = {"variant": "snapkv", "context_tokens": 32768, "prefill_seconds": 2.5, "step_ms": 7.0, "running": 8}
    write_run(
        folder / "identical_needle-8m.jsonl", {"variant": "h2o", "identical": 49, "prompts": 50, "answer_tokens": 32}
    )
    assert " ".join(compaction.identical().text.split()) == (
        "With a budget that holds the whole prompt, 49 of 50 answers of needle-8m equal those of dense attention "
        "(`h2o`)."
    )
    write_run(folder / "time_32K.jsonl", took)
    assert " ".join(compaction.times().text.split()) == (
        "A prefill of 32,768 tokens, and steps of 8 requests beside it: 2.50 s and 7.0 ms (`snapkv`)."
    )
    parts = [float(part) for part in range(1, 17)]
    window = {"window": "no sinks", "cache_tokens": 1024, "part_tokens": 4096, "perplexity": parts}
    write_run(folder / "stream_needle-8m.jsonl", window, window | {"window": "sinks", "perplexity": [*parts[1:], 5.5]})
    assert " ".join(compaction.streams().text.split()) == (
        "llama-3.1-8b reads 65,536 tokens through a window of 1,024. Perplexity of the last 4,096: 16.00 (no sinks), "
        "5.50 (sinks)."
    )


def test_right_answers_of_two_turns_are_a_line_for_each_backend(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "RESULTS", tmp_path)
    assert compaction.turns().text == "Nothing yet."
    rows = [
        {"variant": variant, "turn": turn, "right": right, "questions": 24}
        for variant, turn, right in (("dense", "first", 22), ("dense", "second", 23), ("h2o", "second, protected", 0))
    ]
    write_run(tmp_path / "cpu-2core" / "compaction" / "turns_smollm2-135m.jsonl", *rows)
    assert compaction.turns().text.splitlines() == [
        "| backend | first | second | second, protected | second, a new request |",
        "|---|---|---|---|---|",
        "| `dense` | 22/24 | 23/24 | - | - |",
        "| `h2o` | - | - | 0/24 | - |",
    ]


def test_a_server_under_load_is_a_line_for_each_backend_beside_dense_attention(tmp_path, monkeypatch):
    def row(variant, concurrency, speed, prefix=0):
        return {
            "variant": variant, "workload": "shared_prefix" if prefix else "random", "concurrency": concurrency,
            "prefix_tokens": prefix, "ttft_ms_median": 1286.3, "tpot_ms_median": 5.964,
            "output_tokens_per_second": speed,
        }  # fmt: skip

    few = write_run(
        tmp_path / "few_clients.jsonl",
        row("flash_attn", 8, 80.0), row("flash_attn", 1, 60.0), row("flash_attn", 1, 100.0, 31744),
        row("unique", 1, 66.0), row("unique", 1, 125.0, 31744),
    )  # fmt: skip
    # From the other run, loads that are also in the first run are omitted.
    many = write_run(
        tmp_path / "unique.jsonl", row("flash_attn", 1, 1.0), row("flash_attn", 32, 90.0), row("unique", 32, 99.0)
    )
    monkeypatch.setattr(serving, "FEW_CLIENTS", few)
    monkeypatch.setattr(serving, "MANY_CLIENTS", (many,))
    assert serving.serving().text.splitlines()[2:] == [
        "| 0 | 1 | `flash_attn` | 1,286 | 5.96 | 60.0 (1.00x) |",
        "| 0 | 1 | `unique` | 1,286 | 5.96 | 66.0 (1.10x) |",
        "| 0 | 8 | `flash_attn` | 1,286 | 5.96 | 80.0 (1.00x) |",
        "| 0 | 32 | `flash_attn` | 1,286 | 5.96 | 90.0 (1.00x) |",
        "| 0 | 32 | `unique` | 1,286 | 5.96 | 99.0 (1.10x) |",
        "| 31,744 | 1 | `flash_attn` | 1,286 | 5.96 | 100.0 (1.00x) |",
        "| 31,744 | 1 | `unique` | 1,286 | 5.96 | 125.0 (1.25x) |",
    ]


def test_steps_of_one_token_do_not_stand_for_the_others(tmp_path):
    row = {"context_tokens": 131072, "batch": 6, "variant": "unique_offload", "ms_per_token": 15.9}
    again = row | {"one_token": True, "ms_per_token": 15.3}
    path = write_run(tmp_path / "no_hits.jsonl", row | {"one_token": False}, again)
    for variant in (None, "unique_offload"):
        for one_token, ms in ((False, 15.9), (True, 15.3)):
            steps = serving.read_steps(path, variant, one_token=one_token)
            assert [step["ms_per_token"] for step in steps.values()] == [ms]


def test_a_decode_step_after_prompts_is_not_shown_again_from_noise(tmp_path, monkeypatch):
    def steps(name, *found):
        rows = ({"context_tokens": context, "batch": 1, "ms_per_token": ms} for context, ms in found)
        write_run(tmp_path / "decode" / f"{name}.jsonl", *rows)

    steps("dense", (8192, 6.0))
    steps("sparse", (8192, 5.0))
    steps("dense_noise", (8192, 7.0), (131072, 9.0))
    steps("sparse_noise", (8192, 5.5), (131072, 6.0))
    files = ("bf16", "quarters", "dense", "sparse"), ("bf16, noise", "quarters", "dense_noise", "sparse_noise")
    monkeypatch.setattr(serving, "H200", tmp_path)
    monkeypatch.setattr(serving, "_DECODES", files)
    assert serving.decode_steps().text.splitlines()[2:] == [
        "| 8,192 | 1 | bf16 | quarters | 6.00 | 5.00 | 1.20 |",
        "| 131,072 | 1 | bf16, noise | quarters | 9.00 | 6.00 | 1.50 |",
    ]


def test_budgets_stand_beside_one_budget_for_all(tmp_path, monkeypatch):
    def row(provider, us, case="8q1s32K g4"):
        return {"op": "budgets", "case_name": case, "provider": provider, "warm": {"median_us": us}}

    left_out = {"op": "budgets", "case_name": "32q1s512K g4", "provider": "unique", "status": "left out"}
    path = write_run(
        tmp_path / "budgets.jsonl",
        row("unique", 100.8), row("unique, room for no more", 99.5), row("unique, one for all", 100.0), left_out,
    )  # fmt: skip
    monkeypatch.setattr(kernels, "BUDGETS", path)
    assert kernels.budgets_by_request().text.startswith(
        "Budgets by request change the time of a decode step's attention by +0.8% to +0.8%, measured for 1 batches"
    )


def test_adaptive_drafts_have_a_gain_and_a_time_where_nothing_is_drafted(tmp_path, monkeypatch):
    def row(context, ms, acceptance=None, tokens=1.0):
        drafts = 8 if acceptance else None
        return {
            "context_tokens": context, "batch": 1, "draft_tokens": drafts, "acceptance": acceptance,
            "tokens_per_step": tokens, "ms_per_token": ms,
        }  # fmt: skip

    path = write_run(
        tmp_path / "adaptive.jsonl",
        row(2048, 5.0), row(131072, 9.0), row(131072, 6.0, 0.97, 8.5), row(2048, 5.05, 0.9), row(2048, 4.99, 0.97),
    )  # fmt: skip
    monkeypatch.setattr(serving, "ADAPTIVE", path)
    lines = serving.lossless_adaptive().text.splitlines()
    assert lines[2:] == [
        "| 131,072 | 1 | 0.97 | 8.50 | 9.00 | 6.00 | 1.50 |",
        "",
        "Without drafts (contexts of 2,048 tokens) a token takes 1.00 to 1.01 times as long as densely.",
    ]


def test_a_soak_of_a_cache_that_shrinks_says_what_failed_and_what_is_left(tmp_path, monkeypatch):
    end = {
        "state": "end", "seconds": 420.0, "clients": 200, "answers": 6650, "hung_up": 3350, "faults": [],
        "preemptions": 1234.0, "requests_running": 0.0, "kv_cache_usage": 0.0, "parted": 3,
    }  # fmt: skip
    monkeypatch.setattr(compaction, "SOAK", write_run(tmp_path / "soak.jsonl", {"state": "alone"}, end))
    assert " ".join(compaction.soak().text.split()) == (
        "200 clients sent 10,000 requests in 7 minutes and abandoned 3,350 of them. The server preempted requests "
        "1,234 times. 3 of 6,650 answers differ from those asked alone. 0 requests failed. "
        "At the end 0 requests ran, and 0.0% of the cache was in use."
    )


def test_a_storm_says_what_changed_and_what_is_lost(tmp_path, monkeypatch):
    row = {
        "backend": "unique", "clients": 32, "hostile_clients": 16, "minutes": 20.0, "requests": {"a": 1000, "b": 1},
        "quiet_again": {"answers": 32, "changed_too_far": 1, "ms_per_token_median": 8.4},
        "storm": {"answers": 1200, "changed_too_far": 2, "ms_per_token_median": 10.5},
        "ratio_median": 1.25, "preemptions": 3, "faults": [],
    }  # fmt: skip
    path = write_run(tmp_path / "unique.jsonl", row)
    monkeypatch.setattr(states, "STORMS", {"a CPU": tmp_path})
    block = states.storm()
    assert block.sources == [path]
    assert block.text.splitlines()[2] == (
        "| a CPU | unique | 32 | 16 | 20 | 1,001 | 1 of 32 | 2 of 1,200 | 8 / 10 | 1.2 | 3 | 0 |"
    )


def test_adaptive_numbers_stand_beside_fixed_ones_of_the_same_mean(tmp_path, monkeypatch):
    def row(text: str, kind: str, arm: str, choice: str | None, agreement: float, **more: object) -> dict:
        return {"text": text, "kind": kind, "arm": arm, "choice": choice, "agreement": agreement, **more}

    rows = [row("p", "prose", "noise", None, 0.8), row("c", "code", "noise", None, 1.0)]
    rows += [{"text": "q", "kind": "ruler", "arm": "dense", "score": 0.5}, row("q", "ruler", "noise", None, 1.0)]
    for arm, agreement in {"attend_0.975": 0.7, "attend_0.95": 0.6, "zero_0.975": 0.5}.items():
        for choice in ("adaptive", "fixed"):
            if (arm, choice) == ("attend_0.95", "fixed"):
                continue  # time was up
            got = agreement - 0.1 * (choice == "fixed")
            kept = {"kept": 0.4, "kept_by_layer": [0.25, 0.55]}
            rows += [row("p", "prose", arm, choice, got, **kept), row("c", "code", arm, choice, got, **kept)]
            rows += [row("q", "ruler", arm, choice, got, **kept, score=got - 0.1)]
    monkeypatch.setattr(real, "ADAPTIVE", [write_run(tmp_path / "adaptive.jsonl", *rows)])
    lines = real.adaptive().text.splitlines()
    # 2.1 and 1.8 of 2.8; the answers have 0.6 and 0.5 of a dense score of 0.5.
    assert lines[2].startswith("| `attend`, 0.975 | 40% | 0.750 | 0.643 | 0.100 [")
    assert lines[2].endswith("] | 1.20 | 1.00 |")
    assert lines[3].startswith("| `zero`, 0.975 | 40% | 0.536 | 0.429 | 0.100 [")
    assert " ".join(lines[5:]) == (
        "3 texts and questions. At 0.975, `zipvl` keeps 40% of prose, 40% of code, 40% of RULER, and 25% to 55% by "
        "layer."
    )


def test_a_text_whose_noise_is_missing_is_left_out(tmp_path, monkeypatch):
    rows = [{"text": "a", "arm": "noise", "agreement": 0.8}]
    rows += [
        {"text": text, "arm": "zero_0.95", "choice": "fixed", "agreement": 0.6, "kept": 0.4, "share": 0.1}
        for text in "ab"
    ]
    path = write_run(tmp_path / "adaptive.jsonl", *rows)
    monkeypatch.setattr(real, "ADAPTIVE", [path])
    monkeypatch.setattr(real, "ROUTING", path)
    assert real.adaptive_share("zero_0.95", "fixed") == pytest.approx(0.75)
    assert real.kept_by_share("zero_0.95")[0.1].value == pytest.approx(0.75)
    monkeypatch.setattr(real, "ROUTES", {"zero_0.95": "a rule"})
    assert real.routing().text.splitlines()[-1] == "1 texts."


def test_texts_that_a_run_has_not_finished_do_not_count_as_whole(tmp_path, monkeypatch):
    texts = ("a", "b")
    shared = {"context_tokens": 64, "kind": "prose"}
    routed = [shared | {"arm": arm, "text": text, "agreement": 0.5} for arm in ("noise", "dense") for text in texts]
    routed += [
        shared | {"arm": "cosine", "share": share, "text": text, "agreement": 0.25}
        for share, some in ((0.1, texts), (0.2, texts[:1]))
        for text in some
    ]
    monkeypatch.setattr(real, "ROUTING", write_run(tmp_path / "routing.jsonl", *routed))
    monkeypatch.setattr(real, "ROUTES", {"cosine": "a rule"})
    assert real.routing().text.splitlines()[2] == "| a rule | 0.50 [0.50, 0.50] | 0.50 [0.50, 0.50], 1 of 2 |"
    # The first layers of the second text alone would make the mean one of the first layers.
    layers = [
        shared | {"arm": "layer", "tokens": 16, "text": text, "layer": layer, "mass": layer / 2, "missed": layer / 2}
        for text, count in (("a", 3), ("b", 1))
        for layer in range(count)
    ]
    path = write_run(tmp_path / "layers.jsonl", *layers)
    monkeypatch.setattr(real, "CONTRIBUTIONS", path)
    monkeypatch.setattr(sinks, "SINKS", path)
    assert [row["text"] for row in real.contribution_rows(64, 16, "prose")] == ["a"] * 3
    assert sinks.mean_of(sinks.layer_rows(64), "mass") == 0.5


def test_ruler_shows_the_tasks_that_dense_attention_answers_and_the_mean_of_all(tmp_path, monkeypatch):
    easy = {("easy", 4096): (1.0, 0.5), ("easy", 7900): (0.0, 0.0)}
    scores = easy | {("hard", 4096): (0.1, 0.1), ("hard", 7900): (1.0, 1.0)}
    rows = (
        {"task": task, "context_tokens": context, "setting": setting, "score": score}
        for (task, context), pair in scores.items()
        for setting, score in zip(("dense", "unique"), pair, strict=True)
    )
    monkeypatch.setattr(real, "RULER", write_run(tmp_path / "ruler.jsonl", *rows))
    lines = [line.strip("| ").split(" | ") for line in real.ruler().text.splitlines()[2:]]
    assert [[cell.partition(" [")[0] for cell in line] for line in lines] == [
        ["`easy`", "1.00", "0.50", "0.00", "0.00"],
        ["all 2 tasks", "0.55", "0.30", "0.50", "0.50"],
    ]


def test_ruler_scores_of_several_files_are_one_table(tmp_path, monkeypatch):
    def rows(**scores: float) -> list[dict]:
        about = {"id": "a", "task": "easy", "context_tokens": 4096}
        return [about | {"setting": setting, "score": score} for setting, score in scores.items()]

    monkeypatch.setattr(real, "RULER", write_run(tmp_path / "ruler.jsonl", *rows(dense=1.0, unique=0.75)))
    write_run(tmp_path / "ruler_more.jsonl", *rows(dense=0.0, **{"snapkv-2048": 0.5}))
    block = real.ruler_policies()
    assert [path.name for path in block.sources] == ["ruler.jsonl", "ruler_more.jsonl"]
    assert [line.partition(" [")[0] for line in block.text.splitlines()[2:]] == [
        "| `dense` | all | 0.00", "| `unique` | preset | 0.75", "| `snapkv` | 2,048 | 0.50",
    ]  # fmt: skip


def test_ruler_scores_of_a_column_are_those_of_the_same_questions(tmp_path, monkeypatch):
    # The time of `quest` was up after the task that dense attention answers.
    scores = {("dense", "easy"): 1.0, ("dense", "hard"): 0.0, ("quest", "easy"): 0.5}
    rows = (
        {"setting": setting, "id": task, "task": task, "context_tokens": 4096, "score": score}
        for (setting, task), score in scores.items()
    )
    monkeypatch.setattr(real, "RULER", write_run(tmp_path / "ruler.jsonl", *rows))
    lines = [line.partition(" [")[0] for line in real.ruler_policies().text.splitlines()]
    assert lines[0] == "| backend | tokens | 4,096 (1 of 2 questions) |"
    assert lines[2:] == ["| `dense` | all | 1.00", "| `quest` | preset | 0.50"]


def test_results_of_two_models_do_not_become_one_table(tmp_path, monkeypatch):
    row = {"setting": "dense", "id": "a", "task": "easy", "context_tokens": 4096, "score": 1.0}
    monkeypatch.setattr(real, "RULER", write_run(tmp_path / "ruler.jsonl", row, model="one"))
    write_run(tmp_path / "ruler_more.jsonl", row, model="other")
    sentence = "results: got ruler.jsonl and ruler_more.jsonl, of one and other, allowed together: those of one model"
    with pytest.raises(ConfigurationError, match=f"^{sentence}$"):
        real.ruler_policies()


def _art_rows(measure: str, dense: str, base: float) -> list[dict]:
    """Two items for dense attention, and for ART alone and over eviction."""
    stops, loose = "+stopping.block_tokens=64", "+stopping.scale_tolerance=1e-3"
    kept = "snapkv+compaction.budget_ratio=0.2"
    settings = {
        dense: (base, 1.0, 1.0),
        "art": (base, 0.96, 1.0),
        kept: (base / 2, 0.25, 0.25),
        f"{kept}{stops}": (base / 2, 0.2, 0.25),
        f"{kept}{stops}+stopping.dense_order=votes": (base / 4, 0.125, 0.25),
        f"art{stops}{loose}": (base / 2, 0.5, 1.0),
    }
    return [
        {"setting": setting, "id": item, measure: value, "key_read_share": read, "key_kept_share": kept}
        for setting, (value, read, kept) in settings.items()
        for item in "ab"
    ]


def test_art_is_a_row_for_each_cache_order_and_tolerance(tmp_path, monkeypatch):
    other = {"setting": "pyramidkv+compaction.budget_ratio=0.2", "id": "a", "agreement": 0.96}
    texts = [*_art_rows("agreement", "dense-again", 0.96), other | {"key_read_share": 0.5, "key_kept_share": 0.5}]
    monkeypatch.setattr(real, "ART_ANSWERS", write_run(tmp_path / "answers.jsonl", *_art_rows("score", "dense", 0.5)))
    monkeypatch.setattr(real, "ART_TEXTS", write_run(tmp_path / "texts.jsonl", *texts))
    block = real.art_in_full()
    assert block.text.startswith(f"| {ABOUT['model']} | keys kept |")
    lines = [line.removesuffix(" |").removeprefix("| ").split(" | ") for line in block.text.splitlines()[2:]]
    assert [[re.sub(r" \[.*\]", "", cell) for cell in line] for line in lines] == [
        ["`dense`", "100.0%", "100.0%", "score 0.500", "noise 4.0%"],
        ["`art`, preset", "100.0%", "96.0%", "1.00", "0.0%"],
        ["`art`, tau 0.001", "100.0%", "50.0%", "0.50", "48.0%"],
        ["`snapkv`", "25.0%", "25.0%", "0.50", "48.0%"],
        ["and `art`", "25.0%", "20.0%", "0.50", "48.0%"],
        ["and `art`, by votes", "25.0%", "12.5%", "0.25", "72.0%"],
        ["`pyramidkv`", "50.0%", "50.0%", "", "0.0%, 1 of 2"],
    ]
    assert block.sources == [tmp_path / "answers.jsonl", tmp_path / "texts.jsonl"]
    in_short = block.text.splitlines()
    in_short.remove(next(line for line in in_short if line.startswith("| and `art` |")))
    assert real.art().text.splitlines() == in_short


def test_art_counts_questions_and_texts_of_a_run_that_was_out_of_time(tmp_path, monkeypatch):
    answers, texts = (
        [row for row in rows if row["setting"] != "art" or row["id"] == "a"]
        for rows in (_art_rows("score", "dense", 0.5), _art_rows("agreement", "dense-again", 0.96))
    )
    monkeypatch.setattr(real, "ART_ANSWERS", write_run(tmp_path / "answers.jsonl", *answers))
    monkeypatch.setattr(real, "ART_TEXTS", write_run(tmp_path / "texts.jsonl", *texts))
    whole, line, *_ = real.art_in_full().text.splitlines()[2:]
    assert " of " not in whole
    assert [re.sub(r" \[.*\]", "", cell) for cell in line.split(" | ")[-2:]] == ["1.00, 1 of 2", "0.0%, 1 of 2 |"]


@pytest.fixture
def frontier_results(tmp_path, monkeypatch):
    """Decode steps of dense attention and of three budgets."""
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    for name, times in (("dense", (5.5, 39.0)), ("512", (5.0, 7.0)), ("2048", (5.1, 7.5)), ("8192", (5.4, None))):
        steps = zip((8192, 131072), (1, 6), times, strict=True)
        columns = "context_tokens", "batch", "ms_per_token"
        rows = (dict(zip(columns, step, strict=True)) for step in steps if step[-1])
        write_run(tmp_path / f"decode_{name}.jsonl", *rows)


def test_the_frontier_has_times_and_what_is_kept_by_budget(frontier_results):
    block = frontier.frontier()
    names = [path.name for path in block.sources[:4]]
    assert names == ["decode_dense.jsonl", "decode_512.jsonl", "decode_2048.jsonl", "decode_8192.jsonl"]
    heading, _, *rows = (line.strip("| ").split(" | ") for line in block.text.splitlines() if line.startswith("|"))
    assert heading == ["requests and context", "dense", "256", "512", "1,024", "2,048", "4,096", "8,192"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["1 x 8,192, ms per token"] == ["5.50", "-", "5.00", "-", "5.10", "-", "5.40"]
    assert cells["6 x 131,072, ms per token"] == ["39.00", "-", "7.00", "-", "7.50", "-", "-"]
    (tuned,) = (row for row in read_run(quality.TUNED).rows if row["setting"] == "unique-512")
    assert cells["same next token"][2].startswith(f"{tuned['agreement']['value']:.3f} [")
    assert cells["same next token"][-1] == "-"
    assert cells["look-alikes"] == ["24/24", "-", "22/24", "-", "24/24", "-", "-"]


def test_the_gains_of_recipes_are_the_ratios_of_their_rows():
    _, _, *rows = (line.strip("| ").split(" | ") for line in recipes.recipe_gains().text.splitlines())
    units = {unit for _, unit, *_ in rows}
    assert units >= {"ms per token", "tokens of cache", "requests at once", "s to the first token"}
    for _, unit, *numbers, _, gain in rows:
        dense, plugin = (float(number.replace(",", "")) for number in numbers)
        is_time = unit.partition(" ")[0] in ("ms", "s")
        ratio = dense / plugin if is_time else plugin / dense
        assert float(gain.removesuffix("x")) == pytest.approx(ratio, rel=0.03), unit


def test_the_figure_of_the_frontier_has_a_line_for_each_context_and_measure(frontier_results):
    pytest.importorskip("matplotlib")
    left, right = figures.draw_frontier().axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert lines["6 x 128K"] == [[1, 7], [3, 7.5]]
    assert lines["1 x 8K"] == [[1, 5], [3, 5.1], [5, 5.4]]
    assert [line.get_xydata().tolist() for line in left.lines[1::2]] == [[[6, 5.5]], [[6, 39]]]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["agreement", "overlap", "likelihood"]


def test_two_levels_stand_beside_flat_quarters_and_a_bound(tmp_path, monkeypatch):
    leveled = "leveled_quarters"
    ranked = ("oracle", 1.0, 0.75), ("quarters", 1.0, 0.5), (leveled, 0.25, 0.375), (leveled, 0.5, 0.5)
    rows = [
        {
            "arm": "levels", "text": text, "layer": layer, "ranked_by": ranked_by, "refined": refined, "pages": pages,
            "mass": mass + more,
        }
        for ranked_by, refined, mass in ranked
        for pages in (64, 128, 256)
        for text, layer, more in (("a", 5, 0.125), ("a", 11, -0.125))
    ]  # fmt: skip
    monkeypatch.setattr(selection, "LONG", write_run(tmp_path / "one.jsonl", *rows, {"seconds": 1.0}))
    assert selection.levels().text.splitlines()[2:] == [
        "| true weight (a bound) | 0.750 | 0.750 | 0.750 |",
        "| `quarters` | 0.500 | 0.500 | 0.500 |",
        "| `refined` 0.25, minus `quarters` | -0.125 | -0.125 | -0.125 |",
    ]
    rows += [row | {"text": "b"} for row in rows]
    monkeypatch.setattr(selection, "LONG", write_run(tmp_path / "two.jsonl", *rows))
    assert "| -0.125 [-0.125, -0.125] |" in selection.levels().text


def test_copies_are_a_line_for_each_model_and_a_column_for_each_context(tmp_path, monkeypatch):
    def row(context: int, multiple: int, steady: float, **columns: int) -> dict:
        about = {"arm": "copies", "context_tokens": context, "budget_tokens": 1024, "multiple": multiple, "ways": 8}
        return about | {"cold": 1.0, "steady": steady} | columns

    first = write_run(
        tmp_path / "a.jsonl", row(4096, 4, 0.25), row(4096, 8, 0.125), row(4096, 2, 1.0), row(4096, 4, 0.5),
        row(4096, 4, 1.0, budget_tokens=512), row(4096, 4, 1.0, ways=512),
    )  # fmt: skip
    second = write_run(tmp_path / "b.jsonl", row(13312, 4, 0.5), row(13312, 8, 0.0))
    monkeypatch.setattr(selection, "COPIES", {"A": [first], "B": [first, second]})
    assert selection.copies().text.splitlines() == [
        "| model | 4K | 13K |",
        "|---|---|---|",
        "| A | 37.5%, 12.5% | - |",
        "| B | 37.5%, 12.5% | 50.0%, 0.0% |",
    ]
    assert selection.copies().sources == [first, second]


def test_right_answers_are_counted_by_engine_if_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "LOOKUP", tmp_path / "lookup.jsonl")
    assert (offload.lookup().text, list(offload.lookup().sources)) == ("", [])
    row = {
        "requests": 1, "context_tokens": 1 << 20, "kv_gib": 32.0, "right_answer": [5], "answer": [5],
        "ms_per_token": 2.0,
    }  # fmt: skip
    slow = {"needle": 0, "ms_per_token": 900.0, "host_read_share": 0.5}
    write_run(
        offload.LOOKUP,
        row | {"variant": "flash_attn", "needle": 1},
        *(row | {"variant": "unique_offload", **more} for more in (slow, {"needle": 1, "answer": [0]})),
    )
    assert offload.lookup().text.splitlines()[-2:] == [
        "| `flash_attn` | 1 x 1024K | 32 | 1 of 1 | 2.00 | - |",
        "| `unique_offload` | 1 x 1024K | 32 | 1 of 2 | 2.00 | 50% |",
    ]


def test_look_alikes_are_shown_by_the_budget_that_was_asked(tmp_path, monkeypatch):
    files = {budget: tmp_path / f"look_alikes_{budget}.jsonl" for budget in (512, 2048)}
    monkeypatch.setattr(quality, "LOOK_ALIKES", files)
    for budget, path in files.items():
        answers = ({"backend": name, "context_tokens": 4096} for name in ("dense", "unique"))
        write_run(path, *(answer | {"correct": answer["backend"] == "dense" or budget > 512} for answer in answers))
    lines = quality.look_alikes().text.splitlines()
    assert lines[0] == "| context | dense | 512 tokens | 2,048 tokens |"
    assert lines[-1] == "| 4,096 | 1/1 | 0/1 | 1/1 |"


def test_settings_of_several_files_are_held_to_the_noise_of_their_file(tmp_path, monkeypatch):
    routed = "sinkrouter+config=gemma-3-270m_mean.yaml+routing.accept=not_recommended"
    paths = []
    for setting, again, agreement in (("pyramidkv_paper", 1.0, 0.75), (routed, 0.75, 0.25)):
        rows = (
            {"setting": name, "id": str(text), "text": kind, "agreement": share, "key_kept_share": kept}
            for text, kind in enumerate(real.GEMMA_KINDS) for name, share, kept in (
                ("dense-again", again, 1.0), (setting, agreement, 0.14 if setting == "pyramidkv_paper" else 1.0),
            )
        )  # fmt: skip
        paths.append(write_run(tmp_path / f"{len(paths)}.jsonl", *rows))
    monkeypatch.setattr(real, "OTHERS_GEMMA", paths)
    block = real.others_gemma()
    evicted, routed_line = block.text.splitlines()[2:]
    assert evicted.startswith("| `pyramidkv_paper` | preset | 14% | 25.0%")
    assert routed_line.startswith("| `sinkrouter` | calibrated | 100% | 50.0%")
    assert block.sources == paths


def test_notices_tell_the_measured_shares():
    few = [
        real.changed_in(real.SERVED_POLICIES, f"{policy}-512", text) for policy in real.POLICIES for text in real.TEXTS
    ]
    lost = [
        *(real.changed_in(real.EVICTING_GEMMA, setting, text)
          for setting in ("snapkv", "pyramidkv", "h2o", "streaming_llm-1024") for text in real.GEMMA_KINDS),
        *(real.changed_in(real.EVICTING_GEMMA_MORE, "snapkv_paper", text) for text in real.GEMMA_KINDS),
        *(real.changed_in(real.OTHERS_GEMMA[0], "pyramidkv_paper", text) for text in real.GEMMA_KINDS),
        *(real.changed_in(real.SERVED_BACKENDS, setting, text)
          for setting in ("snapkv", "snapkv_paper", "pyramidkv", "h2o") for text in real.TEXTS),
    ]  # fmt: skip
    for preset, shares in {"quest": few, "snapkv": lost}.items():
        values = [100 * share.value for share in shares]
        (sentence,) = notices.notices_of(resolve(None, preset), "auto")
        assert f"change {min(values):.0f} to {max(values):.0f} % of the next tokens" in sentence
    more = [
        real.changed_in(real.SERVED_POLICIES, f"{policy}-1024", text).value
        for policy in real.POLICIES for text in real.TEXTS
    ]  # fmt: skip
    halves = [larger / smaller.value for larger, smaller in zip(more, few, strict=True)]
    assert 0.3 < sum(halves) / len(halves) < 0.7

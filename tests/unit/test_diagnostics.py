import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import api as page_coverage
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, update_page_statistics
from sparse_kernels.row_attention import api as row_attention

from vllm_sparse_plugin.config.account import LayerKeys
from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.metrics.quality import Context, Quality, measure
from vllm_sparse_plugin.policies import POLICIES, QuestSelection, Selection, StreamingLLMSelection, UniqueSelection
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer

PAGE = 4
HEADS, GROUP, SIZE = 2, 3, 8


def capped_logit(query: torch.Tensor, key: torch.Tensor, scale: float, softcap: float) -> float:
    logit = float(query.double() @ key.double()) * scale
    return softcap * math.tanh(logit / softcap) if softcap else logit


def by_hand(query, keys, values, context, pages, scale, sinks, softcap, halves, always) -> dict[str, list[float]]:
    """Computes one query token, head and token after the other, in Python's floats.

    The estimate treats all keys of a page as the best matching half's mean, except for pages that are always read.
    """
    result = {name: [] for name in Quality._fields}
    complete = context // PAGE
    for head in range(HEADS):
        read = {int(page) for page in pages[head] if page >= 0}
        shares, cosines, estimates = [[0.0] * (complete + 1) for _ in range(GROUP)], [], []

        known = {*range(always.sink_pages), *range(complete - always.recent_pages, complete), complete}
        for g in range(GROUP):
            logits = [capped_logit(query[head, g], keys[head, n], scale, softcap) for n in range(context)]
            total = sum(math.exp(x) for n, x in enumerate(logits) if n // PAGE in known)
            masses = {}
            for page in set(range(complete)) - known:
                best = max(capped_logit(query[head, g], half, scale, softcap) for half in halves[head, page])
                masses[page] = PAGE * math.exp(best)
            total += sum(masses.values())
            estimates.append(1 - sum(mass for p, mass in masses.items() if p not in read) / total)
            weights = [math.exp(x) for x in logits]
            for n, weight in enumerate(weights):
                shares[g][n // PAGE] += weight / sum(weights)
            sink = 0.0 if sinks is None else math.exp(float(sinks[head * GROUP + g]))
            outputs = []
            for seen in (range(context), [n for n in range(context) if n // PAGE in read or n // PAGE == complete]):
                total = sum(weights[n] for n in seen) + sink
                outputs.append(sum(weights[n] / total * values[head, n].double() for n in seen))
            cosines.append(float(torch.nn.functional.cosine_similarity(*outputs, dim=0)))
        share = [sum(of_head[p] for of_head in shares) / GROUP for p in range(complete + 1)]
        best = sorted(range(complete), key=lambda p, share=share: (-share[p], p))[: len(read)]
        result["mass"].append(sum(share[p] for p in read) + share[complete])
        result["oracle_mass"].append(sum(share[p] for p in best) + share[complete])
        result["recall"].append(len(read & set(best)) / len(read))
        result["cosine"].append(sum(cosines) / GROUP)
        result["estimated_mass"].append(sum(estimates) / GROUP)
    return result


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 4, HEADS * GROUP)], ids=["plain", "sinks"])
def test_quality_is_what_a_loop_finds(sinks, softcap):
    torch.manual_seed(1)
    contexts = [37, 38, 40]
    query = torch.randn(3, HEADS, GROUP, SIZE).bfloat16()
    keys, values = torch.randn(HEADS, 40, SIZE).bfloat16(), torch.randn(HEADS, 40, SIZE).bfloat16()
    pages = torch.tensor([[[0, 3, 8], [0, 8, -1]], [[0, 3, 8], [0, 7, 8]], [[0, 4, 9], [0, 9, -1]]])
    halves, always = keys.float().unflatten(1, (10, 2, 2)).mean(dim=3), PageSelection(3, 1, 1)
    # In pieces, as a server has them.
    pieces = Context(keys.split(16, dim=1), values.split(12, dim=1), halves.split(4, dim=1))
    softmax = Softmax(0.5, softcap, sinks)
    quality = measure(query, pieces, torch.tensor(contexts), pages, PAGE, softmax, always)
    for token, context in enumerate(contexts):
        expected = by_hand(query[token], keys, values, context, pages[token], 0.5, sinks, softcap, halves, always)
        for name, found in quality._asdict().items():
            torch.testing.assert_close(found[token], torch.tensor(expected[name]), atol=1e-5, rtol=1e-5, msg=name)


def test_reading_everything_is_perfect():
    query = torch.randn(1, HEADS, GROUP, SIZE)
    keys, values = torch.randn(2, HEADS, 19, SIZE)
    pages = torch.arange(4).expand(1, HEADS, 4)
    quality = measure(query, Context([keys], [values]), torch.tensor([19]), pages, PAGE, Softmax(0.3))
    assert quality.estimated_mass is None
    for part in quality[:-1]:
        torch.testing.assert_close(part, torch.ones(1, HEADS))


def test_reading_the_best_pages_is_the_oracle():
    query = torch.randn(1, HEADS, GROUP, SIZE) * 3
    keys, values = torch.randn(2, HEADS, 32, SIZE)
    weights = torch.einsum("qhgd,hnd->qhgn", query, keys).softmax(dim=-1)
    best = weights.unflatten(-1, (8, PAGE)).sum(dim=-1).mean(dim=2).topk(3, dim=-1).indices
    quality = measure(query, Context([keys], [values]), torch.tensor([32]), best, PAGE, Softmax(1.0))
    assert quality.recall.eq(1).all()
    torch.testing.assert_close(quality.mass, quality.oracle_mass)
    assert quality.mass.lt(1).all()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    for name in (live._VLLM_FOLDER, live._OUR_FOLDER):
        monkeypatch.delenv(name, raising=False)
    found = CollectorRegistry()
    monkeypatch.setattr(live, "REGISTRY", found)
    return found


def samples(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    found = {}
    for family in registry.collect():
        assert family.type == "summary"
        for sample in family.samples:
            found[sample.name, sample.labels["layer"], sample.labels["kv_head"]] = sample.value
    return found


class Meter:
    """Measures tokens of layer 7, whose first KV head is head 2 of all workers, and publishes the results."""

    def __init__(self) -> None:
        self.counts = live.DeviceCounts([(7, range(2, 2 + HEADS))], live.QUALITY, 5, torch.device("cpu"))

    def record(self, seed: int, overflow: bool = False) -> Quality:
        generator = torch.Generator().manual_seed(seed)
        block_rows = torch.randn(5, HEADS, 16, 2 * SIZE, generator=generator).bfloat16()
        table, context = torch.tensor([3, 1, 4]), 45
        # The last block has room for three more tokens, which are unwritten.
        block_rows[4, :, 13:] = torch.nan
        layout = StatisticsLayout(8, SIZE, "int4", 2, KINDS["quarters"])
        rows = torch.zeros(5, HEADS, layout.rows(16), 2 * SIZE).bfloat16()
        cache = KVCache.from_rows(block_rows, 8, layout.views(rows, 16))
        page = torch.arange(5)
        update_page_statistics(cache.keys, cache.statistics, table[page // 2], page % 2)
        query = torch.randn(1, HEADS, GROUP, SIZE, generator=generator)
        if overflow:
            query[0, 1] = torch.inf
        lens, selection, softmax = torch.tensor([context]), PageSelection(3, 1, 1), Softmax(0.4)
        pages = torch.tensor([[[0, 3, 4], [0, 1, 4]]])
        token = QueryTokens(query, table[None], lens)
        live.LayerQuality(self.counts.of_layers[0], 0, 1).record(token, context + 2, cache, pages, softmax, selection)
        for _ in range(2 * live.COUNTED_STEPS):
            self.counts.step()
        tokens = block_rows[table].transpose(0, 1).flatten(1, 2)[:, :context]
        keys, values = tokens.split(SIZE, dim=-1)
        summaries = [cache.statistics.summaries(table)[0]]
        return measure(query, Context([keys], [values], summaries), lens, pages, 8, softmax, selection)


MEASURED = {
    "mass": "attention_mass",
    "recall": "page_recall",
    "cosine": "output_cosine",
    "estimated_mass": "estimated_mass",
}


def test_what_is_recorded_reaches_the_registry_of_the_process_that_serves_metrics(registry, monkeypatch):
    live.expose()
    live.expose()  # every process of an engine calls this
    meter = Meter()
    first, second = meter.record(seed=0), meter.record(seed=1)
    found = samples(registry)
    for field, name in MEASURED.items():
        for head in range(HEADS):
            expected = sum(float(getattr(quality, field)[0, head]) for quality in (first, second))
            where = "7", str(2 + head)
            assert found[f"vllm_sparse_{name}_sum", *where] == pytest.approx(expected, abs=1e-6)
            assert found[f"vllm_sparse_{name}_count", *where] == 2
    assert len(found) == 4 * 2 * HEADS
    assert b"# TYPE vllm_sparse_page_recall summary" in generate_latest(registry)
    # A head with overflowing numbers is not counted.
    meter.record(seed=2, overflow=True)
    found = samples(registry)
    assert found["vllm_sparse_page_recall_count", "7", "2"] == 3
    assert found["vllm_sparse_page_recall_count", "7", "3"] == 2
    # A worker that starts later adds to the same numbers.
    with monkeypatch.context() as worker:
        worker.setattr(os, "getpid", lambda: 99_999_999)
        live._file.cache_clear()
        Meter().record(seed=0)
    live._file.cache_clear()
    assert samples(registry)["vllm_sparse_page_recall_count", "7", "2"] == 4


def test_a_context_is_measured_piece_by_piece(monkeypatch):
    whole, pieces = Meter(), Meter()
    quality = whole.record(seed=3)
    monkeypatch.setattr(row_attention, "_PIECE_TOKENS", 16)
    monkeypatch.setattr(page_coverage, "_PIECE_PAGES", 2)
    assert pieces.record(seed=3).mass.equal(quality.mass)
    torch.testing.assert_close(pieces.counts.of_layers[0], whole.counts.of_layers[0], rtol=0, atol=1 << 10)


def test_a_server_that_a_program_with_an_engine_starts_has_a_folder_of_its_own(registry, monkeypatch, tmp_path):
    monkeypatch.setenv(live._OUR_FOLDER, str(tmp_path))
    with monkeypatch.context() as worker:
        worker.setattr(live.multiprocessing, "parent_process", lambda: "the engine's")
        live.expose()
    assert os.environ[live._OUR_FOLDER] == str(tmp_path)
    live.expose()
    assert os.environ[live._OUR_FOLDER] != str(tmp_path)
    live._file.cache_clear()
    Meter().record(seed=0)
    assert samples(registry)["vllm_sparse_attention_mass_count", "7", "2"] == 1


def test_where_vllm_collects_from_files_they_are_put_beside_its_own(registry, monkeypatch, tmp_path):
    monkeypatch.setenv(live._VLLM_FOLDER, str(tmp_path))
    live.expose()
    Meter().record(seed=0)
    assert samples(registry) == {}
    live.MultiProcessCollector(registry, path=str(tmp_path))
    assert samples(registry)["vllm_sparse_attention_mass_count", "7", "2"] == 1


def test_how_far_attention_reads_reaches_the_metrics(registry):
    live.expose()
    counts = live.DeviceCounts([(3, range(2, 4)), (5, range(2, 3))], live.READS, 4, torch.device("cpu"))
    for visits in ([4, 20, 1300, 9000], [1, 7, 400, 3000]):
        counts.of_layers[1][0] += torch.tensor(visits)
        for _ in range(live.COUNTED_STEPS):
            counts.step()
    # The latest counts have been requested, but not published.
    found = samples(registry)
    assert found["vllm_sparse_kv_read_share_sum", "5", "2"] == 1300
    for _ in range(live.COUNTED_STEPS):
        counts.step()
    found = samples(registry)
    assert found["vllm_sparse_blocks_read_sum", "5", "2"] == 27
    assert found["vllm_sparse_blocks_read_count", "5", "2"] == 5
    assert found["vllm_sparse_kv_read_share_sum", "5", "2"] == 1700
    assert found["vllm_sparse_kv_read_share_count", "5", "2"] == 12000
    assert len(found) == 2 * 2


def test_lengths_say_how_far_a_budget_reads(registry):
    """Pages of 8 tokens, a budget of 4 pages. With 40 tokens the fourth page is complete and the fifth begins at 32."""
    live.expose()
    reads = live.ContextReads(LayerKeys(page_size=8, budget_pages=4, dense_tokens=40))
    #  one token, two tokens, a prompt's end, within the budget, too short, a chunk of a prompt, padding
    query_lens = torch.tensor([1, 2, 1, 1, 1, 30, 0, 0])
    seq_lens = torch.tensor([1003, 509, 700, 39, 40, 900, 0, 0])
    is_prefilling = torch.tensor([False, False, True, False, False, False])
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    batch = {
        "seq_lens_cpu_upper_bound": seq_lens,
        "query_start_loc_cpu": query_start,
        "is_prefilling": is_prefilling,
    }
    for _ in range(live.COUNTED_STEPS):
        assert samples(registry) == {}
        reads.step(SimpleNamespace(**batch), 2)
    found = samples(registry)
    assert found == {
        ("vllm_sparse_kv_read_share_sum", "", ""): 4 * 8 * 3 + 1003 % 8 + 509 % 8 + 508 % 8,
        ("vllm_sparse_kv_read_share_count", "", ""): 1003 + 509 + 508,
    }
    for _ in range(live.COUNTED_STEPS):
        reads.step(SimpleNamespace(**batch | {"seq_lens_cpu_upper_bound": None}), 2)
    assert samples(registry) == found
    # By request, for every step, including requests that read everything.
    logged = []
    reads.step(SimpleNamespace(**batch), 2, None, lambda *sums: logged.append([sum_.tolist() for sum_ in sums]))
    read = [32 + 1003 % 8, 64 + 509 % 8 + 508 % 8, 0, 39, 40, 0, 0, 0]
    assert logged == [[read, [1003, 509 + 508, 0, 39, 40, 0, 0, 0]]]
    assert samples(registry) == found


def test_a_step_without_decoding_tokens_counts_nothing(registry):
    live.expose()
    reads = live.ContextReads(LayerKeys(page_size=8, budget_pages=4))
    batch = {
        "seq_lens_cpu_upper_bound": torch.tensor([300, 200]),
        "query_start_loc_cpu": torch.tensor([0, 100, 200]),
        "is_prefilling": None,
    }
    for _ in range(live.COUNTED_STEPS):
        reads.step(SimpleNamespace(**batch), 1)
    assert samples(registry) == {}


SELECTIONS = [policy for policy in POLICIES if issubclass(policy, Selection)]


@pytest.fixture
def inputs() -> LayerInputs:
    """Queries at the positions 297 to 299 that match some keys well."""
    keys, values = torch.randn(2, 2, 300, 64).bfloat16()
    query = torch.randn(3, 2, 4, 64) + 2 * keys[:, [40, 41, 250]].transpose(0, 1).unsqueeze(2).float()
    return LayerInputs(query.bfloat16(), keys, values, 0.125)


@pytest.mark.parametrize("policy", SELECTIONS, ids=lambda policy: policy.name())
def test_a_larger_budget_gets_more_and_one_of_everything_all(policy, inputs):
    paged = PagedLayer(inputs, policy())
    found = [paged.quality(policy(budget_tokens=8 * pages)) for pages in (4, 8, 16, 37)]
    masses = [float(quality.mass.mean()) for quality in found]
    assert masses[:3] == sorted(set(masses[:3]))
    for quality in found[:3]:
        assert (quality.mass <= quality.oracle_mass + 1e-6).all()
        assert quality.recall.mean() < 1
    for part in found[3]:
        if part is not None:
            torch.testing.assert_close(part, torch.ones_like(part))


def test_the_pages_judged_are_those_of_the_policys_score(inputs):
    """Quest with exact bounds, computed from its formula."""
    selection = QuestSelection(budget_tokens=64, statistics="bf16", sink_pages=0, recent_pages=0)
    quality = PagedLayer(inputs, selection).quality()
    pages = inputs.keys[:, :296].float().unflatten(1, (37, 8))
    query = inputs.query.float()[..., None, :]
    products = torch.maximum(query * pages.amax(dim=2)[None, :, None], query * pages.amin(dim=2)[None, :, None])
    scores = products.sum(dim=-1).amax(dim=2).bfloat16()
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :8]
    expected = measure(
        inputs.query, Context([inputs.keys], [inputs.values]), inputs.context_lens, best, 8, Softmax(0.125)
    )
    for found, wanted in zip(quality[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(found, wanted)


def test_streaming_llm_misses_what_lies_between(inputs):
    ours, window = (PagedLayer(inputs, policy(budget_tokens=64)) for policy in (UniqueSelection, StreamingLLMSelection))
    assert ours.quality().mass.mean() > window.quality().mass.mean() + 0.1


def refused(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "diagnose", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert len(err.splitlines()) == 1
    return err.removeprefix("error: ").rstrip("\n")


REFUSED = {
    "dense": (
        ["--attention-backend", "dense"],
        "attention_backend: got 'dense', allowed: unique, unique_paper, quest, infllm, mean, streaming_llm, ",
    ),
    "unknown backend": (["--attention-backend", "h2o"], "attention_backend: got 'h2o', allowed: unique, "),
    "budget": (
        ["--budget-tokens", "100"],
        "sparse_attention.selection.budget_tokens: got 100, allowed: a multiple of ",
    ),
    "dense by its settings": (
        ["--additional-config", '{"sparse_attention": {"selection": {"policy": "dense"}}}'],
        "sparse_attention.selection.budget_tokens: unknown key, allowed: policy",
    ),
    "stopping": (
        ["--additional-config", '{"sparse_attention": {"stopping": {}}}'],
        "sparse_attention.stopping: got a rule, allowed: null for diagnose",
    ),
    "routing": (
        ["--additional-config", '{"sparse_attention": {"routing": {"threshold": 0.5}}}'],
        "sparse_attention.routing: got thresholds, allowed: null for diagnose",
    ),
    "compaction": (
        ["--additional-config", '{"sparse_attention": {"compaction": {"method": "snapkv"}}}'],
        "sparse_attention.compaction: got snapkv, allowed: null for diagnose",
    ),
    "anchors": (
        ["--additional-config", '{"sparse_attention": {"selection": {"anchor_layers": 2}}}'],
        "sparse_attention.selection.anchor_layers: got 2, allowed: 1 for diagnose, where each layer chooses its pages",
    ),
    "settings": (["--additional-config", '{"sparse_attention": 5}'], "sparse_attention: got 5, allowed: a JSON object"),
    "layer": (["--layer", "8"], "layer: got 8, allowed: 0 to 7"),
    "model": (["--model", "/nonexistent"], "model: got '/nonexistent', allowed: a folder with a config.json "),
    "no file": (["--prompts", "/nonexistent"], "prompts: got '/nonexistent' (No such file or directory), allowed: "),
    "context": (["--context", "100"], "context: got 100 tokens, allowed: from 4096 to the model's 32768"),
    "task": (["--task", "riddle"], "task: got 'riddle', allowed: single, "),
    "questions": (["--questions", "0"], "questions: got 0, allowed: 1 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_diagnose_refuses(case, monkeypatch, capsys):
    arguments, sentence = REFUSED[case]
    assert refused(monkeypatch, capsys, *arguments).startswith(sentence)


BAD_PROMPTS = {
    "empty": ("\n", "without a line, allowed: one or more"),
    "no JSON": ('{"prompt": "a"}\n{', "prompts: got '{' in line 2, allowed: a JSON object with the text `prompt`"),
    "no prompt": ('{"completion": "a"}', "in line 1, allowed: a JSON object"),
    "number": ('{"prompt": 5}', "in line 1, allowed: a JSON object"),
    "list": ("[1]", "prompts: got '[1]' in line 1, allowed: a JSON object"),
    "too long": (json.dumps({"prompt": "word " * 40_000}), "tokens in line 1, allowed: the model's 32768"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_diagnose_refuses_prompts(case, monkeypatch, capsys, tmp_path):
    text, sentence = BAD_PROMPTS[case]
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert sentence in refused(monkeypatch, capsys, "--prompts", str(path))


@pytest.mark.parametrize(("tokens", "budget"), [(5, 64), (8, 64), (60, 64), (300, 1024)])
def test_nothing_is_missed_where_everything_is_read(tokens, budget):
    """With fewer tokens than a page, the oracle has no page to choose."""
    query, keys = torch.randn(3, 2, 4, 32), torch.randn(2, tokens, 32, dtype=torch.bfloat16)
    inputs = LayerInputs(query.bfloat16(), keys, torch.randn_like(keys), 0.2)
    quality = PagedLayer(inputs, UniqueSelection(budget_tokens=budget)).quality()
    assert (quality.recall == 1).all()
    torch.testing.assert_close(quality.mass, torch.ones(3, 2))


def test_diagnose_of_prompts(monkeypatch, capsys, tmp_path):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.jsonl"
    text = " ".join(f"line {i}: return value_{i * 37 % 101}" for i in range(80))
    lines = [{"prompt": text}, {"prompt": text, "completion": " line 80: return value_31"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--prompts",
        str(prompts),
        "--attention-backend",
        "unique",
        "--attention-backend",
        "streaming_llm",
        "--layer",
        "2",
    ]
    arguments += ["--budget-tokens", "128", "--budget-tokens", "64", "--queries", "5", "--by", "head"]
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "diagnose", *arguments, "--json", str(report)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    run, *rows = map(json.loads, Path(report).read_text().splitlines())
    assert run["model"] == "needle-8m"
    # Prompts, backends, budgets, KV heads.
    assert len(rows) == 2 * 2 * 2 * 2
    assert {row["layer"] for row in rows} == {2}
    assert {row["queries"] for row in rows if row["prompt"] == "line 1"} == {5}
    assert rows[-1]["queries"] > 5
    by_budget = {
        budget: sum(row["mass"] for row in rows if row["budget_tokens"] == budget and row["backend"] == "unique")
        for budget in (64, 128)
    }
    assert 0 < by_budget[64] < by_budget[128]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(table) == 2 * 2 * 2

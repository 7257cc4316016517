import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from vllm_sparse_plugin.config.account import LayerKeys
from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.policies import POLICIES, QuestSelection, Selection, UniqueSelection
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer, Quality, measure

PAGE = 4
HEADS, GROUP, SIZE = 2, 3, 8


def by_hand(query, keys, values, context, pages, scale) -> dict[str, list[float]]:
    """Computes one query token, head and token after the other, in Python's floats."""
    result = {name: [] for name in Quality._fields}
    complete = context // PAGE
    for head in range(HEADS):
        read = {int(page) for page in pages[head] if page >= 0}
        shares, cosines = [[0.0] * (complete + 1) for _ in range(GROUP)], []
        for g in range(GROUP):
            products = [float(query[head, g].double() @ keys[head, n].double()) for n in range(context)]
            weights = [math.exp(scale * product) for product in products]
            for n, weight in enumerate(weights):
                shares[g][n // PAGE] += weight / sum(weights)
            outputs = []
            for seen in (range(context), [n for n in range(context) if n // PAGE in read or n // PAGE == complete]):
                total = sum(weights[n] for n in seen)
                outputs.append(sum(weights[n] / total * values[head, n].double() for n in seen))
            cosines.append(float(torch.nn.functional.cosine_similarity(*outputs, dim=0)))
        share = [sum(of_head[p] for of_head in shares) / GROUP for p in range(complete + 1)]
        best = sorted(range(complete), key=lambda p, share=share: (-share[p], p))[: len(read)]
        result["mass"].append(sum(share[p] for p in read) + share[complete])
        result["oracle_mass"].append(sum(share[p] for p in best) + share[complete])
        result["recall"].append(len(read & set(best)) / len(read))
        result["cosine"].append(sum(cosines) / GROUP)
    return result


def test_quality_is_what_a_loop_finds():
    torch.manual_seed(1)
    contexts = [37, 38, 40]
    query = torch.randn(3, HEADS, GROUP, SIZE).bfloat16()
    keys, values = torch.randn(HEADS, 40, SIZE).bfloat16(), torch.randn(HEADS, 40, SIZE).bfloat16()
    pages = torch.tensor([[[0, 3, 8], [0, 8, -1]], [[0, 3, 8], [0, 7, 8]], [[0, 4, 9], [0, 9, -1]]])
    quality = measure(query, keys, values, torch.tensor(contexts), pages, PAGE, 0.5)
    for token, context in enumerate(contexts):
        expected = by_hand(query[token], keys, values, context, pages[token], 0.5)
        for name, found in quality._asdict().items():
            torch.testing.assert_close(found[token], torch.tensor(expected[name]), atol=1e-5, rtol=1e-5, msg=name)


def test_reading_the_best_pages_is_the_oracle():
    query = torch.randn(1, HEADS, GROUP, SIZE) * 3
    keys, values = torch.randn(2, HEADS, 32, SIZE)
    weights = torch.einsum("qhgd,hnd->qhgn", query, keys).softmax(dim=-1)
    best = weights.unflatten(-1, (8, PAGE)).sum(dim=-1).mean(dim=2).topk(3, dim=-1).indices
    quality = measure(query, keys, values, torch.tensor([32]), best, PAGE, 1.0)
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


def count_reads() -> None:
    """Counts and publishes the reads of layer 7, whose first KV head is head 2 of all workers."""
    counts = live.DeviceCounts([(7, range(2, 4))], live.READS, 4, torch.device("cpu"))
    counts.of_layers[0].add_(torch.tensor([[4, 20, 1300, 9000], [1, 7, 400, 3000]]))
    for _ in range(2 * live.COUNTED_STEPS):
        counts.step()


def test_counts_reach_the_registry_of_the_process_that_serves_metrics(registry, monkeypatch):
    live.expose()
    live.expose()  # every process of an engine calls this
    count_reads()
    found = samples(registry)
    assert found["vllm_sparse_blocks_read_sum", "7", "2"] == 20
    assert found["vllm_sparse_blocks_read_count", "7", "3"] == 1
    assert len(found) == 2 * 2 * 2
    assert b"# TYPE vllm_sparse_blocks_read summary" in generate_latest(registry)
    # A worker that starts later adds to the same numbers.
    with monkeypatch.context() as worker:
        worker.setattr(os, "getpid", lambda: 99_999_999)
        live._file.cache_clear()
        count_reads()
    live._file.cache_clear()
    assert samples(registry)["vllm_sparse_blocks_read_sum", "7", "2"] == 40


def test_a_server_that_a_program_with_an_engine_starts_has_a_folder_of_its_own(registry, monkeypatch, tmp_path):
    monkeypatch.setenv(live._OUR_FOLDER, str(tmp_path))
    with monkeypatch.context() as worker:
        worker.setattr(live.multiprocessing, "parent_process", lambda: "the engine's")
        live.expose()
    assert os.environ[live._OUR_FOLDER] == str(tmp_path)
    live.expose()
    assert os.environ[live._OUR_FOLDER] != str(tmp_path)
    live._file.cache_clear()
    count_reads()
    assert samples(registry)["vllm_sparse_blocks_read_sum", "7", "2"] == 20


def test_where_vllm_collects_from_files_they_are_put_beside_its_own(registry, monkeypatch, tmp_path):
    monkeypatch.setenv(live._VLLM_FOLDER, str(tmp_path))
    live.expose()
    count_reads()
    assert samples(registry) == {}
    live.MultiProcessCollector(registry, path=str(tmp_path))
    assert samples(registry)["vllm_sparse_blocks_read_sum", "7", "2"] == 20


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
    expected = measure(inputs.query, inputs.keys, inputs.values, inputs.context_lens, best, 8, 0.125)
    for found, wanted in zip(quality, expected, strict=True):
        torch.testing.assert_close(found, wanted)


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
        "attention_backend: got 'dense', allowed: unique, quest, streaming_llm, ",
    ),
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
    "context": (["--context", "100"], "context: got 100 tokens, allowed: from 4096 to the model's 32768"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_diagnose_refuses(case, monkeypatch, capsys):
    arguments, sentence = REFUSED[case]
    assert refused(monkeypatch, capsys, *arguments).startswith(sentence)


BAD_PROMPTS = {
    "empty": ("\n", "without a line, allowed: one or more"),
    "no JSON": ('{"prompt": "a"}\n{', "prompts: got '{' in line 2, allowed: a JSON object with the text `prompt`"),
    "number": ('{"prompt": 5}', "in line 1, allowed: a JSON object"),
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
    arguments = ["--prompts", str(prompts), "--attention-backend", "unique", "--attention-backend", "streaming_llm"]
    arguments += ["--budget-tokens", "128", "--budget-tokens", "64", "--by", "head"]
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "diagnose", *arguments, "--json", str(report)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    run, *rows = map(json.loads, Path(report).read_text().splitlines())
    assert run["model"] == "needle-8m"
    # Prompts, layers, backends, budgets, KV heads.
    assert len(rows) == 2 * 8 * 2 * 2 * 2
    assert {row["queries"] for row in rows if row["prompt"] == "line 1"} == {16}
    assert 5 < rows[-1]["queries"] < 16
    by_budget = {
        budget: sum(row["mass"] for row in rows if row["budget_tokens"] == budget and row["backend"] == "unique")
        for budget in (64, 128)
    }
    assert 0 < by_budget[64] < by_budget[128]
    out = capsys.readouterr().out
    # By head, then a summary by budget.
    assert len([line for line in out.splitlines() if line.startswith("│")]) == 2 * 2 * 8 * 2 + 2 * 2

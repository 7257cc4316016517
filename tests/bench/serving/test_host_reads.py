"""The share of pages from host memory, measured on texts."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.host_reads import host_share
from bench.common.results import ResultFile, read_run
from bench.serving import host_reads
from bench.serving.__main__ import main as serving_main
from bench.serving.host_reads import HostReadSettings, host_reads_variant, read_batches, table
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run


class Engine:
    """Reads as many pages as a budget has tokens; half of them from the host, or all in the first time."""

    def __init__(self) -> None:
        self.total = (0.0, 0)
        self.seen: set[tuple[str, ...]] = set()

    def generate(self, prompts, sampling, use_tqdm):
        read = sampling.extra_args["sparse_budget_tokens"]
        missed = read / 2 if tuple(prompts) in self.seen else read
        self.seen.add(tuple(prompts))
        self.total = self.total[0] + missed, self.total[1] + read
        return [SimpleNamespace(prompt_token_ids=[1] * len(prompt)) for prompt in prompts]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [
        {"prompt": "abcd", "kind": "prose"},
        {"prompt": "abcdef", "kind": "prose"},
        {"prompt": "x", "kind": "code"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_second_time_counts(texts, tmp_path, monkeypatch, model):
    fake, asked = Engine(), []

    @contextmanager
    def engine(opened, variant, config, **options):
        asked.append((variant.name, json.loads(config)["sparse_attention"], options["max_num_seqs"]))
        yield fake, variant.backend

    monkeypatch.setattr(host_reads, "engine", engine)
    monkeypatch.setattr(host_reads, "host_reads", lambda: fake.total)
    output = tmp_path / "found.jsonl"
    with ResultFile(output, describe_run(Path(model), "abc")):
        pass
    settings = HostReadSettings(
        model=model, repeats=1, gpu_memory_utilization=0.9, output=str(output), texts=str(texts), copies=2048,
        budgets=(512, 1024), new_tokens=8, host_memory="1GiB",
    )  # fmt: skip
    host_reads_variant(settings.model_dump_json())
    ((name, sections, requests),) = asked
    assert (name, requests) == ("unique_offload", 2)
    assert sections["selection"]["budget_tokens"] == 512
    assert sections["offload"] == {"host_memory": "1GiB", "hot_pages": 4.0}
    rows = read_run(output).rows
    assert [(row["text"], row["budget_tokens"], row["prompt_tokens"]) for row in rows] == [
        ("prose", 512, 5), ("prose", 1024, 5), ("code", 512, 1), ("code", 1024, 1),
    ]  # fmt: skip
    assert {row["host_read_share"] for row in rows} == {0.5}
    assert [column.header for column in table(rows).columns] == ["text", "tokens", "budget", "2048"]


def test_there_is_no_share_without_offloading():
    assert host_share((0.0, 0), (0.0, 0)) == {}
    assert host_share((1.0, 4), (2.0, 8)) == {"host_read_share": 0.25}


def test_texts_are_objects(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigurationError, match=r"texts: got .* in line 1, allowed: a JSON object with the text"):
        read_batches(path)


def test_an_engine_that_fails_is_named(texts, tmp_path, monkeypatch, model, capsys):
    codes, now, limits = iter([3, None]), [0.0], []

    def run_python(_module, _arguments, seconds):
        limits.append(seconds)
        now[0] += 60
        return next(codes)

    monkeypatch.setattr(host_reads, "run_python", run_python)
    monkeypatch.setattr(host_reads, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)
    arguments = ["--model", model, "--texts", str(texts), "--copies", "2K,4K", "--budget", "512", "--time-limit", "90"]
    monkeypatch.setattr(sys, "argv", ["serving", "host-reads", *arguments, "--output", str(tmp_path / "found.jsonl")])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert ended.value.code == 3
    assert limits == [90, 30]  # the limit is that of the command
    printed = " ".join(capsys.readouterr().out.split())
    assert "error: the engine with copies of 2048 tokens ended with exit code 3" in printed
    assert "error: the engine with copies of 4096 tokens was not done by the deadline" in printed

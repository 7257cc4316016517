"""Models, variants and results that every measurement shares."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.bench.pages import ABOUT, write_run

from bench.common.engine import Variant, WrongBackendError, force_routing
from bench.common.models import NEEDLE_8M, open_model
from bench.common.options import parse_grid
from bench.common.results import ResultFile, read_run, read_runs
from bench.common.worker import BenchWorker
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError


@pytest.mark.parametrize("ratio", [0, 0.25, 0.6, 1])
def test_forced_routing_skips_its_share_of_the_groups_and_keeps_other_settings(ratio):
    with open_model("llama-3.1-8b") as model:
        text = force_routing(model, '{"sparse_attention": {"min_context_tokens": 5}, "other": 1}', ratio)
    assert Variant.parse("unique").additional_config(text) == text
    given = json.loads(text)
    assert given.pop("other") == 1
    resolved = resolve(given["sparse_attention"], "unique")
    assert resolved.config.min_context_tokens == 5
    skipped = [
        torch.full((8,), 0.99) >= resolved.routing.of_layer(layer, range(8), "cpu").coefficients[:, 0]
        for layer in range(32)
    ]
    assert int(torch.stack(skipped[2:]).sum()) == round(ratio * 30 * 8)
    assert max(int(layer.sum()) for layer in skipped[2:]) - min(int(layer.sum()) for layer in skipped[2:]) <= 1
    with pytest.raises(ConfigurationError, match="skip_ratio: got 2, allowed: 0 to 1"):
        force_routing(model, None, 2)


def test_the_shape_of_llama_is_that_of_its_checkpoint():
    transformers = pytest.importorskip("transformers")
    with open_model("llama-3.1-8b") as model:
        config = transformers.AutoConfig.from_pretrained(model.folder)
        assert model.drawn_weights
        assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
        assert config.rope_parameters["rope_type"] == "llama3"
        assert config.max_position_embeddings == 131072
        assert (model.folder / "tokenizer.json").exists()
        assert model.kv_bytes_per_token("auto") == 128 * 1024
        assert model.kv_bytes_per_token("fp8") == 64 * 1024
        folder = model.folder
    assert not folder.exists()


def test_a_folder_is_a_model_and_is_left_alone():
    with open_model("needle-8m") as named, open_model(str(NEEDLE_8M)) as given:
        assert named == given
        assert not named.drawn_weights
    assert NEEDLE_8M.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dense", Variant(None)),
        ("FLASH_ATTN:fp8", Variant("FLASH_ATTN", "fp8")),
        ("unique:auto", Variant("UNIQUE", "auto")),
    ],
)
def test_variants_are_parsed_from_their_names(text, expected):
    assert Variant.parse(text) == expected
    assert Variant.parse(expected.name) == expected


def test_settings_reach_our_backends_only():
    text = '{"sparse_attention": {"selection": {"budget_tokens": 256}}}'
    assert Variant.parse("unique").additional_config(text) == text
    assert Variant.parse("flash_attn").additional_config(text) is None
    with pytest.raises(ConfigurationError, match="budget_tokens: got 3"):
        Variant.parse("unique").additional_config('{"sparse_attention": {"selection": {"budget_tokens": 3}}}')


def test_another_backend_than_the_one_asked_for_is_no_result():
    assert Variant.parse("dense").check_backends(["CPU_ATTN"]) == "CPU_ATTN"
    assert Variant.parse("unique").check_backends(["UNIQUE"]) == "UNIQUE"
    for used in (["FLASH_ATTN"], ["FLASH_ATTN", "UNIQUE"], []):
        with pytest.raises(WrongBackendError, match="unique: vLLM runs "):
            Variant.parse("unique").check_backends(used)


def test_drawn_weights_are_no_longer_tiny():
    class Worker(BenchWorker):
        def __init__(self) -> None:
            self.model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False), torch.nn.RMSNorm(64))
            for parameter in self.model.parameters():
                torch.nn.init.uniform_(parameter, -1e-3, 1e-3)

        def get_model(self) -> torch.nn.Module:
            return self.model

    worker = Worker()
    worker.draw_weights()
    assert worker.model(torch.randn(100, 256)).std().item() == pytest.approx(1, abs=0.1)


def test_grids_are_sorted_by_context():
    rows = parse_grid(["128K=1", "2048=24,6"])
    assert [(row.context, row.batches) for row in rows] == [(2048, (24, 6)), (131072, (1,))]
    assert parse_grid(["32K,8K=1,8"]) == parse_grid(["8K=1,8", "32K=1,8"])


def test_results_of_several_runs_can_follow_each_other(tmp_path):
    rows = [{"batch": batch} for batch in range(4)]
    path = write_run(tmp_path / "both.jsonl", *rows[:3], ABOUT, rows[3])
    assert [run.rows for run in read_runs(path)] == [rows[:3], rows[3:]]
    assert read_runs(path)[1].about == ABOUT
    assert read_run(path).rows == rows


def test_a_result_file_is_begun_and_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, ABOUT) as file:
        file.write({"batch": 1})
        assert read_run(path).rows == [{"batch": 1}]
    with ResultFile(path) as file:
        file.write({"batch": 2})
    assert [row["batch"] for row in read_run(path).rows] == [1, 2]
    with ResultFile(path, ABOUT):
        pass
    assert read_run(path).rows == []


def test_a_line_that_a_killed_process_cut_costs_no_other_line(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, ABOUT) as file:
        file.write({"batch": 1})
    with path.open("a") as cut:
        cut.write('{"batch": 2, "seco')
    assert read_run(path).rows == [{"batch": 1}]
    # Another process has the file open already, and goes on.
    with ResultFile(path) as file, ResultFile(path) as other:
        other.write({"batch": 3})
        file.write({"batch": 4})
    assert [row["batch"] for row in read_run(path).rows] == [1, 3, 4]
    assert path.read_text().count("\n") == 5
    sentence = f"results: line 3 of '{path}' is cut, since the process that wrote it was ended; it does not count\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(
    "broken",
    [
        '{"versions": {}',
        "no JSON",
        '{"versions": {}}\n<<<<<<< ours',
        '{"versions": {}}\n[1]',
        '{"versions": {}}\nnull',
    ],
)
def test_what_is_no_result_file_is_refused(tmp_path, broken):
    path = tmp_path / "out.jsonl"
    path.write_text(broken)
    with pytest.raises(ConfigurationError, match=r"^results: got '.*out.jsonl', allowed: JSON lines that begin with "):
        read_runs(path)


def test_whole_blocks_are_copied_in_every_layer_with_statistics_beside_them():
    memory = torch.arange(2 * 4 * 6, dtype=torch.int16)
    caches = [memory.as_strided((4, 3), (6, 1), 24 * layer) for layer in range(2)]  # the views leave out half a block
    beside = torch.arange(8.0).view(4, 2)
    layers = {
        "one": SimpleNamespace(kv_cache=caches[0], impl=SimpleNamespace(statistics_beside=beside)),
        "two": SimpleNamespace(kv_cache=caches[1]),
        "none": SimpleNamespace(),
    }
    worker = BenchWorker()
    worker.model_runner = SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=4))
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    before = memory.view(2, 4, 6).clone()
    worker.copy_blocks([(0, 3), (1, 2)])
    assert torch.equal(memory.view(2, 4, 6), before[:, [0, 1, 1, 0]])
    assert torch.equal(beside, torch.tensor([[0.0, 1.0], [2.0, 3.0], [2.0, 3.0], [0.0, 1.0]]))
    layers["two"].kv_cache = memory.as_strided((4, 3), (6, 1), 3)
    with pytest.raises(RuntimeError, match="are not one after the other"):
        worker.copy_blocks([(0, 3)])

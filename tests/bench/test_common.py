"""Models, variants, engines and results that every measurement shares."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from support.bench.pages import ABOUT, write_run

from bench.common import engine as engines
from bench.common.engine import Variant, WrongBackendError, engine, engine_options, force_routing
from bench.common.models import NEEDLE_8M, open_model
from bench.common.results import ResultFile, read_run, read_runs
from bench.common.worker import BenchWorker
from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError

SETTINGS = json.dumps({KEY: {"selection": {"budget_tokens": 256}}})


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


def test_a_shape_is_that_of_its_checkpoint_and_a_folder_is_left_alone():
    transformers = pytest.importorskip("transformers")
    with open_model("llama-3.1-8b") as model:
        config = transformers.AutoConfig.from_pretrained(model.folder)
        assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
        assert (config.rope_parameters["rope_type"], config.rms_norm_eps) == ("llama3", 1e-5)
        assert (model.folder / "tokenizer.json").exists()
        assert (model.longest, model.kv_bytes_per_token("auto")) == (131072, 128 * 1024)
        assert model.kv_bytes_per_token("fp8") == 64 * 1024
    assert not model.folder.exists()
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
        ("unique_wide", Variant("UNIQUE", "auto", "unique_wide")),
    ],
)
def test_variants_are_parsed_from_their_names_and_settings_reach_ours_only(text, expected):
    variant = Variant.parse(text)
    assert variant == expected
    assert Variant.parse(expected.name) == expected
    found = variant.additional_config(SETTINGS)
    assert (found is None) != variant.sparse
    if found:
        assert json.loads(found)[KEY]["selection"] == {"budget_tokens": 256}
        with pytest.raises(ConfigurationError, match="budget_tokens: got 3"):
            variant.additional_config('{"sparse_attention": {"selection": {"budget_tokens": 3}}}')


def test_the_options_are_those_of_the_variant_and_nothing_that_was_left_out():
    with open_model("needle-8m") as model:
        ours = engine_options(model, Variant.parse("unique:fp8"), SETTINGS, block_size=None, seed=3)
        dense = engine_options(model, Variant.parse("dense"), SETTINGS)
    assert ours["attention_backend"] == "UNIQUE"
    assert ours["additional_config"] == json.loads(SETTINGS)
    assert (ours["kv_cache_dtype"], ours["seed"], ours["model"]) == ("fp8", 3, str(model.folder))
    assert "block_size" not in ours
    assert not {"attention_backend", "additional_config", "load_format"} & set(dense)
    with open_model("llama-3.1-8b") as model:
        assert engine_options(model, Variant.parse("unique"), None)["load_format"] == "dummy"


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls of an engine whose layers run TRITON_ATTN."""
    found: list[str] = []

    def call(method: str) -> list[list[str]]:
        found.append(method)
        return [["TRITON_ATTN"]]

    @contextmanager
    def start(**options):
        try:
            yield SimpleNamespace(collective_rpc=call)
        finally:
            found.append("ended")

    monkeypatch.setattr(engines, "engine_in_process", start)
    return found


def test_weights_are_drawn_and_the_backend_is_that_of_the_layers(calls):
    with open_model("llama-3.1-8b") as model, engine(model, Variant.parse("dense"), None) as (_, backend):
        assert backend == "TRITON_ATTN"
    assert calls == ["draw_weights", "attention_backends", "ended"]


def test_another_backend_ends_the_engine(calls):
    refused = pytest.raises(WrongBackendError, match="unique: vLLM runs TRITON_ATTN")
    with open_model("needle-8m") as model, refused, engine(model, Variant.parse("unique"), None):
        pass
    assert calls == ["attention_backends", "ended"]


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


def test_results_of_several_runs_can_follow_each_other(tmp_path):
    rows = [{"batch": batch} for batch in range(4)]
    path = write_run(tmp_path / "both.jsonl", *rows[:3], ABOUT, rows[3])
    assert [run.rows for run in read_runs(path)] == [rows[:3], rows[3:]]
    assert read_runs(path)[1].about == ABOUT
    assert read_run(path).rows == rows


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
        "no JSON",
        '{"versions": {}}\n<<<<<<< ours',
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

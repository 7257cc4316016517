"""`vllm-sparse plan` counts what fits, without a model's weights."""

import json

import pytest
from typer.testing import CliRunner

from vllm_sparse_plugin.config import Retention, preset_names, requests_at_once, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.cli.plan import CacheShape, _bytes_of, _pool

LLAMA = CacheShape(32, 8, 128, 2)


@pytest.fixture
def folder(tmp_path):
    values = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_requests_that_decode_and_one_that_prefills_fit():
    moving = Retention(False, 100, None, 4, 0)
    # 1,000 tokens are 63 blocks of 16; 7 and the incomplete one are kept.
    assert requests_at_once([None], 630, 1000, 16) == 10
    assert requests_at_once([moving], 62, 1000, 16) == 0
    assert requests_at_once([moving], 63, 1000, 16) == 1
    assert requests_at_once([moving], 63 + 8 * 5, 1000, 16) == 6
    assert requests_at_once([moving, None], 2 * 63 + 71 * 3, 1000, 16) == 4


def test_every_preset_has_a_row_and_compaction_fits_more(folder):
    output = run("--model", str(folder), "--gpu-memory", "80GiB", "--weights", "16GiB", "--context", "32768")
    assert "57.6 GiB for the KV cache" in output
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in output.splitlines() if "│" in line}
    assert set(preset_names()) <= set(rows)
    longest = {preset: int(cells[-1]) for preset, cells in rows.items()}
    # 128 KiB a token: 471,859 tokens of cache are 14 requests of 32,769 tokens.
    assert longest["dense"] == 14
    assert longest["unique"] < 14
    assert longest["snapkv"] > 300
    assert longest["streaming_llm"] > longest["snapkv"] > longest["dense"]


def test_classes_of_layers_share_the_pool():
    config = resolve(None, "pyramidkv")
    tables, blocks = _pool(config, LLAMA, 2**35, 64)
    dense, whole = _pool(resolve(None, "dense"), LLAMA, 2**35, 64)
    assert (len(tables), len(dense), blocks) == (4, 1, 4 * whole)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("1.5GB", 1_500_000_000), ("12", 12), ("2 MiB", 2 << 20)]
)
def test_sizes(text, size):
    assert _bytes_of("gpu_memory", text) == size


def test_bad_input_is_one_sentence(folder):
    with pytest.raises(ConfigurationError, match=r"gpu_memory: got 'much', allowed: a size such as 80GiB"):
        run("--model", str(folder), "--gpu-memory", "much", "--weights", "1GiB")
    with pytest.raises(ConfigurationError, match=r"weights: got none"):
        run("--model", str(folder))
    with pytest.raises(ConfigurationError, match=r"gpu_memory: got 8GiB, allowed: more than 16.0 GiB"):
        run("--model", str(folder), "--gpu-memory", "8GiB", "--weights", "16GiB")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"model: got .*, allowed: a folder with a config.json"):
        run("--model", str(folder))

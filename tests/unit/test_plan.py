"""`vllm-sparse plan` computes how many requests fit, without a model's weights."""

import json

import pytest
from typer.testing import CliRunner

from vllm_sparse_plugin.config import preset_names, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import Retention, requests_at_once
from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.cli.plan import CacheShape, _pool

LLAMA = CacheShape(32, 32, 8, 128, 2)


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
    # 1,000 tokens are 63 blocks of 16; 7 and the incomplete one are kept. vLLM keeps one block of the pool.
    assert requests_at_once([None], 1 + 630, 1000, 16) == 10
    assert requests_at_once([moving], 1 + 62, 1000, 16) == 0
    assert requests_at_once([moving], 1 + 63, 1000, 16) == 1
    assert requests_at_once([moving], 1 + 63 + 8 * 5, 1000, 16) == 6
    assert requests_at_once([moving, None], 1 + 2 * 63 + 71 * 3, 1000, 16) == 4


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
    shares = {preset: [cell.strip() for cell in cells[:2]] for preset, cells in rows.items()}
    assert shares["dense"] == ["100.0%", "100.0%"]
    assert shares["unique"] == ["3.1%", "100.0%"]
    assert shares["snapkv"] == ["3.1%", "3.1%"]
    assert shares["art"] == shares["sinkrouter"] == ["?", "100.0%"]


def test_layers_of_other_kinds_are_named(folder):
    sentence = "24 of 32 layers do not attend to the whole context; the numbers take all layers to do so"
    assert "whole context;" not in run("--model", str(folder), *SIZES)
    values = json.loads((folder / "config.json").read_text())
    for field, kinds in {
        "layer_types": ["sliding_attention", "sliding_attention", "conv", "full_attention"] * 8,
        "layers_block_type": ["mamba", "mamba", "mlp", "attention"] * 8,
        "hybrid_override_pattern": "M-M*" * 8,
    }.items():
        (folder / "config.json").write_text(json.dumps({"text_config": {**values, field: kinds}}))
        assert sentence in run("--model", str(folder), *SIZES)


@pytest.mark.parametrize(
    ("fields", "which"),
    [
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, "the layers of sliding_window"),
        ({"sliding_window": 131072, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
    ],
)
def test_other_layers_are_told_without_a_list_of_their_kinds(folder, fields, which):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | fields))
    output = run("--model", str(folder), *SIZES)
    if which is None:
        assert "whole context;" not in output
    else:
        assert f"{which} do not attend to the whole context; the numbers take all layers to do so" in output


OFFLOADING = {"preset": "unique_offload"}


def test_offloading_divides_both_memories(folder):
    host = ("--host-memory", "160GiB", "--max-num-seqs", "8")
    output = run("--model", str(folder), *SIZES, "--context", "131072", *host)
    # 128 KiB a token, so 160 GiB are 1,310,720 tokens; 1/16 of the bytes are statistics; a buffer is 1/32 of 16 GiB.
    assert rows_of(output)["unique_offload"][2] == "1,310,720"
    assert (
        "unique_offload: 160.0 GiB of host memory; on the GPU 10.0 GiB of page statistics, 1.0 GiB of buffers for "
        "prompts and 16.0 GiB of copies of pages; a request adds up to 2.8 ms to a step (no page has a copy), 0.28 ms "
        "if nine of ten have one"
    ) in output
    settings = json.dumps({"sparse_attention": OFFLOADING | {"offload": {"host_memory": "16GiB", "hot_pages": 0}}})
    output = run("--model", str(folder), *SIZES, *host, "--additional-config", settings)
    assert rows_of(output)["as given"][2] == "131,072"
    assert "as given: 16.0 GiB of host memory" in output
    assert "and 0.0 GiB of copies of pages" in output
    # Selections in pieces are read where they are.
    settings = json.dumps({"sparse_attention": OFFLOADING | {"selection": {"budget_tokens": 8200}}})
    output = run("--model", str(folder), *SIZES, "--additional-config", settings)
    (line,) = (line for line in output.splitlines() if line.startswith("as given:"))
    assert "and 0.0 GiB of copies of pages" in line
    # What a server refuses beside offloading has no numbers.
    settings = json.dumps({"sparse_attention": OFFLOADING | {"first_dense_layers": 2}})
    output = run("--model", str(folder), *SIZES, "--additional-config", settings)
    assert "as given is refused: sparse_attention.offload: got 2 leading dense layers, allowed: null" in output
    assert "as given" not in rows_of(output)


def test_buffers_and_statistics_limit_what_the_host_has_room_for(folder):
    small = ("--gpu-memory", "30GiB", "--gpu-memory-utilization", "1", "--weights", "16GiB", "--host-memory", "999GiB")
    # 14 GiB without the buffers are 13 GiB of statistics: 208 GiB of keys and values.
    assert rows_of(run("--model", str(folder), *small, "--context", "131072"))["unique_offload"][2] == "1,703,936"
    output = run("--model", str(folder), *small, "--context", str(131072 * 14))
    assert "unique_offload is refused: context: got 1835008, allowed: less" in output


def test_host_memory_whose_statistics_do_not_fit_the_gpu_is_refused(folder):
    small = ("--gpu-memory", "30GiB", "--gpu-memory-utilization", "1", "--weights", "16GiB", "--context", "131072")

    def given(size: str) -> str:
        settings = json.dumps({"sparse_attention": OFFLOADING | {"offload": {"host_memory": size}}})
        return run("--model", str(folder), *small, "--additional-config", settings)

    assert (
        "as given is refused: sparse_attention.offload.host_memory: got 999GiB, whose page statistics "
        "take 62.4 GiB of GPU memory, allowed: up to 208.0GiB"
    ) in given("999GiB")
    assert "as given: 208.0 GiB of host memory" in given("208GiB")


SIZES = ("--gpu-memory", "80GiB", "--weights", "16GiB")


def rows_of(output: str) -> dict[str, list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines)}


def test_blocks_are_those_that_a_server_would_choose(folder):
    from vllm_sparse_plugin.admission import CUDA_KERNEL_BLOCK
    from vllm_sparse_plugin.tools.cli import plan

    assert plan._KERNEL_BLOCK == CUDA_KERNEL_BLOCK
    output = run("--model", str(folder), *SIZES)
    assert "\nBlocks of 64 tokens.\n" in output
    rows, output = rows_of(output), run("--model", str(folder), *SIZES, "--kv-cache-dtype", "fp8")
    eight_bits = rows_of(output)
    (blocks,) = (line for line in output.splitlines() if line.startswith("Blocks of "))
    assert blocks.startswith("Blocks of 64 tokens; 256 with ")
    assert " unique," in blocks
    assert "dense" not in blocks
    assert int(eight_bits["dense"][-1]) == 2 * int(rows["dense"][-1])
    assert int(eight_bits["unique"][-1]) > 1.8 * int(rows["unique"][-1])


def test_a_preset_that_does_not_fit_is_marked_and_the_table_goes_on(folder):
    output = run("--model", str(folder), *SIZES, "--block-size", "96")
    rows = rows_of(output)
    assert "unique_paper" not in rows
    assert {"dense", "zipvl"} <= set(rows)
    assert "unique_paper is refused: block_size: got 96, allowed: a multiple of 64\n" in output


def test_settings_that_are_given_have_a_row_of_their_own(folder):
    settings = {"sparse_attention": {"compaction": {"method": "snapkv", "budget_tokens": 1024}}}
    given = ("--model", str(folder), *SIZES, "--additional-config", json.dumps(settings))
    rows = rows_of(run(*given))
    assert next(iter(rows)) == "as given"
    assert int(rows["as given"][-1]) > 10 * int(rows["unique"][-1])
    assert next(iter(rows_of(run(*given, "--attention-backend", "quest")))) == "as given"
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.topk: unknown key"):
        run("--model", str(folder), *SIZES, "--additional-config", '{"sparse_attention": {"topk": 1}}')


@pytest.mark.parametrize("dtype", ["fp8_e5m2", ""])
def test_a_type_of_cache_that_is_not_served_is_refused(folder, dtype):
    allowed = "auto, bfloat16, float16, fp8 or fp8_e4m3"
    with pytest.raises(ConfigurationError, match=f"^kv_cache_dtype: got '{dtype}', allowed: {allowed}$"):
        run("--model", str(folder), *SIZES, "--kv-cache-dtype", dtype)


@pytest.mark.parametrize(("bits", "served"), [(8, True), (4, False)])
def test_a_quantised_checkpoint_brings_its_type_of_cache(folder, bits, served):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"kv_cache_scheme": {"type": "float", "num_bits": bits}}
    (folder / "config.json").write_text(json.dumps(config))
    if served:
        assert "8 bits an element" in run("--model", str(folder), *SIZES)
        assert "16 bits an element" in run("--model", str(folder), *SIZES, "--kv-cache-dtype", "bfloat16")
    else:
        with pytest.raises(ConfigurationError, match=r"^kv_cache_dtype: got 'float of 4 bits', allowed: auto, "):
            run("--model", str(folder), *SIZES)


def test_a_name_of_the_hub_is_a_folder_of_its_cache(folder, monkeypatch):
    import huggingface_hub

    snapshot = folder / "models--org--name" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((folder / "config.json").read_text())

    def download(name: str, local_files_only: bool) -> str:
        assert local_files_only
        if name != "org/name":
            raise FileNotFoundError
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert run("--model", "org/name", *SIZES).startswith("name: 57.6 GiB for the KV cache")
    with pytest.raises(ConfigurationError, match=r"^model: got 'org/other', .* after `hf download org/other`$"):
        run("--model", "org/other", *SIZES)


def test_the_table_fits_80_columns(folder):
    arguments = ["plan", "--model", str(folder), *SIZES, "--context", "131072"]
    wide, narrow = (CliRunner().invoke(app, arguments, env={"COLUMNS": width}).output for width in ("200", "80"))
    table = [line.rstrip() for line in wide.splitlines() if line.startswith(("┃", "│"))]
    assert max(map(len, table)) <= 80
    assert table == [line.rstrip() for line in narrow.splitlines() if line.startswith(("┃", "│"))]


def test_presets_with_which_nothing_fits_are_named_below_the_table(folder):
    output = run("--model", str(folder), *SIZES, "--context", "1000000")
    rows = rows_of(output)
    assert rows["dense"][-1] == "0"
    assert set(rows) == {"dense", "unique_offload"}
    (line,) = (line for line in output.splitlines() if line.startswith("No request of 1,000,000 tokens fits with "))
    assert " unique," in line


def test_a_context_beyond_the_models_is_told(folder):
    values = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(values))
    sentence = "A context of 8,193 tokens is beyond the model's 8,192; a server refuses it."
    assert sentence in run("--model", str(folder), *SIZES, "--context", "8193")
    assert "beyond the model" not in run("--model", str(folder), *SIZES, "--context", "8192")


def test_classes_of_layers_share_the_pool():
    config = resolve(None, "pyramidkv")
    tables, blocks = _pool(config, LLAMA, 2**35, 64, 256)
    dense, whole = _pool(resolve(None, "dense"), LLAMA, 2**35, 64, 256)
    assert (len(tables), len(dense), blocks) == (4, 1, 4 * whole)


def test_evictions_keep_queries_of_all_running_requests():
    evicting = resolve({"compaction": {"method": "snapkv", "every": 128}}, "dense")
    (_, blocks), (_, fewer) = (_pool(evicting, LLAMA, 2**35, 64, running) for running in (1, 1025))
    # 32 queries of 32 layers with 32 heads of 128 elements are 8 MiB, as much as a block of 64 tokens.
    assert blocks - fewer == 1024
    with pytest.raises(ConfigurationError, match=r"^max_num_seqs: got 4096, allowed: fewer"):
        _pool(evicting, LLAMA, 2**35, 64, 4096)


def test_drafts_keep_pages_of_all_running_requests():
    drafting = resolve({"lossless": {"score_every": 8}, "selection": {"budget_tokens": 2040}}, "unique")
    layer_bytes = 32 * LLAMA.block_bytes(drafting, 64)
    (_, blocks), (_, fewer) = (_pool(drafting, LLAMA, 2**35, 64, running) for running in (0, 4096))
    # 256 pages of 4 bytes for 32 layers with 8 KV heads are 256 KiB for a request.
    assert blocks - fewer == -(-4096 * 2**18 // layer_bytes)
    with pytest.raises(ConfigurationError, match=r"^max_num_seqs: got 131072, allowed: fewer, since drafts keep pages"):
        _pool(drafting, LLAMA, 2**35, 64, 1 << 17)


def test_bad_input_is_one_sentence(folder):
    for size in ("much", "9" * 400 + "GiB", "1e23", "80"):
        with pytest.raises(ConfigurationError, match=f"gpu_memory: got '{size}', allowed: a size such as 80GiB"):
            run("--model", str(folder), "--gpu-memory", size, "--weights", "1GiB")
    for share in ("nan", "0"):
        with pytest.raises(ConfigurationError, match=r"^gpu_memory_utilization: got "):
            run("--model", str(folder), "--weights", "1GiB", "--gpu-memory-utilization", share)
    with pytest.raises(ConfigurationError, match=r"weights: got none"):
        run("--model", str(folder))
    with pytest.raises(ConfigurationError, match=r"gpu_memory: got 8GiB, allowed: more than 16.0 GiB"):
        run("--model", str(folder), "--gpu-memory", "8GiB", "--weights", "16GiB")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"model: got .*, allowed: a folder with a config.json"):
        run("--model", str(folder))

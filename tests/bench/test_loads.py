"""Loads with different requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.results import read_run
from bench.serving.loads import LoadSettings, loads_variant, parse_mixed_loads, table
from vllm_sparse_plugin.errors import ConfigurationError


def test_loads_are_parsed_from_their_names() -> None:
    (mixed,) = parse_mixed_loads(["16x32K+1x128K:dense+2x2K:budget=512+3x300:coverage=0.9"])
    assert (mixed.count, mixed.longest, mixed.tokens) == (22, 131072, 16 * 32768 + 131072 + 4096 + 900)
    assert [part.arguments for part in mixed.parts] == [
        {}, {"sparse": "dense"}, {"sparse_budget_tokens": 512}, {"sparse_coverage": 0.9},
    ]  # fmt: skip


def test_records_beside_the_blocks_are_noise_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    class Engine:
        cache_config = SimpleNamespace(num_gpu_blocks=1001, block_size=16)
        llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache_config))

        def generate(self, prompts: list[dict[str, list[int]]], _sampling: object, use_tqdm: bool) -> list[object]:
            assert not use_tqdm
            calls.append([len(prompt["prompt_token_ids"]) for prompt in prompts])
            return []

        def collective_rpc(self, method: str) -> None:
            calls.append(method)

    @contextmanager
    def engine(*_arguments: object, **_options: object) -> Iterator[tuple[Engine, str]]:
        yield Engine(), "UNIQUE_OFFLOAD"

    monkeypatch.setattr("bench.serving.loads.engine", engine)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")  # restored behind the test
    output = tmp_path / "loads.jsonl"
    output.write_text('{"versions": {}}\n')
    settings = LoadSettings(
        model="llama-3.1-8b", variant="unique_offload", additional_config=None, loads=parse_mixed_loads(["2x1K"]),
        max_model_len=2048, new_tokens=8, max_num_seqs=2, repeats=1, gpu_memory_utilization=0.9, output=str(output),
    )  # fmt: skip
    loads_variant(settings.model_dump_json())
    # Records are made by the first step, and filled before the first measured one.
    assert calls == [[64], "fill_page_records", *[[1015, 1015]] * 3]
    assert len(read_run(output).rows) == 1


@pytest.mark.parametrize("text", ["", "32K", "x32K", "2x", "2x32K:sparse", "2x32K:budget", "2x32K:coverage=x"])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="allowed: COUNTxCONTEXT"):
        parse_mixed_loads([text])


def test_the_table_has_the_worst_ratio_of_each_load() -> None:
    rows = [
        {"max_model_len": 1024, "load": "1x1K", "variant": name, **({"ms_per_token": ms} if ms else {})}
        for name, ms in (("flash_attn", 2.0), ("unique", 3.0), ("quest", 1.0), ("art", None))
    ]
    lines = table(rows)
    assert [list(column.cells) for column in lines.columns] == [
        ["1K"], ["1x1K"], ["2.00"], ["3.00"], ["1.00"], ["-"], ["1.50"],
    ]  # fmt: skip

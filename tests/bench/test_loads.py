"""Loads with different requests."""

import pytest

from bench.serving.loads import parse_mixed_loads, table
from vllm_sparse_plugin.errors import ConfigurationError


def test_loads_are_parsed_from_their_names() -> None:
    (mixed,) = parse_mixed_loads(["16x32K+1x128K:dense+2x2K:budget=512+3x300:coverage=0.9"])
    assert (mixed.count, mixed.longest, mixed.tokens) == (22, 131072, 16 * 32768 + 131072 + 4096 + 900)
    assert [part.arguments for part in mixed.parts] == [
        {}, {"sparse": "dense"}, {"sparse_budget_tokens": 512}, {"sparse_coverage": 0.9},
    ]  # fmt: skip


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

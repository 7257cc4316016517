"""An engine on a GPU compiles the kernels of compaction and of sparse prefill at start, and none for a prompt.

The tests compare the specialisations of Triton's launches, so they need no GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

PROGRAM = Path(__file__).parents[1] / "support" / "warm_ups.py"
COMPACTIONS = {
    "snapkv": ({"method": "snapkv"}, 0),
    "a small snapkv": ({"method": "snapkv", "budget_tokens": 256, "min_context_tokens": 0}, 0),
    "a share of snapkv": ({"method": "snapkv", "budget_ratio": 0.2, "window_tokens": 48}, 0),
    "pyramidkv, first layers": ({"method": "pyramidkv"}, 0),
    "pyramidkv, last layers": ({"method": "pyramidkv"}, 31),
    "h2o": ({"method": "h2o"}, 0),
    "zipvl": ({"method": "zipvl", "budget_ratio": 0.5}, 0),
}
"""Settings of every method with kernels, and a layer out of 32."""
FEW = {"min_context_tokens": 1024, "min_blocks": 2}
OF_TOKENS = {"_probe_sums", "_join_sums", "_column_sums", "_attend_listed"}
OF_BLOCKS = {"_summarise", "_block_logits", "_measure", "_choose", "_group_queries"}
PREFILLS = {
    "zipvl": ("zipvl", {}, OF_TOKENS),
    "zipvl_paper": ("zipvl_paper", {}, OF_TOKENS),
    "few probes": ("zipvl", {"prefill": {"recent_probes": 5, "random_probes": 2}}, OF_TOKENS),
    "unique_prefill": ("unique_prefill", {"prefill": FEW}, OF_BLOCKS),
    "a share of the weight": (
        "unique",
        {"prefill": {"method": "blocks", "coverage": 0.9, **FEW}},
        OF_BLOCKS | {"_ungroup_with_sinks"},
    ),
}
"""Presets with settings, and the kernels of their prompts. `zipvl` and `unique` have learned sinks."""


@pytest.fixture(scope="module")
def launches() -> dict[str, dict[str, list]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    prefills = [(preset, settings) for preset, settings, _ in PREFILLS.values()]
    asked = {"compaction": list(COMPACTIONS.values()), "prefill": prefills}
    arguments = [sys.executable, str(PROGRAM), json.dumps(asked)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        part: dict(zip(names, found[part], strict=True))
        for part, names in (("compaction", COMPACTIONS), ("prefill", PREFILLS))
    }


@pytest.mark.parametrize("case", COMPACTIONS)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_prompt_is_compacted_by_kernels_that_are_compiled_at_the_start(launches, case: str, eight_bits: bool) -> None:
    warm, launched = ({tuple(launch) for launch in found} for found in launches["compaction"][case][eight_bits])
    assert len({name for name, *_ in launched}) == 7
    assert launched <= warm


@pytest.mark.parametrize("case", PREFILLS)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_prompt_attends_by_kernels_that_are_compiled_at_the_start(launches, case: str, eight_bits: bool) -> None:
    warm, launched = ({tuple(launch) for launch in found} for found in launches["prefill"][case][eight_bits])
    assert {name for name, *_ in launched} == PREFILLS[case][2]
    assert launched <= warm

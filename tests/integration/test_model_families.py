"""Models that vLLM builds in other ways: learned sinks, chunked attention, layers that share a cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.families import FAMILIES, NEW_TOKENS

SCRIPT = Path(__file__).parents[1] / "support" / "families.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_the_context_decodes_what_dense_attention_decodes(family, tmp_path):
    command = [sys.executable, str(SCRIPT), family, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    ways = json.loads(done.stdout.splitlines()[-1])
    dense = ways["dense"]
    # What is compared is no single token, repeated.
    assert len(set(dense["tokens"])) >= 3
    assert ways["budget of the context"] == dense
    every = ways["every page"]
    assert every["tokens"] == dense["tokens"]
    # Another order of summation; outputs of attention are rounded to bfloat16 in every layer.
    assert every["logprobs"] == pytest.approx(dense["logprobs"], abs=0.1)
    small = ways["small budget"]
    assert len(small["tokens"]) == NEW_TOKENS
    assert all(-30 < logprob <= 0 for logprob in small["logprobs"])
    assert small["logprobs"] != dense["logprobs"]

"""Checks of ZipVL's prefill."""

import pytest
import torch
from support.bench.kernels import CPU, SMALL

from bench.kernels import checks
from bench.kernels.cases import PrefillCase
from bench.kernels.providers import PROVIDERS
from bench.kernels.workload import Workload

TOKENS = {each.name: each for each in PROVIDERS["tokens"].providers if each.name != "FlashAttention 3"}


@pytest.fixture
def prompt(interpreted):
    return Workload(SMALL, CPU, max_blocks=64).prefill_inputs(PrefillCase(512, 512, 2))


@pytest.mark.parametrize("name", TOKENS)
def test_zipvl_and_its_parts_pass(prompt, name):
    each = TOKENS[name]
    each.check(prompt, {"call": each.prepare(None, prompt)})


def keep_another(kept):
    """Leaves out a token that is kept for its attention, and keeps one that is not."""
    free = torch.arange(512)[4:-1]
    kept.mask[0, free[kept.mask[0, 4:-1]][0]] = False
    kept.mask[0, free[~kept.mask[0, 4:-1]][-1]] = True


def keep_fewer(kept):
    kept.mask[0, 4:40] = False


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("zipvl", lambda output: output[300, 1].mul_(1.1), "relative error 0"),
        ("zipvl_paper", lambda output: output[-1, 3].fill_(torch.nan), "relative error inf"),
        ("zipvl_paper", lambda output: output.add_(1e-3), "tokens that are not important have outputs"),
        ("part: probe", lambda sums: sums[0, 9].add_(0.02 * sums.max()), "a sum is off"),
        ("part: choice", lambda kept: kept.mask[0, 2:3].zero_(), "a token that is always kept is not"),
        ("part: choice", keep_fewer, "tokens by attention, not 216"),
        ("part: choice", keep_another, "has more attention than one that is kept"),
    ],
)
def test_zipvl_that_is_wrong_fails(prompt, name, spoil, reason):
    each = TOKENS[name]
    output = each.prepare(None, prompt)()
    found = output.clone() if isinstance(output, torch.Tensor) else output
    spoil(found)
    with pytest.raises(checks.CheckError, match=reason):
        each.check(prompt, {"call": lambda: found})

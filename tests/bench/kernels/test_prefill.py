"""Checks of sparse prefill."""

import pytest
import torch
from support.bench.kernels import CPU, SMALL

from bench.kernels import checks, prefill
from bench.kernels.cases import PrefillCase
from bench.kernels.providers import PROVIDERS
from bench.kernels.workload import Workload

LONG = PrefillCase(1600, 128, 2)
"""Its tiles have 23 and 24 past blocks and read 16 of them."""


@pytest.fixture
def prefill_inputs(interpreted):
    return Workload(SMALL, CPU, max_blocks=64).prefill_inputs(LONG)


def flash_attention(
    q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, return_softmax_lse=False, **others
):
    """The parts of vLLM's FlashAttention that prefill uses."""
    assert (others["causal"], others["fa_version"], return_softmax_lse) == (True, 3, False)
    for index, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[index : index + 2].tolist()
        if first == last:
            continue
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].float() for x in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * softmax_scale
        position = torch.arange(length - (last - first), length)
        logits = logits.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), values).to(out.dtype)
    return out


PREFILL = {each.name: each for each in PROVIDERS["prefill"].providers}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_and_its_parts_pass(prefill_inputs, name):
    each = PREFILL[name]
    each.check(prefill_inputs, {"call": each.prepare([flash_attention, None], prefill_inputs)})


def test_prefill_that_leaves_out_one_good_block_fails(prefill_inputs, monkeypatch):
    find = prefill.Launches.choice

    def worse(plan, scores):
        # The best block that is not always read gets the lowest score.
        for tile in plan.checked_tiles():
            free = scores[tile.index, :, 1 : tile.past_blocks - 1]
            free.scatter_(1, free.argmax(dim=1, keepdim=True), -1.0)
        return find(plan, scores)

    monkeypatch.setattr(prefill.Launches, "choice", worse)
    with pytest.raises(checks.CheckError, match="of the best blocks' scores"):
        PREFILL["unique, density 0.1"].check(prefill_inputs, {})


def spoiled(each, inputs, spoil):
    output = each.prepare([flash_attention, None], inputs)()
    found = [part.clone() for part in output] if isinstance(output, tuple) else output.clone()
    spoil(found)
    return {"call": lambda: found}


@pytest.mark.parametrize("name", ["unique, density 0.1", "FlashAttention 3"])
def test_tokens_that_are_not_compared_have_to_be_written(interpreted, name):
    # Four tiles, the second of which is not compared.
    inputs = Workload(SMALL, CPU, max_blocks=64).prefill_inputs(PrefillCase(1600, 256, 2))

    def spoil(output):
        output[70] = torch.nan

    with pytest.raises(checks.CheckError, match="call: an output is not finite"):
        PREFILL[name].check(inputs, spoiled(PREFILL[name], inputs, spoil))


def swap_blocks(choice):
    pages, lengths = choice
    pages[:, [1, 2]] = pages[:, [2, 1]]
    assert int(lengths[0]) > 128


def leave_a_block_out(choice):
    choice[0][0, 1:-1] = choice[0][0, 2:].clone()
    choice[1][0] -= 64


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("unique, density 0.1", lambda output: output[0, 0].mul_(1.1), "tile 0: relative error 0"),
        ("unique, density 0.1", lambda output: output[-1, 3].fill_(torch.nan), "tile 1: relative error inf"),
        ("FlashAttention 3", lambda output: output[-1, 0].mul_(1.1), "relative error 0"),
        ("unique, density 0.05", lambda output: output[70, 2].zero_(), "tile 1: relative error 1"),
        ("part: keys from statistics", lambda keys: keys[1, 77, 3].mul_(1.02), "a key is off"),
        ("part: scores, keys included", lambda scores: scores[1, 1, 10].mul_(1.05), "a score of tile 1 is off"),
        ("part: choice", swap_blocks, "not those of blocks in order"),
        ("part: choice", leave_a_block_out, "tile 0 reads other blocks than the best"),
        ("part: attention", lambda rows: rows[0].mul_(1.1), "tile 0: relative error 0"),
        ("part: regrouping", lambda output: output[5, 1, 3].add_(1), "differ from themselves"),
    ],
)
def test_prefill_that_is_wrong_fails(prefill_inputs, name, spoil, reason):
    each = PREFILL[name]
    calls = spoiled(each, prefill_inputs, spoil)
    with pytest.raises(checks.CheckError, match=reason):
        each.check(prefill_inputs, calls)

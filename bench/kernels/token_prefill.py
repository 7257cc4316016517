"""ZipVL's prefill: calls and checks of the whole and of its parts. A prompt is one chunk.

Keys and queries are random, so the attention says nothing about how many tokens are important. A fixed share is kept,
that of the paper's Table 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch
from sparse_kernels.token_prefill import (
    KeptTokens,
    ListedAttention,
    PrefillSizes,
    Scratch,
    TokenRule,
    draw_probes,
    rows_that_see,
    token_prefill,
)
from sparse_kernels.token_prefill.reference import attend_all, attend_kept, column_sums
from sparse_kernels.token_prefill.tokens import choose_tokens

from bench.kernels.checks import Calls, CheckError, require_close
from bench.kernels.rivals import Call, imported
from bench.kernels.workload import PrefillInputs

KEPT = 0.421
"""Share of the tokens that is kept."""
ALL_ATTEND = TokenRule(fixed_ratio=KEPT)
"""`zipvl`."""
PUBLISHED = TokenRule(fixed_ratio=KEPT, others="zero", sink_tokens=0)
"""`zipvl_paper`."""
_SUM_ERROR = 1e-2
"""Relative to the largest sum. Weights are products of bfloat16 numbers."""


def load_kernels() -> ModuleType:
    """The kernels of ZipVL's prefill."""
    return import_module("sparse_kernels.token_prefill.triton")


def load_attention() -> Callable[[ListedAttention], None]:
    """FlashAttention 3 over lists of tokens, as the backends call it. Imports the kernels, too."""
    load_kernels()
    (attend,) = imported("vllm_sparse_plugin.attention.cuda.flash:attend_listed")()
    return cast("Callable[[ListedAttention], None]", attend)


def _scratch(inputs: PrefillInputs, rule: TokenRule) -> Scratch:
    """Memory of the launches, which layers share."""
    query, case = inputs.query, inputs.case
    sizes = PrefillSizes(case.chunk, 1, case.context, *query.shape[1:])
    return Scratch.make(sizes, rule, query.dtype, query.dtype, query.device)


def whole(attend: Callable[[ListedAttention], None], inputs: PrefillInputs, rule: TokenRule) -> Call:
    """A prefill as the backends call it. An engine draws the probe rows once per step."""
    batch, scratch, probes = inputs.batch, _scratch(inputs, rule), draw_probes(inputs.batch, rule)

    def call() -> torch.Tensor:
        output = torch.empty(inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device)
        token_prefill(batch, inputs.cache, inputs.softmax, rule, output, probes=probes, attend=attend, scratch=scratch)
        return output

    return call


def probing(_: Any, inputs: PrefillInputs, rule: TokenRule = ALL_ATTEND) -> Call:
    """Sums of the probe rows' attention on each token, in the scratch."""
    launch, batch = load_kernels().launch_sums, inputs.batch
    scratch, probes = _scratch(inputs, rule), draw_probes(batch, rule)
    return lambda: launch(batch, inputs.cache, inputs.softmax, probes, scratch)


def choosing(_: Any, inputs: PrefillInputs, rule: TokenRule = ALL_ATTEND) -> Callable[[], KeptTokens]:
    """The important tokens, by sums."""
    sums, probes, batch = probing(_, inputs, rule)(), draw_probes(inputs.batch, rule), inputs.batch
    return lambda: choose_tokens(sums, probes, batch, rule)


def check_whole(inputs: PrefillInputs, calls: Calls, rule: TokenRule) -> None:
    """Outputs are the reference's attention over the tokens that the kernels choose; others are zero as published."""
    expected, kept = torch.zeros(inputs.query.shape, device=inputs.query.device), choosing(None, inputs, rule)()
    if rule.others == "attend":
        attend_all(inputs.batch, inputs.cache, inputs.softmax, kept, rule, expected)
    else:
        attend_kept(inputs.batch, inputs.cache, inputs.softmax, kept, expected)
    some = expected.ne(0).any(dim=-1).any(dim=-1)
    for name, call in calls.items():
        output = call()
        if bool(output[~some].any()):
            raise CheckError(f"{name}: tokens that are not important have outputs")
        require_close(output[some], expected[some], name)


def check_sums(inputs: PrefillInputs, calls: Calls) -> None:
    """Sums equal the reference's up to rounding."""
    expected = column_sums(inputs.batch, inputs.cache, inputs.softmax, draw_probes(inputs.batch, ALL_ATTEND))
    for name, call in calls.items():
        error = (call() - expected).abs().max() / expected.max()
        if not bool(error <= _SUM_ERROR):
            raise CheckError(f"{name}: a sum is off by {float(error):.3g} of the largest")


def check_choice(inputs: PrefillInputs, calls: Calls) -> None:
    """Every token that is kept for its attention has at least that of every token that is not."""
    tokens, probes = inputs.case.context, draw_probes(inputs.batch, ALL_ATTEND)
    normalised = probing(None, inputs)()[0, :tokens] / rows_that_see(probes, tokens)[0]
    wanted = math.ceil(KEPT * tokens)
    for name, call in calls.items():
        mask = call().mask[0, :tokens]
        always = torch.zeros_like(mask)
        always[: ALL_ATTEND.sink_tokens] = always[-1] = True
        chosen = mask & ~always
        if not bool(mask[always].all()):
            raise CheckError(f"{name}: a token that is always kept is not")
        if not wanted - int(always.sum()) <= int(chosen.sum()) <= wanted:
            raise CheckError(f"{name}: keeps {int(chosen.sum())} tokens by attention, not {wanted}")
        if not bool(normalised[chosen].min() >= normalised[~mask].max()):
            raise CheckError(f"{name}: a token that is left out has more attention than one that is kept")

"""The measurements of a running engine agree with `vllm-sparse diagnose`."""

from pathlib import Path

import pytest
import torch
from support import meter
from support.engines import in_fresh_process, save_shallow
from support.meter import Decoded
from transformers import AutoTokenizer

from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, PagedLayer

SELECTION = {"budget_tokens": 256}
LAYERS = 3
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_shallow(tmp_path_factory.mktemp("model"), LAYERS)


@pytest.fixture(scope="module")
def decoded(model) -> Decoded:
    """A text that a model decoded with dense attention in all layers except the last, which influences no other."""
    lines = " ".join(f"line {i}: return value_{i * 37 % 101}" for i in range(150))
    prompt = AutoTokenizer.from_pretrained(model).encode(lines)
    return in_fresh_process(meter.decode, model, prompt, NEW_TOKENS, SELECTION, LAYERS - 1)


def test_every_step_is_measured_in_the_layer_that_selects(decoded):
    contexts = [each.context for each in decoded.measured]
    # The first new token belongs to the prompt step.
    assert contexts == list(range(len(decoded.tokens) - NEW_TOKENS + 1, len(decoded.tokens)))


def test_the_meter_says_what_diagnose_says_of_what_attention_saw(decoded):
    """Selections are equal. Sums have as many float32 terms as tokens, in another order."""
    for each in decoded.measured:
        for found, wanted in zip(each.meter, each.diagnosed, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=len(decoded.tokens) * torch.finfo().eps)


def test_the_meter_says_what_diagnose_says_of_the_text(model, decoded):
    """transformers and vLLM differ in the last bits of bfloat16 queries and keys. Weights then differ by a few percent,
    and another page may be selected at the edge of the budget of 32 pages."""
    inputs = CapturingModel(model, "cpu").run(decoded.tokens[:-1], NEW_TOKENS - 1)[LAYERS - 1]
    diagnosed = PagedLayer(inputs, UniqueSelection(**SELECTION)).quality()
    for name, tolerance in {"mass": 0.02, "estimated_mass": 0.02, "recall": 2 / 32, "cosine": 0.02}.items():
        found = torch.cat([getattr(each.meter, name) for each in decoded.measured])
        wanted = getattr(diagnosed, name)
        assert found.shape == wanted.shape == (NEW_TOKENS - 1, 2)
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, msg=name)
        # It tells tokens and heads apart.
        assert (wanted - wanted.mean()).abs().max() > tolerance


def test_metrics_add_up_what_was_measured(decoded):
    for field, name in (("mass", "attention_mass"), ("estimated_mass", "estimated_mass"), ("recall", "page_recall")):
        total, count = decoded.totals[f"vllm_sparse_{name}"]
        assert count == 2 * len(decoded.measured)
        wanted = sum(float(getattr(each.meter, field).sum()) for each in decoded.measured)
        assert total == pytest.approx(wanted, abs=1e-6)

"""The attention of a model that is trained."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.masked_attention import Packing
from sparse_kernels.masked_attention.reference import always_read
from support.mixed import save_jamba, save_llama4
from support.training import CONFIG

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection, _attend_densely
from vllm_sparse_plugin.tools.training.data import Document, pack
from vllm_sparse_plugin.tools.training.model import load_model


def test_a_packed_row_is_its_documents_and_a_large_budget_is_dense(model):
    from transformers import AutoModelForCausalLM

    served = replace(ServedSelection.of(CONFIG), selection=CONFIG.selection.model_copy(update={"budget_tokens": 512}))
    attention = PackedAttention(served, "tiny")
    loaded = load_model(model, attention, torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    (row,) = pack([Document(list(range(2, 52)), 0), Document(list(range(60, 90)), 0)], 100, seed=0)
    positions = torch.cat([torch.arange(length) for length in row.packing.lengths])[None]
    with torch.no_grad():
        parts = torch.tensor(row.tokens).split(row.packing.lengths)
        wanted = torch.cat([plain(part[None]).logits[0] for part in parts])
        got = {}
        for name, mask in (("dense", None), ("hard", served.mask(None)), ("soft", served.mask(1.0)),
                           ("sparse", served.mask(None, 24))):  # fmt: skip
            with attention.using(row.packing, mask):
                got[name] = loaded(torch.tensor(row.tokens)[None], position_ids=positions).logits[0]
    for name in ("dense", "hard", "soft"):
        torch.testing.assert_close(got[name], wanted, rtol=1e-3, atol=1e-3)
    assert (got["sparse"] - wanted).abs().max() > 0.1


@pytest.mark.parametrize(
    ("save", "reason"), [(save_jamba, "state-space layers"), (partial(save_llama4, chunk=24), "chunks")]
)
def test_layers_that_would_see_other_tokens_than_when_served_are_refused(tmp_path, save, reason):
    """A state would carry one document of a row into the next, and chunks would be whole documents."""
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")
    (row,) = pack([Document(list(range(2, 52)), 0), Document(list(range(60, 90)), 0)], 100, seed=0)
    with (
        pytest.raises(ConfigurationError, match=f"^model: got .*{reason}.*, allowed for training: models without$"),
        torch.no_grad(), attention.using(row.packing, None),
    ):  # fmt: skip
        load_model(save(tmp_path / "mixed"), attention, torch.float32)(torch.tensor(row.tokens)[None])


@pytest.mark.parametrize("budget", [24, 96])
def test_under_autocast_all_is_attended_in_16_bits(monkeypatch, budget):
    """Positions leave queries and keys in float32 there; a server has them, as values, in 16 bits."""
    attention, seen = PackedAttention(ServedSelection.of(CONFIG), "tiny"), []
    for name in ("masked_attention", "_attend_densely"):
        monkeypatch.setattr(
            f"vllm_sparse_plugin.tools.training.attention.{name}",
            lambda *given, of=name: seen.append((of, given)) or given[0],
        )
    query, key = torch.zeros(1, 4, 100, 32), torch.zeros(1, 2, 100, 32)
    value, mask = torch.zeros(1, 2, 100, 32, dtype=torch.bfloat16), ServedSelection.of(CONFIG).mask(1.0, budget)
    with attention.using(Packing((100,)), mask):
        attention._attend(SimpleNamespace(layer_idx=1), query, key, value, None)
    ((name, given),) = seen
    # What a mask leaves whole is attended without it.
    assert name == ("masked_attention" if budget == 24 else "_attend_densely")
    assert [x.dtype for x in given[:3]] == [torch.bfloat16] * 3


@pytest.mark.parametrize("multiple", [8, 64])
def test_sequences_that_are_lengthened_for_a_gpu_attend_as_before(multiple):
    torch.manual_seed(0)
    lengths = (1, 63, 64, 65)
    inputs = [torch.randn(sum(lengths), heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(sum(lengths), 4, 16, dtype=torch.float64)
    results = []
    for each in (1, multiple):
        output = _attend_densely(*inputs, Packing(lengths), 0.25, each)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_mask_knows_what_it_leaves_whole():
    for budget, context, whole in ((24, 31, True), (24, 32, False), (96, 103, True), (96, 104, False)):
        mask = ServedSelection.of(CONFIG).mask(1.0, budget)
        assert mask.reads_all(context) == whole
        pages = context // 8
        always = always_read(context, pages, mask, torch.device("cpu"))
        assert always.all() == whole
    assert replace(mask, dense_tokens=200).reads_all(200)


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_prompts_attend_densely_and_what_follows_under_the_mask(model, monkeypatch, temperature):
    """Held to a mask that leaves contexts whole up to the end of the prompt, one sequence at a time."""
    monkeypatch.setattr("vllm_sparse_plugin.tools.training.attention._LOGITS_AT_ONCE", 17 * 4 * 90)
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")
    loaded, mask = load_model(model, attention, torch.float32).eval(), ServedSelection.of(CONFIG).mask(temperature)
    lengths, prompts = (90, 77), (50, 0)
    tokens = torch.randint(2, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(sum(lengths), 97, generator=torch.Generator().manual_seed(2))

    def pass_of(part, weight, packing, mask, prompts=None):
        positions = torch.cat([torch.arange(length) for length in packing.lengths])[None]
        loaded.zero_grad()
        with attention.using(packing, mask, prompts):
            logits = loaded(part[None], position_ids=positions).logits[0]
            (logits * weight).sum().backward()
        return logits.detach(), [parameter.grad.clone() for parameter in loaded.parameters()]

    got, gradients = pass_of(tokens, weight, Packing(lengths), mask, prompts)
    alone = [
        pass_of(part, own, Packing((length,)), replace(mask, dense_tokens=prompt))
        for part, own, length, prompt in zip(
            tokens.split(lengths), weight.split(lengths), lengths, prompts, strict=True
        )
    ]
    torch.testing.assert_close(got, torch.cat([logits for logits, _ in alone]), rtol=1e-4, atol=1e-4)
    for gradient, *parts in zip(gradients, *(each for _, each in alone), strict=True):
        torch.testing.assert_close(gradient, sum(parts), rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    whole, _ = pass_of(tokens, weight, Packing(lengths), None)
    torch.testing.assert_close(got[:50], whole[:50], rtol=1e-4, atol=1e-4)
    assert (got[50:90] - whole[50:90]).abs().max() > 0.1


def test_straight_through_says_what_is_served_with_the_gradients_of_the_soft_mask():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 90, 32, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    soft = ServedSelection.of(CONFIG).mask(0.5)
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")

    def pass_of(mask, is_exact):
        with attention.using(Packing((90,)), mask, (40,), is_exact):
            output, _ = attention._attend(SimpleNamespace(layer_idx=1), *inputs, None)
            return output.detach(), torch.autograd.grad(output.square().sum() if mask.is_hard else output.sum(), inputs)

    served, _ = pass_of(replace(soft, temperature=None), False)
    softly, wanted = pass_of(soft, False)
    got, gradients = pass_of(soft, True)
    # The difference to the soft one is added, which rounds once more.
    torch.testing.assert_close(got, served, rtol=1e-6, atol=1e-6)
    assert (got - softly).abs().max() > 0.1
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, expected)


def test_scores_learn_from_what_is_decoded_and_the_same_where_activations_are_computed_again(model, monkeypatch):
    """In parts and packed, held to one sequence at a time, whole; prompts give no loss."""
    attention, mask = PackedAttention(ServedSelection.of(CONFIG), "tiny"), ServedSelection.of(CONFIG).mask(None)
    loaded = load_model(model, attention, torch.float32)
    tokens = torch.randint(2, 97, (160,), generator=torch.Generator().manual_seed(1))

    def loss_of(part, lengths, prompts):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        loaded.zero_grad()
        shares = {}
        with torch.no_grad(), attention.using(Packing(lengths), None, prompts, shares=shares):
            loaded(part[None], position_ids=positions)
        with attention.using(Packing(lengths), mask, prompts, shares=shares):
            loaded(part[None], position_ids=positions)
            loss = attention.selection_loss(part.device)
            loss.backward()
        return loss.detach(), {name: weight.grad for name, weight in loaded.named_parameters()}

    alone = [loss_of(*each) for each in ((tokens[:90], (90,), (50,)), (tokens[90:], (70,), (0,)))]
    monkeypatch.setattr("vllm_sparse_plugin.tools.training.attention._LOGITS_AT_ONCE", 17 * 4 * 90)
    packed = loss_of(tokens, (90, 70), (50, 0))
    loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loaded.train()
    for loss, gradients in (packed, loss_of(tokens, (90, 70), (50, 0))):
        torch.testing.assert_close(loss, alone[0][0] + alone[1][0], rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            parts = [each[name] for _, each in alone if each[name] is not None]
            # Values and what follows the last layer's attention are not in it.
            assert (gradient is None) == (not parts), name
            if parts:
                torch.testing.assert_close(gradient, sum(parts), rtol=1e-3, atol=1e-4 * float(sum(parts).abs().max()))
    assert packed[1]["model.layers.0.self_attn.k_proj.weight"].abs().max() > 0
    assert loss_of(tokens[:90], (90,), (89,))[0] > 0
    assert attention.selection_loss(tokens.device) == 0

"""An engine serves a trained model with the settings of its training. Every step gives the training's output."""

from pathlib import Path

import pytest
import torch
from sparse_kernels.masked_attention import Packing
from support.engines import run_engine
from support.llama import save_llama
from support.training import SETTINGS, TOKENIZER, rows
from vllm.engine.arg_utils import EngineArgs

from vllm_sparse_plugin.config import resolve, section_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection
from vllm_sparse_plugin.tools.training.model import ADAPTER, SECTION, load_model
from vllm_sparse_plugin.tools.training.trainer import Run, Trainer

DECODED = 200
CONFIG = resolve(
    {"selection": {"page_size": 16, "budget_tokens": 48, "statistics": "int8"}, "min_context_tokens": 0}, "unique"
)
"""Settings that differ from the preset of the backend."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    model = save_llama(folder / "before", longest=512)
    run = Run(model, folder / "after", ServedSelection.of(CONFIG), section_of(CONFIG), SETTINGS)
    Trainer(run, rows(), TOKENIZER, "cpu").train()
    return run.output


def agreement(model: Path, tokens: list[int], mask_of_budget: int | None) -> float:
    """The share of tokens that are the likeliest continuation, under the hard mask or with dense attention."""
    served = ServedSelection.of(CONFIG)
    attention = PackedAttention(served, "trained")
    mask = None if mask_of_budget is None else served.mask(None, mask_of_budget)
    with torch.no_grad(), attention.using(Packing((len(tokens),)), mask):
        logits = load_model(model, attention, torch.bfloat16)(torch.tensor([tokens])).logits[0]
    right = logits[:-1].argmax(dim=-1) == torch.tensor(tokens[1:])
    return float(right.float().mean())


def test_an_engine_decodes_what_was_trained(trained):
    """All tokens except the first are decoded, so every step is a row of the hard mask."""
    with run_engine(
        "unique", model=str(trained), max_model_len=512, skip_tokenizer_init=True, dtype="bfloat16"
    ) as engine:
        (answer,) = engine.answer([[5]], max_tokens=DECODED, ignore_eos=True)
    tokens = [5, *answer]
    assert len(set(answer)) > 20
    # With random weights pages have similar scores, so rounding sometimes changes the selection.
    others = max(agreement(trained, tokens, 64), agreement(trained, tokens, None))
    assert agreement(trained, tokens, 48) > max(0.7, others + 0.15)


def test_an_adapter_beside_its_base_is_served_by_the_file_that_came_with_it(trained):
    """The model's config.json does not describe the adapter, which an engine may load at any time."""
    with run_engine(
        "unique", {"config": str(trained / ADAPTER / SECTION)}, model=str(trained.parent / "before"),
        max_model_len=512, skip_tokenizer_init=True, dtype="bfloat16", enable_lora=True, max_lora_rank=8,
    ) as engine:  # fmt: skip
        (without,) = engine.answer([[5]], max_tokens=DECODED, ignore_eos=True)
        (answer,) = engine.answer([[5]], max_tokens=DECODED, ignore_eos=True, adapter=trained / ADAPTER)
    assert without != answer
    tokens = [5, *answer]
    others = max(agreement(trained, tokens, 64), agreement(trained, tokens, None))
    assert agreement(trained, tokens, 48) > max(0.7, others + 0.15)


def test_an_engine_refuses_to_contradict_what_was_trained(trained):
    arguments = {"model": str(trained), "attention_backend": "unique", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.selection\.page_size: got 8, allowed: 16, with "):
        EngineArgs(
            **arguments, additional_config={"sparse_attention": {"selection": {"page_size": 8}}}
        ).create_engine_config()
    told = {"sparse_attention": {"selection": {"page_size": 8}, "trained": False}}
    EngineArgs(**arguments, additional_config=told).create_engine_config()

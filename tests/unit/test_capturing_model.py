"""The forward pass that captures queries and keys computes what transformers computes."""

from pathlib import Path

import pytest
import torch
from support.mixed import save_jamba, save_llama4

from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel

WINDOW = 24
TOKENS = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers of a window and two that attend to everything."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=WINDOW, initializer_range=0.3,
        query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "windowed"
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama4(tmp_path_factory.mktemp("models") / "chunked", WINDOW)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_jamba(tmp_path_factory.mktemp("models") / "hybrid")


def logits_of(folder: Path) -> torch.Tensor:
    """Logits of plain attention: `[num_tokens, vocabulary]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].float()


@pytest.fixture(scope="module")
def plain(windowed: Path) -> torch.Tensor:
    return logits_of(windowed)


def expect_one_pass(folder: Path, plain: torch.Tensor, read: int) -> None:
    """Expects of decoding after a prompt what one pass over everything predicts."""
    model = CapturingModel(folder, "cpu")
    cache = model.prefill(TOKENS[:read])
    once, again = (model.decode(cache, TOKENS[read:]) for _ in range(2))
    # The cache is as before.
    assert once.predictions == again.predictions
    chosen = plain[read:].gather(1, torch.tensor(once.predictions)[:, None])[:, 0]
    # Of two tokens that are nearly equally likely, either may come first.
    assert (plain[read:].max(dim=-1).values - chosen).max() <= 0.05 * plain.abs().max()


def test_layers_of_a_window_attend_to_it_alone(windowed: Path, plain: torch.Tensor) -> None:
    model = CapturingModel(windowed, "cpu")
    found = model._forward(TOKENS, 1, None, use_cache=False)[0].float()
    assert (found - plain).norm() <= 0.05 * plain.norm()
    layers = model.run(TOKENS, 8)
    assert [layer is None for layer in layers] == [True, False] * 2


@pytest.mark.parametrize("read", [WINDOW - 4, WINDOW - 1, WINDOW, WINDOW + 1, 90])
def test_decoding_after_any_prompt_is_one_pass_over_everything(windowed: Path, plain: torch.Tensor, read: int) -> None:
    expect_one_pass(windowed, plain, read)


@pytest.mark.parametrize("read", [WINDOW - 4, WINDOW, 2 * WINDOW + 5])
def test_layers_of_chunks_attend_to_their_chunk_alone(chunked: Path, read: int) -> None:
    expect_one_pass(chunked, logits_of(chunked), read)
    layers = CapturingModel(chunked, "cpu").run(TOKENS, 8)
    assert [layer is None for layer in layers] == [True, False] * 2


@pytest.mark.parametrize("read", [20, 90])
def test_decoding_continues_the_states_of_a_prompt(hybrid: Path, read: int) -> None:
    expect_one_pass(hybrid, logits_of(hybrid), read)
    model = CapturingModel(hybrid, "cpu")
    whole = model.run(TOKENS, 120 - read)
    decoded = model.decode(model.prefill(TOKENS[:read]), TOKENS[read:]).layers
    assert [layer is None for layer in decoded] == [True, False] * 2
    for one, other in zip(whole, decoded, strict=True):
        if one is not None and other is not None:
            assert one.query.shape == other.query.shape
            assert one.keys.shape == other.keys.shape
            for name in ("query", "keys", "values"):
                expected, found = (getattr(each, name).float() for each in (one, other))
                assert (expected - found).norm() <= 0.05 * expected.norm()

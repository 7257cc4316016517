"""Tiny image and audio models in whole engines: images and audio as messages of OpenAI's chat API."""

from __future__ import annotations

import base64
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from bench.common.models import NEEDLE_8M
from bench.robustness.families.engines import engine
from bench.robustness.families.referee import watch
from bench.robustness.families.table import AUDIO, BUDGET, IMAGES, NEW_TOKENS, SMALL, WAYS, Way

_FEW, _MANY = 1, 12
"""Numbers of images or sounds in a message that fits the budget, and in one that does not."""
_QUESTION = "What is this? " * 8
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif 'image' in part['type'] %}<image>"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}"
    "{% endfor %}{% endfor %}"
)
_SAMPLE_RATE = 16_000
_PLACEHOLDERS = "image_token_id", "audio_token_index"
"""Fields of a configuration with the id of the tokens that stand for an image or a sound."""
_ZIPVL = Way("zipvl", {"prefill": {"tau": 0.5, "min_context_tokens": BUDGET + 1}}, judged=False)
"""Prompts read important tokens, and decode steps are dense."""


def _tokenizer(special_tokens: list[str]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(NEEDLE_8M)
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    return tokenizer


def _text_model(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    fields = {name: value for name, value in SMALL.items() if name != "dtype"}
    return fields | {"vocab_size": len(tokenizer)} | changes


def _write_seeing_model(folder: Path) -> None:
    """Writes configuration and processor of a tiny Idefics 3, whose processor needs no torchvision."""
    from transformers import Idefics3Config, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = _tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles])
    config = Idefics3Config(
        text_config=_text_model(tokenizer, model_type="llama"),
        vision_config={
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
            "image_size": 56, "patch_size": 14,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Idefics3ForConditionalGeneration"]
    config.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_CHAT_TEMPLATE).save_pretrained(folder)


def _write_hearing_model(folder: Path) -> None:
    """Writes configuration and processor of a tiny Qwen2-Audio."""
    from transformers import Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = _tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    text = _text_model(tokenizer, model_type="qwen2")
    del text["head_dim"]
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "d_model": 64, "encoder_layers": 1,
            "encoder_attention_heads": 1, "encoder_ffn_dim": 64, "max_source_positions": 1500,
        },
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.save_pretrained(folder)
    sounds = WhisperFeatureExtractor(feature_size=16)
    Qwen2AudioProcessor(sounds, tokenizer, chat_template=_CHAT_TEMPLATE).save_pretrained(folder)


def _image(generator: np.random.Generator) -> dict[str, Any]:
    """An image of noise, as a part of a message."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (112, 112, 3), dtype=np.uint8)).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(file)}"}}


def _sound(generator: np.random.Generator) -> dict[str, Any]:
    """Two seconds of noise, as a part of a message."""
    import soundfile

    file = io.BytesIO()
    noise = 0.3 * generator.standard_normal(2 * _SAMPLE_RATE)
    soundfile.write(file, noise, _SAMPLE_RATE, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": _base64(file), "format": "wav"}}


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()


MODALITIES: Mapping[str, tuple[str, Callable[[Path], None], Callable[[np.random.Generator], dict[str, Any]]]] = {
    IMAGES: ("image", _write_seeing_model, _image),
    AUDIO: ("audio", _write_hearing_model, _sound),
}
"""vLLM's name of a modality, the function that writes its model, and the function that makes a part of a message."""


def ask(name: str, folder: Path, **arguments: Any) -> list[Any]:
    """vLLM's greedy outputs for few and for many images or sounds, one message after the other.

    Args:
        name: of `MODALITIES`.
        folder: folder for the model.
        **arguments: of the engine.
    """
    from vllm import SamplingParams

    modality, write, make_part = MODALITIES[name]
    write(folder)
    generator = np.random.default_rng(0)
    parts = [make_part(generator) for _ in range(_MANY)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True, detokenize=False)
    limits = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {modality: _MANY}, "mm_processor_cache_gb": 0}
    outputs = []
    with engine(folder, **limits, **arguments) as llm:
        for count in (_FEW, _MANY):
            content: Any = [*parts[:count], {"type": "text", "text": _QUESTION}]
            messages: Any = [{"role": "user", "content": content}]
            outputs += llm.chat(messages, sampling, use_tqdm=False, chat_template_content_format="openai")
    return outputs


@contextmanager
def watch_kept_tokens() -> Iterator[list[torch.Tensor]]:
    """Yields the important tokens of each prompt and layer in this process under zipvl: `[context]` bool each."""
    from vllm_sparse_plugin.attention import prefill

    module: Any = prefill  # it does not export what it imports
    attend, found = module.token_prefill, list[torch.Tensor]()

    def watched(batch: Any, *rest: Any, **named: Any) -> Any:
        kept = attend(batch, *rest, **named)
        found.extend(mask[:length].cpu() for mask, length in zip(kept.mask, batch.seq_lens.tolist(), strict=True))
        return kept

    with mock.patch.object(module, "token_prefill", watched):
        yield found


def kept_by_modality(kept: Sequence[torch.Tensor], tokens: Sequence[int], folder: Path) -> dict[str, float]:
    """The share of important tokens among those of text and among those of images or sounds, over all layers.

    Args:
        kept: results of `watch_kept_tokens`. Those of other contexts do not count.
        tokens: the prompt, with a token for each part of an image or a sound.
        folder: of the model, whose configuration names this token.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    placeholders = {config[field] for field in _PLACEHOLDERS if field in config}
    is_text = torch.tensor([token not in placeholders for token in tokens])
    layers = torch.stack([mask for mask in kept if len(mask) == len(tokens)]).float()
    return {"text": float(layers[:, is_text].mean()), "other": float(layers[:, ~is_text].mean())}


def faults_of(name: str) -> Iterator[str]:
    """The faults of images or audio under `unique`, `snapkv` and `zipvl`, compared with dense attention and the
    reference."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        dense = list(map(continuation, ask(name, Path(folder))))
        if dense[0].logprobs == dense[1].logprobs:
            yield "more images or sounds change nothing"
        for label, way in {"unique": WAYS["unique"], "snapkv": WAYS["snapkv"], "zipvl": _ZIPVL}.items():
            yield from (f"{label}: {fault}" for fault in _faults_under(way, dense, name, Path(folder)))


def _faults_under(way: Way, dense: Sequence[Continuation], name: str, folder: Path) -> Iterator[str]:
    """The faults of a way to serve images or audio; `dense` are the answers of dense attention."""
    from bench.robustness.families.evictions import watch_evictions

    with watch() as referee, watch_evictions(referee.note) as moves, watch_kept_tokens() as kept:
        outputs = ask(name, folder, **way.arguments)
    found = list(map(continuation, outputs))
    yield from referee.faults
    if way is _ZIPVL:
        for modality, share in kept_by_modality(kept, outputs[1].prompt_token_ids, folder).items():
            if not 0 < share < 1:
                yield f"of the tokens of {modality} {share:.0%} are important"
    if (error := logprob_error(dense[0], found[0])) > LOGPROB_TOLERANCE:
        yield f"within the budget log probabilities differ by {error:.3g} from dense attention's"
    if not all(math.isfinite(logprob) for step in found[1].logprobs for logprob in step.values()):
        yield "log probabilities are not finite"
    if found[1].logprobs == dense[1].logprobs:
        yield "a small budget changes nothing"
    if bool(referee.steps) != way.judged:
        yield f"layers decoded {referee.steps} times in the plugin's kernels"
    if bool(moves[0]) != way.evicts:
        yield f"layers moved tokens {moves[0]} times"


def answer_densely(name: str) -> None:
    """Answers with vLLM's own attention; raises vLLM's exception."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        ask(name, Path(folder))

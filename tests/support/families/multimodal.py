"""Tiny image and audio models, asked by messages of OpenAI's chat API."""

import base64
import io
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from support.families.engines import engine
from support.families.evictions import watch_evictions
from support.families.referee import watch
from support.families.table import BUDGET, NEW_TOKENS, SMALL, WAYS, Way

from bench.common.models import NEEDLE_8M

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


def _write_seeing_model(folder: Path) -> int:
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
    return config.image_token_id


def _write_hearing_model(folder: Path) -> int:
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
    return config.audio_token_index


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


MODALITIES: dict[str, tuple[Callable[[Path], int], Callable[[np.random.Generator], dict[str, Any]]]] = {
    "image": (_write_seeing_model, _image),
    "audio": (_write_hearing_model, _sound),
}
"""By vLLM's name: what writes a model and returns the token that stands for a part, and what makes a part."""


def _ask(modality: str, folder: Path, **arguments: Any) -> list[Any]:
    """vLLM's greedy outputs for few and for many images or sounds, one message after the other."""
    from vllm import SamplingParams

    generator = np.random.default_rng(0)
    parts = [MODALITIES[modality][1](generator) for _ in range(_MANY)]
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
def _watch_important_tokens() -> Iterator[list[torch.Tensor]]:
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


def modality_faults(modality: str) -> Iterator[str]:
    """The faults of images or audio under `unique`, `snapkv` and `zipvl`."""
    with tempfile.TemporaryDirectory() as folder:
        placeholder = MODALITIES[modality][0](Path(folder))
        dense = list(map(continuation, _ask(modality, Path(folder))))
        if dense[0].logprobs == dense[1].logprobs:
            yield "more images or sounds change nothing"
        for label, way in {"unique": WAYS["unique"], "snapkv": WAYS["snapkv"], "zipvl": _ZIPVL}.items():
            with watch() as referee, watch_evictions(referee.note) as moves, _watch_important_tokens() as kept:
                outputs = _ask(modality, Path(folder), **way.arguments)
            faults = [*referee.faults, *_faults(way, dense, list(map(continuation, outputs)))]
            if bool(referee.steps) != way.judged or bool(moves[0]) != way.evicts:
                faults.append(f"layers decoded {referee.steps} times in the plugin's kernels, moved {moves[0]} times")
            if way is _ZIPVL:
                is_text = torch.tensor(outputs[1].prompt_token_ids) != placeholder
                layers = torch.stack([mask for mask in kept if len(mask) == len(is_text)]).float()
                shares = layers[:, is_text].mean(), layers[:, ~is_text].mean()
                if not all(0 < share < 1 for share in shares):
                    faults.append(f"of the tokens of text and of others {shares} are important")
            yield from (f"{label}: {fault}" for fault in faults)


def _faults(way: Way, dense: list[Continuation], found: list[Continuation]) -> Iterator[str]:
    if (error := logprob_error(dense[0], found[0])) > LOGPROB_TOLERANCE:
        yield f"within the budget log probabilities differ by {error:.3g} from dense attention's"
    if not all(math.isfinite(logprob) for step in found[1].logprobs for logprob in step.values()):
        yield "log probabilities are not finite"
    if found[1].logprobs == dense[1].logprobs:
        yield "a small budget changes nothing"

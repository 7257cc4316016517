"""Models of commands: their folders, names, files and loading."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.caches import user_cache

FETCHED = ("smollm2-135m", "gemma-3-270m")
"""Models that `fetch-model` knows."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER = re.compile(
    r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config|.*\.(tiktoken|jinja)$"
)
"""File names of a tokenizer, and of the file that names end tokens."""
_BEGIN_WITH_BOS = "gemma"
"""Prefix of the `model_type` of models whose texts begin with `bos`, whatever their tokenizer says."""
_MOST_CONFIG_BYTES = 1 << 24


def folder_of(model: str | Path) -> Path:
    """Return the folder of a model, of a fetched model, or of a name in Hugging Face's cache; otherwise the path
    unchanged."""
    path = Path(model)
    if path.exists() or not _HUB_NAME.fullmatch(str(model)):
        return path
    if (fetched := fetched_folder(str(model))).is_dir():
        return fetched
    # Imported here: folders do not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not a valid name
        return path


def fetched_folder(name: str) -> Path:
    """Return the folder to which `fetch-model` writes a model by default."""
    return user_cache() / "vllm-sparse" / "models" / name


def download_command(name: str) -> str | None:
    """Return the command that brings a model by its name into the cache; None for what is no name."""
    if name in FETCHED:
        return f"vllm-sparse fetch-model {name}"
    return f"hf download {name}" if _HUB_NAME.fullmatch(name) and "/" in name else None


def name_of(folder: Path) -> str:
    """Return the name of a model without its organisation. Folders in Hugging Face's cache are named by commit."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def tokenizer_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits that identify the files of a model's tokenizer and its end tokens."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.glob("*") if _TOKENIZER.match(each.name)):
        digest.update(f"{file.name}\n".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return a model's config.json, or another JSON file of the model.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object.
    """
    with (folder / name).open("rb") as file:
        content = file.read(_MOST_CONFIG_BYTES + 1)
    try:
        config = json.loads(content) if len(content) <= _MOST_CONFIG_BYTES else None
    except RecursionError:
        config = None
    if not isinstance(config, dict):
        raise ValueError("no JSON object")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json for the language model, also for multimodal models."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def end_tokens(model: str | Path) -> frozenset[int]:
    """Return the ids where vLLM ends an answer, from a model's generation_config.json or else config.json.

    The tokenizer may have one more.
    """
    for name in ("generation_config.json", "config.json"):
        with suppress(OSError, ValueError):
            found = read_config(folder_of(model), name).get("eos_token_id")
            if found is not None:
                return frozenset(each for each in (found if isinstance(found, list) else [found]) if type(each) is int)
    return frozenset()


def load_tokenizer(model: str | Path) -> Any:
    """Return the tokenizer of a model on this machine. Texts begin with `bos` if the model was trained so.

    transformers ignores `add_bos_token` if there is a tokenizer.json, and conversions from GGUF omit it. Without `bos`
    such a model loses its attention sink.

    Args:
        model: folder, or name in Hugging Face's cache.

    Raises:
        Exception: of many kinds; the tokenizer is missing or damaged.
    """
    # Imported here: it takes seconds.
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer.encode("")[:1] != [bos] and _needs_bos(folder_of(model)):
        tokenizer.add_bos_token = True
    return tokenizer


def _needs_bos(folder: Path) -> bool:
    """Return whether texts begin with `bos`, from tokenizer_config.json or else the kind of model."""
    with suppress(OSError, ValueError):
        setting = read_config(folder, "tokenizer_config.json").get("add_bos_token")
        if isinstance(setting, bool):
            return setting
    with suppress(OSError, ValueError):
        return str(read_config(folder).get("model_type")).startswith(_BEGIN_WITH_BOS)
    return False


def load_causal_lm(folder: Path, attention: str, dtype: Any) -> Any:
    """Return a transformers model.

    Args:
        folder: of the model.
        attention: name of the attention function.
        dtype: of the weights.

    Raises:
        ConfigurationError: transformers cannot load the model, or weights are missing or have other shapes.
    """
    from transformers import AutoModelForCausalLM

    # Its warnings are refused below.
    with quiet_transformers(), explain_load(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    model, found = loaded
    # transformers would use random numbers for missing weights.
    wrong = [*found["missing_keys"], *(str(name) for name, *_ in found["mismatched_keys"])]
    if wrong:
        raise ConfigurationError(
            f"model: got {name_of(folder)!r} without {len(wrong)} weights that its config.json asks for, such as "
            f"{min(wrong)}, allowed: weights and a config.json of the same model"
        )
    return model


def keeps_keys_alone(layer: Any) -> bool:
    """Return whether a layer of a transformers cache has keys and values alone, which new tokens join in new tensors.

    Others, such as those of a state, may write in place and do not divide by tokens.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def attends_in_chunks(module: Any) -> bool:
    """Return whether a transformers attention module sees the current chunk of its context only, as in Llama 4.

    Unlike a sliding window, transformers does not name it to the attention function.
    """
    kinds: list[str] = getattr(getattr(module, "config", None), "layer_types", None) or []
    return bool(kinds) and kinds[module.layer_idx] == "chunked_attention"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers until the end of the block."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def explain_load(folder: Path) -> Iterator[None]:
    """Turn any error while a model loads into a refusal. The libraries raise errors of many kinds.

    Raises:
        ConfigurationError: states the reason.
    """
    try:
        yield
    except (MemoryError, ConfigurationError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"model: got {name_of(folder)!r} ({reason}), allowed: a model that transformers can load"
        ) from None

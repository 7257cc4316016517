"""Tells models apart by what is in their folder, wherever that lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_FIELDS = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "layer_types", "sliding_window", "rope_theta", "rope_scaling",
    "rope_parameters", "quantization_config",
)  # fmt: skip
"""Fields of a config.json that decide what a model computes and that its weights do not show."""
_WEIGHTS = ("model*.safetensors", "*.safetensors", "*.bin")
"""Files of weights: those of the first pattern that has some."""
_PIECES, _PIECE_BYTES = 64, 1 << 12
_MOST_CONFIG_BYTES = 1 << 24


def fingerprint_of(model: str | Path, revision: str | None = None, cache: str | None = None) -> str | None:
    """Returns sixteen hexadecimal digits of a model: of fields of its config.json and of 64 pieces of each file of
    weights.

    Args:
        model: folder, or name in Hugging Face's cache.
        revision: of a name.
        cache: folder of that cache, if it is another one.

    Returns:
        None if the model is not on this machine.
    """
    folder = Path(model)
    if not folder.is_dir():
        # Imported late: folders need nothing of it.
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(model), revision=revision, cache_dir=cache, local_files_only=True))
        except (OSError, ValueError):  # not in the cache, or no name
            return None
    digest = hashlib.sha256()
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG_BYTES))
        digest.update(json.dumps(_described(config), sort_keys=True).encode())
        for path in next(filter(None, (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)), []):
            size = path.stat().st_size
            digest.update(f"{size}\n".encode())
            with path.open("rb") as file:
                add_pieces(digest, file, size, _PIECES, _PIECE_BYTES)
    except (OSError, ValueError, RecursionError):
        return None
    return digest.hexdigest()[:16]


def overridden_fields(overrides: object) -> list[str]:
    """Returns the fields of a fingerprint that an engine replaces, so that it serves another model.

    Args:
        overrides: vLLM's `hf_overrides`: values of fields, or a function, which may replace any.
    """
    if not isinstance(overrides, Mapping):
        return ["a function"] if callable(overrides) else []
    text = overrides.get("text_config")
    return sorted({*_FIELDS} & {*overrides, *(text if isinstance(text, Mapping) else ())})


def add_pieces(digest: Any, file: IO[bytes], size: int, pieces: int, piece_bytes: int) -> None:
    """Adds evenly spread pieces of a file to a digest, the first and the last bytes among them.

    Args:
        digest: of `hashlib`.
        file: opened.
        size: of the file.
        pieces: how many, at least two. Those of a small file overlap.
        piece_bytes: of each.
    """
    for number in range(pieces):
        file.seek(number * max(size - piece_bytes, 0) // (pieces - 1))
        digest.update(file.read(piece_bytes))


def _described(config: object) -> dict[str, object]:
    """The fields of a config.json that count, those of the language model where it has others beside it."""
    if not isinstance(config, Mapping):
        raise ValueError("no JSON object")
    text = config.get("text_config")
    described = text if isinstance(text, Mapping) else config
    return {name: described[name] for name in _FIELDS if described.get(name) is not None}

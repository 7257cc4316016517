"""Features of vLLM together with the plugin, on Llama's architecture; and prefix caching in a hybrid."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from bench.common.models import NEEDLE_8M
from bench.robustness.families import multimodal, speculation
from bench.robustness.families.cells import OK, Cell, unless_raised
from bench.robustness.families.engines import decode, engine, prompt
from bench.robustness.families.referee import watch
from bench.robustness.families.table import (
    FAMILIES,
    FEATURES_OF,
    LONG_PROMPT,
    LORA,
    NEW_TOKENS,
    PREFIX_OF_HYBRID,
    PROMPT_LOGPROBS,
    STRUCTURED,
    WAYS,
)  # fmt: skip

_UNIQUE = WAYS["unique"].arguments
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_RANK = 4
_HYBRIDS = "qwen3_next", "lfm2"
_TEXT = " ".join(map(str, range(200)))
"""A text with more tokens than the budget."""

Faults = Iterator[str]


def prompt_logprobs() -> Faults:
    """Log probabilities of a prompt equal dense attention's, because the prompt is dense."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        FAMILIES["llama"].write(Path(folder))
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        found = []
        for arguments in ({}, _UNIQUE):
            with engine(Path(folder), **arguments) as llm:
                done = llm.generate(prompt(LONG_PROMPT), sampling, use_tqdm=False)[0]
            found.append([max(entry.logprob for entry in step.values()) for step in done.prompt_logprobs[1:]])
    error = max(abs(before - after) for before, after in zip(*found, strict=True))
    if len(found[1]) != LONG_PROMPT - 1 or error > LOGPROB_TOLERANCE:
        yield f"log probabilities of a prompt differ by {error:.3g} from dense attention's"


def structured_output() -> Faults:
    """Output follows a JSON schema, a regular expression or a choice, after a prompt longer than the budget."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    wanted: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
        "json": ({"json": _SCHEMA}, lambda text: sorted(json.loads(text)) == ["age", "name"]),
        "regex": ({"regex": r"[a-f]{3}-\d{4}"}, lambda text: re.fullmatch(r"[a-f]{3}-\d{4}", text)),
        "choice": ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
    }
    arguments = {
        "skip_tokenizer_init": False,
        "load_format": "auto",
        # Otherwise the model could write spaces forever. vLLM reads this from the engine, not from a request.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    with watch() as referee, engine(NEEDLE_8M, **arguments, **_UNIQUE) as llm:
        for name, (constraint, holds) in wanted.items():
            sampling = SamplingParams(
                temperature=0,
                max_tokens=80,
                structured_outputs=StructuredOutputsParams(**constraint),
            )
            text = llm.generate(_TEXT, sampling, use_tqdm=False)[0].outputs[0].text
            try:
                kept = bool(holds(text))
            except ValueError:
                kept = False
            if not kept:
                yield f"{name}: got {text!r}"
    yield from referee.faults
    if not referee.steps:
        yield "no layer decoded in the plugin's kernels"


def lora() -> Faults:
    """An adapter changes the decoded tokens as with dense attention."""
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        model, adapter = Path(folder) / "model", Path(folder) / "adapter"
        FAMILIES["llama"].write(model)
        write_adapter(adapter, model)
        request = LoRARequest("random", 1, str(adapter))
        arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        dense = decode(model, lora=request, **arguments)
        plain = decode(model)
        with watch() as referee:
            found = decode(model, lora=request, **arguments, **_UNIQUE)
    yield from referee.faults
    if dense[0].tokens == plain[0].tokens:
        yield "the adapter changes nothing"
    if (error := logprob_error(dense[0], found[0])) > LOGPROB_TOLERANCE:
        yield f"within the budget log probabilities differ by {error:.3g} from dense attention's"
    if not referee.steps:
        yield "no layer decoded in the plugin's kernels"


def write_adapter(folder: Path, model: Path, scale: float = 1.0) -> None:
    """Writes a random adapter for the query and value projections, with its product multiplied by `scale`."""
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator) * hidden**-0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, _RANK, generator=generator) * scale
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")


def prefix_caching_of_hybrids() -> Faults:
    """A cached prefix includes state and statistics: the second answer equals the first one, and equals dense
    attention's if every page is read. One of the models has experts, the other has none."""
    for key in _HYBRIDS:
        with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
            FAMILIES[key].write(Path(folder))
            for fault in _prefix_caching(Path(folder)):
                yield f"{key}: {fault}"


def _prefix_caching(folder: Path) -> Faults:
    from vllm.platforms import current_platform

    dense, _ = _twice(folder, {})
    whole, _ = _twice(folder, WAYS["every page"].arguments)
    with watch() as referee:
        sparse, hits = _twice(folder, _UNIQUE)
    yield from referee.faults
    error, allowed = max(map(logprob_error, dense, whole)), LOGPROB_TOLERANCE
    if error > allowed and not current_platform.is_cpu():
        # Chunks of prompts end at block borders, and this plugin's blocks are larger. Other chunks change the rounding
        # of the state, and may change the choice of experts. vLLM's own attention shows the size of this effect.
        other, _ = _twice(folder, {"max_num_batched_tokens": 320})
        allowed = max(allowed, 2 * max(map(logprob_error, dense, other)))
    if error > allowed:
        yield f"log probabilities differ by {error:.3g} from dense attention's"
    if (error := logprob_error(*sparse)) > LOGPROB_TOLERANCE:
        yield f"log probabilities differ by {error:.3g} between the first and the second time"
    if not hits:
        yield "no prefix was cached"


def _twice(folder: Path, arguments: Mapping[str, Any]) -> tuple[list[Continuation], int]:
    """The continuation of the long prompt, twice, and the number of its cached tokens the second time."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True, detokenize=False)
    with engine(folder, **{"enable_prefix_caching": True, **arguments}) as llm:
        done = [llm.generate(prompt(LONG_PROMPT), sampling, use_tqdm=False)[0] for _ in range(2)]
    return [continuation(request) for request in done], int(done[1].num_cached_tokens or 0)


def _nothing() -> None:
    """Replaces the dense run of a feature whose test already compares with dense attention."""


class _Feature(NamedTuple):
    faults: Callable[[], Faults]
    """Finds its faults."""
    densely: Callable[[], object] = _nothing
    """Uses it with vLLM's own attention; raises vLLM's exception."""


_TRIALS: Mapping[str, _Feature] = {
    LORA: _Feature(lora),
    STRUCTURED: _Feature(structured_output),
    PROMPT_LOGPROBS: _Feature(prompt_logprobs),
    PREFIX_OF_HYBRID: _Feature(prefix_caching_of_hybrids),
    **{
        name: _Feature(partial(speculation.faults_of, name), partial(speculation.speculate_densely, name))
        for name in speculation.SPECULATORS
    },
    **{
        name: _Feature(partial(multimodal.faults_of, name), partial(multimodal.answer_densely, name))
        for name in multimodal.MODALITIES
    },
}


def run_features(names: Sequence[str]) -> Iterator[Cell]:
    """Tries features in this process, one after the other."""
    for name in names:
        yield _try(name)


def _try(name: str) -> Cell:
    cell = Cell(FEATURES_OF, name, OK)
    trial = _TRIALS[name]
    return unless_raised(cell, lambda: cell.with_faults(list(trial.faults())), trial.densely)

"""Speculative decoding in whole engines of tiny models. Drafts attend densely or sparsely. They must not change
answers.

A draft model with the model's own weights has many accepted tokens. Other drafts have few.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, logprob_error
from bench.robustness.families.engines import continuations, engine
from bench.robustness.families.referee import watch, watch_dense_layers
from bench.robustness.families.table import DRAFT_MODEL, EAGLE, EAGLE_3, FAMILIES, MTP, WAYS, Family
from vllm_sparse_plugin.config import KEY

_NEW_TOKENS = 32
"""Enough tokens for drafts to fill several pages."""
_LLAMA = FAMILIES["llama"]


@dataclass(frozen=True)
class Speculator:
    """A method of speculative decoding, its model, and its draft."""

    method: str
    """vLLM's name of the method."""
    target: Family = _LLAMA
    draft: Family | None = None
    """None if the draft is part of the model."""
    accepts: bool = False
    """Whether some drafts are right: the draft has the model's weights."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further parts of `--speculative-config`."""


def _llama(**changes: Any) -> Family:
    return Family("draft", _LLAMA.configuration, _LLAMA.architecture, "a draft", changes)


SPECULATORS: Mapping[str, Speculator] = {
    EAGLE: Speculator("eagle", draft=_llama(num_hidden_layers=2)),
    # EAGLE-3 uses hidden states of three layers. vLLM's default layers do not exist in a tiny model.
    EAGLE_3: Speculator("eagle3", draft=_llama(num_hidden_layers=2, eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
    MTP: Speculator("mtp", Family("MiMo", "Qwen2Config", "MiMoForCausalLM", "MTP", {"num_nextn_predict_layers": 1})),
    DRAFT_MODEL: Speculator("draft_model", draft=_LLAMA, accepts=True),
}


@dataclass(frozen=True)
class Speculated:
    """Output of an engine with speculative decoding, and its number of right drafts."""

    continuations: list[Continuation]
    drafted: float
    accepted: float


def speculate(speculator: Speculator, folder: Path, draft: str | None, **arguments: Any) -> Speculated:
    """Decode the short and the long prompt with a draft.

    Args:
        speculator: the method and the draft.
        folder: folder for the configurations of model and draft.
        draft: attention of the draft, `dense` or `sparse`; None without the plugin's backends.
        **arguments: of the engine.
    """
    target = folder / "target"
    speculator.target.write(target)
    speculation = {"method": speculator.method, "num_speculative_tokens": 3, **speculator.settings}
    if speculator.draft is not None:
        speculator.draft.write(folder / "draft")
        speculation["model"] = str(folder / "draft")
    if draft is not None:
        arguments["additional_config"] = {KEY: {**arguments["additional_config"][KEY], "speculation": {"draft": draft}}}
    with engine(target, speculative_config=speculation, disable_log_stats=False, **arguments) as llm:
        found = continuations(llm, new_tokens=_NEW_TOKENS)
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    name = "vllm:spec_decode_num_{}_tokens"
    return Speculated(found, counts[name.format("draft")], counts[name.format("accepted")])


def faults_of(name: str, drafts: Sequence[str] = ("dense", "sparse")) -> Iterator[str]:
    """Return the faults of a method under `unique`: answers that differ from plain decoding, or wrong statistics."""
    speculator, unique = SPECULATORS[name], WAYS["unique"].arguments
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as temporary:
        folder = Path(temporary)
        speculator.target.write(folder / "target")
        with engine(folder / "target", **unique) as llm:
            plain = continuations(llm, new_tokens=_NEW_TOKENS)
        for draft in drafts:
            with watch() as referee, watch_dense_layers(referee):
                found = speculate(speculator, folder, draft, **unique)
            faults = list(referee.faults)
            # Verifying several tokens at once changes the order of sums.
            pairs = zip(plain, found.continuations, strict=True)
            if (error := max(logprob_error(*pair) for pair in pairs)) > LOGPROB_TOLERANCE:
                faults.append(f"log probabilities differ by {error:.3g} from those without speculation")
            if not found.drafted:
                faults.append("nothing was drafted")
            if speculator.accepts and not 0 < found.accepted < found.drafted:
                faults.append(f"{found.accepted:.0f} of {found.drafted:.0f} drafts were accepted")
            if bool(referee.dense_steps) != (draft == "dense"):
                faults.append(f"layers of full attention decoded densely {referee.dense_steps} times")
            yield from (f"{draft} draft: {fault}" for fault in faults)


def speculate_densely(name: str) -> None:
    """Speculate with vLLM's own attention. vLLM's exceptions pass through."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        speculate(SPECULATORS[name], Path(folder), None)

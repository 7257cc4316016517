"""Prefix caching in hybrids, and drafts: features that change which steps write the page statistics."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.continuations import LOGPROB_TOLERANCE, Continuation, continuation, logprob_error
from support.families.engines import continuations, engine, prompt
from support.families.referee import watch, watch_dense_layers
from support.families.table import FAMILIES, LONG_PROMPT, NEW_TOKENS, WAYS, Family

from vllm_sparse_plugin.config import KEY

_UNIQUE, _LLAMA = WAYS["unique"].arguments, FAMILIES["llama"]
_DRAFTED_TOKENS = 32
"""Enough tokens for drafts to fill several pages."""


def prefix_faults(key: str) -> Iterator[str]:
    """Asks a hybrid twice: a cached prefix includes state and statistics, so both answers are equal."""
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[key].write(Path(folder))
        twice = partial(_twice, Path(folder))
        (dense, _), (whole, _) = twice(), twice(**WAYS["every page"].arguments)
        with watch() as referee:
            sparse, hits = twice(**_UNIQUE)
        yield from referee.faults
        error, allowed = max(map(logprob_error, dense, whole)), LOGPROB_TOLERANCE
        if error > allowed and not current_platform.is_cpu():
            # Chunks end at block borders, and other chunks change the rounding of the state: see what this does alone.
            other, _ = twice(max_num_batched_tokens=320)
            allowed = max(allowed, 2 * max(map(logprob_error, dense, other)))
    if error > allowed:
        yield f"log probabilities differ by {error:.3g} from dense attention's"
    if (error := logprob_error(*sparse)) > LOGPROB_TOLERANCE:
        yield f"log probabilities differ by {error:.3g} between the first and the second time"
    if not hits:
        yield "no prefix was cached"


def _twice(folder: Path, **arguments: Any) -> tuple[list[Continuation], int]:
    """The continuation of the long prompt, twice, and the number of its cached tokens the second time."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True, detokenize=False)
    with engine(folder, **{"enable_prefix_caching": True, **arguments}) as llm:
        done = [llm.generate(prompt(LONG_PROMPT), sampling, use_tqdm=False)[0] for _ in range(2)]
    return [continuation(request) for request in done], int(done[1].num_cached_tokens or 0)


class Speculator(NamedTuple):
    """A method of speculative decoding."""

    target: Family = _LLAMA
    draft: Family | None = None
    """None if the draft is part of the model."""
    accepts: bool = False
    """Whether some drafts are right: the draft has the model's weights."""


def _draft(**changes: Any) -> Family:
    return Family(_LLAMA.configuration, _LLAMA.architecture, {"num_hidden_layers": 2, **changes})


SPECULATORS = {
    "eagle": Speculator(draft=_draft()),
    # EAGLE-3 uses hidden states of three layers. vLLM's default layers do not exist in a tiny model.
    "eagle3": Speculator(draft=_draft(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
    "mtp": Speculator(Family("Qwen2Config", "MiMoForCausalLM", {"num_nextn_predict_layers": 1})),
    "draft_model": Speculator(draft=_LLAMA, accepts=True),
}
"""By vLLM's name of the method."""


def draft_faults(method: str) -> Iterator[str]:
    """Drafts attend densely or sparsely under `unique`. They must not change answers, and keep their statistics."""
    speculator = SPECULATORS[method]
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    with tempfile.TemporaryDirectory() as parent:
        target = Path(parent) / "target"
        speculator.target.write(target)
        if speculator.draft is not None:
            speculation["model"] = str(Path(parent) / "draft")
            speculator.draft.write(Path(parent) / "draft")
        with engine(target, **_UNIQUE) as llm:
            plain = continuations(llm, new_tokens=_DRAFTED_TOKENS)
        for draft in ("dense", "sparse"):
            settings = {**_UNIQUE["additional_config"][KEY], "speculation": {"draft": draft}}
            more = _UNIQUE | {"additional_config": {KEY: settings}, "disable_log_stats": False}
            with (
                watch() as referee, watch_dense_layers(referee),
                engine(target, speculative_config=dict(speculation), **more) as llm,
            ):  # fmt: skip
                found = continuations(llm, new_tokens=_DRAFTED_TOKENS)
                counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            drafted, accepted = (counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
            faults = list(referee.faults)
            # Verifying several tokens at once changes the order of sums.
            if (error := max(map(logprob_error, plain, found))) > LOGPROB_TOLERANCE:
                faults.append(f"log probabilities differ by {error:.3g} from those without speculation")
            if not drafted or (speculator.accepts and not 0 < accepted < drafted):
                faults.append(f"{accepted:.0f} of {drafted:.0f} drafts were accepted")
            if bool(referee.dense_steps) != (draft == "dense"):
                faults.append(f"layers of full attention decoded densely {referee.dense_steps} times")
            yield from (f"{draft} draft: {fault}" for fault in faults)

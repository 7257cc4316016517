"""An engine whose measurements are kept together with the input of attention. It runs in a separate process."""

from pathlib import Path
from typing import Any, NamedTuple

from sparse_kernels.batch import QueryTokens
from sparse_kernels.cache import KVCache

from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.metrics.quality import Quality
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer


class Measured(NamedTuple):
    """The measurement of one token."""

    context: int
    meter: Quality
    diagnosed: Quality
    """The result of `diagnose` for the same query, keys and values."""


class Decoded(NamedTuple):
    """A text that an engine has decoded, and its measurements."""

    tokens: list[int]
    measured: list[Measured]
    totals: dict[str, tuple[float, int]]


def decode(
    model: Path, prompt: list[int], new_tokens: int, selection: dict[str, Any], first_dense_layers: int
) -> Decoded:
    """Decodes greedily, every step measured, with one engine."""
    from vllm import LLM, SamplingParams

    measure, measured, policy = live.measure_cached, [], UniqueSelection(**selection)

    def kept(token: QueryTokens, longest: int, cache: KVCache, *others: Any) -> Quality:
        quality = measure(token, longest, cache, *others)
        # A block may have room for more tokens.
        length, softmax = int(token.context_lens), others[1]
        rows = (part.gather_blocks(token.block_table[0])[:, :length] for part in (cache.keys, cache.values))
        seen = LayerInputs(*(part.bfloat16() for part in (token.query, *rows)), softmax.scale)
        measured.append(Measured(length, quality, PagedLayer(seen, policy).quality()))
        return quality

    live.measure_cached = kept
    llm = LLM(
        str(model), attention_backend="unique", max_model_len=4096, enforce_eager=True,
        additional_config={
            "sparse_attention": {
                "selection": selection,
                "first_dense_layers": first_dense_layers,
                "diagnostics": {"sample_every": 1},
            }
        },
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return Decoded([*prompt, *answer.outputs[0].token_ids], measured, live.count_totals())

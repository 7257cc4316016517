"""Layers that keep vLLM's attention beside layers of the plugin."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.engines import MODEL, metrics_text, spoil_freed_blocks, sum_of_metric
from support.families.engines import engine
from support.families.table import FAMILIES


def run_beside_layers_of_other_kinds(
    key: str, compaction: dict[str, object], blocks: int, length: int
) -> dict[str, object]:
    """Serves a family with compaction in a pool of some blocks that is too small for its prompts of some length.

    Returns:
        The sums of some metrics, and answers: `short` prompts, which keep everything, after vLLM's own `dense`
        attention and after compaction; a `crowd` of long prompts with compaction; and the crowd `again`, with freed
        blocks of other contents.
    """
    from vllm import LLM, SamplingParams

    def ask(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(done.outputs[0].token_ids) for done in llm.generate(inputs, sampling, use_tqdm=False)]

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[(number * 7919 + word) % 480 + 10 for number in range(length)] for word in range(count)]

    short, crowd, family = prompts(2, 250), prompts(5, length), FAMILIES[key]
    arguments = {
        "max_model_len": length + 140,
        "block_size": 32,
        "disable_log_stats": False,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 256,
    }
    kept = {"budget_tokens": 128, "min_context_tokens": 300, **compaction}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.write(folder)
        with engine(folder, **arguments) as llm:
            dense = [ask(llm, [prompt], 12)[0] for prompt in short]
        with engine(
            folder, attention_backend="dense", additional_config={"sparse_attention": {"compaction": kept}},
            num_gpu_blocks_override=blocks, **arguments,
        ) as llm:  # fmt: skip
            found = {"dense": dense, "short": [ask(llm, [prompt], 12)[0] for prompt in short]}
            found["crowd"] = ask(llm, crowd, 40)
            spoil_freed_blocks(llm)
            found["again"] = ask(llm, crowd, 40)
    names = "vllm_sparse_blocks_freed_sum", "vllm:kv_cache_usage_perc"
    return found | {name: sum_of_metric(metrics_text(), name) for name in names}


def start_with_layers_of_their_own(backend: str, layers: int) -> str | None:
    """Starts an engine whose first layers use vLLM's attention backend; returns the error of the start."""
    from vllm import LLM
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from vllm_sparse_plugin.errors import ConfigurationError

    make = Attention.__init__

    @functools.wraps(make)
    def make_layer(layer: Attention, *args: object, prefix: str = "", **kwargs: object) -> None:
        own = {"attn_backend": CPUAttentionBackend} if extract_layer_index(prefix) < layers else {}
        make(layer, *args, prefix=prefix, **kwargs | own)

    Attention.__init__ = make_layer
    try:
        LLM(str(MODEL), attention_backend=backend, max_model_len=2048, enforce_eager=True, load_format="dummy")
    except ConfigurationError as error:
        return str(error)
    return None

"""Teacher forcing inside vLLM: a request names the tokens that it decodes first.

`--logits-processors vllm_sparse_plugin.tools.forced_tokens:ForcedTokens` adds the processor to a server. It is no entry
point, since vLLM would load it into the servers of all who install the plugin. A request with `forced_token_ids` in
`vllm_xargs` (`SamplingParams.extra_args`) then decodes those tokens one by one, each attending as any decoded token
does, and goes on freely. Log probabilities stay those of the model: vLLM takes them before any processor, unless
its `--logprobs-mode` says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext


class ForcedTokens(AdapterLogitsProcessor, LogitsProcessor):
    """Leaves a request one token to choose from, as long as it has tokens to force.

    One class for both of vLLM's model runners, because one option names it for both. V1 hands a request's logits
    and its output to a function; V2 hands over the batch.
    """

    def __init__(self, vllm_config: VllmConfig, *runner: Any) -> None:
        """Take V1's device and whether to pin memory, or V2's state of all requests."""
        if vllm_config.speculative_config is not None:
            raise ValueError(f"logits_processors: got {FORCED_TOKENS_PROCESSOR} with speculation, allowed: without")
        if len(runner) == 1:
            self._prompt_lens = runner[0].prompt_len
            self._forced: dict[int, list[int]] = {}
        else:
            super().__init__(vllm_config, *runner)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuse a request whose ids are not ids; vLLM answers with the sentence."""
        forced = _forced_tokens(params)
        if not isinstance(forced, list) or not all(isinstance(token, int) and token >= 0 for token in forced):
            raise ValueError(f"{FORCED_TOKENS_ARGUMENT}: got {forced!r:.80}, allowed: a list of token ids")

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling sees it, too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """V1: the function for one request, None for those that force nothing."""
        forced = _forced_tokens(params)

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            return _keep_only(logits, forced, len(output))

        return process if forced else None

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """V2: note the tokens of the request in `slot` and return whether there are any."""
        self._forced[slot] = _forced_tokens(params)
        return bool(self._forced[slot])

    def apply(self, logits: torch.Tensor, context: LogitsContext | None = None) -> torch.Tensor:
        """Change `logits`, float32 `[rows, vocabulary]`, in place."""
        if context is None:
            return super().apply(logits)
        # Without speculation a request has one row, and the length on the host is exact.
        for row, slot in enumerate(context.idx_mapping_np.tolist()):
            if forced := self._forced.get(slot):
                decoded = int(context.seq_lens_upper_bound_np[row]) - int(self._prompt_lens.np[slot])
                _keep_only(logits[row], forced, decoded)
        return logits


def _forced_tokens(params: SamplingParams) -> list[int]:
    forced: list[int] = (params.extra_args or {}).get(FORCED_TOKENS_ARGUMENT, [])
    return forced


def _keep_only(logits: torch.Tensor, forced: list[int], step: int) -> torch.Tensor:
    """Make token `step` of `forced` the only choice; one beyond the vocabulary would end the worker and is skipped."""
    if 0 <= step < len(forced) and forced[step] < len(logits):
        logits.fill_(float("-inf"))
        logits[forced[step]] = 0
    return logits

"""Teacher forcing inside vLLM: a request states the tokens that it decodes first.

`--logits-processors vllm_sparse_plugin.tools.forced_tokens:ForcedTokens` adds the processor to a server. It is not an
entry point, because vLLM would then load it in every server with the plugin installed. A request with
`forced_token_ids` in `vllm_xargs` (`SamplingParams.extra_args`) decodes these tokens one by one, with the same
attention as any decoded token. Then it continues freely. Log probabilities are the model's: vLLM takes them before
processors, unless `--logprobs-mode` says otherwise.
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
    """Allows a request only the next forced token, as long as it has forced tokens.

    One class serves both of vLLM's model runners, because one option names it for both. V1 passes a request's logits
    and output to a function. V2 passes the batch.
    """

    def __init__(self, vllm_config: VllmConfig, *runner: Any) -> None:
        """Take the device and memory pinning from V1, or the state of all requests from V2."""
        if vllm_config.speculative_config is not None:
            raise ValueError(f"logits_processors: got {FORCED_TOKENS_PROCESSOR} with speculation, allowed: without")
        if len(runner) == 1:
            self._prompt_lens = runner[0].prompt_len
            self._forced: dict[int, list[int]] = {}
        else:
            super().__init__(vllm_config, *runner)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuse a request whose ids are invalid. vLLM returns the sentence."""
        forced = _forced_tokens(params)
        if not isinstance(forced, list) or not all(isinstance(token, int) and token >= 0 for token in forced):
            raise ValueError(f"{FORCED_TOKENS_ARGUMENT}: got {forced!r:.80}, allowed: a list of token ids")

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor also changes greedy sampling."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """V1: return the function for one request; None if it forces nothing."""
        forced = _forced_tokens(params)

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            return _keep_only(logits, forced, len(output))

        return process if forced else None

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """V2: record the tokens of the request in `slot`. Return whether there are any."""
        self._forced[slot] = _forced_tokens(params)
        return bool(self._forced[slot])

    def apply(self, logits: torch.Tensor, context: LogitsContext | None = None) -> torch.Tensor:
        """Change `logits`, float32 `[rows, vocabulary]`, in place."""
        if context is None:
            return super().apply(logits)
        # Without speculative decoding a request has one row, and the host knows its exact length.
        for row, slot in enumerate(context.idx_mapping_np.tolist()):
            if forced := self._forced.get(slot):
                decoded = int(context.seq_lens_upper_bound_np[row]) - int(self._prompt_lens.np[slot])
                _keep_only(logits[row], forced, decoded)
        return logits


def _forced_tokens(params: SamplingParams) -> list[int]:
    forced: list[int] = (params.extra_args or {}).get(FORCED_TOKENS_ARGUMENT, [])
    return forced


def _keep_only(logits: torch.Tensor, forced: list[int], step: int) -> torch.Tensor:
    """Make token `step` of `forced` the only choice. An id beyond the vocabulary would crash the worker: it is
    skipped."""
    if 0 <= step < len(forced) and forced[step] < len(logits):
        logits.fill_(float("-inf"))
        logits[forced[step]] = 0
    return logits

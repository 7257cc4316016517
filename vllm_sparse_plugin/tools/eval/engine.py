"""An engine of vLLM in this process, as an endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_sparse_plugin.config import trained_section
from vllm_sparse_plugin.config.account import ModelKeys
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.eval.endpoints import (
    EndpointError,
    Reply,
    Request,
    after_forced,
    check_logprobs,
    first_line,
)
from vllm_sparse_plugin.tools.eval.fidelity import ALTERNATIVES, keep_likely
from vllm_sparse_plugin.tools.eval.reading import (
    COUNT_METHOD,
    COUNTING_WORKER,
    Totals,
    resolve_arguments,
    shares_of,
)


class Engine:
    """An engine of vLLM in this process."""

    def __init__(self, model: str, arguments: dict[str, Any], most_tokens: int, forcing: bool, batch: int) -> None:
        """Start the engine.

        Args:
            model: folder or name.
            arguments: of `vllm.LLM`.
            most_tokens: length of the longest prompt with its answer.
            forcing: whether requests have forced tokens.
            batch: requests per batch.

        Raises:
            ConfigurationError: the model's context is too short, or vLLM refuses the arguments.
            EndpointError: the engine does not start.
        """
        # Same size as in the servers of other commands. vLLM's CPU build would take nearly all memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        defaults: dict[str, Any] = {"max_model_len": most_tokens}
        if forcing:
            defaults["logits_processors"] = [FORCED_TOKENS_PROCESSOR]
        try:
            model_config = EngineArgs(model=model, **arguments).create_model_config()
            if model_config.max_model_len < most_tokens:
                raise ConfigurationError(
                    f"context: got {most_tokens} tokens, allowed: at most the model's {model_config.max_model_len}"
                )
            keys = ModelKeys(
                resolve_arguments(arguments, trained_section(model_config.hf_config)),
                model_config.get_total_num_hidden_layers(),
                model_config.get_head_size(),
                block_size=1,
            )
            self._counts = not keys.by_length and "worker_extension_cls" not in arguments
            if self._counts:
                defaults["worker_extension_cls"] = COUNTING_WORKER
            self._llm = LLM(model=model, **(defaults | arguments))
            cache = self._llm.llm_engine.vllm_config.cache_config
            itemsize = 1 if cache.cache_dtype in EIGHT_BIT_CACHES else 2
            self._keys = replace(keys, block_size=cache.block_size, itemsize=itemsize)
        except (TypeError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"in_process: got {model!r} with {arguments} ({first_line(error):.160}), allowed: what vLLM serves"
            ) from None
        except ConfigurationError:
            raise
        except RuntimeError as error:
            raise EndpointError(f"did not start ({first_line(error)})") from None
        self._batch = batch

    def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Answer one batch after the other. Each answer has the time of its whole batch."""
        remaining = iter(requests)
        while batch := list(islice(remaining, self._batch)):
            sampling = [
                SamplingParams(
                    temperature=0,
                    max_tokens=len(request.forced) + request.answer_tokens,
                    ignore_eos=request.ignores_end,
                    logprobs=ALTERNATIVES if request.answer_tokens == 0 else None,
                    extra_args={FORCED_TOKENS_ARGUMENT: request.forced} if request.forced else None,
                )
                for request in batch
            ]
            prompts: Any = [{"prompt_token_ids": request.prompt} for request in batch]
            try:
                counted = self._counted()
                begin = time.perf_counter()
                outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
                seconds = time.perf_counter() - begin
                counted_after = self._counted()
            except (RuntimeError, ValueError) as error:
                raise EndpointError(f"did not answer a question ({first_line(error)})") from None
            for request, output in zip(batch, outputs, strict=True):
                completion = output.outputs[0]
                token_ids = list(completion.token_ids)
                answer = after_forced(request, token_ids)
                alternatives = [{token: each.logprob for token, each in at.items()} for at in completion.logprobs or []]
                logprobs = [at[token] for token, at in zip(token_ids, alternatives, strict=False)]
                predictions = tuple(map(keep_likely, alternatives))
                shares = shares_of(self._keys, len(request.prompt), len(token_ids), counted, counted_after)
                yield Reply(answer, check_logprobs(request, logprobs), seconds, predictions, shares)

    def close(self) -> None:
        """End the engine's processes. At interpreter exit, vLLM waits for them forever on a GPU."""
        self._llm.llm_engine.engine_core.shutdown()

    def _counted(self) -> list[Totals]:
        """Return the kernel counts of each worker; empty if nothing is counted."""
        return self._llm.collective_rpc(COUNT_METHOD) if self._counts else []

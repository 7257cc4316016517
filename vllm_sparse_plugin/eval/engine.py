"""An engine of vLLM in this process, as an endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.eval.endpoints import EndpointError, Reply, Request, after_forced, check_logprobs, first_line


class Engine:
    """An engine of vLLM in this process."""

    def __init__(self, model: str, arguments: dict[str, Any], most_tokens: int, forcing: bool, batch: int) -> None:
        """Start it.

        Args:
            model: folder or name.
            arguments: of `vllm.LLM`.
            most_tokens: of the longest prompt and answer.
            forcing: whether requests will have forced tokens.
            batch: requests that are handed over together.

        Raises:
            ConfigurationError: if the model is too short, or vLLM refuses the arguments.
            EndpointError: if the engine does not start.
        """
        # As the servers that other commands start; vLLM's CPU build would take nearly all memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        more = {"logits_processors": [FORCED_TOKENS_PROCESSOR]} if forcing else {}
        try:
            longest = EngineArgs(model=model, **arguments).create_model_config().max_model_len
            if longest < most_tokens:
                raise ConfigurationError(f"context: got {most_tokens} tokens, allowed: at most the model's {longest}")
            self._llm = LLM(model=model, **{"max_model_len": most_tokens, **more, **arguments})
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
        """Answer one batch after the other; each takes the whole batch's time."""
        remaining = iter(requests)
        while batch := list(islice(remaining, self._batch)):
            sampling = [
                SamplingParams(
                    temperature=0,
                    max_tokens=len(request.forced) + request.answer_tokens,
                    min_tokens=len(request.forced),
                    logprobs=0 if request.answer_tokens == 0 else None,
                    extra_args={FORCED_TOKENS_ARGUMENT: request.forced} if request.forced else None,
                )
                for request in batch
            ]
            prompts: Any = [{"prompt_token_ids": request.prompt} for request in batch]
            begin = time.perf_counter()
            try:
                outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
            except (RuntimeError, ValueError) as error:
                raise EndpointError(f"did not answer a question ({first_line(error)})") from None
            seconds = time.perf_counter() - begin
            for request, output in zip(batch, outputs, strict=True):
                said = output.outputs[0]
                token_ids = list(said.token_ids)
                answer = after_forced(request, token_ids)
                positions = zip(token_ids, said.logprobs or [], strict=False)
                logprobs = [position[token].logprob for token, position in positions]
                yield Reply(answer, check_logprobs(request, logprobs), seconds)

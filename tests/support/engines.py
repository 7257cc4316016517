"""Engines without a server, each in a separate process, forked from a process that has imported vLLM.

A server has three processes that import vLLM, at twenty seconds of a core each. A fork needs none of these. The forked
process has loaded no plugin and started no thread. On a GPU the process is new: in a fork, Triton refuses host memory
that is mapped into the GPU, such as the seeds of vLLM's sampler.
"""

import functools
import gc
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
_IMPORTED_ONCE = [
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.metrics.loggers",
    "vllm.v1.worker.cpu_worker",
    "vllm_sparse_plugin.lossless.speculation",
]


def save_shallow(folder: Path, layers: int) -> Path:
    """Saves the first layers of the test model. This is faster, but the model finds no needles."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    left = tuple(f"model.layers.{layer}." for layer in range(layers))
    weights = load_file(MODEL / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers." not in name or name.startswith(left)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


@contextmanager
def _process() -> Iterator[ProcessPoolExecutor]:
    """Yield a process that makes one call after the other, and can run an engine."""
    with ProcessPoolExecutor(1, _context(), _keep_engines) as pool:
        try:
            yield pool
        except BaseException:
            # The pool waits for calls that a test has abandoned.
            for process in multiprocessing.active_children():
                process.kill()
            raise


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process that may start an engine, and return its result or raise its error."""
    with _process() as pool:
        return pool.submit(function, *arguments).result()


def collect_in_fresh_process(function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    """Call a function like `in_fresh_process`, and return a list of the yielded values."""
    return in_fresh_process(_collect, function, *arguments)


def _collect(function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    return list(function(*arguments))


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens."""

    tokens: list[int]
    likeliest: list[dict[int, float]]
    """Log probabilities of the likeliest tokens at each place, by token, and of the sampled token."""


@dataclass(frozen=True)
class Engine:
    """An engine that runs in another process."""

    _pool: ProcessPoolExecutor
    _number: int = 0
    """Of the engines of its process."""

    def beside(self, backend: str | None, config: dict[str, Any] | None = None, **arguments: Any) -> "Engine":
        """Start another engine in the same process; arguments are those of `run_engine`."""
        return Engine(self._pool, self._pool.submit(_start, _arguments(backend, config, arguments)).result())

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(_in_engine, self._number, function, *arguments).result()

    def answer(
        self,
        prompts: Sequence[str | list[int]],
        max_tokens: int = 16,
        ignore_eos: bool = False,
        arguments: Sequence[dict[str, Any] | None] | None = None,
        adapter: Path | None = None,
    ) -> list[list[int]]:
        """The greedy continuations of a batch of prompts. Each prompt may have `vllm_xargs`.

        The model answers, or the adapter of a folder.
        """
        of_each = [None] * len(prompts) if arguments is None else list(arguments)
        return self._call(_answer, list(prompts), max_tokens, ignore_eos, of_each, adapter)

    def expect(
        self, prompts: Sequence[list[int]], arguments: dict[str, Any] | None = None, max_tokens: int = 1
    ) -> list[dict[int, float]]:
        """Log probabilities of the likeliest next tokens of a batch of prompts, by token.

        With more than one of `max_tokens` these are the log probabilities of the last token.
        """
        return self._call(_expect, list(prompts), arguments, max_tokens)

    def sample(self, prompts: Sequence[list[int]], max_tokens: int, top_k: int = 0) -> list[Sampled]:
        """Continuations of a batch of prompts, sampled at temperature 1, with the two likeliest tokens at each place.
        With `top_k` other than 0, samples come from the `top_k` likeliest tokens."""
        return self._call(_sample, list(prompts), max_tokens, top_k)

    def follow(self, prompt: str, regex: str) -> str:
        """The greedy continuation of a prompt that matches a regular expression."""
        return self._call(_follow, prompt, regex)

    def leads_where_parted(
        self, prompts: Sequence[list[int]], own: Sequence[list[int]], other: Sequence[list[int]]
    ) -> list[float]:
        """How much likelier this engine finds its own token, in log probability, at each first difference.

        Attention sums the same numbers in orders that depend on the batch and the processor. Answers may differ only at
        a tie, which is a lead of about 0.
        """
        parted = [
            (index, next(place for place, pair in enumerate(zip(one, two, strict=False)) if len(set(pair)) == 2))
            for index, (one, two) in enumerate(zip(own, other, strict=True))
            if one != two
        ]
        expected = self.expect([[*prompts[index], *own[index][:place]] for index, place in parted])
        return [
            tokens[own[index][place]] - tokens.get(other[index][place], -math.inf)
            for (index, place), tokens in zip(parted, expected, strict=True)
        ]

    def spoil_freed_blocks(self) -> None:
        """From now on, fill blocks with large values as soon as they are freed."""
        self._call(_spoil)

    def idle_after_steps(self) -> None:
        """From now on, compute a step without requests after each step, as data-parallel engines of experts do."""
        self._call(_idle)

    def end(self) -> int:
        """End the engine but keep its model. Return how many caches of layers are still in memory."""
        return self._call(_end)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum_of_metric(self.metrics(), name)

    def metrics(self) -> str:
        """All metrics, as at `/metrics`."""
        return self._call(metrics_text)


@contextmanager
def run_engine(backend: str | None, config: dict[str, Any] | None = None, **arguments: Any) -> Iterator[Engine]:
    """Run an engine with settings of the plugin and further arguments of `vllm.LLM`, such as `model`."""
    with _process() as pool:
        pool.submit(_start, _arguments(backend, config, arguments)).result()
        yield Engine(pool)


def _arguments(backend: str | None, config: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an engine."""
    from support.presets import serving

    arguments = {"max_model_len": 16_384, "max_num_batched_tokens": 4096, "attention_backend": backend} | more
    return serving(arguments if config is None else arguments | {"additional_config": {"sparse_attention": config}})


def sum_of_metric(text: str, name: str) -> float:
    """Sum the samples of all metrics with this name prefix in a `/metrics` text."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


# The following code runs in the process of the engines.
_engines: list[Any] = []


def _keep_engines() -> None:
    # vLLM collects garbage several times per engine. The imported modules are never garbage.
    gc.freeze()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # An earlier test may have made a folder of metrics for its process. This process must not use it.
    os.environ.pop("SPARSE_PLUGIN_METRICS_DIR", None)


def _start(arguments: dict[str, Any]) -> int:
    """Start an engine, and return its number."""
    from vllm import LLM

    _engines.append(LLM(**{"model": str(MODEL), "enforce_eager": True, "disable_log_stats": False} | arguments))
    return len(_engines) - 1


def _in_engine(number: int, function: Callable[..., Any], *arguments: Any) -> Any:
    global _llm
    _llm = _engines[number]
    return function(*arguments)


def _answer(
    prompts: list[str | list[int]], max_tokens: int, ignore_eos: bool, arguments: list[dict[str, Any] | None],
    adapter: Path | None,
) -> list[list[int]]:  # fmt: skip
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = [
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, extra_args=extra)
        for extra in arguments
    ]
    inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    lora = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    answers = _llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
    return [list(done.outputs[0].token_ids) for done in answers]


def _expect(
    prompts: list[list[int]], arguments: dict[str, Any] | None, max_tokens: int
) -> list[dict[int, float]]:  # fmt: skip
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=20, extra_args=arguments
    )  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = _llm.generate(inputs, sampling, use_tqdm=False)
    return [{token: each.logprob for token, each in one.outputs[0].logprobs[-1].items()} for one in done]


def _sample(prompts: list[list[int]], max_tokens: int, top_k: int) -> list[Sampled]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=1, max_tokens=max_tokens, ignore_eos=True, logprobs=2, seed=None, top_k=top_k
    )  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        Sampled(
            list(done.outputs[0].token_ids),
            [{token: each.logprob for token, each in place.items()} for place in done.outputs[0].logprobs],
        )
        for done in _llm.generate(inputs, sampling, use_tqdm=False)
    ]


def _follow(prompt: str, regex: str) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(regex=regex)
    sampling = SamplingParams(temperature=0, max_tokens=80, structured_outputs=constraint)
    return _llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].text


def _spoil() -> None:
    spoil_freed_blocks(_llm)


def spoil_freed_blocks(llm: Any) -> None:
    """From now on, fill blocks of an engine of this process with large values as soon as they are freed."""
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    # A state-space layer has several tensors.
    tensors = [each for cache in caches for each in (cache if isinstance(cache, list) else [cache])]
    free = pool.free_blocks

    def spoil(blocks: Iterable[Any], *arguments: Any, **more: Any) -> None:
        blocks = list(blocks)
        free(blocks, *arguments, **more)
        freed = [block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null]
        for cache in tensors:
            # Kernels may multiply unused rows by zero. NaN would remain NaN.
            cache[freed] = 50.0

    pool.free_blocks = spoil


def _idle() -> None:
    core = _llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_and_idle() -> Any:
        outputs = step()
        core.execute_dummy_batch()
        return outputs

    core.step_fn = step_and_idle


def _end() -> int:
    from torch.multiprocessing.reductions import StorageWeakRef

    client = _llm.llm_engine.engine_core
    runner = client.engine_core.model_executor.driver_worker.worker.model_runner
    caches = [StorageWeakRef(cache.untyped_storage()) for cache in runner.kv_caches]
    model = runner.get_model()
    client.shutdown()
    left = sum(not cache.expired() for cache in caches)
    del model
    return left


def metrics_text() -> str:
    """The metrics of this process."""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()

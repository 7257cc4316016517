"""One model in many deployments of vLLM: how each is asked, and the event that it must show."""

import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from support.asker import Asker
from support.continuations import Continuation, continuation
from support.families.engines import engine

from bench.common.metrics import metrics_text
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.worker import EXTENSION
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.needles import ask as question_about
from vllm_sparse_plugin.tools.needles import kv_needles, library_text, magic_needles, with_needles
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerSettings, launch_server

NEW_TOKENS = 16
TIE = 0.125
"""The step of a bfloat16 logit between 16 and 32, the range of needle-8m's largest logits.

Workers and batches change the order of summation, so answers may part between tokens that are as close."""
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks a server to keep the blocks of a prompt for the server that decodes."""
_CHARACTERS = 3300
"""Length of a document: its tokens are several times the budget."""
_MAX_MODEL_LEN = 2048
SETTINGS: Mapping[str, Any] = {KEY: {"selection": {"budget_tokens": 256}, "min_context_tokens": 0}}
_OFFERED = 1 << 28
"""Bytes of a KV cache."""

Answers = list[Continuation]
Arguments = Mapping[str, Any]
"""Of `vllm.LLM`, in addition to those of a plain engine: eager, one process, no prefix cache."""


@cache
def prompts() -> list[list[int]]:
    """Two questions about each of two short documents, whose keys and values lie in the first half."""
    tokenizer, found = load_tokenizer(NEEDLE_8M), []
    for task, make in (("multikey", magic_needles), ("kv", kv_needles)):
        rng = random.Random(task)
        needles = make(rng, 8)
        places = [(0.06 * (index + 1), needle.text) for index, needle in enumerate(needles)]
        document = with_needles(library_text(rng.randrange(1 << 20), _CHARACTERS), places)
        found += [tokenizer.encode(document + question_about(task, needles, index)[0]) for index in (2, 5)]
    return found


class _Told(NamedTuple):
    continuations: Answers
    cached_tokens: int
    texts: list[str]


@contextmanager
def _engine(backend: str | None, arguments: Arguments) -> Iterator[Any]:
    """An engine in this process. All of its workers run the requested backend."""
    defaults: dict[str, Any] = {
        "load_format": "auto", "skip_tokenizer_init": False, "max_model_len": _MAX_MODEL_LEN,
        "max_num_batched_tokens": _MAX_MODEL_LEN, "worker_extension_cls": EXTENSION,
    }  # fmt: skip
    if backend is not None:
        defaults |= {"attention_backend": backend, "additional_config": SETTINGS}
    with engine(NEEDLE_8M, **{**defaults, **arguments}) as llm:
        if backend is not None:
            assert set(map(tuple, llm.collective_rpc("attention_backends"))) == {(backend.upper(),)}
        yield llm


def _ask(llm: Any, together: bool = False, lora: Any = None, **sampling: Any) -> _Told:
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 5, "ignore_eos": True}
    parameters = SamplingParams(**(defaults | sampling))
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts()]
    batches = [inputs] if together else [[each] for each in inputs]
    done = [each for batch in batches for each in llm.generate(batch, parameters, lora_request=lora, use_tqdm=False)]
    cached = sum(each.num_cached_tokens or 0 for each in done)
    return _Told([continuation(each) for each in done], cached, [each.outputs[0].text for each in done])


def plainly(backend: str | None, arguments: Arguments, **how: Any) -> Answers:
    """Asks once."""
    with _engine(backend, arguments) as llm:
        return _ask(llm, **how).continuations


def _together(backend: str, arguments: Arguments) -> Answers:
    return plainly(backend, arguments, together=True)


def _again(backend: str, arguments: Arguments) -> Answers:
    """Asks again: prompts come from the prefix cache, or from where a connector has moved it."""
    with _engine(backend, arguments) as llm:
        first = _ask(llm)
        if "kv_transfer_config" in arguments:
            llm.reset_prefix_cache()
        second = _ask(llm)
    assert second.cached_tokens > sum(map(len, prompts())) // 2, "prompts were not cached"
    return first.continuations + second.continuations


def _from_files(backend: str, arguments: Arguments) -> Answers:
    """Asks a second engine, which reads the files of the first one."""
    # The hashes of blocks start from a random number per process, unless it is set.
    os.environ["PYTHONHASHSEED"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        tiers = [{"type": "fs", "root_dir": folder}]
        connector = _connector("OffloadingConnector", cpu_bytes_to_use=_OFFERED, secondary_tiers=tiers,
                               spec_name="TieringOffloadingSpec")  # fmt: skip
        found = []
        for _ in range(2):
            with _engine(backend, {**arguments, **connector}) as llm:
                found.append(_ask(llm))
    assert found[1].cached_tokens > found[0].cached_tokens, "the second engine found no file"
    return found[0].continuations + found[1].continuations


def _speculating(backend: str, arguments: Arguments) -> Answers:
    with _engine(backend, arguments) as llm:
        found = _ask(llm)
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert counts["vllm:spec_decode_num_draft_tokens"], "nothing was drafted"
    return found.continuations


def _structured(backend: str, arguments: Arguments) -> Answers:
    """Asks under a grammar that allows every text, and under one of digits."""
    from vllm.sampling_params import StructuredOutputsParams

    with _engine(backend, arguments) as llm:
        found = _ask(llm, structured_outputs=StructuredOutputsParams(regex=r"[\s\S]*"))
        digits = _ask(llm, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{24}"))
    assert all(re.fullmatch("[0-9]+", text) for text in digits.texts), digits.texts
    return found.continuations


def _adapted(backend: str, arguments: Arguments) -> Answers:
    """Asks with an adapter whose product is zero."""
    from vllm.lora.request import LoRARequest

    config, rank = json.loads((NEEDLE_8M / "config.json").read_text(encoding="utf-8")), 4
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q_proj", "num_attention_heads"), ("v_proj", "num_key_value_heads")):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, config["hidden_size"])
            weights[f"{prefix}.lora_B.weight"] = torch.zeros(config[heads] * config["head_dim"], rank)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
        return plainly(backend, arguments, lora=LoRARequest("zero", 1, folder))


def _reloading(backend: str, arguments: Arguments) -> Answers:
    """Asks before weights are replaced, and after they are loaded again."""
    with _engine(backend, arguments) as llm:
        before = _ask(llm).continuations
        llm.collective_rpc("draw_weights")
        assert _ask(llm).continuations != before, "other weights gave the same answers"
        llm.collective_rpc("reload_weights")
        return before + _ask(llm).continuations


def _sleeping(backend: str, arguments: Arguments) -> Answers:
    """Asks after each of two sleeps. The second one discards the weights."""
    found = []
    with _engine(backend, arguments) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            found += _ask(llm).continuations
    return found


@contextmanager
def server(name: str, *arguments: str, model: Path = NEEDLE_8M, backend: str | None = "unique",
           settings: Mapping[str, Any] = SETTINGS, **environment: str) -> Iterator[LaunchedServer]:  # fmt: skip
    """A server, ready to answer."""
    more = ("--max-num-batched-tokens", str(_MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(_OFFERED), *arguments)
    if torch.cuda.is_available():
        more += "--gpu-memory-utilization", "0.2"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    config = None if backend is None else json.dumps(settings)
    with launch_server(name, ServerSettings(model, _MAX_MODEL_LEN, backend, config, more, environment=environment)) as (
        launched
    ):
        launched.wait_until_ready()
        yield launched


def ask_ranks(client: Any, model: str, ranks: list[int], questions: list[list[int]], **more: Any) -> list[Answers]:
    """Asks engines of a data-parallel server all questions, one engine after the other."""
    found = []
    for rank in ranks:
        asker = Asker(client.with_options(default_headers={"X-data-parallel-rank": str(rank)}), model, NEW_TOKENS)
        found.append([asker.ask(tokens, **more) for tokens in questions])
    pattern = r'vllm:request_success_total\{engine="(\d)"[^}]*"length"[^}]*\} (.*)'
    asked = {int(rank): float(count) for rank, count in re.findall(pattern, metrics_text(client))}
    assert asked == {rank: ranks.count(rank) * len(questions) for rank in set(ranks)}
    return found


def _by_ranks(backend: str, arguments: Arguments) -> Answers:
    more = "--data-parallel-size", "2", "--no-enable-prefix-caching"
    with server("ranks", *more, backend=backend) as launched:
        first, second = ask_ranks(launched.client, NEEDLE_8M.name, [0, 1], prompts())
    return first + second


@contextmanager
def nixl_pair(backend: str = "unique", **extra: Any) -> Iterator[tuple[LaunchedServer, LaunchedServer]]:
    """A server that prefills, and one that decodes from its blocks; `extra` are settings of vLLM's connector."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transfer = _connector("NixlConnector", **extra)["kv_transfer_config"] | {"kv_buffer_device": device}
    with ExitStack() as servers:
        prefill, decode = (
            servers.enter_context(
                server(name, "--kv-transfer-config", json.dumps(transfer), "--no-enable-prefix-caching",
                       backend=backend, VLLM_NIXL_SIDE_CHANNEL_PORT=port)
            )
            for name, port in (("prefill", "5710"), ("decode", "5720"))
        )  # fmt: skip
        yield prefill, decode


def prefilled(client: Any, tokens: list[int]) -> dict[str, Any]:
    """Computes a prompt; returns where its blocks are, for the server that decodes."""
    first = client.completions.create(
        model=NEEDLE_8M.name, prompt=tokens, max_tokens=1, temperature=0, extra_body={"kv_transfer_params": WANTED}
    )
    return dict(first.kv_transfer_params)


def _disaggregated(backend: str, arguments: Arguments) -> Answers:
    with nixl_pair(backend) as (prefill, decode):
        asker = Asker(decode.client, NEEDLE_8M.name, NEW_TOKENS)
        found = [asker.ask(each, kv_transfer_params=prefilled(prefill.client, each)) for each in prompts()]
        moved = asker.metrics()["vllm:external_prefix_cache_hits_total"]
    assert moved > sum(map(len, prompts())) // 2, "prompts were not moved"
    return found


def _connector(name: str, **settings: Any) -> dict[str, Any]:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True}


class Deployment(NamedTuple):
    """How an engine differs from a plain one, and how it is asked."""

    arguments: Arguments = MappingProxyType({})
    ask: Callable[[str, Arguments], Answers] = plainly
    gpus: int = 1
    """Number of GPUs that it needs on a machine with GPUs."""
    needs_gpu: bool = False
    """Whether vLLM's CPU build refuses it."""
    package: str = ""
    """Name of a module that it needs in addition."""


def _graphs(mode: str, **more: Any) -> Arguments:
    return {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}, **more}


DEPLOYMENTS = {
    "tensor parallel 2": Deployment({"tensor_parallel_size": 2}, gpus=2),
    # Without compilation, vLLM's CPU workers skip the run that creates the tensors between stages.
    "pipeline parallel 2": Deployment(
        _graphs("NONE", pipeline_parallel_size=2, gpu_memory_utilization=0.15), gpus=2,
    ),
    "data parallel 2": Deployment(ask=_by_ranks, gpus=2),
    "Ray": Deployment({"distributed_executor_backend": "ray"}, package="ray"),
    "compiled": Deployment(_graphs("NONE")),
    "full CUDA graphs": Deployment(_graphs("FULL_DECODE_ONLY"), needs_gpu=True),
    "piecewise CUDA graphs": Deployment(_graphs("PIECEWISE"), needs_gpu=True),
    "prefix caching": Deployment({"enable_prefix_caching": True}, _again),
    "prefill in chunks of 256": Deployment({"max_num_batched_tokens": 256}),
    "requests at once": Deployment({"max_num_seqs": 8}, _together),
    "n-gram speculation": Deployment({
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        "disable_log_stats": False,
    }, _speculating),
    "structured output": Deployment(ask=_structured),
    "LoRA adapter": Deployment({"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}, _adapted),
    "weight reload": Deployment(ask=_reloading),
    "sleep and wake": Deployment({"enable_sleep_mode": True}, _sleeping, needs_gpu=True),
    "offloading to memory": Deployment(
        _connector("OffloadingConnector", cpu_bytes_to_use=_OFFERED), _again, needs_gpu=True
    ),
    "offloading to files": Deployment(ask=_from_files, needs_gpu=True),
    "SimpleCPUOffloadConnector": Deployment(
        _connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=_OFFERED), _again, needs_gpu=True
    ),
    "NIXL prefill and decode": Deployment(ask=_disaggregated, package="nixl"),
}  # fmt: skip


def answers_of(name: str, backend: str) -> Answers:
    """The answers of a deployment, all questions once or several times."""
    deployment = DEPLOYMENTS[name]
    if deployment.gpus > 1:
        # By default vLLM gives each CPU worker a separate NUMA node.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return deployment.ask(backend, deployment.arguments)

"""The questions for each deployment, and the event that each must show."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.continuations import Continuation, continuation
from bench.common.engine import Variant
from bench.common.metrics import metrics_text, read_metrics
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.worker import EXTENSION
from bench.robustness.deployments import table
from bench.robustness.families.engines import engine
from bench.robustness.families.features import write_adapter
from bench.robustness.soak.clients import Asker
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.needles import ask as question_about
from vllm_sparse_plugin.tools.needles import kv_needles, library_text, magic_needles, with_needles
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerSettings, launch_server

if TYPE_CHECKING:
    from openai import OpenAI
    from vllm import LLM, RequestOutput

NEW_TOKENS = 16
_CHARACTERS = 3300
"""Length of a document: its tokens are several times the budget."""
_MAX_MODEL_LEN = 2048
_LIKELIEST = 5
_SETTINGS = {KEY: {"selection": {"budget_tokens": 256}, "min_context_tokens": 0}}
_ANYTHING = r"[\s\S]*"
_OFFERED = 1 << 28
"""Bytes of a KV cache."""


WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks a server to keep the blocks of a prompt for the server that decodes."""


class IdleError(RuntimeError):
    """A deployment answered without using its feature."""


@dataclass(frozen=True)
class Launcher:
    """Starts engines and servers of one deployment."""

    arguments: Mapping[str, Any]
    """Arguments of `vllm.LLM` in addition to those of the plain deployment."""
    variant: Variant
    """The attention backend."""

    @contextmanager
    def engine(self, **more: Any) -> Iterator[LLM]:
        """An engine in this process. All of its workers must run the requested backend."""
        arguments: dict[str, Any] = {
            "load_format": "auto", "skip_tokenizer_init": False, "max_model_len": _MAX_MODEL_LEN, "max_num_seqs": 2,
            "max_num_batched_tokens": _MAX_MODEL_LEN, "worker_extension_cls": EXTENSION,
        }  # fmt: skip
        if self.variant.sparse:
            arguments |= {"attention_backend": self.variant.backend, "additional_config": _SETTINGS}
        with engine(NEEDLE_8M, **(arguments | dict(self.arguments) | more)) as llm:
            for used in llm.collective_rpc("attention_backends"):
                self.variant.check_backends(used)
            yield llm

    def server(self, name: str, *arguments: str, **environment: str) -> AbstractContextManager[LaunchedServer]:
        """A server, ready to start."""
        more = ("--max-num-batched-tokens", str(_MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(_OFFERED))
        settings = ServerSettings(
            NEEDLE_8M, _MAX_MODEL_LEN, self.variant.backend, self.variant.additional_config(json.dumps(_SETTINGS)),
            (*more, *arguments), environment=environment, log_lines=0,
        )  # fmt: skip
        return launch_server(name, settings)


@dataclass(frozen=True)
class Answers:
    """The answers of an engine to all questions."""

    continuations: list[Continuation]
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    requests: list[RequestOutput] = field(default_factory=list, repr=False)


Trial = Callable[[Launcher], Iterator[Answers]]
"""Asks all questions once or several times."""


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


def ask(llm: LLM, together: bool = False, lora: Any = None, **sampling: Any) -> Answers:
    """Asks an engine all questions, greedily.

    Args:
        llm: the engine.
        together: whether to ask in one batch instead of one after the other.
        lora: an adapter.
        **sampling: further arguments of `SamplingParams`.
    """
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": _LIKELIEST, "ignore_eos": True}
    parameters = SamplingParams(**(defaults | sampling))
    inputs: list[Any] = [{"prompt_token_ids": tokens} for tokens in prompts()]
    batches = [inputs] if together else [[each] for each in inputs]
    done = [
        request for batch in batches
        for request in llm.generate(batch, parameters, lora_request=lora, use_tqdm=False)
    ]  # fmt: skip
    return Answers([continuation(each) for each in done], sum(each.num_cached_tokens or 0 for each in done), done)


def _expect(holds: object, fault: str) -> None:
    if not holds:
        raise IdleError(fault)


def plainly(launcher: Launcher) -> Iterator[Answers]:
    """Asks once."""
    with launcher.engine() as llm:
        yield ask(llm)


def together(launcher: Launcher) -> Iterator[Answers]:
    """Asks all questions in one batch."""
    with launcher.engine() as llm:
        yield ask(llm, together=True)


def twice(launcher: Launcher) -> Iterator[Answers]:
    """Asks again with a warm prefix cache."""
    with launcher.engine() as llm:
        yield ask(llm)
        again = ask(llm)
        _expect(again.cached_tokens > sum(map(len, prompts())) // 2, "prompts were not in the prefix cache")
        yield again


def offloaded(launcher: Launcher) -> Iterator[Answers]:
    """Asks again after the prefix cache has moved to the connector's memory."""
    with launcher.engine() as llm:
        yield ask(llm)
        llm.reset_prefix_cache()
        again = ask(llm)
        _expect(again.cached_tokens > sum(map(len, prompts())) // 2, "no block came back")
        yield again


def from_files(launcher: Launcher) -> Iterator[Answers]:
    """Asks a second engine, which reads the files of the first one."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        extra = {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": _OFFERED,
            "secondary_tiers": [{"type": "fs", "root_dir": folder}],
        }  # fmt: skip
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        found = []
        # The hashes of blocks start from a random number per process, unless it is set.
        os.environ["PYTHONHASHSEED"] = "0"
        for _ in range(2):
            with launcher.engine(kv_transfer_config=dict(transfer), enable_prefix_caching=True) as llm:
                found.append(ask(llm))
                yield found[-1]
        _expect(found[1].cached_tokens > found[0].cached_tokens, "the second engine found no file")


def speculating(launcher: Launcher) -> Iterator[Answers]:
    """Asks once. At least one token must have been drafted."""
    with launcher.engine() as llm:
        yield ask(llm)
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    _expect(counts["vllm:spec_decode_num_draft_tokens"], "nothing was drafted")


def structured(launcher: Launcher) -> Iterator[Answers]:
    """Asks under a grammar that allows every text, and under one of digits."""
    from vllm.sampling_params import StructuredOutputsParams

    with launcher.engine() as llm:
        yield ask(llm, structured_outputs=StructuredOutputsParams(regex=_ANYTHING))
        digits = ask(llm, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{24}"))
    texts = [request.outputs[0].text for request in digits.requests]
    _expect(all(re.fullmatch("[0-9]+", text) for text in texts), f"a grammar of digits gave {texts!r}")


def adapted(launcher: Launcher) -> Iterator[Answers]:
    """Asks with an adapter that adds zero."""
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder, launcher.engine() as llm:
        adapter = Path(folder) / "adapter"
        write_adapter(adapter, NEEDLE_8M, scale=0.0)
        yield ask(llm, lora=LoRARequest("zero", 1, str(adapter)))


def with_prompt_logprobs(launcher: Launcher) -> Iterator[Answers]:
    """Asks also for the log probabilities of the prompt."""
    with launcher.engine() as llm:
        answers = ask(llm, prompt_logprobs=1)
    given = [len(request.prompt_logprobs or ()) for request in answers.requests]
    _expect(given == list(map(len, prompts())), f"log probabilities of {given} tokens")
    yield answers


def reloading(launcher: Launcher) -> Iterator[Answers]:
    """Asks before weights are replaced, and after they are loaded again."""
    with launcher.engine() as llm:
        before = ask(llm)
        yield before
        llm.collective_rpc("draw_weights")
        drawn = ask(llm)
        _expect(drawn.continuations != before.continuations, "other weights gave the same answers")
        llm.collective_rpc("reload_weights")
        yield ask(llm)


def sleeping(launcher: Launcher) -> Iterator[Answers]:
    """Asks between two sleeps. The second sleep discards the weights."""
    with launcher.engine() as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            yield ask(llm)


def _ask_server(client: OpenAI) -> Answers:
    asker = Asker(client, NEEDLE_8M.name, NEW_TOKENS)
    return Answers([asker.ask(tokens) for tokens in prompts()])


def by_ranks(launcher: Launcher) -> Iterator[Answers]:
    """Asks each engine of a data-parallel server."""
    with launcher.server("data-parallel", "--data-parallel-size", "2", "--no-enable-prefix-caching") as server:
        server.wait_until_ready()
        with server.explain_failures():
            for rank in range(2):
                yield _ask_server(server.client.with_options(default_headers={"X-data-parallel-rank": str(rank)}))
            text = metrics_text(server.client)
    pattern = r'vllm:request_success_total\{engine="\d"[^}]*"length"[^}]*\} (.*)'
    asked = [float(count) for count in re.findall(pattern, text)]
    _expect(asked == [len(prompts())] * 2, f"the engines answered {asked} questions")


@contextmanager
def nixl_pair(launcher: Launcher, *arguments: str, **extra: Any) -> Iterator[tuple[LaunchedServer, LaunchedServer]]:
    """A server that prefills and one that decodes from its blocks, both ready.

    Args:
        launcher: starts them.
        *arguments: further arguments of both servers.
        **extra: settings of vLLM's connector.
    """
    from vllm.platforms import current_platform

    transfer = {
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": current_platform.device_type,
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    with ExitStack() as servers:
        prefill, decode = (
            servers.enter_context(
                launcher.server(
                    name, "--kv-transfer-config", json.dumps(transfer), *arguments,
                    VLLM_NIXL_SIDE_CHANNEL_PORT=str(port),
                )
            )
            for name, port in (("prefill", 5710), ("decode", 5720))
        )  # fmt: skip
        for server in (prefill, decode):
            server.wait_until_ready()
        with prefill.explain_failures(), decode.explain_failures():
            yield prefill, decode


def prefilled(client: OpenAI, tokens: list[int]) -> dict[str, Any]:
    """Computes a prompt; returns where its blocks are, for the server that decodes."""
    first: Any = client.completions.create(
        model=NEEDLE_8M.name, prompt=tokens, max_tokens=1, temperature=0,
        extra_body={"kv_transfer_params": WANTED},
    )  # fmt: skip
    return dict(first.kv_transfer_params)


def moved_tokens(client: OpenAI) -> int:
    """Tokens whose blocks a server has taken from another one."""
    return round(read_metrics(metrics_text(client))["vllm:external_prefix_cache_hits_total"])


def disaggregated(launcher: Launcher) -> Iterator[Answers]:
    """One server prefills, another one decodes from its blocks."""
    with nixl_pair(launcher) as (prefill, decode):
        asker = Asker(decode.client, NEEDLE_8M.name, NEW_TOKENS)
        found = [asker.ask(each, kv_transfer_params=prefilled(prefill.client, each)) for each in prompts()]
        hits = moved_tokens(decode.client)
    _expect(hits > sum(map(len, prompts())) // 2, f"{hits} tokens came from the server that prefills")
    yield Answers(found)


TRIALS: Mapping[str, Trial] = {
    table.DATA_PARALLEL: by_ranks,
    table.PREFIX_CACHING: twice,
    table.TOGETHER: together,
    table.NGRAM: speculating,
    table.STRUCTURED: structured,
    table.LORA: adapted,
    table.PROMPT_LOGPROBS: with_prompt_logprobs,
    table.RELOAD: reloading,
    table.SLEEP: sleeping,
    table.OFFLOAD_MEMORY: offloaded,
    table.OFFLOAD_FILES: from_files,
    table.OFFLOAD_SIMPLE: offloaded,
    table.NIXL: disaggregated,
}
"""Trials by deployment; `plainly` for all others."""

"""The output of a token depends on its request alone: on an idle engine, and beside hostile neighbours.

vLLM's scheduler runs one layer, so that no product of matrices differs by the size of a batch.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from support.bare_layer import BareLayer, LayerBatch
from support.engines import MODEL
from support.state_fuzz.cases import MAX_MODEL_LEN, Case
from support.state_fuzz.schedule import Fuzz
from support.state_fuzz.truth import VOCABULARY
from support.state_fuzz.worker import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, Worker
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.request import Request, RequestStatus

from vllm_sparse_plugin.config import KEY

pytestmark = pytest.mark.nightly
PROMPTS, NEIGHBOURS, ANSWER_TOKENS, BLOCK = int(os.environ.get("NIGHTLY_PROMPTS", "1000")), 16, 4, 64
SELECTION = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
KEPT = {"budget_tokens": 128, "min_context_tokens": 0}
WAYS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("unique", "quest", "streaming_llm"), SELECTION),
    "dense": {},
    "art": {"stopping": {"block_tokens": 64, "patience": 1}, "min_context_tokens": 0},
    "sinkrouter": {
        "routing": {"threshold": 0.0, "dense_layers": 0, "accept": "uncalibrated"}, "min_context_tokens": 0,
    },
    "unique_prefill": SELECTION | {"prefill": {"method": "blocks", "min_context_tokens": 128, "min_blocks": 1}},
    "zipvl": {},
    "snapkv": {"compaction": KEPT | {"window_tokens": 8}},
    "pyramidkv": {"compaction": KEPT | {"window_tokens": 8}},
    "h2o": {"compaction": KEPT | {"every": 40}},
}  # fmt: skip
"""Settings of each backend. Tokens that `lossless` returns are those of dense attention."""
SPARSE_PREFILL = ("unique_prefill", "zipvl")
SIGNS = torch.randn(NUM_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()


@dataclass(frozen=True)
class OfBackend(Case):
    settings: dict[str, Any] = field(default_factory=dict)

    def vllm_config(self) -> VllmConfig:
        config = EngineArgs(
            model=str(MODEL), attention_backend=self.policy, additional_config={KEY: dict(self.settings)},
            block_size=self.block_size, enforce_eager=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=self.max_requests,
            max_num_batched_tokens=self.chunk_tokens, enable_prefix_caching=True, async_scheduling=False,
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = self.num_blocks
        return config


class Server(Fuzz):
    """Answers judged requests, one after the other, beside a number of neighbours."""

    def __init__(self, backend: str, neighbours: int) -> None:
        # No request is preempted: a resumed request attends to its answer as to a prompt.
        blocks = 2 + (1 + NEIGHBOURS) * MAX_MODEL_LEN // BLOCK
        settings = WAYS[backend]
        super().__init__(0, OfBackend(backend, BLOCK, blocks, 1 + NEIGHBOURS, 400, 0, True, settings=settings))
        self.neighbours, self.judged = neighbours, ""
        self.outputs: dict[int, bytes] = {}
        """Of the judged request, by position."""

    def answer(self, name: str, prompt: list[int]) -> dict[int, bytes]:
        """The output at each position of a request that the engine computes."""
        self.judged, self.outputs = name, {}
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))
        step = BareLayer.step

        def recorded(layer: BareLayer, batch: LayerBatch, *tensors: torch.Tensor) -> tuple[torch.Tensor, Any]:
            output, metadata = step(layer, batch, *tensors)
            names: list[str] = self.worker.input_batch.req_ids
            if self.judged in names:
                row = names.index(self.judged)
                first, end = batch.query_start[row : row + 2].tolist()
                context = int(batch.seq_lens[row])
                for place in range(first, end):
                    self.outputs[context - end + place] = output[place].view(torch.uint8).numpy().tobytes()
            return output, metadata

        with (
            mock.patch.object(BareLayer, "step", recorded),
            mock.patch.object(Worker, "queries_of", lambda _, keys: queries_of(keys)),
            mock.patch.multiple(Worker, _check_output=mock.DEFAULT, _check_statistics=mock.DEFAULT),
        ):
            while name in self.scheduler.requests:
                self.step()
        return self.outputs

    def _clients(self) -> None:
        others = [name for name in self.scheduler.requests if name != self.judged]
        if len(others) < self.neighbours:
            self._ask_as_neighbour()
        self._abort("aborts") if self.rng.random() < 0.02 else None

    def _ask_as_neighbour(self) -> None:
        judged = self.scheduler.requests.get(self.judged)
        start = [] if judged is None else list(judged.prompt_token_ids)[: self.rng.randrange(400)]
        prompt = [*(start if self.rng.random() < 0.5 else []), *self._tokens(self.rng.randrange(1, 100))]
        self.asked += 1
        extra = self.rng.choice([None, {"sparse": "dense"}])
        answer = self.rng.randrange(1, MAX_MODEL_LEN - len(prompt) - 1)
        sampling = SamplingParams(temperature=0, max_tokens=min(answer, 60), ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(Request(f"r{self.asked}", prompt, sampling, None, block_hasher=self.hasher))

    def _abort(self, kind: str) -> None:
        others = [name for name in self.scheduler.requests if name != self.judged]
        if others:
            self.scheduler.finish_requests(self.rng.choice(others), RequestStatus.FINISHED_ABORTED)

    def _sample(self, output: Any, unknown: Any) -> Any:
        for name, new in super()._sample(output, unknown):
            yield name, [self.scheduler.requests[name].num_tokens % VOCABULARY] * len(new)


def queries_of(keys: torch.Tensor) -> torch.Tensor:
    """Queries that depend on the key of their token alone."""
    return keys.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) * SIGNS


def draw_prompts() -> list[list[int]]:
    """Prompts of random lengths; half of them begin like an earlier one."""
    rng, found = random.Random(0), []
    for _ in range(PROMPTS):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 480))]
        if found and rng.random() < 0.5:
            earlier = rng.choice(found[-8:])
            prompt = (earlier[: rng.randrange(len(earlier) + 1)] + prompt)[:480]
        found.append(prompt)
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", WAYS)
def test_neighbours_change_no_bit(backend):
    idle, busy = Server(backend, 0), Server(backend, NEIGHBOURS)
    compared, changed = 0, []
    for place, prompt in enumerate(draw_prompts()):
        alone, beside = (server.answer(f"judged-{place}", prompt) for server in (idle, busy))
        # vLLM's kernels compute the prompts of dense attention. Prefix hits differ, so fewer positions may be common.
        first = 0 if backend in SPARSE_PREFILL else len(prompt)
        common = [position for position in alone.keys() & beside.keys() if position >= first]
        assert common
        compared += len(common)
        if any(alone[position] != beside[position] for position in common):
            changed.append(place)
    assert compared >= PROMPTS * (ANSWER_TOKENS - 1)
    assert changed == []

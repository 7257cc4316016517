"""Drives one engine through features of vLLM that touch its requests, and returns what it saw.

What runs here runs in the engine's process, where a step is a call.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.engines import sum_of_metric
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

BLOCK, BLOCKS, CHUNK = 32, 90, 256
PROMPT = 1000
NEW = 24
SELECTING = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}


class Driver:
    """One engine with blocks for two or three prompts, and what a test asks of it."""

    def __init__(self, model: Path, backend: str, settings: dict[str, Any]) -> None:
        self.llm = LLM(
            model=str(model), attention_backend=backend, enforce_eager=True, disable_log_stats=False, max_model_len=-1,
            max_num_batched_tokens=CHUNK, max_num_seqs=6, block_size=BLOCK, num_gpu_blocks_override=BLOCKS,
            kv_cache_memory_bytes=1 << 28, scheduling_policy="priority",
            additional_config={"sparse_attention": settings},
        )  # fmt: skip
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def answers(self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.token_ids) for one in done for output in one.outputs]

    def answer(self, prompt: list[int], tokens: int = NEW, **more: Any) -> list[int]:
        """What the engine answers when it has nothing in its cache."""
        self.llm.reset_prefix_cache()
        return self.answers([prompt], greedy(tokens, **more))[0]

    def steps(
        self, prompts: dict[str, list[int]], after: int, then: Callable[[dict[str, list[int]]], Any]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Take steps with an empty cache, call `then` behind one of them, and go on to the end.

        Returns:
            The answers so far when `then` was called, and whole.
        """
        self.llm.reset_prefix_cache()
        engine, seen, before, count = self.llm.llm_engine, {}, {}, 0
        for name, prompt in prompts.items():
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy(NEW))
        while engine.has_unfinished_requests():
            seen |= {done.request_id: list(done.outputs[0].token_ids) for done in engine.step()}
            count += 1
            if count == after:
                before = dict(seen)
                then(before)
        return before, seen

    def preempt(self, prompt: list[int], after: int) -> tuple[list[int], list[int]]:
        """An answer when all requests are preempted and the cache is emptied behind a step, and whole."""
        before, whole = self.steps({"a": prompt}, after, lambda _: self.scheduler.reset_prefix_cache(True))
        return before.get("a", []), whole["a"]

    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return BLOCKS - 1 - pool.get_num_free_blocks()

    def metric(self, name: str) -> float:
        from prometheus_client import REGISTRY, generate_latest

        return sum_of_metric(generate_latest(REGISTRY).decode(), name)


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def text(seed: int, tokens: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [0, *(rng.randrange(3, 4000) for _ in range(tokens - 1))]


def see_requests(model: Path) -> dict[str, Any]:
    """What an engine that selects pages makes of requests that are no plain ones."""
    driver, prompt, seen = Driver(model, "unique", SELECTING), text(3), {}
    alone = driver.answer(prompt)
    seen["max_model_len"] = driver.scheduler.max_model_len
    seen["alone"], seen["dense"] = alone, driver.answer(prompt, extra_args={"sparse": "dense"})

    # vLLM's CPU engine ends when a prompt with a seed is computed in chunks, with its own attention too.
    drawn, short = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}, prompt[:CHUNK]
    driver.llm.reset_prefix_cache()
    seen["n"] = driver.answers([short], SamplingParams(n=3, seed=7, **drawn))
    driver.llm.reset_prefix_cache()
    seen["one by one"] = driver.answers([short] * 3, [SamplingParams(seed=7 + place, **drawn) for place in range(3)])

    reads = driver.metric("vllm_sparse_kv_read_share_count")
    (found,) = driver.llm.beam_search(
        [{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    )
    seen["beams"] = [beam.cum_logprob for beam in found.sequences]
    seen["sums"] = [driver_sum(driver, prompt, beam.tokens[PROMPT:]) for beam in found.sequences]
    # Counters are copied every 16 steps at the latest.
    seen["beams read"] = driver.metric("vllm_sparse_kv_read_share_count") - reads

    driver.llm.reset_prefix_cache()
    hits = "vllm:prefix_cache_hits_total"
    seen["salted"] = []
    for salt in ("a", "b", "a"):
        before = driver.metric(hits)
        inputs = {"prompt_token_ids": prompt, "cache_salt": salt}
        (done,) = driver.llm.generate(inputs, greedy(NEW, extra_args={"sparse_budget_tokens": 64}), use_tqdm=False)
        seen["salted"].append((list(done.outputs[0].token_ids), driver.metric(hits) - before))

    seen["preempted"] = {after: driver.preempt(prompt, after) for after in (1, 3, 12)}
    seen["fresh"] = {
        after: before + driver.answer(prompt + before, NEW - len(before)) if before else alone
        for after, (before, _) in seen["preempted"].items()
    }
    seen["used"] = driver.used_blocks()
    return seen


def driver_sum(driver: Driver, prompt: list[int], tokens: list[int]) -> float:
    """The log probability of some tokens, each behind a prompt that ends before it."""
    total = 0.0
    for place, token in enumerate(tokens):
        inputs = {"prompt_token_ids": prompt + tokens[:place]}
        (done,) = driver.llm.generate(inputs, greedy(1, logprobs=20), use_tqdm=False)
        total += done.outputs[0].logprobs[0][token].logprob
    return total


def see_schedules(model: Path) -> dict[str, Any]:
    """What an engine that selects pages makes of priorities, and of sessions whose prompts grow."""
    driver, seen = Driver(model, "unique", SELECTING), {}
    engine = driver.llm.llm_engine
    # Their prompts fill all blocks; the second answer needs one more, while the first goes on.
    prompts = {"low": text(4, 860), "middle": text(5, 950), "high": text(6, 970)}
    driver.llm.reset_prefix_cache()
    preempted = driver.metric("vllm:num_preemptions_total")
    answers, ends, before = {}, [], []
    for name, priority in (("low", 3), ("middle", 2)):
        engine.add_request(name, {"prompt_token_ids": prompts[name]}, greedy(NEW), priority=priority)
    steps = 0
    while engine.has_unfinished_requests():
        for done in engine.step():
            answers[done.request_id] = list(done.outputs[0].token_ids)
            ends += [done.request_id] if done.finished else []
        steps += 1
        if steps == 12:
            before = list(answers["low"])
        if steps == 6:
            engine.add_request("high", {"prompt_token_ids": prompts["high"]}, greedy(NEW), priority=0)
    seen["answers"], seen["ends"], seen["before"] = answers, ends, before
    seen["preemptions"] = driver.metric("vllm:num_preemptions_total") - preempted

    turns = [text(7), text(8, 300)]
    driver.llm.reset_prefix_cache()
    seen["session"] = session(driver, turns)
    # vLLM drops the last token of a turn, here the only one. Kept ones would have attended to selected pages.
    seen["turns"] = [driver.answer(turns[0], 1), driver.answer(turns[0] + turns[1], 8)]
    seen["used"] = driver.used_blocks()
    return seen


def session(driver: Driver, turns: list[list[int]]) -> list[list[int]]:
    """What an engine answers to each part of a prompt that grows: one token to the first, eight to others."""
    engine, answers = driver.llm.llm_engine, []
    core = engine.engine_core

    def send(tokens: list[int], resumable: bool) -> None:
        # The session lengthens its list.
        inputs = {"type": "token", "prompt_token_ids": list(tokens)}
        request = engine.input_processor.process_inputs(
            "session", inputs, greedy(8 if answers else 1), ("generate",), resumable=resumable
        )
        core.add_request(request)

    for turn in turns:
        send(turn, resumable=True)
        # Four chunks at most, and the tokens.
        outputs = [output for _ in range(4 + 8) for output in core.get_output().outputs]
        answers.append([token for output in outputs for token in output.new_token_ids])
    # A part that is not resumable ends a session.
    send([0], resumable=False)
    core.get_output()
    return answers


def see_compacted(model: Path, backend: str) -> dict[str, Any]:
    """What an engine that evicts answers when a prompt is preempted behind each of its steps."""
    driver, prompt = Driver(model, backend, {"compaction": {"min_context_tokens": 0, "budget_tokens": 128}}), text(3)
    alone = driver.answer(prompt)
    preempted = {after: driver.preempt(prompt, after)[1] for after in (1, 3)}
    return {"alone": alone, "preempted": preempted, "used": driver.used_blocks()}

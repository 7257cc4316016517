"""Whole engines on a GPU: CUDA graphs, speculation, tensor parallelism and fp8 caches keep the answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import Sampled
from support.gpu_engines import MODEL, engine
from support.needles import needle_range
from support.rolling import CACHE, ROLLING, WindowedModel, distance, library_tokens
from transformers import AutoTokenizer

from vllm_sparse_plugin.metrics.live import count_totals
from vllm_sparse_plugin.tools.needles import Question, build_questions, is_correct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONTEXTS = (4096, 13_000)
SPARSE_PROMPTS = {"method": "blocks", "min_context_tokens": 1024}
NEVER = {"stopping": {"patience": 0, "block_tokens": 512}}


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        question
        for context in CONTEXTS
        for task in ("multikey", "multiquery", "kv")
        for question in build_questions(tokenizer, task, context, 5, seed=7)
    ]


def ask(llm: Any, questions: list[Question], arguments: dict[str, Any] | None = None) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=32, extra_args=arguments)
    outputs = llm.generate([question.prompt for question in questions], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def share_correct(questions: list[Question], answers: list[tuple[int, ...]]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return sum(is_correct(question, text) for question, text in zip(questions, texts, strict=True)) / len(questions)


@pytest.fixture(scope="module")
def answers(questions: list[Question]) -> list[tuple[int, ...]]:
    """The answers of a plain engine with full decode graphs."""
    with engine() as llm:
        return ask(llm, questions)


def test_needles_are_found(questions: list[Question], answers: list[tuple[int, ...]]) -> None:
    assert share_correct(questions, answers) >= 0.95


@pytest.mark.parametrize(
    ("offload", "arguments"),
    [
        pytest.param({}, {}, id="graphs"),
        pytest.param({"hot_pages": 0}, {}, id="no copies"),
        pytest.param({"hot_pages": 0.02}, {}, id="few copies"),
        pytest.param({"hot_pages": 0.5}, {"enforce_eager": True, "compilation_config": {}}, id="eager"),
        pytest.param({}, {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}, id="full graphs"),
        pytest.param({}, {"tensor_parallel_size": 2}, id="two GPUs"),
    ],
)
def test_offloading_keeps_the_answers(
    questions: list[Question], answers: list[tuple[int, ...]], offload: dict[str, Any], arguments: dict[str, Any]
) -> None:
    count = arguments.get("tensor_parallel_size", 1)
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    settings = {"sparse_attention": {"offload": {"host_memory": "4GiB"} | offload}}
    with engine(additional_config=settings, kv_cache_memory_bytes=None, **arguments) as llm:
        assert ask(llm, questions) == answers
        # The second time all prompts are prefix hits.
        assert share_correct(questions, ask(llm, questions)) >= 0.95
        from_host, read = count_totals().get("vllm_sparse_host_reads", (0.0, 0))
    if count == 1 and offload.get("hot_pages") != 0:
        assert 0 < from_host < read


def test_offloading_keeps_the_answers_of_an_8_bit_cache(questions: list[Question]) -> None:
    settings = {"sparse_attention": {"offload": {"host_memory": "4GiB"}}}
    with engine(kv_cache_dtype="fp8") as llm:
        expected = ask(llm, questions)
    with engine(kv_cache_dtype="fp8", additional_config=settings, kv_cache_memory_bytes=None) as llm:
        assert ask(llm, questions) == expected


def test_offloading_keeps_the_answers_of_sparse_prompts(questions: list[Question]) -> None:
    prefill = {"prefill": SPARSE_PROMPTS | {"min_blocks": 4}}
    with engine(additional_config={"sparse_attention": prefill}) as llm:
        expected = ask(llm, questions)
    settings = {"sparse_attention": prefill | {"offload": {"host_memory": "4GiB"}}}
    with engine(additional_config=settings, kv_cache_memory_bytes=None) as llm:
        assert ask(llm, questions) == expected


def test_offloaded_requests_with_a_common_prompt_arrive_together(questions: list[Question]) -> None:
    # vLLM shares a block from the step on that fills it, so these prompts read what others write in the same step.
    document, _ = questions[0].parts
    asked = [replace(questions[0], prompt=document + other.parts[1]) for other in questions[:6]]
    settings = {"sparse_attention": {"offload": {"host_memory": "4GiB"}}}
    with engine(max_num_batched_tokens=16_384) as llm:
        expected = ask(llm, asked)
    with engine(max_num_batched_tokens=16_384, additional_config=settings, kv_cache_memory_bytes=None) as llm:
        assert ask(llm, asked) == expected


def test_offloading_finds_needles_when_requests_are_preempted(
    questions: list[Question],
) -> None:
    settings = {"sparse_attention": {"offload": {"host_memory": "160MiB", "hot_pages": 0.3}}}
    with engine(additional_config=settings, kv_cache_memory_bytes=None) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        assert cache.num_gpu_blocks * cache.block_size < sum(question.context_tokens for question in questions) / 4
        assert share_correct(questions, ask(llm, questions)) >= 0.95


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"enforce_eager": True, "compilation_config": {}}, id="eager"),
        pytest.param(
            {"max_num_batched_tokens": 512, "enable_prefix_caching": False}, id="small chunks, no prefix cache"
        ),
        pytest.param({"max_num_seqs": 1}, id="one request at a time"),
        pytest.param({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}, id="full graphs"),
        pytest.param({"tensor_parallel_size": 2}, id="two GPUs"),
        pytest.param({"additional_config": {"sparse_attention": NEVER}}, id="a rule that never stops"),
        pytest.param(
            {
                "additional_config": {
                    "sparse_attention": NEVER
                    | {"routing": {"threshold": 1.5, "dense_layers": 0, "accept": "uncalibrated"}}
                }
            },
            id="a rule that never stops, routing that skips nothing",
        ),
    ],
)
def test_the_engine_keeps_the_answers(
    questions: list[Question], answers: list[tuple[int, ...]], arguments: dict[str, Any]
) -> None:
    if arguments.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    with engine(**arguments) as llm:
        assert ask(llm, questions) == answers


def test_ngram_speculation_keeps_greedy_answers(questions: list[Question], answers: list[tuple[int, ...]]) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with engine(speculative_config=speculation) as llm:
        assert ask(llm, questions) == answers
        drafts = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_draft_tokens")
    assert drafts > 0


def test_an_fp8_cache_finds_needles(questions: list[Question]) -> None:
    with engine(kv_cache_dtype="fp8") as llm:
        assert share_correct(questions, ask(llm, questions)) >= 0.9


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_dense_attention_that_stops_finds_needles(questions: list[Question], kv_cache_dtype: str) -> None:
    with engine(attention_backend="art", kv_cache_dtype=kv_cache_dtype) as llm:
        assert share_correct(questions, ask(llm, questions)) >= 0.9


KINDS = (None, {"sparse_budget_tokens": 24}, {"sparse": "dense"}, {"sparse_budget_tokens": 4096})


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True, "compilation_config": {}}], ids=["graphs", "eager"])
def test_requests_with_budgets_answer_as_alone(questions: list[Question], arguments: dict[str, Any]) -> None:
    """A small budget changes tokens, so a request with another request's budget would be detected.

    All batches have one size, because the layers around attention may round differently in other sizes.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    prompts = [question.prompt for question in questions[-4:]]
    mix = [kind for _ in prompts for kind in KINDS]
    asked = [prompt for prompt in prompts for _ in KINDS]

    def answers(llm: Any, kinds: list[dict[str, Any] | None]) -> list[tuple[int, ...]]:
        sampling = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args=kind) for kind in kinds]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    with engine(**arguments) as llm:
        answers(llm, mix)  # Fills the prefix cache.
        alone = {index: answers(llm, [kind] * len(mix)) for index, kind in enumerate(KINDS)}
        mixed = answers(llm, mix)
        with pytest.raises(VLLMValidationError, match="sparse_budget_tokens: got 8200, allowed on a GPU: a multiple"):
            llm.generate(prompts[:1], SamplingParams(extra_args={"sparse_budget_tokens": 8200}), use_tqdm=False)
        assert answers(llm, mix) == mixed
    for index, tokens in enumerate(mixed):
        assert tokens == alone[index % len(KINDS)][index]
    assert alone[1] not in (alone[0], alone[2])


def test_dense_requests_answer_as_a_server_whose_budget_holds_the_context(questions: list[Question]) -> None:
    whole = {"sparse_attention": {"min_context_tokens": 16_384}}
    with engine(additional_config=whole) as llm:
        expected = ask(llm, questions)
    with engine() as llm:
        assert ask(llm, questions, {"sparse": "dense"}) == expected


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 16_384])
def test_sparse_prefill_that_reads_every_block_keeps_the_answers(
    questions: list[Question], answers: list[tuple[int, ...]], max_num_batched_tokens: int
) -> None:
    settings = {"sparse_attention": {"prefill": SPARSE_PROMPTS | {"density": 1.0}}}
    with engine(additional_config=settings, max_num_batched_tokens=max_num_batched_tokens) as llm:
        found = ask(llm, questions)
        read, past = count_totals()["vllm_sparse_prefill_density"]
    assert read == past > 0
    # FlashAttention may add in another order if sequences are shorter.
    assert sum(ours == theirs for ours, theirs in zip(found, answers, strict=True)) >= 0.9 * len(answers)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("backend", ["unique_prefill", "dense"])
@pytest.mark.parametrize("share", [{"density": 0.1}, {"coverage": 0.95}], ids=["density", "coverage"])
def test_sparse_prefill_finds_needles(
    questions: list[Question], backend: str, kv_cache_dtype: str, share: dict[str, float]
) -> None:
    settings = {"sparse_attention": {"prefill": SPARSE_PROMPTS | {"min_blocks": 4} | share}}
    with engine(attention_backend=backend, kv_cache_dtype=kv_cache_dtype, additional_config=settings) as llm:
        assert share_correct(questions, ask(llm, questions)) >= 0.9
        read, past = count_totals()["vllm_sparse_prefill_density"]
    assert 0 < read < past


@pytest.mark.parametrize("backend", ["snapkv", "pyramidkv", "h2o", "streaming_llm"])
@pytest.mark.parametrize("eager", [True, False])
def test_prompts_within_the_budget_are_served_as_without_compaction(questions, backend, eager):
    arguments = {"attention_backend": "dense", "enforce_eager": eager}
    with engine(**arguments) as llm:
        expected = ask(llm, questions)
    # The last layers of a pyramid keep a small share of the budget.
    keep = {"compaction": {"budget_tokens": 1 << 20}, "selection": {"policy": "dense"}}
    compacting = {"attention_backend": backend, "additional_config": {"sparse_attention": keep}}
    with engine(**(arguments | compacting)) as llm:
        assert ask(llm, questions) == expected


KEEP = {"compaction": {"budget_tokens": 1024}}
WIDE = {"compaction": {"budget_tokens": 1024, "pool_tokens": 13}}


def blocks_in_use(llm: Any) -> float:
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_usage()


@pytest.mark.parametrize(
    ("backend", "settings", "least"), [("snapkv", WIDE, 0.5), ("pyramidkv", WIDE, 0.1), ("h2o", KEEP, 0.0)]
)
def test_compacted_prompts_answer_the_same_in_graphs_as_eagerly_and_give_everything_back(
    questions, backend, settings, least
):
    answered = []
    for eager in (True, False):
        # With few blocks, requests wait for each other and some are preempted.
        with engine(
            attention_backend=backend, enforce_eager=eager, num_gpu_blocks_override=1200, max_num_batched_tokens=2000,
            additional_config={"sparse_attention": settings},
        ) as llm:  # fmt: skip
            answered.append(ask(llm, questions))
            assert blocks_in_use(llm) == 0
    assert answered[0] == answered[1]
    assert share_correct(questions, answered[0]) >= least


@pytest.mark.parametrize("every", [None, 64])
@pytest.mark.parametrize("eager", [False, True])
def test_protected_needles_are_found_whatever_the_votes(questions, every, eager):
    """Heavy hitters of a prompt seldom are its needles."""
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    some = [question for question in questions if question.task == "multikey"]
    needles = [{"sparse_protect": needle_range(tokenizer, question)} for question in some]
    settings = {"compaction": {"budget_tokens": 1024, "every": every}}
    shares = []
    with engine(attention_backend="h2o", enforce_eager=eager, additional_config={"sparse_attention": settings}) as llm:
        for arguments in (needles, [None] * len(some)):
            sampling = [SamplingParams(temperature=0, max_tokens=32, extra_args=each) for each in arguments]
            outputs = llm.generate([question.prompt for question in some], sampling, use_tqdm=False)
            shares.append(share_correct(some, [tuple(output.outputs[0].token_ids) for output in outputs]))
        assert blocks_in_use(llm) == 0
    assert shares[0] >= shares[1] + 0.5


@pytest.mark.parametrize("backend", ["snapkv", "h2o"])
def test_two_gpus_keep_of_their_heads_what_one_keeps(questions, backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    answered = []
    for size in (1, 2):
        with engine(
            attention_backend=backend, tensor_parallel_size=size, additional_config={"sparse_attention": KEEP}
        ) as llm:
            answered.append(ask(llm, questions))
            assert blocks_in_use(llm) == 0
    # Two workers add in another order.
    same = sum(ours == theirs for ours, theirs in zip(*answered, strict=True))
    assert same >= 0.8 * len(questions)


def test_compacted_prompts_of_an_fp8_cache_find_needles(questions):
    with engine(attention_backend="snapkv", kv_cache_dtype="fp8", additional_config={"sparse_attention": WIDE}) as llm:
        assert share_correct(questions, ask(llm, questions)) >= 0.4
        assert blocks_in_use(llm) == 0


@pytest.mark.parametrize("eager", [False, True])
def test_positions_roll_as_in_a_plain_computation(eager: bool) -> None:
    """As on a CPU (`test_rolling.py`): prompts of several chunks; on a GPU also decode graphs."""
    from vllm import SamplingParams

    folder = MODEL.parent / "witness-6m"  # its attention depends on its sinks
    text = library_tokens(folder, 1300)
    # Within the cache, growing beyond it, and long. The last one is the beginning of an earlier one.
    prompts = [text[:40], text[60:140], text[:700], text[600:1300], text[600:1200]]
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine(
        folder, attention_backend="dense", max_model_len=768, max_num_batched_tokens=256, enforce_eager=eager,
        additional_config={"sparse_attention": {"compaction": ROLLING}},
    ) as llm:  # fmt: skip
        done = [llm.generate(part, greedy, use_tqdm=False) for part in (inputs[:-1], inputs[-1:])]
        assert blocks_in_use(llm) == 0
    drawn = [
        Sampled(
            list(answer.outputs[0].token_ids),
            [{token: each.logprob for token, each in place.items()} for place in answer.outputs[0].logprobs],
        )
        for answers in done
        for answer in answers
    ]
    model = WindowedModel(folder)
    rolling, text_positions = (
        [distance(model, prompt, one, rolls) for prompt, one in zip(prompts, drawn, strict=True)]
        for rolls in (True, False)
    )
    assert len(prompts[0]) + 60 < CACHE
    assert max(rolling) < 0.05
    # For short contexts both positions are equal.
    assert sum(text_positions[2:]) > 2 * sum(rolling[2:])

import logging
import multiprocessing
from types import SimpleNamespace

import pytest
from sparse_kernels.page_statistics import KINDS, StatisticsLayout

from vllm_sparse_plugin import notices
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

LARGE = "sparse_attention.selection: 512 tokens in pages of 16 are 32 pages; selections of fewer than 64 large pages "
FEW = "sparse_attention.selection.budget_tokens: decode steps read {} tokens; on SmolLM2-135M, 512 of 7,700 tokens "
LOST = "sparse_attention.compaction: what a prompt does not keep is lost; on SmolLM2-135M and Gemma 3 270M, 1,024 "
CACHE = "sparse_attention.selection.statistics: 'auto' stores int8 means in this 8-bit KV cache, and quarters in a "
THRESHOLD = "sparse_attention.routing.threshold: it was not calibrated for this model, "
CUBIC = "sparse_attention.routing.cubic: it was not calibrated for this model, "
MEAN_OF_SOME = {"policy": "mean", "keys": "representative"}
INFLLM = "sparse_attention.selection.policy: Representative keys are those that agree most with their page's own mean, "
LAMBDA = "sparse_attention.selection.lambda: it has no effect with statistics 'quarters', "
PROMPTS = "sparse_attention.prefill: prompts attend sparsely, "
HITTERS = "sparse_attention.compaction.method: h2o keeps tokens that all of a prompt attends to, "
POOL = "sparse_attention.compaction.pool_tokens: 5 keeps parts of long answers only; "
ZERO = "sparse_attention.prefill.others: zero, as published, keeps 64 % of dense attention's next-token agreement "
CUBIC_ROUTING = {"cubic": [0.5, 0, 0, 0], "longest": 4096}
CASES = {
    "defaults": ("unique", {}, "auto", []),
    "as published": ("unique_paper", {}, "auto", [FEW.format(512)]),
    "32 pages of 16": (
        "unique", {"selection": {"page_size": 16, "budget_tokens": 512}}, "auto", [LARGE, FEW.format(512)],
    ),
    "64 pages of 16": ("unique", {"selection": {"page_size": 16}}, "auto", []),
    "63 pages of 32": (
        "quest",
        {"selection": {"page_size": 32, "budget_tokens": 2016}},
        "auto",
        ["sparse_attention.selection: 2016 tokens in pages of 32 are 63 pages; selections of fewer than 64 large "],
    ),
    "few pages of 8": ("unique", {"selection": {"budget_tokens": 64}}, "auto", [FEW.format(64)]),
    "pages that are not scored": ("streaming_llm", {"selection": {"page_size": 32}}, "auto", [LOST]),
    "8-bit cache": ("unique", {}, "fp8", [CACHE]),
    "8-bit cache by its other name": ("unique", {}, "fp8_e4m3", [CACHE]),
    "8-bit cache and int8": ("unique", {"selection": {"statistics": "int8"}}, "fp8", []),
    "8-bit cache and another policy": ("quest", {}, "fp8", [FEW.format(512)]),
    "sinkrouter": ("sinkrouter", {}, "auto", [THRESHOLD]),
    "routing by a cubic": ("dense", {"routing": CUBIC_ROUTING}, "auto", [CUBIC]),
    "calibrated": ("dense", {"routing": CUBIC_ROUTING | {"fingerprint": "0", "recommended": True}}, "auto", []),
    "important tokens": ("zipvl", {}, "auto", [PROMPTS]),
    "important tokens as published": ("zipvl_paper", {}, "auto", [PROMPTS, ZERO]),
    "outputs of zero": ("zipvl", {"prefill": {"others": "zero"}}, "auto", [PROMPTS, ZERO]),
    "outputs of zero beside decoding": (
        "unique", {"prefill": {"method": "zipvl", "others": "zero"}}, "auto", [PROMPTS, ZERO],
    ),
    "narrow pools": ("snapkv_paper", {}, "auto", [LOST, POOL]),
    "narrow pools by layer": ("pyramidkv_paper", {}, "auto", [LOST, POOL]),
    "heavy hitters": ("h2o", {}, "auto", [LOST, HITTERS]),
    "wide pools": ("snapkv", {}, "auto", [LOST]),
    "infllm": ("infllm", {}, "auto", [FEW.format(512), INFLLM]),
    "infllm by its policy": ("dense", {"selection": MEAN_OF_SOME}, "auto", [FEW.format(512), INFLLM]),
    "lambda spelled out": ("unique", {"selection": {"lambda": 1.0}}, "auto", [LAMBDA]),
    "lambda and a deviation": ("unique", {"selection": {"lambda": 0.5, "statistics": "int8"}}, "auto", []),
    "lambda and an 8-bit cache": ("unique", {"selection": {"lambda": 0.5}}, "fp8", [CACHE]),
    "lambda of a preset": ("unique_paper", {"selection": {"statistics": "quarters"}}, "auto", [FEW.format(512)]),
    "a small window without eviction": ("streaming_llm", {"compaction": None}, "auto", [FEW.format(512)]),
    "1,024 tokens": ("quest", {"selection": {"budget_tokens": 1024}}, "auto", []),
    "1,016 tokens": ("unique", {"selection": {"budget_tokens": 1016}}, "auto", [FEW.format(1016)]),
    "few tokens to draft with": ("lossless", {"selection": {"budget_tokens": 512}}, "auto", []),
    "three": (
        "quest", {"selection": {"page_size": 16}, "routing": {"threshold": 0.5}}, "auto",
        [LARGE, FEW.format(512), THRESHOLD],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_configuration(case):
    backend, settings, cache_dtype, beginnings = CASES[case]
    said = notices.notices_of(resolve(settings, backend), cache_dtype)
    assert len(said) == len(beginnings)
    for sentence, beginning in zip(said, beginnings, strict=True):
        assert sentence.startswith(beginning)
        assert sentence.endswith(".")
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("selection", "statistics"),
    [({}, "quarters"), ({"statistics": "quarters"}, "quarters"), ({"statistics": "sketch"}, "sketch")],
)
def test_a_lambda_that_was_changed_and_has_no_effect_is_refused(selection, statistics, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        notices.notices_of(resolve({"selection": {"lambda": 0.5} | selection}, "unique"), "auto")
    assert str(caught.value) == (
        f"sparse_attention.selection.lambda: got 0.5 with statistics {statistics!r}, which store no deviation, "
        "allowed: with statistics int8, fp8 or bf16"
    )
    (tmp_path / "mine.yaml").write_text("selection: {lambda: 2.0}\n")
    with pytest.raises(ConfigurationError, match=r"selection\.lambda: got 2 with"):
        notices.notices_of(resolve({"config": str(tmp_path / "mine.yaml"), "selection": selection}, "unique"), "auto")


def test_presets_say_what_they_lose_and_the_others_say_nothing():
    silent = [name for name, preset in BACKENDS.items() if not notices.notices_of(resolve(None, preset), "auto")]
    assert silent == ["UNIQUE", "DENSE", "ART", "LOSSLESS"]


@pytest.fixture
def logged():
    """The messages of vLLM's loggers; none has been logged before."""
    from vllm.logger import init_logger

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = init_logger("vllm.vllm_sparse_plugin.notices")
    logger.addHandler(handler)
    notices._log_once.cache_clear()
    yield messages
    logger.removeHandler(handler)
    notices._log_once.cache_clear()


def test_each_sentence_is_logged_once(logged):
    config = resolve({"routing": {"threshold": 0.5}}, "infllm")
    for _ in range(2):
        notices.announce(config, "auto")
    assert logged == notices.notices_of(config, "auto")
    assert len(logged) == 3


def test_a_process_that_another_started_logs_nothing(logged, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    notices.announce(resolve(None, "infllm"), "auto")
    assert not logged


def test_the_memory_of_statistics_is_logged_with_their_name(monkeypatch):
    from vllm_sparse_plugin.attention import base

    messages = []
    monkeypatch.setattr(base.logger, "info", lambda text, *values: messages.append(text % values))
    spec = SimpleNamespace(block_size=64, tokens_per_state=16 / 17, page_size_bytes=17 << 10)
    settings = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=1024))
    base.report_memory("UNIQUE", settings, spec, StatisticsLayout(8, 64, "int4", kind=KINDS["quarters"]), 2)
    assert messages == [
        "UNIQUE: page statistics (quarters, int4, pages of 8 tokens) take 2.0 MiB of 34.0 MiB of KV cache, "
        "6.25 % on top of keys and values"
    ]

"""The engine of quick runs: the default backend reads little of a long document and answers as it did before."""

from support.engines import MODEL, run_engine
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import build_questions

GOLDEN = [223, 26, 25, 26, 25, 19, 19, 19]
"""The tokens of the answer: " 8787111"."""


def test_the_default_backend_answers_from_a_long_document() -> None:
    (question,) = build_questions(AutoTokenizer.from_pretrained(MODEL), "single", 4096, 1, seed=5)
    with run_engine("unique", {"selection": {"budget_tokens": 256}}) as engine:
        assert engine.answer([question.prompt], max_tokens=8) == [GOLDEN]
        read, steps = (engine.metric(f"vllm_sparse_kv_read_share_{part}") for part in ("sum", "count"))
    assert 0 < read < 0.1 * steps

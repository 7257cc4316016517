"""The engine of quick runs: the default backend finds a fact in a long document, as when its answer was recorded."""

from support.engines import MODEL, run_engine
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import build_questions

GOLDEN = [223, 26, 25, 26, 25, 19, 19, 19]
"""The tokens of the answer: " 8787111"."""


def test_the_default_backend_answers_from_a_long_document() -> None:
    (question,) = build_questions(AutoTokenizer.from_pretrained(MODEL), "single", 4096, 1, seed=5)
    with run_engine("unique", {"selection": {"budget_tokens": 64}}) as engine:
        assert engine.answer([question.prompt], max_tokens=8) == [GOLDEN]

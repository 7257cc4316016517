"""Text whose last words are likely only if a distant needle is read."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import build_questions


@dataclass(frozen=True)
class NeedleText:
    """A file, and how `vllm-sparse eval` scores its question and answer."""

    options: tuple[str, ...]


def write_needle_text(path: Path, model: Path) -> NeedleText:
    """Write a document with its question and answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = build_questions(tokenizer, "multikey", 4300, 2, seed=5)[0]
    text = f"{question.prompt} {question.answer}"
    path.write_text(text, encoding="utf-8")
    scored = len(tokenizer.encode(question.parts[1] + f" {question.answer}")) - 1
    window = ("--context", str(len(tokenizer.encode(text))), "--scored-tokens", str(scored), "--questions", "1")
    return NeedleText(("--text", str(path), *window))

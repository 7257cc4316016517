"""Questions of `vllm-sparse eval`, their answers, and what the command prints and writes."""

import functools
import json
import re
from pathlib import Path

from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
NEEDLES = ["--task", "multikey", "--questions", "4", "--label", "mine"]


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def find(tokens: list[int]) -> list[int]:
    """The answer of a perfect reader to a question about one needle."""
    document, question = tokenizer().decode(tokens).rsplit("\n", 1)
    key = re.fullmatch(r"What is the special magic number for (.+)\? Answer:", question)[1]
    value = re.search(rf"magic number for {key} is: (\d+)\.", document)[1]
    return tokenizer().encode(f" {value}", add_special_tokens=False)


def refused(result: tuple[int, str, str], code: int = 2) -> str:
    found, _, err = result
    assert found == code
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return line.removeprefix("error: ")


def cells(out: str, task: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith(f"│ {task} "))
    return [cell.strip() for cell in line.split("│")[1:-1]]


def rewrite(source: Path, target: Path, label: str, **scores: float) -> None:
    """Copy a file of results under another label, with changed scores of some items."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    lines[0]["settings"]["label"] = label
    for line in lines[1:]:
        line["score"] = scores.get(line["id"], line["score"])
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))

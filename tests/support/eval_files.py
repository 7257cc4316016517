"""Files of benchmark records, and the items made from them with needle-8m's tokens."""

import functools
import json
from pathlib import Path

from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.eval.items import Item, Prompter
from vllm_sparse_plugin.tools.eval.longbench import plan_file

CONTEXT = 1024


@functools.cache
def prompter() -> Prompter:
    return Prompter(AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "needle-8m"))


def write(path: Path, records: list[dict], separator: str = "\n") -> Path:
    path.write_text(separator.join(json.dumps(each, ensure_ascii=False) for each in records), encoding="utf-8")
    return path


def build(
    path: Path, records: list[dict], context: int = CONTEXT, most: int | None = None, **prompts: str
) -> list[Item]:
    planned = plan_file(write(path, records), prompts, prompter(), context, most)
    built = [each.build() for each in planned]
    assert [each.id for each in planned] == [each.id for each in built]
    return built


def text(item: Item) -> tuple[str, str]:
    return prompter().decode(item.context), prompter().decode(item.question)

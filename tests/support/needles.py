"""Places of needles in prompts."""

from typing import Any

from vllm_sparse_plugin.tools.needles import Question


def needle_range(tokenizer: Any, question: Question) -> str:
    """The tokens of the line that answers a question, in the form of `sparse_protect`."""
    end = question.prompt.index(question.answer) + len(question.answer)
    begin = question.prompt.rindex("\n", 0, end)
    offsets = tokenizer(question.prompt, return_offsets_mapping=True)["offset_mapping"]
    inside = [token for token, (first, last) in enumerate(offsets) if first < end and last > begin]
    return f"{inside[0]}:{inside[-1] + 1}"

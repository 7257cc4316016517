"""Plans the items of a run: generated tasks, and text for perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

from vllm_sparse_plugin.errors import ConfigurationError, expect_known
from vllm_sparse_plugin.tools import needles
from vllm_sparse_plugin.tools.eval import ruler
from vllm_sparse_plugin.tools.eval.items import COMPLETION, NLL, PERPLEXITY, Item, PlannedItem, Prompter
from vllm_sparse_plugin.tools.files import read_text

GROUPS: dict[str, tuple[str, ...]] = {"ruler": tuple(ruler.TASKS), "needles": needles.TASKS}
"""Groups of tasks."""
NAMES = (*(name for names in GROUPS.values() for name in names), *needles.STRESS_TASKS)
"""Single tasks."""


def choose_tasks(chosen: Sequence[str]) -> list[str]:
    """Return the tasks of given names of tasks and groups.

    Raises:
        ConfigurationError: a name is unknown.
    """
    expect_known("task", chosen, (*GROUPS, *NAMES))
    return list(dict.fromkeys(each for name in chosen for each in GROUPS.get(name, (name,))))


def plan_tasks(
    names: Sequence[str], prompter: Prompter, contexts: Sequence[int], count: int, seed: int
) -> list[PlannedItem]:
    """Return `count` items per task and context, ordered by context, task and number.

    Raises:
        ConfigurationError: a context is below `needles.MIN_CONTEXT_TOKENS`.
    """
    if names:
        needles.check_contexts(contexts)
    planned = []
    for context_tokens, name in product(contexts, names):
        questions = cache(partial(needle_items, prompter, name, context_tokens, count, seed))
        for index in range(count):
            if name in ruler.TASKS:
                build = partial(ruler.build_item, ruler.TASKS[name], name, prompter, context_tokens, index, seed)
            else:
                build = partial(lambda questions, index: questions()[index], questions, index)
            planned.append(PlannedItem(f"{name}/{context_tokens}/{index}", build))
    return planned


def needle_items(prompter: Prompter, task: str, context_tokens: int, count: int, seed: int) -> list[Item]:
    """Return the questions of `vllm-sparse needles` as items."""
    items = []
    for index, question in enumerate(needles.build_questions(prompter, task, context_tokens, count, seed)):
        before, question_tokens = prompter.split(*question.parts)
        items.append(
            Item(
                id=f"{task}/{context_tokens}/{index}",
                task=task,
                context_tokens=context_tokens,
                context=before,
                question=question_tokens,
                answers=(question.answer,),
                answer_tokens=needles.answer_tokens(task),
                metric="exact_first_line",
            )
        )
    return items


def plan_perplexity(
    paths: Sequence[Path], prompter: Prompter, contexts: Sequence[int], count: int, scored_tokens: int
) -> list[PlannedItem]:
    """Return `count` windows per context over the text of the files, see `plan_windows`.

    Raises:
        ConfigurationError: a file cannot be read, or the text is too short.
    """
    texts = [read_text(path, "text", "a file of text") for path in paths]
    return plan_windows("\n".join(texts), prompter, contexts, count, scored_tokens)


def plan_windows(
    text: str, prompter: Prompter, contexts: Sequence[int], count: int, scored_tokens: int
) -> list[PlannedItem]:
    """Return `count` windows per context over a text. The newest tokens of each window are scored.

    The scored tokens of two windows of one size do not overlap.

    Raises:
        ConfigurationError: the text is too short.
    """
    tokens = prompter.encode_plain(text)
    begin = prompter.begin
    planned = []
    for context_tokens in contexts:
        size = context_tokens - len(begin)
        needed = size + (count - 1) * scored_tokens
        if not 0 < scored_tokens < size:
            raise ConfigurationError(f"scored_tokens: got {scored_tokens}, allowed: 1 to {size - 1}")
        if len(tokens) < needed:
            raise ConfigurationError(
                f"text: got {len(tokens)} tokens, allowed: {needed} or more for {count} windows of {context_tokens}"
            )
        for index in range(count):
            start = index * (len(tokens) - size) // max(count - 1, 1)
            name = f"{PERPLEXITY}/{context_tokens}/{index}"
            window = partial(_window, name, context_tokens, begin, tokens, start, start + size, scored_tokens)
            planned.append(PlannedItem(name, window))
    return planned


def plan_completions(
    entries: Sequence[Mapping[str, str]], prompter: Prompter, scored_tokens: int
) -> tuple[list[PlannedItem], int]:
    """Return an item per prompt, and the length of the longest prompt with its completion.

    The first `scored_tokens` tokens of a completion are scored. Without a completion, the newest tokens of the prompt
    are.

    Args:
        entries: `name`, `prompt` and `completion`; the completion may be empty.
        prompter: of the model's tokenizer.
        scored_tokens: maximum scored tokens per entry.

    Raises:
        ConfigurationError: a prompt is too short.
    """
    cut = []
    for entry in entries:
        if entry["completion"]:
            context, scored = prompter.split(entry["prompt"], entry["completion"])
            scored = scored[:scored_tokens]
        else:
            tokens = prompter.encode(entry["prompt"])
            context, scored = tokens[:-scored_tokens], tokens[-scored_tokens:]
        if not context or not scored:
            raise ConfigurationError(
                f"completions: got {len(context) + len(scored)} tokens in {entry['name']}, allowed: more than the "
                f"{scored_tokens} that are scored, or a completion"
            )
        cut.append((entry["name"], context, scored))
    longest = max(len(context) + len(scored) for _, context, scored in cut)
    planned = []
    for name, context, scored in cut:
        item_id = f"{COMPLETION}/{name}"
        build = partial(Item, item_id, COMPLETION, longest, context, scored, (), answer_tokens=0, metric=NLL)
        planned.append(PlannedItem(item_id, build))
    return planned, longest


def _window(
    name: str, context_tokens: int, begin: list[int], tokens: list[int], start: int, end: int, scored_tokens: int
) -> Item:
    return Item(
        id=name,
        task=PERPLEXITY,
        context_tokens=context_tokens,
        context=begin + tokens[start : end - scored_tokens],
        question=tokens[end - scored_tokens : end],
        answers=(),
        answer_tokens=0,
        metric=NLL,
    )

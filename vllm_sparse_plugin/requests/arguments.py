"""What a request may say of its own attention, in `vllm_xargs` of the OpenAI API or `SamplingParams.extra_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_kernels.limits import MAX_K

from vllm_sparse_plugin.config.schema import ResolvedConfig
from vllm_sparse_plugin.policies import Selection, UniqueSelection
from vllm_sparse_plugin.policies.base import PagesRead

DENSE, BUDGET, COVERAGE = ARGUMENTS = ("sparse", "sparse_budget_tokens", "sparse_coverage")
"""Arguments of a request that are ours."""
PREFIX = "sparse"
"""Every argument that begins with this is meant for us."""
EVERY_PAGE = 1 << 40
"""Pages that no context has: the request is served dense."""
_MOST_TOKENS = 1 << 20


def takes_budgets(config: ResolvedConfig) -> bool:
    """Returns whether a request may have a budget of its own."""
    return config.lossless is None and _against_budgets(config) is None


def varies_pages(config: ResolvedConfig) -> bool:
    """Returns whether rows of a step may read other numbers of pages than the budget of the settings: by a budget of
    their request, or by a coverage, which lossless mode and a compaction that slides have as well."""
    return takes_budgets(config) or config.coverage is not None


def most_pages_on_gpu(selection: Selection) -> int:
    """Returns the complete pages that a row may read at most on a GPU, where all have the same launches.

    A launch has room for so many whatever they read. Larger budgets take other launches, which all requests of a server
    have whose own budget is larger.
    """
    return max(MAX_K, selection.budget_pages, selection.pages_read.most)


def pages_of_request(
    arguments: Mapping[str, Any] | None, config: ResolvedConfig, on_gpu: bool = False
) -> PagesRead | None:
    """Returns the complete pages that a decode step of a request reads per KV head; None for those of the settings.

    Args:
        arguments: `extra_args` of the request; those that are not ours are left alone.
        config: the server's configuration.
        on_gpu: whether the server runs on a GPU.

    Raises:
        ValueError: names the argument, what it got and what is allowed.
    """
    given = {name: arguments[name] for name in ARGUMENTS if arguments and arguments.get(name) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: got all of them, allowed: one in a request")
    ((name, got),) = given.items()
    if config.lossless is not None:
        raise ValueError(f"{name}: got {got!r:.80} in lossless mode, whose answers are dense ones, allowed: none")
    if name == DENSE:
        return _dense(got, config)
    if against := _against_budgets(config):
        raise ValueError(f"{name}: got {got!r:.80} with {against}, allowed: none")
    selection = config.selection
    assert isinstance(selection, Selection)
    if name == BUDGET:
        return _budget(got, selection, on_gpu)
    if on_gpu and config.coverage is None:
        # Its launches would be those of every step.
        raise ValueError(f"{name}: got {got!r:.80}, allowed on a GPU: none with a server that has no coverage")
    return _coverage(got, selection)


def _against_budgets(config: ResolvedConfig) -> str | None:
    """Returns what leaves no room for budgets of requests, if anything does."""
    if not isinstance(config.selection, Selection):
        return f"policy {config.selection.name()}"
    if not config.selection.has_kernel():
        return f"policy {config.selection.name()}, whose select has no kernel"
    if config.stop_rule is not None:
        return "stopping"
    if config.compaction is not None and config.compaction.retention().slides:
        # What a larger budget would read has been given back.
        return "a compaction that slides"
    return None


def _dense(got: Any, config: ResolvedConfig) -> PagesRead:
    if got != "dense":
        raise ValueError(f"sparse: got {got!r:.80}, allowed: dense")
    # Blocks of a prompt that was read sparsely, or of which a part is gone, are not those of a dense request.
    for section in ("prefill", "compaction"):
        if getattr(config, section) is not None:
            raise ValueError(f"sparse: got dense with a server whose {section} is sparse, allowed: none")
    return PagesRead(EVERY_PAGE, EVERY_PAGE)


def _budget(got: Any, selection: Selection, on_gpu: bool) -> PagesRead:
    size, least = selection.page_size, selection.least_budget_tokens
    most, where = (most_pages_on_gpu(selection) * size, " on a GPU") if on_gpu else (_MOST_TOKENS, "")
    if type(got) is not int or not least <= got <= most or got % size:
        raise ValueError(
            f"sparse_budget_tokens: got {got!r:.80}, allowed{where}: a multiple of page_size ({size}), from {least} to "
            f"{most}"
        )
    return PagesRead(got // size, got // size)


def _coverage(got: Any, selection: Selection) -> PagesRead:
    if not isinstance(selection, UniqueSelection) or not selection.estimates_weight:
        raise ValueError(f"sparse_coverage: got {got!r:.80}, allowed: policy unique with quarters or a sketch")
    if type(got) not in (int, float) or not 0.01 <= got <= 1:
        raise ValueError(f"sparse_coverage: got {got!r:.80}, allowed: from 0.01 to 1")
    return selection.covering(float(got))

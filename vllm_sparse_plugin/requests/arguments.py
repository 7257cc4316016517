"""The arguments of a request for its attention, in `vllm_xargs` of the OpenAI API or `SamplingParams.extra_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_kernels.limits import MAX_K

from vllm_sparse_plugin.config.schema import ResolvedConfig
from vllm_sparse_plugin.policies import Selection, UniqueSelection
from vllm_sparse_plugin.policies.unique import LEVELED

DENSE, BUDGET = READS = ("sparse", "sparse_budget_tokens")
"""The arguments that say what decode steps read."""
PROTECT = "sparse_protect"
"""The argument that says which tokens compaction keeps, see `protected`."""
PAGES = "sparse_pages"
"""What `READS` become when a request enters an engine: the complete pages that its decode steps read per KV head."""
ARGUMENTS = (*READS, PROTECT)
"""The arguments that this plugin reads."""
PREFIX = "sparse"
"""The plugin checks every argument whose name begins with this."""
EVERY_PAGE = 1 << 40
"""More pages than any context has: the request is served densely."""
_MOST_TOKENS = 1 << 20


def takes_budgets(config: ResolvedConfig) -> bool:
    """Returns whether a request may set its budget."""
    return config.lossless is None and _against_budgets(config) is None


def most_pages_on_gpu(selection: Selection) -> int:
    """Returns the most complete pages that a row may read on a GPU.

    Launches are the same for all rows, and have room for this many pages. A larger budget of the settings takes other
    launches for all requests.
    """
    return max(MAX_K, selection.budget_pages)


def largest_selection(config: ResolvedConfig) -> int:
    """Returns the complete pages that a GPU launch has room for, if the settings select pages."""
    assert isinstance(config.selector, Selection)
    return most_pages_on_gpu(config.selector) if takes_budgets(config) else config.selector.budget_pages


def pages_of_request(arguments: Mapping[str, Any] | None, config: ResolvedConfig, on_gpu: bool = False) -> int | None:
    """Returns the complete pages that a decode step of a request reads per KV head; None to follow the settings.

    Args:
        arguments: `extra_args` of the request; arguments of other plugins are ignored.
        config: the settings of the server.
        on_gpu: whether the server runs on a GPU.

    Raises:
        ValueError: names the argument, the value and the allowed values.
    """
    values = {name: arguments[name] for name in READS if arguments and arguments.get(name) is not None}
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"{', '.join(values)}: got all of them, allowed: one in a request")
    ((name, got),) = values.items()
    if config.lossless is not None:
        raise ValueError(f"{name}: got {got!r:.80} in lossless mode, which answers densely, allowed: none")
    if name == DENSE:
        return _dense(got, config, on_gpu)
    if against := _against_budgets(config):
        raise ValueError(f"{name}: got {got!r:.80} with {against}, allowed: none")
    selection = config.selection
    assert isinstance(selection, Selection)
    return _budget(got, selection, on_gpu)


def _against_budgets(config: ResolvedConfig) -> str | None:
    """Returns the part of the settings that excludes budgets of requests; None if there is none."""
    if not isinstance(config.selection, Selection):
        return f"policy {config.selection.name()}"
    if not config.selection.has_kernel:
        return f"policy {config.selection.name()}, which selects pages in torch"
    if config.stop_rule is not None:
        return "stopping"
    if config.compaction is not None and config.compaction.retention().slides:
        # The blocks that a larger budget would read have been given back.
        return "a compaction that keeps a sliding window"
    return None


def _dense(got: Any, config: ResolvedConfig, on_gpu: bool) -> int:
    if got != "dense":
        raise ValueError(f"sparse: got {got!r:.80}, allowed: dense")
    # After sparse prefill or compaction, the blocks of a prompt differ from those of a dense request.
    for section in ("prefill", "compaction"):
        if getattr(config, section) is not None:
            raise ValueError(f"sparse: got dense with {section} in the settings of the server, allowed: none")
    if config.offload is not None and on_gpu:
        # Each step would read the whole context over the bus, and all other requests would wait.
        raise ValueError("sparse: got dense with offload in the settings of the server, allowed on a GPU: none")
    return EVERY_PAGE


def _budget(got: Any, selection: Selection, on_gpu: bool) -> int:
    size, least = selection.page_size, selection.least_budget_tokens
    most, where = (most_pages_on_gpu(selection) * size, " on a GPU") if on_gpu else (_MOST_TOKENS, "")
    if isinstance(selection, UniqueSelection) and selection.statistics == LEVELED:
        most = min(most, MAX_K * size)
    if type(got) is not int or not least <= got <= most or got % size:
        raise ValueError(
            f"sparse_budget_tokens: got {got!r:.80}, allowed{where}: a multiple of page_size ({size}), from {least} to "
            f"{most}"
        )
    return got // size

"""Checks requests when they enter an engine, and separates the cached blocks of requests that read differently."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_sparse_plugin.compat import chosen_backend
from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.engine_traits import layers_over_everything
from vllm_sparse_plugin.errors import choices, printable
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.requests.arguments import ARGUMENTS, PAGES, PREFIX, PROTECT, READS, pages_of_request
from vllm_sparse_plugin.requests.protected import protected_ranges

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")
_SEPARATOR = "\n"
"""Separates the client's cache salt from the reads of the request."""
_LONGEST = 32
"""Characters of a name that is compared with the arguments."""
_MOST_COMPARED = 64
"""Names of a request that are compared with the arguments."""
_LATIN = str.maketrans("авеёіјкмнорԁѕтухαεικνορτυχı", "abeeijkmhopdstyxaeikvoptuxi")
"""Cyrillic, Greek and Turkish letters that look like Latin ones."""
_LETTERS = {name.replace("_", ""): name for name in ARGUMENTS} | {
    name.removeprefix(f"{PREFIX}_").replace("_", ""): name for name in ARGUMENTS
}
"""The arguments by their letters, with and without the prefix."""
_LONG = [letters for letters in _LETTERS if len(letters) > 10]
"""Those of which one mistake makes no other word."""


def check_request(
    vllm_config: VllmConfig,
    arguments: Mapping[str, Any] | None,
    beam_search: bool = False,
    streams_input: bool = False,
    ignored: Collection[str] = (),
) -> None:
    """Refuses a request that an engine cannot serve. It has no effect on engines with another backend.

    Args:
        vllm_config: configuration of the engine.
        arguments: `extra_args` of the request.
        beam_search: whether the request asks for beam search.
        streams_input: whether the request is a session whose prompt grows.
        ignored: fields of the request that the server does not know.

    Raises:
        ValueError: names the argument, the value and the allowed values.
    """
    names, misplaced = _ours(arguments or ()), _ours(ignored)
    if not names and not misplaced and not streams_input:
        return
    config = _served(vllm_config)
    if config is None:
        return
    if misplaced:
        raise ValueError(
            f"{printable(', '.join(misplaced))}: got a field of the request, allowed: an entry of vllm_xargs"
        )
    if streams_input and config.compaction is not None:
        # The scheduler and the workers would compact prompts of different lengths.
        raise ValueError("prompt: got a stream of inputs with a server that compacts prompts, allowed: a whole prompt")
    if streams_input and vllm_config.speculative_config and not vllm_config.scheduler_config.async_scheduling:
        # If a turn ends within its drafts, vLLM counts the rest of them as tokens of the next turn, and hashes them.
        raise ValueError(
            "prompt: got a stream of inputs with drafts but without asynchronous scheduling, allowed: a whole prompt"
        )
    for name in names:
        _expect_known(name)
    reads = [name for name in names if name in READS]
    if streams_input and reads:
        # A later input may have other values, and vLLM hashes the blocks of all inputs with the salt of the first.
        raise ValueError(f"{', '.join(reads)}: got a value with a stream of inputs, allowed: none")
    if names and beam_search:
        # vLLM starts new requests for every token of a beam, without these arguments.
        raise ValueError(f"{', '.join(names)}: got a value with beam search, allowed: none")
    num_layers = layers_over_everything(vllm_config) if PROTECT in names else 0
    normal_form(arguments or {}, config, num_layers, _on_gpu())


def check_drafts(fields: Any) -> None:
    """Refuses what vLLM's first model runner, that of a CPU, answers otherwise with drafts than without.

    It looks for `min_tokens` and `thinking_token_budget` in the tokens before a draft alone, and returns no log
    probabilities of `logprob_token_ids`.

    Args:
        fields: the object with vLLM's fields of a request, or its sampling parameters; None for none.

    Raises:
        ValueError: names the field.
    """
    for name in ("min_tokens", "thinking_token_budget", "logprob_token_ids"):
        if getattr(fields, name, None) and not _on_gpu():
            raise ValueError(f"{name}: got a value with drafts on a CPU, allowed: none")


def normal_form(arguments: Mapping[str, Any], config: ResolvedConfig, num_layers: int, on_gpu: bool) -> dict[str, Any]:
    """Returns `extra_args` of a request as workers read them: `PAGES` in place of a budget, and the ranges that
    compaction keeps as pairs of numbers.

    Args:
        arguments: `extra_args` of the request; arguments of other plugins stay as they are.
        config: the settings of the server.
        num_layers: layers of the model that compaction serves.
        on_gpu: whether the server runs on a GPU.

    Raises:
        ValueError: names the argument, the value and the allowed values.
    """
    normal = _of_others(arguments)
    pages = pages_of_request(arguments, config, on_gpu)
    if pages is not None:
        normal[PAGES] = pages
    if ranges := protected_ranges(arguments, config, num_layers):
        normal[PROTECT] = [(each.start, each.stop) for each in ranges]
    return normal


def enter(
    vllm_config: VllmConfig, arguments: Mapping[str, Any] | None, salt: str | None
) -> tuple[Mapping[str, Any] | None, str | None]:
    """Returns `extra_args` of a request in their normal form, and the cache salt that vLLM hashes with its blocks.

    The keys of a decoded token depend on the pages that earlier tokens have read. A request that reads other pages than
    the settings say therefore shares blocks only with requests that read the same number of pages.

    Args:
        vllm_config: configuration of the engine.
        arguments: `extra_args` of the request.
        salt: the client's salt, or None.
    """
    has_separator = salt is not None and _SEPARATOR in salt
    if not has_separator and not any(name.startswith(PREFIX) for name in arguments or ()):
        return arguments, salt
    config = _served(vllm_config)
    if config is None:
        return arguments, salt
    arguments = arguments or {}
    try:
        num_layers = layers_over_everything(vllm_config) if PROTECT in arguments else 0
        normal = normal_form(arguments, config, num_layers, _on_gpu())
    except ValueError as error:
        # It passed a frontend without the check, and must not end the engine for others.
        logger.warning("%s; the request runs with the settings of the server", error)
        normal = _of_others(arguments)
    pages = normal.get(PAGES)
    default = config.selector.budget_pages if config.selector is not None else None
    reads = "" if pages in (None, default) or not config.is_sparse else f"reads {pages} pages"
    # What follows the last separator is from here, whatever a client names.
    return normal, f"{salt or ''}{_SEPARATOR}{reads}" if reads or has_separator else salt


def _of_others(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of other plugins."""
    return {name: value for name, value in arguments.items() if not name.startswith(PREFIX)}


def _served(vllm_config: VllmConfig) -> ResolvedConfig | None:
    """Returns the settings of an engine; None without a backend of this plugin."""
    name = chosen_backend(vllm_config, BACKENDS)
    return None if name is None else resolved(vllm_config, BACKENDS[name])


def _ours(names: Iterable[str]) -> list[str]:
    """Returns the names that are arguments of this plugin, or look like one.

    Its time is bounded: names of any length and number cost a comparison of their beginning.
    """
    compared = set(islice((name for name in names if len(name) <= _LONGEST), _MOST_COMPARED))
    return [name for name in names if name.startswith(PREFIX) or (name in compared and _looks_like(name))]


def _looks_like(name: str) -> str | None:
    """Returns the argument that a name of at most `_LONGEST` characters looks like: in other letters, with a mistake,
    or without the prefix; None for another name."""
    plain = unicodedata.normalize("NFKD", name).casefold().translate(_LATIN)
    letters = "".join(each for each in plain if each.isalnum() and each.isascii())
    if letters in _LETTERS:
        return _LETTERS[letters]
    near = difflib.get_close_matches(letters, _LONG, n=1, cutoff=0.88)
    if not near and len(letters) == len(PREFIX):
        near = difflib.get_close_matches(letters, [PREFIX], n=1, cutoff=0.83)
    return _LETTERS[near[0]] if near else None


def _expect_known(name: str) -> None:
    if name in ARGUMENTS:
        return
    hint = None
    if len(name) <= _LONGEST:
        hint = _looks_like(name) or next(iter(difflib.get_close_matches(name, ARGUMENTS, n=1)), None)
    meant = f" (did you mean {hint!r}?)" if hint else ""
    raise ValueError(f"{printable(name)}: unknown argument{meant}, allowed: {choices(ARGUMENTS)}")


def _on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()

"""Registers the attention backends in vLLM, in every process. Repeated calls have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.names import BACKENDS, KEY

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def announce() -> None:
    """Registers the names of the backends if the version of vLLM is tested. Idempotent."""
    if compat.untested_vllm() is None:
        compat.register_backend_names(BACKENDS)


def register() -> None:
    """Registers the backends, and the checks that run if one of them is chosen. Idempotent.

    Raises:
        UntestedVLLMError: for an untested version of vLLM, which stays unchanged.
    """
    if untested := compat.untested_vllm():
        raise UntestedVLLMError(untested)
    compat.register_backend_names(BACKENDS)
    compat.hook_platform(BACKENDS, prepare_if_chosen, admit_if_chosen, check_layers_if_chosen)
    compat.hook_requests(check_request, enter)
    compat.hook_lookahead()
    compat.hook_speculators(make_speculator)


def check_request(
    vllm_config: VllmConfig,
    arguments: Mapping[str, Any] | None,
    beam_search: bool,
    streams_input: bool,
    ignored: Collection[str],
    fields: Any = None,
) -> None:
    """Checks a request that has arguments for plugins, unknown fields, a growing prompt or drafts. It imports nothing
    for other requests.

    Raises:
        ValueError: if one of this plugin's backends is chosen and cannot serve the request.
    """
    drafts = vllm_config.speculative_config is not None
    if (arguments or streams_input or ignored or drafts) and compat.chosen_backend(vllm_config, BACKENDS):
        from vllm_sparse_plugin.requests import check

        if drafts:
            check.check_drafts(fields)
        check.check_request(vllm_config, arguments, beam_search, streams_input, ignored)


def enter(
    vllm_config: VllmConfig, arguments: Mapping[str, Any] | None, salt: str | None
) -> tuple[Mapping[str, Any] | None, str | None]:
    """Returns a request's arguments and the salt for the hashes of its blocks, as the engine reads them. It imports
    nothing for requests with neither arguments for plugins nor a salt."""
    if not (arguments or salt) or compat.chosen_backend(vllm_config, BACKENDS) is None:
        return arguments, salt
    from vllm_sparse_plugin.requests import check

    return check.enter(vllm_config, arguments, salt)


class UntestedVLLMError(RuntimeError):
    """The installed version of vLLM is not tested with this version of the plugin."""

    def __init__(self, version: str) -> None:
        first, end = (".".join(map(str, release)) for release in compat.TESTED_VLLM)
        super().__init__(f"got vLLM {version}, allowed: {first} or later, before {end}")


def make_speculator(vllm_config: VllmConfig, device: torch.device) -> Any:
    """Returns the drafter of lossless mode for vLLM's second model runner, and hooks the plan of its CUDA graphs."""
    from vllm_sparse_plugin.lossless.graphs import plan_decode_graphs
    from vllm_sparse_plugin.lossless.speculator import SparseSpeculator

    compat.hook_decode_graphs(plan_decode_graphs)
    return SparseSpeculator(vllm_config, device)


def prepare_if_chosen(vllm_config: VllmConfig) -> None:
    """Sets up lossless mode if a configuration chooses one of this plugin's backends and asks for it.

    Raises:
        ConfigurationError: if the settings are wrong.
    """
    if compat.chosen_backend(vllm_config, BACKENDS):
        from vllm_sparse_plugin.lossless.speculation import speculate_if_lossless

        speculate_if_lossless(vllm_config, BACKENDS)


def admit_if_chosen(vllm_config: VllmConfig) -> None:
    """Checks a complete configuration that chooses one of this plugin's backends or has settings for them.

    Raises:
        ConfigurationError: if it is not supported.
    """
    additional = vllm_config.additional_config
    has_settings = isinstance(additional, Mapping) and additional.get(KEY) is not None
    if has_settings or compat.chosen_backend(vllm_config, BACKENDS):
        from vllm_sparse_plugin.admission import admit

        admit(vllm_config, BACKENDS)
        compat.hook_requests(check_request, enter, load=True)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            compat.mend_kernel_overrides()


def refuse_other_weights_if_chosen(vllm_config: VllmConfig, call: str) -> None:
    """Refuses a call that replaces the weights; see `admission.refuse_other_weights`."""
    from vllm_sparse_plugin.admission import refuse_other_weights

    refuse_other_weights(vllm_config, BACKENDS, call)


def check_layers_if_chosen(vllm_config: VllmConfig) -> None:
    """Checks the layers of a worker's model if one of this plugin's backends is chosen. On a CPU it also corrects
    vLLM's sampling of drafts.

    Raises:
        ConfigurationError: see `admission.check_layers`.
    """
    if compat.chosen_backend(vllm_config, BACKENDS):
        from vllm.platforms import current_platform

        from vllm_sparse_plugin.admission import check_layers

        check_layers(vllm_config, BACKENDS)
        compat.hook_weight_updates(refuse_other_weights_if_chosen)
        if vllm_config.speculative_config is not None and current_platform.is_cpu():
            compat.mend_rejection_sampling()

"""Refuses unsupported configurations at start, each in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sparse_kernels.limits import (
    FLOAT8_STATISTICS,
    MAX_PAGES,
    MIN_CAPABILITY,
    PAGES_READ,
    STOP_RULE,
    DecodeShape,
    head_refusals,
)
from sparse_kernels.sparse_decode.refusals import decode_refusals

from vllm_sparse_plugin import compat, connectors
from vllm_sparse_plugin.compaction.notices import compaction_notices
from vllm_sparse_plugin.compaction.refusals import refuse_evictions, refuse_rolling
from vllm_sparse_plugin.config import KEY, ResolvedConfig, check_additional_config
from vllm_sparse_plugin.config.anchors import refuse_anchors
from vllm_sparse_plugin.config.cuts import least_room
from vllm_sparse_plugin.config.fingerprint import fingerprint_of, overridden_fields
from vllm_sparse_plugin.config.prefill import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.engine_settings import resolved, settings_of
from vllm_sparse_plugin.engine_traits import (
    architecture_of,
    engines_in_parts,
    moved_blocks,
    room_for_prompts,
    shared_caches,
    unlike_layers_or_engines,
    unmixed_blocks,
)
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.lossless.notices import lossless_notices
from vllm_sparse_plugin.lossless.speculation import other_scheduler
from vllm_sparse_plugin.metrics.live import expose
from vllm_sparse_plugin.metrics.settings import state_settings
from vllm_sparse_plugin.names import CUTTING_SCHEDULERS
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES, announce, is_from_user
from vllm_sparse_plugin.offload.refusals import refuse_offload, size_cache
from vllm_sparse_plugin.policies import reads_selection
from vllm_sparse_plugin.requests.arguments import largest_selection, takes_budgets

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_Expect = Callable[[bool, str, Any, str], None]
"""Notes or raises a refusal: whether something holds, the field, the value and the allowed values."""

CPU_KERNEL_BLOCK = 32
"""vLLM's CPU attention requires block sizes that are multiples of this many tokens."""
CUDA_KERNEL_BLOCK = 16
"""FlashAttention requires block sizes that are multiples of this many tokens."""
HYBRIDS = ("jamba", "lfm2", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types with state-space layers that tests compare with dense attention, statistics included."""
LEARNED_SINKS = ("gpt_oss",)
"""Model types whose attention has learned sink logits."""
SPECULATORS = ("ngram", "eagle", "eagle3", "mtp")
"""Speculative methods that are supported on every device."""
CPU_SPECULATORS = (*SPECULATORS, "draft_model")
"""Speculative methods that are supported on a CPU. On a GPU the statistics of a draft model's pages differed from those
of its keys."""
SHARING_DRAFTS = ("gemma4_mtp", "step3p5_mtp")
"""Model types of drafts for which vLLM uses a separate proposer that reads the model's caches."""


def drafts_with_attention(vllm_config: VllmConfig) -> bool:
    """Returns whether a draft with its own attention layers speculates."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method != "ngram" and not compat.drafts_for_itself(vllm_config)


def block_multiple(vllm_config: VllmConfig, config: ResolvedConfig, kernel_block: int) -> int:
    """Returns the number of tokens that the block size must be a multiple of."""
    itemsize = 1 if vllm_config.cache_config.cache_dtype in EIGHT_BIT_CACHES else 2
    layouts = [config.statistics_layout(model.get_head_size(), itemsize) for model in _models(vllm_config)]
    pages = config.selector.page_size if config.selector else 1
    # A prefix-cache hit must end where a tile ends.
    tile = config.block_prefill.tile_tokens if config.block_prefill else 1
    return math.lcm(kernel_block, pages, tile, *(layout.unit_tokens for layout in layouts if layout))


def _models(vllm_config: VllmConfig) -> list[ModelConfig]:
    """Returns the model, and the draft model if it has attention layers."""
    models = [vllm_config.model_config]
    if drafts_with_attention(vllm_config) and vllm_config.speculative_config.draft_model_config is not None:
        models.append(vllm_config.speculative_config.draft_model_config)
    return models


def admit(vllm_config: VllmConfig, backends: Mapping[str, str]) -> None:
    """Checks a complete vLLM configuration.

    Args:
        vllm_config: vLLM's configuration after its own checks.
        backends: names and presets of this plugin's backends.

    Raises:
        ConfigurationError: names the field, the value and the allowed values.
    """
    if vllm_config.model_config is not None and vllm_config.model_config.runner_type == "draft":
        # vLLM creates this configuration to load a draft model. The draft is checked with the model.
        return
    name = compat.chosen_backend(vllm_config, backends)
    if name is None:
        if settings_of(vllm_config).given is not None:
            allowed = choices(backend.lower() for backend in backends)
            raise ConfigurationError(f"{KEY}: got settings but no attention backend of this plugin, allowed: {allowed}")
        return
    if isinstance(vllm_config.additional_config, Mapping):
        check_additional_config(vllm_config.additional_config)
    config = resolved(vllm_config, backends[name])
    _name_declared_cache_dtype(vllm_config)
    for field, got, allowed in _unsupported(vllm_config, config):
        _refuse(name, False, field, got, allowed)
    if config.offload is not None:
        size_cache(vllm_config, config.offload)
    if config.prefill is not None:
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = CUTTING_SCHEDULERS[bool(scheduler.async_scheduling)]
    of_engine = *compaction_notices(vllm_config, config), *lossless_notices(vllm_config, config)
    announce(config, vllm_config.cache_config.cache_dtype, of_engine)
    if vllm_config.kv_transfer_config:
        vllm_config.kv_transfer_config.kv_connector_module_path = connectors.__name__
    if drafts_with_attention(vllm_config) and not vllm_config.use_v2_model_runner:
        # Otherwise vLLM's first model runner would choose another backend for the draft, without statistics in its
        # blocks.
        vllm_config.speculative_config.attention_backend = compat.backend_member(name)
    state_settings(name, config)
    if config.runs_kernels or config.compaction:
        expose()


def _refuse(backend: str, holds: bool, field: str, got: Any, allowed: str) -> None:
    if not holds:
        raise ConfigurationError(f"{field}: got {got}, allowed with attention backend {backend.lower()}: {allowed}")


def check_layers(vllm_config: VllmConfig, backends: Mapping[str, str]) -> None:
    """Checks that the attention layers of a worker use the chosen backend; some models have other backends.

    Also checks the model of the routing thresholds and, on a GPU, the heads of every layer.

    Args:
        vllm_config: vLLM's configuration after the model is loaded.
        backends: names and presets of this plugin's backends.

    Raises:
        ConfigurationError: if the worker has attention layers and none of them has the backend, if thresholds are for
            another model, or if the kernels do not support the heads of a layer.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    name = compat.chosen_backend(vllm_config, backends)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    found = {layer.get_attn_backend() for layer in layers.values()}
    names = sorted({backend.get_name() for backend in found if not backend.is_ssm()})
    if name is None or not names:
        return
    if name in names:
        config = resolved(vllm_config, backends[name])
        if config.routing is not None:
            _expect_model(
                partial(_refuse, name), vllm_config, config.routing.fingerprint, config.routing.model, "thresholds"
            )
        served = [layer for layer in layers.values() if layer.get_attn_backend().get_name() == name]
        _expect_layer_shapes(partial(_refuse, name), vllm_config, config, served)
        return
    architecture = architecture_of(vllm_config)
    raise ConfigurationError(
        f"model: got {architecture} with attention backends of its own, allowed with attention backend {name.lower()}: "
        f"models that take the chosen backend in place of {', '.join(names)}"
    )


def _name_declared_cache_dtype(vllm_config: VllmConfig) -> None:
    """Sets the KV cache type that a compressed-tensors checkpoint declares.

    vLLM sets it when it builds the first attention layer. This is after admission and after the choice of the block
    size.
    """
    cache = vllm_config.cache_config
    if cache.cache_dtype == "auto" and _declares_cache_dtype(vllm_config):
        cache.cache_dtype = "fp8"


def _declares_cache_dtype(vllm_config: VllmConfig) -> bool:
    return getattr(vllm_config.quant_config, "kv_cache_scheme", None) is not None


def _unsupported(vllm_config: VllmConfig, config: ResolvedConfig) -> list[tuple[str, Any, str]]:
    from vllm.platforms import current_platform

    refusals: list[tuple[str, Any, str]] = []

    def expect(holds: bool, field: str, got: Any, allowed: str) -> None:
        if not holds:
            refusals.append((field, got, allowed))

    on_cpu, on_cuda = current_platform.is_cpu(), current_platform.is_cuda()
    expect(on_cpu or on_cuda, "platform", current_platform.device_name, "NVIDIA GPUs or vLLM's CPU build")
    capability = (current_platform.get_device_capability() if on_cuda else None) or (0, 0)
    shown = ".".join(map(str, capability))
    expect(not on_cuda or capability >= MIN_CAPABILITY, "compute capability", shown, "8.0 or later")
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    cache_dtypes: tuple[str, ...] = (
        ("auto", "bfloat16") if on_cpu else ("auto", "bfloat16", "float16", *EIGHT_BIT_CACHES)
    )
    got = cache.cache_dtype
    if got == "fp8" and _declares_cache_dtype(vllm_config):
        # The user may name another type for such a checkpoint.
        got, cache_dtypes = f"{got}, which the model's checkpoint declares", cache_dtypes[1:]
    expect(cache.cache_dtype in cache_dtypes, "kv_cache_dtype", got, choices(cache_dtypes))
    if model is not None:
        architecture = architecture_of(vllm_config)
        expect(not model.use_mla, "model", f"{architecture} with MLA", "models with multi-head or grouped attention")
        expect(not model.is_encoder_decoder, "model", f"encoder-decoder {architecture}", "decoder-only models")
        expect(not model.is_attention_free, "model", f"{architecture} without attention", "models with attention")
        known = not model.is_hybrid or model.hf_text_config.model_type in HYBRIDS
        expect(known, "model", f"{architecture} with state-space layers",
               f"models without, or of the types {choices(HYBRIDS)}")  # fmt: skip
        # A hit within a block copies it. vLLM copies one view of the block's memory, which may be a state's, and then
        # leaves out the keys, values and statistics behind it.
        unit = cache.prefix_match_unit if model.is_hybrid else None
        expect(unit is None, "prefix_match_unit", f"{unit} with state-space layers", "none")
        expect(model.runner_type == "generate", "runner", model.runner_type, "generate")
        expect(not _has_alibi(model.hf_config), "model", f"{architecture} with ALiBi", "models with rotary positions")
        dtypes = (torch.bfloat16,) if on_cpu else (torch.bfloat16, torch.float16)
        expect(model.dtype in dtypes, "dtype", _short(model.dtype), choices(tuple(map(_short, dtypes))))
        if on_cuda and config.runs_kernels:
            for each in _models(vllm_config) if config.draft_is_sparse else [model]:
                group = each.get_num_attention_heads(parallel) // each.get_num_kv_heads(parallel)
                _expect_cuda_shapes(expect, group, each.get_head_size(), each.max_model_len, config)
        if config.routing is not None:
            _expect_routable(expect, vllm_config, config.routing)
        if config.compaction is not None:
            _expect_compactable(expect, vllm_config, config.rolling_window is not None)
            has_first = config.routing is None or config.compaction.sink_tokens > 0
            expect(has_first, f"{KEY}.compaction.sink_tokens", "0 with routing, which reads the first token",
                   "at least 1")  # fmt: skip
            # Kernels count the tokens that are left; the cubic was fitted to lengths of the text.
            has_cubic = config.routing is not None and config.routing.cubic is not None
            expect(not has_cubic, f"{KEY}.routing.cubic", "a threshold by length with compaction, which shortens it",
                   "null with routing.threshold, or no compaction")  # fmt: skip
            refusals += refuse_evictions(vllm_config, config.compaction)
        if config.offload is not None:
            refusals += refuse_offload(vllm_config, config)
        if config.rolling_window is not None:
            refusals += refuse_rolling(config, cache.cache_dtype)
        if config.prefill is not None:
            _expect_cuttable(expect, vllm_config, config.prefill)
        if config.lossless is not None:
            _expect_verifiable(expect, vllm_config, config)
        if not refusals:
            multiple = block_multiple(vllm_config, config, CPU_KERNEL_BLOCK if on_cpu else CUDA_KERNEL_BLOCK)
            # vLLM may choose the block size later. It asks the backend for supported sizes.
            expect(
                cache.block_size % multiple == 0 or not cache.user_specified_block_size,
                "block_size",
                cache.block_size,
                f"a multiple of {multiple}"
                + (f" (pages of {config.selector.page_size} tokens)" if config.selector else ""),
            )
    selector = config.selector
    if selector is not None and not selector.has_kernel and on_cuda:
        policy = f"policy {selector.name()}, which selects pages in torch"
        expect(config.stop_rule is None, f"{KEY}.stopping", f"a rule with {policy}", "null on a GPU")
        expect(config.lossless is None, f"{KEY}.lossless", f"a section with {policy}", "null on a GPU")
    if model is not None:
        refusals += refuse_anchors(config, model.hf_text_config.num_hidden_layers)
        _expect_model(expect, vllm_config, config.anchor_fingerprint, None, "anchors")
    # With this option vLLM does not tell whether a request's last token is part of the prompt.
    expect(not cache.kv_sharing_fast_prefill, "kv_sharing_fast_prefill", "true", "false")
    # Two half batches at the same time would share the scratch and the counts of a layer.
    expect(not parallel.use_ubatching, "enable_dbo, ubatch_size", "split batches", "neither option")
    skipped = cache.kv_cache_dtype_skip_layers
    mixed = cache.cache_dtype in EIGHT_BIT_CACHES and skipped
    # The statistics rows of 8-bit and 16-bit caches have no common block size.
    expect(not mixed, "kv_cache_dtype_skip_layers", ", ".join(skipped), f"none with {cache.cache_dtype}")
    dcp, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    expect(dcp == 1, "decode_context_parallel_size", dcp, "1")
    expect(pcp == 1, "prefill_context_parallel_size", pcp, "1")
    if transfer := vllm_config.kv_transfer_config:
        connector, module = transfer.kv_connector, transfer.kv_connector_module_path
        allowed = f"one that keeps page statistics: {choices(connectors.CONNECTORS)}"
        # vLLM makes a connector from `--kv-offloading-size` later.
        known = connector in connectors.CONNECTORS or (connector is None and cache.kv_offloading_size is not None)
        expect(known, "kv_connector", connector, allowed)
        expect(module in (None, connectors.__name__), "kv_connector_module_path", module, "none")
        field = "kv_connector_extra_config.enforce_handshake_compat"
        expect(
            transfer.get_from_extra_config("enforce_handshake_compat", True),
            field,
            "false",
            "true: engines must agree on their page statistics",
        )
        # The engine of prompts hashes the blocks of an answer with the salt of the later request.
        expect(
            not (takes_budgets(config) and transfer.get_from_extra_config("bidirectional_kv_xfer", False)),
            "kv_connector_extra_config.bidirectional_kv_xfer",
            "true",
            "false: a later turn may read other pages than the answers before it",
        )
    if cache.kv_offloading_size is not None:
        backend = cache.kv_offloading_backend
        expect(backend == "native", "kv_offloading_backend", backend, "native")
    if vllm_config.speculative_config is not None and not compat.drafts_for_itself(vllm_config):
        _expect_known_drafts(expect, vllm_config, config, CPU_SPECULATORS if on_cpu else SPECULATORS)
    elif config.draft_is_sparse:
        expect(False, f"{KEY}.speculation.draft", "sparse", "dense without a draft")
    return refusals


def _expect_known_drafts(
    expect: _Expect, vllm_config: VllmConfig, config: ResolvedConfig, methods: tuple[str, ...]
) -> None:
    speculative = vllm_config.speculative_config
    expect(speculative.method in methods, "speculative method", speculative.method, choices(methods))
    if not drafts_with_attention(vllm_config):
        expect(not config.draft_is_sparse, f"{KEY}.speculation.draft", "sparse", "dense without a draft")
        return
    draft = speculative.draft_model_config
    kind = getattr(draft.hf_config, "model_type", None)
    expect(kind not in SHARING_DRAFTS, "speculative model", f"a draft of type {kind}",
           "drafts with a cache of their own")  # fmt: skip
    # Parallel drafting batches queries in an untested way.
    expect(not speculative.parallel_drafting, "speculative parallel_drafting", "true", "false")
    backend, attention = speculative.attention_backend, vllm_config.attention_config
    expect(backend in (None, attention.backend, *attention.backend_per_kind.values()), "speculative attention_backend",
           "none" if backend is None else backend.name.lower(), "none: a draft uses that of the model")  # fmt: skip
    dtype = speculative.kv_cache_dtype
    expect(dtype is None, "speculative kv_cache_dtype", dtype, "none: a draft uses that of the model")
    expect(not draft.use_mla, "speculative model", "a draft with MLA", "drafts with multi-head or grouped attention")
    expect(reads_selection(config.selector) or not config.draft_is_sparse, f"{KEY}.speculation.draft",
           f"sparse with policy {config.selection.name()}", "dense")  # fmt: skip


def attends_whole_context(layer: Any) -> bool:
    """Returns whether a layer attends to its whole context, not to a window or a chunk of it."""
    return layer.sliding_window is None and getattr(layer, "attention_chunk_size", None) is None


def _expect_layer_shapes(expect: _Expect, vllm_config: VllmConfig, config: ResolvedConfig, layers: list[Any]) -> None:
    from vllm.platforms import current_platform

    # The layers of a dense draft may have any heads.
    if not current_platform.is_cuda() or not config.runs_kernels or drafts_with_attention(vllm_config):
        return
    full_layers = [layer for layer in layers if attends_whole_context(layer)]
    for group, head_size in sorted({(layer.num_heads // layer.num_kv_heads, layer.head_size) for layer in full_layers}):
        _expect_cuda_shapes(expect, group, head_size, vllm_config.model_config.max_model_len, config)


def _expect_cuda_shapes(
    expect: _Expect, group: int, head_size: int, max_model_len: int, config: ResolvedConfig
) -> None:
    from vllm.platforms import current_platform

    capability = (*current_platform.get_device_capability(),)
    selector, stopping = config.selector, config.stop_rule is not None
    refusals = list(head_refusals(group, head_size, stopping))
    # vLLM runs another FlashAttention for such heads, which supports only its own page size.
    shown = f"heads of {head_size} on compute capability {'.'.join(map(str, capability))}"
    expect(config.block_prefill is None or head_size < 256 or capability < (10, 0), f"{KEY}.prefill", shown, "null")
    if reads_selection(selector):
        layout = selector.statistics_layout(head_size, 2)
        served = layout is None or layout.kind.runs_on_gpu
        expect(served, "selection.policy", selector.name(), "one whose page statistics have a Triton form, on a GPU")
        # Longer contexts would take launches that are slower than those of quarters.
        longest, leveled = MAX_PAGES * selector.page_size, layout is not None and layout.kind.is_leveled
        expect(
            not leveled or max_model_len <= longest,
            "max_model_len",
            max_model_len,
            f"up to {longest} with statistics in two levels, or quarters",
        )
        shape = DecodeShape(
            group,
            head_size,
            max_pages=max_model_len // selector.page_size,
            k=largest_selection(config),
            stopping=stopping,
            float8_statistics=layout is not None and layout.format == "fp8",
        )
        refusals += decode_refusals(shape, capability)
    for refusal in refusals:
        field, got, allowed = refusal.field, str(refusal.got), refusal.allowed
        if selector is not None and refusal.field == PAGES_READ:
            field, got = "budget_tokens", str(selector.budget_tokens)
            most = refusal.most * selector.page_size
            allowed = f"up to {most} (pages of {selector.page_size} tokens) where attention may stop"
        elif refusal.field == STOP_RULE:
            field, got, allowed = f"{KEY}.stopping", "a rule", "null on this GPU"
        elif refusal.field == FLOAT8_STATISTICS:
            field, got, allowed = "selection.statistics", "fp8", "int8 or bf16 on this GPU"
        expect(False, field, got, allowed)


def _expect_routable(expect: _Expect, vllm_config: VllmConfig, routing: Routing) -> None:
    model = vllm_config.model_config
    field = f"{KEY}.routing"
    has_sink_logits = model.hf_config.model_type in LEARNED_SINKS
    # In these models learned sink logits replace the attention to the first token, so routing has no signal.
    expect(
        not has_sink_logits,
        "model",
        f"{model.hf_config.model_type} with learned attention sinks",
        "models without them, or no routing",
    )
    layers, kv_heads = routing.shape
    num_layers = model.hf_text_config.num_hidden_layers
    expect(
        layers in (None, num_layers), f"{field}.threshold", f"a list of {layers}", f"the model's {num_layers} layers"
    )
    heads = model.get_total_num_kv_heads()
    wrong = next((count for count in kv_heads if count != heads), heads)
    expect(wrong == heads, f"{field}.threshold", f"a layer's list of {wrong}", f"the model's {heads} KV heads")
    longest = model.max_model_len
    expect(routing.cubic is None or longest <= routing.longest, "max_model_len", longest,
           f"up to {routing.longest}, the longest context of the cubic ({field}.longest)")  # fmt: skip
    form = "cubic" if routing.threshold is None else "threshold"
    if routing.objection != routing.accept and routing.objection == "uncalibrated":
        expect(False, f"{field}.{form}", "a value that is not calibrated for this model",
               "the file of vllm-sparse calibrate as config, or routing.accept uncalibrated")  # fmt: skip
    elif routing.objection != routing.accept and routing.objection == "not_recommended":
        expect(False, f"{field}.recommended", "false, since vllm-sparse calibrate advises against routing",
               "another backend, or routing.accept not_recommended")  # fmt: skip
    elif Path(model.model).is_dir():
        _expect_model(expect, vllm_config, routing.fingerprint, routing.model, "thresholds")


def refuse_other_weights(vllm_config: VllmConfig, backends: Mapping[str, str], call: str) -> None:
    """Refuses a call that replaces the weights of a running engine whose settings were found for its weights.

    Args:
        vllm_config: vLLM's configuration.
        backends: names and presets of this plugin's backends.
        call: what a program calls.

    Raises:
        ConfigurationError: if thresholds or anchors have the fingerprint of a model.
    """
    name = compat.chosen_backend(vllm_config, backends)
    if name is None:
        return
    config, expect = resolved(vllm_config, backends[name]), partial(_refuse, name)
    found = {
        "thresholds": config.routing.fingerprint if config.routing else None,
        "anchors": config.anchor_fingerprint,
    }
    for settings, fingerprint in found.items():
        expect(fingerprint is None, f"{call}", f"a call beside {settings} of the model with fingerprint {fingerprint}",
               "a new server, with settings for the new weights")  # fmt: skip


def _expect_model(
    expect: _Expect, vllm_config: VllmConfig, fingerprint: str | None, name: str | None, settings: str
) -> None:
    """Expects the model that settings were found for, given by its fingerprint and name."""
    model = vllm_config.model_config
    if fingerprint is None:
        return
    changed = overridden_fields(model.hf_overrides)
    why, default = "so that the model is another one", f"the default beside {settings} of the model as it is"
    expect(not changed, "hf_overrides", f"{', '.join(changed)}, {why}",
           f"none of these beside {settings} of the model as it is")  # fmt: skip
    at_load = model.quantization if model.model_arch_config.quantization_config is None else None
    expect(vllm_config.lora_config is None, "enable_lora", f"true, {why}", default)
    expect(at_load is None, "quantization", f"{at_load}, {why}", default)
    expect(vllm_config.weight_transfer_config is None, "weight_transfer_config", f"one, {why}", default)
    load_format = vllm_config.load_config.load_format
    expect(load_format != "dummy", "load_format", f"dummy, {why}", default)
    expect(model.hf_config_path in (None, model.model), "hf_config_path", f"{model.hf_config_path}, {why}", default)
    served = fingerprint_of(model.model, model.revision, vllm_config.load_config.download_dir)
    expect(served == fingerprint, "model", f"{Path(model.model).name} with fingerprint {served}",
           f"{name or 'one'} with fingerprint {fingerprint}, the model of the {settings}")  # fmt: skip


def _expect_compactable(expect: _Expect, vllm_config: VllmConfig, rolls: bool) -> None:
    # These cases are not proven safe: a layer might read blocks that were given back.
    traits = (*unmixed_blocks(vllm_config), *engines_in_parts(vllm_config), *shared_caches(vllm_config))
    for got in (*traits, *moved_blocks(vllm_config)):
        expect(False, f"{KEY}.compaction", got, "null")
    for got in unlike_layers_or_engines(vllm_config) if rolls else ():
        expect(False, f"{KEY}.compaction.positions", f"rolling with {got}", "text")


def _expect_cuttable(expect: _Expect, vllm_config: VllmConfig, prefill: BlockPrefill | ZipVLPrefill) -> None:
    scheduler, least = vllm_config.scheduler_config, least_room(prefill)
    # vLLM checks a configuration again after a change.
    given = None if scheduler.scheduler_cls in CUTTING_SCHEDULERS else scheduler.scheduler_cls
    expect(given is None, "scheduler_cls", f"{given} with {KEY}.prefill, which cuts prompts at fixed positions", "none")
    room = room_for_prompts(vllm_config)
    threshold, tokens = scheduler.long_prefill_token_threshold, scheduler.max_num_batched_tokens
    if 0 < threshold < least:
        expect(False, "long_prefill_token_threshold", f"{threshold} with {KEY}.prefill", f"0, or at least {least}")
    elif room < least:
        expect(False, "max_num_batched_tokens",
               f"{tokens} with {KEY}.prefill and max_num_seqs {scheduler.max_num_seqs}",
               f"at least {tokens + least - room}")  # fmt: skip
    if isinstance(prefill, ZipVLPrefill):
        # A connector finds parts of chunks.
        for got in moved_blocks(vllm_config):
            expect(False, f"{KEY}.prefill", f"zipvl with {got}", "null or blocks")


def _expect_verifiable(expect: _Expect, vllm_config: VllmConfig, config: ResolvedConfig) -> None:
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    architecture = architecture_of(vllm_config)
    field = f"{KEY}.lossless"

    def refuse(holds: bool, got: str) -> None:
        expect(not holds, field, got, "null")

    first = current_platform.is_cuda() and not vllm_config.use_v2_model_runner
    expect(not first, field, "vLLM's first model runner on a GPU", "null, or vLLM's second one, which is its default")
    other = other_scheduler(vllm_config)
    asked = config.config.lossless is not None and config.config.lossless.draft_length == "adaptive"
    if other is not None and asked and is_from_user(config, "lossless.draft_length"):
        expect(False, f"{field}.draft_length", f"adaptive {other}", "fixed")
    # Answers must equal those of dense attention, so only drafts may leave tokens out.
    refuse(not config.is_sparse, "a section without sparse attention for drafts")
    refuse(config.prefill is not None, f"a section and {KEY}.prefill")
    refuse(config.compaction is not None, f"a section and {KEY}.compaction")
    refuse(config.draft_is_sparse, f"a section and {KEY}.speculation.draft sparse")
    speculative = vllm_config.speculative_config
    if speculative is not None:
        refuse(not compat.drafts_for_itself(vllm_config), f"a section and drafts of {speculative.method}")
    # Drafting steps do not support these cases, or lossless answers are not proven for them.
    for got in unlike_layers_or_engines(vllm_config):
        refuse(True, got)
    refuse(model.is_multimodal_model, f"{architecture}, which reads more than text")
    refuse(model.uses_mrope, f"{architecture} with positions of several dimensions")
    refuse(model.enable_prompt_embeds, "prompts of embeddings")
    refuse(vllm_config.lora_config is not None, "LoRA adapters")
    refuse(vllm_config.watermark_config is not None, "watermarks")
    for got in moved_blocks(vllm_config):
        refuse(True, got)
    refuse(parallel.tensor_parallel_size > 1, f"{parallel.tensor_parallel_size} tensor-parallel workers")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_alibi(hf_config: Any) -> bool:
    attention = getattr(hf_config, "attn_config", None)
    nested = attention.get("alibi") if isinstance(attention, Mapping) else getattr(attention, "alibi", False)
    return bool(hf_config.model_type == "bloom" or getattr(hf_config, "alibi", False) or nested)

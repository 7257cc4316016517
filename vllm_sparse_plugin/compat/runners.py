"""Changes to vLLM's model runners and to their sampling."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from vllm_sparse_plugin.compat.engine import HOOKED, drafts_for_itself

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


CallsLayers = Callable[[Any, Callable[[], bool]], bool]
"""See `hook_model_runners`."""
_RUNNER_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules of vLLM's two model runners. The CPU's runner derives from the first."""
_steps: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What `batch_of_step` returns, by runner."""
_dummies: WeakSet[Any] = WeakSet()
"""Runners in a dummy run."""


def hook_model_runners(
    building: Callable[[Any], AbstractContextManager[None]],
    spread: Callable[[Any], Any],
    added: Callable[[Any, Any], None],
    calls_layers: CallsLayers,
    finished: Callable[[Any, Iterable[str]], None],
    preempted: Callable[[Any, Iterable[str], Iterable[str]], None],
    ending: Callable[[Any], None],
) -> None:
    """Calls back from the model runners of this process: before they build metadata builders, before vLLM groups the
    cache specifications of layers, before each step chooses a CUDA graph, when requests end or are preempted, and
    before they shut down. The second runner also calls back for new requests. `batch_of_step` and `is_dummy_run` tell
    more of a step.

    Reason: compaction depends on requests and on the lengths of their prompts; vLLM's metadata of a step has neither. A
    backend does not know the name of the layer whose cache it specifies. The second runner drops a request's arguments
    for plugins. To models with state-space layers it does not name the requests of a step, and it calls a single token
    of a prompt decoding. The rows of a dummy run have the numbers of requests that wait. A full CUDA graph calls no
    layer, so a step whose queries vote must run like a step with prompts: with piecewise graphs or without graphs.
    Data-parallel engines agree on this as for such steps. A model may outlive its engine, and vLLM frees only the
    caches it knows.
    Versions: 0.32, 0.33. Remove when `CommonAttentionMetadata` has requests with arguments and prompt lengths, and when
    a backend can request a step without its full graph and learns of the end of an engine.

    Args:
        building: takes a runner; returns a context in which the runner builds its metadata builders.
        spread: takes and returns the cache specifications by layer name.
        added: takes a runner and its new requests, each with `req_id` and `sampling_params`.
        calls_layers: takes a runner, and a function that returns whether its next step computes tokens of a prompt;
            returns whether the step must call layers.
        finished: takes a runner and the names of requests that have ended.
        preempted: takes a runner, the names of requests that were preempted, and those of the requests in the next
            step.
        ending: takes a runner whose layers still have their caches.
    """
    for module in _RUNNER_MODULES:
        # Only the module of this worker's runner has been imported.
        runner: Any = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if runner is None or HOOKED in vars(runner):
            continue
        runner.initialize_kv_cache = _showing(runner.initialize_kv_cache, building)
        runner.get_kv_cache_spec = _spreading(runner.get_kv_cache_spec, spread)
        if hasattr(runner, "add_requests"):
            runner.add_requests = _telling(runner.add_requests, added)
        if hasattr(runner, "execute_model"):
            runner.execute_model = _telling_ends(runner.execute_model, finished, preempted)
        if hasattr(runner, "shutdown"):
            runner.shutdown = _ending(runner.shutdown, ending)
        if hasattr(runner, "_dummy_run"):
            setattr(runner, "_dummy_run", _noting_dummies(runner._dummy_run))  # noqa: B010
        if hasattr(runner, "gather_batch_req_state"):
            runner.gather_batch_req_state = _mixing_gathered(runner.gather_batch_req_state, calls_layers)
        elif hasattr(runner, "_determine_batch_execution_and_padding"):
            determine = _mixing_determined(runner._determine_batch_execution_and_padding, calls_layers)
            setattr(runner, "_determine_batch_execution_and_padding", determine)  # noqa: B010
        setattr(runner, HOOKED, True)


def batch_of_step(runner: Any) -> Any | None:
    """Returns the batch whose metadata the second runner builds; None outside of it.

    `idx_mapping_np` has the numbers of its requests, in order; `is_prefilling_np` says which compute their prompts.
    """
    return _steps.get(runner)


def is_dummy_run(runner: Any) -> bool:
    """Returns whether a runner is in a dummy run, which has no requests."""
    return runner in _dummies


def hook_speculators(make: Callable[[VllmConfig, torch.device], Any]) -> None:
    """Makes vLLM's second model runner use the drafter of `make` in lossless mode. It does not affect other drafts.

    Reason: the runner chooses drafters by a fixed list of names.
    Versions: 0.32, 0.33. Remove when the runner accepts a class, as the first runner does.

    Args:
        make: takes vLLM's configuration and the device; returns the drafter.
    """
    from vllm.v1.worker.gpu import spec_decode

    choose: Any = spec_decode.init_speculator
    if getattr(choose, HOOKED, False):
        return
    spec_decode.init_speculator = _making(choose, make)
    if runner := sys.modules.get(_RUNNER_MODULES[1]):
        # The runner has already imported the function by name.
        setattr(runner, "init_speculator", spec_decode.init_speculator)  # noqa: B010


def hook_decode_graphs(plan: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Makes vLLM's second model runner plan the CUDA graphs of lossless mode with `plan`. It does not affect other
    drafts.

    Reason: vLLM assigns a number of tokens to the next larger graph of any width. With drafts of several lengths, many
    batches find a graph of another width and run without a graph.
    Versions: 0.32, 0.33. Remove when each width has its own next larger graph.

    Args:
        plan: takes a `CudaGraphManager` and vLLM's own plan of its graphs.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    plan_one: Any = CudaGraphManager._init_candidates
    if getattr(plan_one, HOOKED, False):
        return

    @functools.wraps(plan_one)
    def init_candidates(manager: Any) -> None:
        if drafts_for_itself(manager.vllm_config):
            plan(manager, plan_one)
        else:
            plan_one(manager)

    setattr(init_candidates, HOOKED, True)
    setattr(CudaGraphManager, "_init_candidates", init_candidates)  # noqa: B010


def hook_weight_updates(check: Callable[[VllmConfig, str], None]) -> None:
    """Checks the calls of a worker of this process that replace the weights of its model. Idempotent.

    `sleep` counts at level 2, which drops the weights.

    Reason: vLLM tells no backend that weights change. Thresholds and anchors of other weights ruin text without a sign.
    Versions: 0.32, 0.33. Remove when a backend learns of new weights.

    Args:
        check: takes the configuration and the name of the call; raises an error for a call that it refuses.
    """
    checked = [(module, "GPUModelRunner", "reload_weights") for module in _RUNNER_MODULES]
    for module, owner, name in (*checked, ("vllm.v1.worker.gpu_worker", "Worker", "sleep")):
        # Only the modules of this worker have been imported.
        kind: Any = getattr(sys.modules.get(module), owner, None)
        if kind is not None and not getattr(getattr(kind, name), HOOKED, False):
            setattr(kind, name, _checking(getattr(kind, name), check))


def _checking(call: Callable[..., Any], check: Callable[[VllmConfig, str], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(worker: Any, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[0] if args else 1)
        if call.__name__ != "sleep" or level == 2:
            check(worker.vllm_config, call.__name__)
        return call(worker, *args, **kwargs)

    setattr(checked, HOOKED, True)
    return checked


def mend_rejection_sampling() -> None:
    """Corrects vLLM's rejection sampler on a CPU: each draft gets the sampling settings of its request, and steps
    without drafts are sampled. Idempotent.

    Reason: the CPU kernel that expands a request's values to its drafts writes into a copy unless they are int64. The
    temperatures, top-k and top-p of drafts were uninitialised memory, and tokens had a wrong distribution. In a step
    without drafts, a top-k without a top-p took the maximum of an empty tensor and ended the engine.
    Versions: 0.32. Remove when `_expand_kernel_impl` writes to its argument, and `apply_top_k_only` accepts no rows.
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
    if getattr(apply, HOOKED, False):
        return

    @functools.wraps(apply)
    def apply_top_k_top_p(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return apply(logits, *args, **kwargs) if len(logits) else logits

    setattr(apply_top_k_top_p, HOOKED, True)
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


def mend_kernel_overrides() -> None:
    """Lets vLLM's CPU platform start an engine in a process that has loaded Numba, as a second engine does. Idempotent.

    Reason: a worker replaces Triton kernels in the attributes of all loaded modules, and looks into the `vars` of each
    attribute. Those of the LLVM library of Numba are no mapping, and the start ended in an AttributeError.
    Versions: 0.32. Remove when `_rebind_kernels` skips attributes without a mapping.
    """
    from vllm.triton_utils import dispatcher

    def mapping_of(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    # A global of the module hides the builtin function.
    dispatcher.vars = mapping_of


def _making(choose: Callable[..., Any], make: Callable[[VllmConfig, torch.device], Any]) -> Callable[..., Any]:
    @functools.wraps(choose)
    def init_speculator(vllm_config: VllmConfig, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        if drafts_for_itself(vllm_config):
            return make(vllm_config, device)
        return choose(vllm_config, device, *args, **kwargs)

    setattr(init_speculator, HOOKED, True)
    return init_speculator


def _current_config_of(runner: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a runner's configuration is vLLM's current one, which backend classes read.

    vLLM sets it when it builds a model, but not when it asks for cache specifications.
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
        if hasattr(runner, "model_state"):
            _note_requests(runner)
        with building(runner), _current_config_of(runner):
            return initialize_kv_cache(runner, *args, **kwargs)

    return initialize


def _note_requests(runner: Any) -> None:
    """Lets `batch_of_step` know the batch of each step of the second runner."""
    prepare, building = runner.model_state.prepare_attn, ref(runner)
    if getattr(prepare, HOOKED, False):
        return

    @functools.wraps(prepare)
    def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        _steps[building()] = input_batch
        try:
            return prepare(input_batch, *args, **kwargs)
        finally:
            del _steps[building()]

    setattr(prepare_attn, HOOKED, True)
    runner.model_state.prepare_attn = prepare_attn


def _noting_dummies(dummy_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dummy_run)
    def run(runner: Any, *args: Any, **kwargs: Any) -> Any:
        _dummies.add(runner)
        try:
            return dummy_run(runner, *args, **kwargs)
        finally:
            _dummies.discard(runner)

    return run


def _telling(add_requests: Callable[..., Any], added: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(add_requests)
    def add(runner: Any, scheduler_output: Any) -> None:
        add_requests(runner, scheduler_output)
        added(runner, scheduler_output.scheduled_new_reqs)

    return add


def _telling_ends(
    execute_model: Callable[..., Any],
    finished: Callable[[Any, Iterable[str]], None],
    preempted: Callable[[Any, Iterable[str], Iterable[str]], None],
) -> Any:
    @functools.wraps(execute_model)
    def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.finished_req_ids:
            finished(runner, scheduler_output.finished_req_ids)
        preempted(runner, scheduler_output.preempted_req_ids or (), scheduler_output.num_scheduled_tokens)
        return execute_model(runner, scheduler_output, *args, **kwargs)

    return execute


def _ending(shutdown: Callable[[Any], None], ending: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(shutdown)
    def shut_down(runner: Any) -> None:
        ending(runner)
        shutdown(runner)

    return shut_down


def _mixing_gathered(gather: Callable[..., Any], calls_layers: CallsLayers) -> Callable[..., Any]:
    """For the second runner. A batch counts as mixed if its requests have no common number of tokens; for drafters, if
    it is not eligible for decode graphs."""

    @functools.wraps(gather)
    def gather_batch_req_state(runner: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        state, tokens_of_each = gather(runner, scheduler_output, dummy_run)

        def in_prompt() -> bool:
            return not dummy_run and bool(state.is_prefilling_np.any())

        if calls_layers(runner, in_prompt):
            return state._replace(decode_graph_eligible=False), None
        return state, tokens_of_each

    return gather_batch_req_state


def _mixing_determined(determine: Callable[..., Any], calls_layers: CallsLayers) -> Callable[..., Any]:
    """For the first runner. As in dummy runs, an argument says whether a batch is mixed."""

    @functools.wraps(determine)
    def determine_batch(runner: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = kwargs.get("force_uniform_decode") is not None

        def in_prompt() -> bool:
            batch, count = runner.input_batch, len(kwargs["num_scheduled_tokens_np"])
            computed, prompts = batch.num_computed_tokens_cpu[:count], batch.num_prompt_tokens[:count]
            return not is_dummy and bool((computed < prompts).any())

        if calls_layers(runner, in_prompt):
            kwargs["force_uniform_decode"] = False
        return determine(runner, *args, **kwargs)

    return determine_batch

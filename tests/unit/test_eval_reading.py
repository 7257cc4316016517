import pytest
import torch

from vllm_sparse_plugin.config.account import ModelKeys
from vllm_sparse_plugin.metrics.live import READS, SKIPPED, DeviceCounts, count_totals
from vllm_sparse_plugin.tools.eval.reading import CountingWorker, resolve_arguments, shares_of

BLOCKS, STOPPED = (ratio.name for ratio in READS)
(ROUTED,) = (ratio.name for ratio in SKIPPED)


def keys_of(backend: str | None, settings: dict) -> ModelKeys:
    arguments = {"attention_backend": backend, "additional_config": {"sparse_attention": settings}}
    return ModelKeys(resolve_arguments(arguments), num_layers=8, head_size=64, block_size=64)


def share_of(backend: str | None, settings: dict, before: list[dict], after: list[dict]) -> float:
    return shares_of(keys_of(backend, settings), 16384, 2, before, after).read


def test_vllms_own_attention_reads_everything():
    assert resolve_arguments({}) is None
    assert resolve_arguments({"attention_backend": "FLASH_ATTN"}) is None
    assert share_of(None, {}, [], []) == 1.0


def test_where_lengths_tell_nothing_is_counted():
    keys = keys_of("snapkv", {})
    assert shares_of(keys, 16384, 100, [], []) == keys.shares(16384, 100)
    assert keys.shares(16384, 100).read < 0.1


def test_attention_that_stops_reads_what_its_workers_have_counted_since():
    before = [{STOPPED: (100, 200)}, {STOPPED: (0, 0)}]
    after = [{STOPPED: (350, 700)}, {STOPPED: (50, 700)}]
    assert share_of("art", {}, before, after) == (250 + 50) / (500 + 700)


@pytest.mark.parametrize("backend", ["art", "sinkrouter"])
def test_shares_that_no_worker_counts_are_unknown(backend):
    """An engine with another worker extension counts nothing. Both would seem to read everything."""
    assert shares_of(keys_of(backend, {}), 16384, 2, [], []) is None
    assert shares_of(keys_of("unique", {}), 16384, 2, [], []) is not None


def test_layers_that_are_routed_read_what_is_not_skipped():
    before, after = [{ROUTED: (0, 0)}], [{ROUTED: (30, 40)}]
    # Two layers are never routed.
    assert share_of("sinkrouter", {}, before, after) == pytest.approx((2 + 6 * 0.25) / 8)
    both = share_of("sinkrouter", {"stopping": {}}, [{}], [{ROUTED: (30, 40), STOPPED: (1, 2)}])
    assert both == pytest.approx((2 * 0.5 + 6 * 0.25 * 0.5) / 8)


def test_a_worker_tells_what_all_its_layers_have_counted():
    before = count_totals()
    stopping = DeviceCounts([(0, range(2)), (1, range(2))], READS, 4, torch.device("cpu"))
    routed = DeviceCounts([(0, range(2))], SKIPPED, 2, torch.device("cpu"))
    for counters in stopping.of_layers:
        counters += torch.tensor([1, 3, 512, 2048])
    routed.of_layers[0][0] += torch.tensor([4, 5])
    after = CountingWorker().sparse_count_totals()

    def grown(name: str) -> tuple[int, int]:
        sums = (totals.get(name, (0, 0)) for totals in (after, before))
        return tuple(new - old for new, old in zip(*sums, strict=True))

    assert grown(STOPPED) == (4 * 512, 4 * 2048)
    assert grown(BLOCKS) == (12, 4)
    assert grown(ROUTED) == (4, 5)

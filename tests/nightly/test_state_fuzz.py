"""Long random schedules of one layer. `NIGHTLY_SEED` is the first seed; every seed has other settings."""

import os

import pytest
import torch
from support.state_fuzz.schedule import Fuzz

pytestmark = pytest.mark.nightly
FIRST, SEEDS, STEPS = int(os.environ.get("NIGHTLY_SEED", "0")), 48, 1500


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The shapes are tiny: several threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_every_record_and_output_of_a_schedule_is_right(seed):
    counts = Fuzz(seed).run(STEPS)
    assert counts["judged_rows"] > 0
    assert counts["finished"] > 0

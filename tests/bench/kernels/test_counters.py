"""Hardware counters: what Nsight Compute prints, and which case is counted."""

import pytest

from bench.kernels.cli import _one_case
from bench.kernels.counters import Kernel, read_counters
from vllm_sparse_plugin.errors import ConfigurationError

PRINTED = """==PROF== Connected to process 7
==PROF== Profiling "sparse_decode": 0%....100% - 1 pass
==PROF== Disconnected from process 7
"ID","Kernel Name","Device","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","byte","byte","ns","%"
"0","sparse_decode(DecodeParams)","0","226,750,464","1,024","62,048","81.5"
"1","merge","0","2048","512","3000","1.25"
"""


def test_each_kernel_has_its_counters() -> None:
    assert read_counters(PRINTED) == [
        Kernel("sparse_decode", 226750464.0, 1024.0, 62048.0, 81.5), Kernel("merge", 2048.0, 512.0, 3000.0, 1.25),
    ]  # fmt: skip


def test_without_a_table_the_message_has_the_last_line() -> None:
    with pytest.raises(ConfigurationError, match="got 'no permission', allowed: a table"):
        read_counters("==PROF== Connected\nno permission\n\n")


def test_a_case_names_operation_statistics_context_and_batch() -> None:
    op, case = _one_case("decode:leveled=128K=32")
    assert (op, case.name) == ("decode", "32q1s128K g4 leveled")
    for wrong in ("decode", "topk=8K=1"):
        with pytest.raises(ConfigurationError, match="such as decode=128K=6"):
            _one_case(wrong)

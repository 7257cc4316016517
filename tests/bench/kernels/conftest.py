import pytest
from support.bench.kernels import CPU, SMALL

from bench.kernels.cases import DecodeCase, TopKCase
from bench.kernels.workload import Workload


@pytest.fixture
def workload() -> Workload:
    return Workload(SMALL, CPU, max_blocks=64)


@pytest.fixture
def decode_inputs(workload):
    return workload.decode_inputs(DecodeCase(batch=4, context=768, group=2))


@pytest.fixture
def topk_inputs(workload):
    return workload.topk_inputs(TopKCase(rows=8, pages=256))

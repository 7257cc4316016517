"""Every CUDA source compiles, for the oldest and the newest architecture it is written for; no GPU needed."""

from pathlib import Path

import pytest
import sparse_kernels

pytest.importorskip("cuda.core", reason="needs cuda-core")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from sparse_kernels.cuda.launch import CODE_FORMATS, FORMATS, compile_source

ROOT = Path(sparse_kernels.__file__).parent
BF16, FP16, FP8, INT8 = FORMATS.values()
SKETCH, QUARTERS = CODE_FORMATS.values()
SHAPE = {"GROUP": 4, "HEAD_SIZE": 128, "PAGES_PER_BLOCK": 8}
LAUNCH = {"WARPS": 8, "BLOCKS_PER_SM": 2}
SCORE = {**SHAPE, **LAUNCH, "QUERY": BF16, "MEAN": INT8, "CHUNK": 1024, "PIPELINED": 0}
ATTEND = {**SHAPE, **LAUNCH, "QUERY": BF16, "KV": BF16, "OUTPUT": BF16, "PAGE_SIZE": 8, "CLUSTER": 1}
DECODE = {**ATTEND, "MEAN": INT8, "FUSED": 0, "STOP_TILES": 0}
ROUTED = {**SHAPE, **LAUNCH, "QUERY": BF16, "KV": BF16, "BLOCK_TOKENS": 64, "LEAST_TOKENS": 256, "STOP_TOKENS": 0}
STOPPED = ROUTED | {"STOP_TOKENS": 512, "PAGE_SIZE": 16, "WARPS": 4, "BLOCKS_PER_SM": 4}
ROUTE = {"QUERY": BF16, "KV": BF16, "GROUP": 4, "HEAD_SIZE": 128, "WARPS": 4}
MERGE = {"GROUP": 4, "HEAD_SIZE": 128, "OUTPUT": BF16, "SPLITS": 64, "PARTS": 4}
TOPK = {"WARPS": 32, "PER_THREAD": 64, "CANDIDATES": 0, "PAGES_PER_BLOCK": 0}
ONE_BLOCK_PER_SM = {"BLOCKS_PER_SM": 1}

CASES = {
    "score int8": ("page_score/score.cu", SCORE),
    "score fp8": ("page_score/score.cu", SCORE | {"MEAN": FP8, "QUERY": FP16}),
    "score bf16": ("page_score/score.cu", SCORE | {"MEAN": BF16, "PIPELINED": 1}),
    "score sketches": ("page_score/score.cu", SCORE | {"MEAN": SKETCH}),
    "score quarters": ("page_score/score.cu", SCORE | {"MEAN": QUARTERS}),
    "score groups of 16, blocks of a page": ("page_score/score.cu", SCORE | {"GROUP": 16, "PAGES_PER_BLOCK": 1}),
    "top-k": ("page_topk/topk.cu", TOPK),
    "top-k of candidates": ("page_topk/topk.cu", TOPK | {"CANDIDATES": 1, "PAGES_PER_BLOCK": 8, "PER_THREAD": 4}),
    "attend": ("sparse_attention/attend.cu", ATTEND),
    "attend fp8": ("sparse_attention/attend.cu", ATTEND | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 64}),
    "attend large": ("sparse_attention/attend.cu", ATTEND | ONE_BLOCK_PER_SM | {"GROUP": 16, "HEAD_SIZE": 256}),
    "decode": ("sparse_decode/decode.cu", DECODE),
    "decode pages of 32": ("sparse_decode/decode.cu", DECODE | {"GROUP": 3, "PAGE_SIZE": 32, "PAGES_PER_BLOCK": 2}),
    "route": ("group_routing/route.cu", ROUTE),
    "route fp8": (
        "group_routing/route.cu",
        ROUTE | {"QUERY": FP8, "KV": FP8, "GROUP": 16, "WARPS": 8, "HEAD_SIZE": 64},
    ),
    "routed": ("routed_attention/attend.cu", ROUTED),
    "routed fp8": ("routed_attention/attend.cu", ROUTED | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 64, "GROUP": 3}),
    "routed large": ("routed_attention/attend.cu", ROUTED | ONE_BLOCK_PER_SM | {"GROUP": 16, "HEAD_SIZE": 256}),
    "routed that stops": ("routed_attention/attend.cu", STOPPED),
    "routed that stops, blocks of 64 tokens": (
        "routed_attention/attend.cu",
        STOPPED | {"STOP_TOKENS": 64, "BLOCK_TOKENS": 16, "GROUP": 1},
    ),
    "routed that stops, fp8": (
        "routed_attention/attend.cu",
        STOPPED | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 64, "GROUP": 3, "PAGE_SIZE": 8},
    ),
    "routed that stops, large": (
        "routed_attention/attend.cu",
        STOPPED | {"BLOCKS_PER_SM": 2, "GROUP": 16, "HEAD_SIZE": 256},
    ),
    "merge": ("routed_attention/merge.cu", MERGE),
    "merge large": ("routed_attention/merge.cu", MERGE | {"HEAD_SIZE": 256, "OUTPUT": FP16, "SPLITS": 5, "PARTS": 2}),
    "merge of what stopped": ("routed_attention/merge.cu", MERGE | {"SPLITS": 0}),
}
HOPPER = {
    "attend cluster": ("sparse_attention/attend.cu", ATTEND | {"CLUSTER": 8}),
    "decode fused": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1}),
    "decode cluster": ("sparse_decode/decode.cu", DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "WARPS": 16}),
    "decode sketches": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "MEAN": SKETCH}),
    "decode quarters": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "MEAN": QUARTERS}),
    "decode cluster, quarters, heads of 256": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "HEAD_SIZE": 256, "MEAN": QUARTERS},
    ),
    "decode cluster, scores from memory": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"CLUSTER": 8, "WARPS": 16},
    ),
    "decode that stops": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "CLUSTER": 4, "STOP_TILES": 64}),
    "decode that stops, blocks of 64 tokens": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "WARPS": 16, "STOP_TILES": 8},
    ),
    "decode that stops, fp8": (
        "sparse_decode/decode.cu",
        DECODE | {"CLUSTER": 4, "KV": FP8, "QUERY": FP8, "HEAD_SIZE": 64, "STOP_TILES": 32},
    ),
    "decode that stops, large": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"CLUSTER": 8, "GROUP": 16, "HEAD_SIZE": 256, "STOP_TILES": 32},
    ),
    "decode fp8": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "CLUSTER": 2, "KV": FP8, "QUERY": FP8}),
}


def check(case: tuple[str, dict[str, int]], architecture: str) -> None:
    source, macros = case
    code = compile_source(ROOT / source, architecture, macros)
    assert code.code, "an empty binary"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiles(case: tuple[str, dict[str, int]], architecture: str) -> None:
    check(case, architecture)


@pytest.mark.parametrize("case", HOPPER.values(), ids=HOPPER)
def test_clusters_compile(case: tuple[str, dict[str, int]]) -> None:
    check(case, "sm_90a")


def test_an_error_names_the_source() -> None:
    with pytest.raises(RuntimeError, match=r"topk\.cu does not compile for sm_90a"):
        compile_source(ROOT / "page_topk/topk.cu", "sm_90a", {})

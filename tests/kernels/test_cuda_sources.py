"""Every CUDA source compiles for every supported architecture, without a GPU."""

import ast
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import sparse_kernels

pytest.importorskip("cuda.core", reason="needs cuda-core")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from sparse_kernels import batch
from sparse_kernels.cuda import params
from sparse_kernels.cuda.launch import (
    CODE_FORMATS,
    FORMATS,
    LEVELED_FORMAT,
    _known_architectures,
    architecture_of,
    compile_source,
)
from sparse_kernels.cuda.shared_memory import piece_bytes
from sparse_kernels.limits import MAX_K, DecodeShape
from sparse_kernels.sparse_decode.launches import MOST_CHUNK, Launch, fixed_bytes, values_bytes

ROOT = Path(sparse_kernels.__file__).parent
SOURCES = sorted(ROOT.rglob("*.cu"))
BF16, FP16, FP8, INT8 = FORMATS.values()
SKETCH, QUARTERS = CODE_FORMATS.values()
LEVELED = LEVELED_FORMAT
SHAPE = {"GROUP": 4, "HEAD_SIZE": 128, "PAGES_PER_BLOCK": 8}
LAUNCH = {"WARPS": 8, "BLOCKS_PER_SM": 2}
SCORE = {**SHAPE, **LAUNCH, "QUERY": BF16, "RECORD": INT8, "CHUNK": 1024, "PIPELINED": 0}
DECODE = {
    **SHAPE,
    **LAUNCH,
    "QUERY": BF16,
    "KV": BF16,
    "OUTPUT": BF16,
    "PAGE_SIZE": 8,
    "CLUSTER": 1,
    "RECORD": INT8,
    "FUSED": 0,
    "LISTED": 0,
    "GIVEN": 0,
    "WRITTEN": 0,
    "STOP_TILES": 0,
    "HOT": 0,
}
SPLIT = {
    **SHAPE,
    **LAUNCH,
    "QUERY": BF16,
    "KV": BF16,
    "BLOCK_TOKENS": 64,
    "LEAST_TOKENS": 256,
    "STOP_TOKENS": 0,
    "SELECTED": 0,
    "PAGE_SIZE": 16,
}
STOPPED = SPLIT | {"STOP_TOKENS": 512, "PAGE_SIZE": 16, "WARPS": 4, "BLOCKS_PER_SM": 4}
ROUTE = {"QUERY": BF16, "KV": BF16, "GROUP": 4, "HEAD_SIZE": 128, "WARPS": 4, "COUNTS": 0}
MERGE = {"GROUP": 4, "HEAD_SIZE": 128, "OUTPUT": BF16, "SPLITS": 64, "PARTS": 4}
TOPK = {"WARPS": 32, "PER_THREAD": 64, "CANDIDATES": 0}
LIST = {"CLUSTER": 1, "WARPS": 32}
FIND = {**SHAPE, **LAUNCH, "QUERY": BF16, "RECORD": QUARTERS, "PAGE_SIZE": 8, "PIPELINED": 1}
SELECTED = SPLIT | {"SELECTED": 1, "LEAST_TOKENS": 128, "PAGE_SIZE": 8}
ONE_BLOCK_PER_SM = {"BLOCKS_PER_SM": 1}
QUICK, SYNTAX_ONLY = "--Ofast-compile=max", "--fdevice-syntax-only"
"""Options of NVRTC: few optimisations, and none of the code."""
GIVEN = {"LISTED": 1, "GIVEN": 1}

CASES = {
    "score int8": ("page_score/score.cu", SCORE),
    "score fp8": ("page_score/score.cu", SCORE | {"RECORD": FP8, "QUERY": FP16}),
    "score bf16": ("page_score/score.cu", SCORE | {"RECORD": BF16, "PIPELINED": 1}),
    "score sketches": ("page_score/score.cu", SCORE | {"RECORD": SKETCH}),
    "score quarters": ("page_score/score.cu", SCORE | {"RECORD": QUARTERS}),
    "score groups of 16, blocks of a page": ("page_score/score.cu", SCORE | {"GROUP": 16, "PAGES_PER_BLOCK": 1}),
    "find candidates": ("sparse_decode/candidates.cu", FIND),
    "find candidates by int8, groups of 3": (
        "sparse_decode/candidates.cu",
        FIND | {"RECORD": INT8, "GROUP": 3, "HEAD_SIZE": 80, "PIPELINED": 0, "BLOCKS_PER_SM": 3},
    ),
    "top-k": ("page_topk/topk.cu", TOPK),
    "top-k of candidates": ("page_topk/topk.cu", TOPK | {"CANDIDATES": 1, "PER_THREAD": 4}),
    "list": ("page_topk/list.cu", LIST),
    "decode": ("sparse_decode/decode.cu", DECODE),
    "decode pages of 32": ("sparse_decode/decode.cu", DECODE | {"GROUP": 3, "PAGE_SIZE": 32, "PAGES_PER_BLOCK": 2}),
    "decode a given list with hot pages, one block": ("sparse_decode/decode.cu", DECODE | GIVEN | {"HOT": 1}),
    "decode a given list, one block": ("sparse_decode/decode.cu", DECODE | GIVEN),
    "decode and write the selection, one block": (
        "sparse_decode/decode.cu",
        DECODE | {"WRITTEN": 1, "GROUP": 3, "PAGE_SIZE": 32, "PAGES_PER_BLOCK": 2},
    ),
    "route": ("group_routing/route.cu", ROUTE),
    "route fp8": (
        "group_routing/route.cu",
        ROUTE | {"QUERY": FP8, "KV": FP8, "GROUP": 16, "WARPS": 8, "HEAD_SIZE": 64},
    ),
    "split": ("split_attention/attend.cu", SPLIT),
    "split fp8": ("split_attention/attend.cu", SPLIT | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 64, "GROUP": 3}),
    "split large": ("split_attention/attend.cu", SPLIT | ONE_BLOCK_PER_SM | {"GROUP": 16, "HEAD_SIZE": 256}),
    "route a group of 71, counting": ("group_routing/route.cu", ROUTE | {"GROUP": 71, "WARPS": 8, "COUNTS": 1}),
    "split a selection": ("split_attention/attend.cu", SELECTED),
    "split a selection, large": (
        "split_attention/attend.cu",
        SELECTED | ONE_BLOCK_PER_SM | {"GROUP": 16, "HEAD_SIZE": 256},
    ),
    "split a selection, fp8, heads of 112": (
        "split_attention/attend.cu",
        SELECTED | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 112, "GROUP": 15, "PAGE_SIZE": 32, "WARPS": 4},
    ),
    "split that stops": ("split_attention/attend.cu", STOPPED),
    "split that stops, blocks of 64 tokens": (
        "split_attention/attend.cu",
        STOPPED | {"STOP_TOKENS": 64, "BLOCK_TOKENS": 16, "GROUP": 1},
    ),
    "split that stops, fp8": (
        "split_attention/attend.cu",
        STOPPED | {"QUERY": FP8, "KV": FP8, "HEAD_SIZE": 64, "GROUP": 3, "PAGE_SIZE": 8},
    ),
    "split that stops, large": (
        "split_attention/attend.cu",
        STOPPED | {"BLOCKS_PER_SM": 2, "GROUP": 16, "HEAD_SIZE": 256},
    ),
    "merge": ("split_attention/merge.cu", MERGE),
    "merge large": ("split_attention/merge.cu", MERGE | {"HEAD_SIZE": 256, "OUTPUT": FP16, "SPLITS": 5, "PARTS": 2}),
    "merge of what stopped": ("split_attention/merge.cu", MERGE | {"SPLITS": 0}),
}
OTHER_SIZES = {
    f"{name}, heads of {size}": (source, macros | {"HEAD_SIZE": size} | (ONE_BLOCK_PER_SM if size > 128 else {}))
    for size in (32, 80, 96, 112, 192, 240)
    for name, source, macros in (
        ("score int8", "page_score/score.cu", SCORE),
        ("score quarters", "page_score/score.cu", SCORE | {"RECORD": QUARTERS}),
        ("score bf16", "page_score/score.cu", SCORE | {"RECORD": BF16, "GROUP": 16}),
        ("score fp8", "page_score/score.cu", SCORE | {"RECORD": FP8}),
        ("route", "group_routing/route.cu", ROUTE),
        ("split a selection", "split_attention/attend.cu", SELECTED),
        ("split that stops", "split_attention/attend.cu", STOPPED),
        ("merge", "split_attention/merge.cu", MERGE | {"PARTS": 512 // size}),
    )
} | {
    "decode a given list until it stops, groups of 16, pages of 32": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | GIVEN | {"CLUSTER": 4, "GROUP": 16, "PAGE_SIZE": 32, "STOP_TILES": 64},
    ),
    "decode sketches, heads of 192": (
        "sparse_decode/decode.cu",
        DECODE | {"FUSED": 1, "HEAD_SIZE": 192, "RECORD": SKETCH},
    ),
    "decode cluster, quarters, heads of 256": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "HEAD_SIZE": 256, "RECORD": QUARTERS},
    ),
    **{
        f"decode leveled quarters, {pages} pages to a block, heads of {size}, groups of {group}": (
            "sparse_decode/decode.cu",
            DECODE
            | ONE_BLOCK_PER_SM
            | {
                "FUSED": 1,
                "CLUSTER": 4,
                "RECORD": LEVELED,
                "HEAD_SIZE": size,
                "GROUP": group,
                "PAGES_PER_BLOCK": pages,
            },
        )
        for size, group, pages in ((32, 1, 6), (80, 16, 2), (96, 7, 8), (112, 4, 1), (192, 2, 3), (256, 8, 8))
    },
    "decode that stops, blocks of 64 tokens": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "WARPS": 16, "STOP_TILES": 8},
    ),
    "decode that stops, large": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"CLUSTER": 8, "GROUP": 16, "HEAD_SIZE": 256, "STOP_TILES": 32},
    ),
    **{
        f"decode that stops, heads of {size}": (
            "sparse_decode/decode.cu",
            DECODE
            | ONE_BLOCK_PER_SM
            | {"FUSED": 1, "CLUSTER": 8, "GROUP": 1, "HEAD_SIZE": size, "RECORD": QUARTERS, "STOP_TILES": 32},
        )
        for size in (80, 96, 112, 192)
    },
}
"""Compiled to PTX for one architecture. No source distinguishes architectures or instructions by these sizes."""
HOPPER = {
    **{f"list cluster of {size}": ("page_topk/list.cu", LIST | {"CLUSTER": size}) for size in (2, 4, 8)},
    "decode a list": ("sparse_decode/decode.cu", DECODE | ONE_BLOCK_PER_SM | {"LISTED": 1, "CLUSTER": 8, "WARPS": 16}),
    "decode a list until it stops": ("sparse_decode/decode.cu", DECODE | {"LISTED": 1, "CLUSTER": 4, "STOP_TILES": 64}),
    "decode a given list": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | GIVEN | {"CLUSTER": 8, "WARPS": 16},
    ),
    "decode and write the selection": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "WRITTEN": 1, "CLUSTER": 8, "WARPS": 16},
    ),
    "decode that stops and write the selection": (
        "sparse_decode/decode.cu",
        DECODE | {"FUSED": 1, "WRITTEN": 1, "CLUSTER": 4, "STOP_TILES": 64},
    ),
    "decode a list and write it": ("sparse_decode/decode.cu", DECODE | {"LISTED": 1, "WRITTEN": 1, "CLUSTER": 2}),
    "decode with hot pages": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "HOT": 1, "RECORD": QUARTERS}),
    "decode with hot pages of 64, cluster, fp8, write the selection": (
        "sparse_decode/decode.cu",
        DECODE
        | ONE_BLOCK_PER_SM
        | {
            "FUSED": 1,
            "HOT": 1,
            "CLUSTER": 8,
            "WARPS": 16,
            "PAGE_SIZE": 64,
            "PAGES_PER_BLOCK": 4,
            "KV": FP8,
            "WRITTEN": 1,
        },
    ),
    "decode fused": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1}),
    "decode cluster": ("sparse_decode/decode.cu", DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "WARPS": 16}),
    "decode sketches": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "RECORD": SKETCH}),
    "decode quarters": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "RECORD": QUARTERS}),
    "decode leveled quarters": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "RECORD": LEVELED}),
    "decode cluster, leveled quarters": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"FUSED": 1, "CLUSTER": 8, "WARPS": 16, "RECORD": LEVELED},
    ),
    "decode leveled quarters until it stops": (
        "sparse_decode/decode.cu",
        DECODE | {"FUSED": 1, "CLUSTER": 4, "RECORD": LEVELED, "STOP_TILES": 64, "WRITTEN": 1},
    ),
    "decode cluster, scores from memory": (
        "sparse_decode/decode.cu",
        DECODE | ONE_BLOCK_PER_SM | {"CLUSTER": 8, "WARPS": 16},
    ),
    "decode that stops": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "CLUSTER": 4, "STOP_TILES": 64}),
    "decode that stops, fp8": (
        "sparse_decode/decode.cu",
        DECODE | {"CLUSTER": 4, "KV": FP8, "QUERY": FP8, "HEAD_SIZE": 64, "STOP_TILES": 32},
    ),
    "decode fp8": ("sparse_decode/decode.cu", DECODE | {"FUSED": 1, "CLUSTER": 2, "KV": FP8, "QUERY": FP8}),
}

OPTIMISED = (
    *(
        "score int8",
        "find candidates",
        "top-k",
        "split",
        "split that stops",
        "merge",
        "route",
    ),
    *("list cluster of 8", "decode cluster", "decode that stops"),
)
"""A case of every source, compiled with the options of an engine."""
OF_EVERY_SOURCE = (
    *(
        "score quarters",
        "find candidates",
        "top-k",
        "top-k of candidates",
        "list",
    ),
    *("decode", "route", "split a selection", "merge"),
)
"""A case of every source, for GPUs without clusters."""


def counted(source: str, macros: dict[str, int]) -> dict[str, int]:
    """The shared memory that the host counts for a case, which the source asserts."""
    group, head_size = macros.get("GROUP", 0), macros.get("HEAD_SIZE", 0)
    match source:
        case "split_attention/attend.cu":
            return {"SHARED_BYTES": piece_bytes(macros["WARPS"], group, head_size, macros["STOP_TOKENS"] > 0)}
        case "sparse_decode/decode.cu":
            launch = Launch(bool(macros["FUSED"]), macros["CLUSTER"], macros["WARPS"], macros["BLOCKS_PER_SM"])
            shape = DecodeShape(group, head_size, 4096, 64, macros["STOP_TILES"] > 0)
            return {"FIXED_BYTES": fixed_bytes(launch, shape), "VALUES_BYTES": values_bytes(launch, shape)}
    return {}


def build(path: Path, macros: dict[str, int], architecture: str, *more: str) -> bytes:
    """Machine code for `sm_90`, PTX for `compute_90`. cuda-core would need a GPU for PTX.

    Args:
        path: the source.
        macros: its constants.
        architecture: what to compile for.
        more: other options of NVRTC.

    Raises:
        RuntimeError: with the compiler's log.
    """
    from cuda.bindings import nvrtc

    def checked(status: object, *values: object) -> tuple[object, ...]:
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
        return values

    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--use_fast_math", f"-I{ROOT}/cuda"]
    options += [f"-I{path.parent}", "--device-as-default-execution-space", *more]
    options += [f"-DSK_{name}={value}" for name, value in macros.items()]
    (program,) = checked(*nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(*nvrtc.nvrtcGetProgramLogSize(program))[0]
        checked(*nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    if SYNTAX_ONLY in more:
        return b""
    of_size, of_code = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
    if architecture.startswith("sm_"):
        of_size, of_code = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
    code = b" " * checked(*of_size(program))[0]
    checked(*of_code(program, code))
    checked(*nvrtc.nvrtcDestroyProgram(program))
    return code


def check(case: tuple[str, dict[str, int]], architecture: str, quick: bool = True) -> None:
    """Compiles a case, with the options of an engine or with few optimisations.

    Args:
        case: the source and its constants.
        architecture: what to compile for.
        quick: whether to leave optimisations out. Everything that may stop a compilation stays: the source's
            assertions, the instructions of the architecture, and the limits of a kernel. It takes a third of the time.
    """
    source, macros = case
    macros = macros | counted(source, macros)
    if quick:
        code = build(ROOT / source, macros, architecture, QUICK)
    else:
        code = compile_source(ROOT / source, architecture, macros).code
    assert code, "an empty binary"


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    check(CASES[name], "sm_90", quick=name not in OPTIMISED)


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_the_oldest_architecture(name: str) -> None:
    # Instructions for float8 depend on the architecture, and only machine code tells whether it has them.
    check(CASES[name], "sm_80" if "fp8" in name else "compute_80")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", OF_EVERY_SOURCE)
def test_a_case_of_every_source_compiles_for_every_architecture(name: str, architecture: str) -> None:
    check(CASES[name], architecture)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *((name, "sm_120") for name in ("list cluster of 8", "decode a list")),
        *(("decode quarters", "sm_120"), ("decode leveled quarters", "sm_100")),
    ],
)
def test_clusters_compile_for_newer_architectures(name: str, architecture: str) -> None:
    check(HOPPER[name], architecture)


def test_every_source_is_compiled_with_the_options_of_an_engine() -> None:
    every = {source for source, _ in (CASES | HOPPER).values()}
    assert {(CASES | HOPPER)[name][0] for name in OPTIMISED} == every == {str(x.relative_to(ROOT)) for x in SOURCES}
    assert {CASES[name][0] for name in OF_EVERY_SOURCE} == every


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(p[0]) : "h"((unsigned short)p[1]));', "requires .target sm_89"),
        ("__shared__ unsigned all[12289]; all[p[0]] = 1; __syncthreads(); p[0] = all[p[1]];", "too much shared data"),
        ('for (int i = 0; i < p[0]; i++) asm volatile("st.u32 [%0], %1;" ::"l"(p), "n"(i));', "integral constant"),
        ('static_assert(sizeof(p) == 4, "pointer");', "pointer"),
    ],
    ids=["instruction", "shared memory", "constant", "assertion"],
)
def test_few_optimisations_refuse_what_an_engine_refuses(line: str, reason: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(f'extern "C" __global__ void kernel(unsigned* p) {{ {line} }}', encoding="utf-8")
    with pytest.raises(RuntimeError, match=reason):
        compile_source(source, "sm_80", {})
    with pytest.raises(RuntimeError, match=reason):
        build(source, {}, "sm_80", QUICK)


@pytest.mark.parametrize("case", OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_other_sizes_compile(case: tuple[str, dict[str, int]]) -> None:
    check(case, "compute_90")


@pytest.mark.parametrize("name", HOPPER)
def test_clusters_compile(name: str) -> None:
    check(HOPPER[name], "sm_90", quick=name not in OPTIMISED)


STRUCTS = {name: params.struct_of(name) for name in params.declarations()}
KERNEL_STRUCTS = {
    "DecodeParams": ("sparse_decode/decode.cu", HOPPER["decode that stops"]),
    "SplitParams": ("split_attention/attend.cu", CASES["split that stops"]),
    "MergeParams": ("split_attention/merge.cu", CASES["merge"]),
    "RouteParams": ("group_routing/route.cu", CASES["route"]),
    "ScoreParams": ("page_score/score.cu", CASES["score int8"]),
    "TopkParams": ("page_topk/topk.cu", CASES["top-k"]),
    "ListParams": ("page_topk/list.cu", CASES["list"]),
    "FindParams": ("sparse_decode/candidates.cu", CASES["find candidates"]),
}
"""Structs used by one kernel, and the source of each."""
SHARED_STRUCTS = [name for name in STRUCTS if name not in KERNEL_STRUCTS]


def struct_calls() -> Iterator[tuple[str, ast.Call]]:
    """The calls that make structs: `struct_of("NAME")(...)`, `NAME(...)`, and `cls(...)` in the class of a struct."""
    for source in ROOT.rglob("*.py"):
        for part in ast.parse(source.read_text(encoding="utf-8")).body:
            for node in ast.walk(part):
                match node:
                    case ast.Call(func=ast.Call(func=ast.Name("struct_of"), args=[ast.Constant(str(name))])):
                        yield name, node
                    case ast.Call(func=ast.Name("cls")) if getattr(part, "name", "") in STRUCTS:
                        yield part.name, node
                    case ast.Call(func=ast.Name(name)) if name in STRUCTS:
                        yield name, node


def test_every_call_that_fills_a_struct_names_all_fields() -> None:
    filled = set()
    for name, call in struct_calls():
        assert not call.args, name
        if call.keywords:
            assert {each.arg for each in call.keywords} == {field for field, _ in STRUCTS[name]._fields_}, name
            filled.add(name)
    assert filled == STRUCTS.keys()


def test_a_field_that_ctypes_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "declarations", lambda: {"OddParams": "    int some[4];  // Four.\n"})
    with pytest.raises(ValueError, match=r"^OddParams: got 'int some\[4\];', allowed: int, i64, float, a pointer or"):
        params.fields_of("OddParams")


def layout_assertions(name: str) -> str:
    """C++ assertions that a device struct has the size and offsets that the host uses."""
    struct = STRUCTS[name]
    offsets = "".join(
        f'static_assert(__builtin_offsetof({name}, {field}) == {getattr(struct, field).offset}, "{name}.{field}");\n'
        for field, _ in struct._fields_
    )
    return f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");\n{offsets}'


def compile_with(path: Path, text: str, macros: dict[str, int], *folders: Path) -> None:
    """Checks the assertions of a text, without code for its kernel. `folders` have headers beside those of `cuda`."""
    path.write_text(text, encoding="utf-8")
    build(path, macros, "sm_90", SYNTAX_ONLY, *(f"-I{folder}" for folder in folders))


def test_the_host_fills_shared_structs_as_the_device_reads_them(tmp_path: Path) -> None:
    assertions = "".join(map(layout_assertions, SHARED_STRUCTS))
    text = f'#include "params.cuh"\n#include "pieces.cuh"\n{assertions}'
    compile_with(tmp_path / "structs.cu", text, {}, ROOT / "split_attention")


@pytest.mark.parametrize("name", KERNEL_STRUCTS)
def test_the_host_fills_the_structs_of_a_kernel_as_the_device_reads_them(name: str, tmp_path: Path) -> None:
    source, (_, macros) = KERNEL_STRUCTS[name]
    text = (ROOT / source).read_text(encoding="utf-8") + layout_assertions(name)
    compile_with(tmp_path / "kernel.cu", text, macros | counted(source, macros), (ROOT / source).parent)


def test_a_struct_that_the_host_fills_otherwise_does_not_compile(tmp_path: Path) -> None:
    wrong = layout_assertions("StopParams").replace("== 8", "== 12")
    with pytest.raises(RuntimeError, match=r"StopParams\.patience"):
        compile_with(tmp_path / "structs.cu", f'#include "params.cuh"\n{wrong}', {})


def test_limits_of_the_host_are_those_of_the_device(tmp_path: Path) -> None:
    text = f"""
    #include "select.cuh"
    #include "whole.cuh"
    static_assert(MAX_CANDIDATES == {MAX_K}, "k");
    static_assert(MOST_STRIPES == {batch.MOST_STRIPES}, "stripes");
    static_assert(WHOLE_COUNTERS == {batch.WHOLE_COUNTERS}, "counters");
    static_assert(WHOLE_TOKENS == {batch.WHOLE_TOKENS}, "tokens");
    static_assert(Chunks::MOST == {MOST_CHUNK}, "chunk");
    """
    compile_with(tmp_path / "limits.cu", text, {})


def test_an_error_names_the_source() -> None:
    with pytest.raises(RuntimeError, match=r"topk\.cu does not compile for sm_90"):
        compile_source(ROOT / "page_topk/topk.cu", "sm_90", {})


KNOWN = [75, 80, 86, 89, 90, 100, 103, 120]
"""Architectures that an NVRTC may support."""


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_103"),
        ((12, 0), "sm_120"),
        ((12, 1), "compute_120"),
        ((11, 0), "compute_103"),
        ((8, 7), "compute_86"),
        ((13, 0), "compute_120"),
    ],
)
def test_a_gpu_that_nvrtc_does_not_know_gets_older_ptx(capability: tuple[int, int], architecture: str) -> None:
    assert architecture_of(capability, KNOWN) == architecture
    assert architecture_of(capability, KNOWN[::-1]) == architecture


def test_a_gpu_older_than_all_that_nvrtc_knows_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"compute capability: got 8\.0, allowed by NVRTC: \[90, 100\]"):
        architecture_of((8, 0), [100, 90])


def test_nvrtc_says_what_it_knows() -> None:
    assert {80, 90} <= set(_known_architectures())


@pytest.mark.parametrize(("architecture", "form"), [("sm_90", "cubin"), ("compute_90", "ptx")])
def test_an_architecture_decides_between_machine_code_and_ptx(
    architecture: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        def __init__(self, _text: str, _language: str, options: object) -> None:
            self.options = options

        def compile(self, form: str) -> tuple[object, str]:
            return self.options, form

    monkeypatch.setattr("cuda.core.Program", Program)
    options, compiled = compile_source(ROOT / "page_topk/topk.cu", architecture, TOPK)
    assert (options.arch, compiled) == (architecture, form)


@pytest.mark.parametrize("name", ["decode cluster", "decode that stops", "list cluster of 8"])
def test_the_newest_ptx_has_clusters(name: str) -> None:
    newest = max(_known_architectures())
    source, macros = HOPPER[name]
    ptx = build(ROOT / source, macros | counted(source, macros), f"compute_{newest}", QUICK)
    assert f".target sm_{newest}".encode() in ptx
    assert b".reqnctapercluster" in ptx or b".explicitcluster" in ptx

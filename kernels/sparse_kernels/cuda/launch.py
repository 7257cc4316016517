"""Compiles the CUDA sources of the operations and launches them on torch's stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_kernels.limits import CLUSTER_CAPABILITY

_HEADERS = Path(__file__).parent

FORMATS: dict[torch.dtype, int] = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float8_e4m3fn: 2,
    torch.int8: 3,
}
"""Numbers of element formats, as in common.cuh."""
SINK_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 6}
"""Formats of learned sink logits, with the same numbers."""
CODE_FORMATS = {2: 4, 4: 5}
"""Formats of codes, by bits per code, with the same numbers."""
LEVELED_FORMAT = 7
"""Format of leveled quarters, with the same numbers."""
_RESERVED_SHARED_BYTES = 1024
"""Shared memory that the GPU reserves per thread block, from compute capability 8.0 on."""


def compile_source(source: Path, architecture: str, macros: dict[str, int]) -> Any:
    """Compiles one CUDA source file. It needs no GPU.

    Args:
        source: the file; it may include the headers of this folder.
        architecture: `sm_90` produces machine code for compute capability 9.0, `compute_90` produces PTX. The driver
            compiles PTX for GPUs of that compute capability and later ones.
        macros: compile-time constants, defined with the prefix `SK_`.

    Returns:
        A `cuda.core` object code.

    Raises:
        RuntimeError: with the compiler's log, if the source does not compile.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        std="c++17",
        use_fast_math=True,
        arch=architecture,
        include_path=[str(_HEADERS), str(source.parent)],
        define_macro=[(f"SK_{name}", str(value)) for name, value in macros.items()] or None,
        device_as_default_execution_space=True,
        name=source.name,
    )
    try:
        return Program(source.read_text(), "c++", options).compile(
            "ptx" if architecture.startswith("compute_") else "cubin"
        )
    except Exception as error:
        raise RuntimeError(f"{source.name} does not compile for {architecture} with {macros}: {error}") from error


def architecture_of(capability: tuple[int, int], known: Sequence[int]) -> str:
    """Returns the architecture to compile for.

    Args:
        capability: compute capability of the GPU.
        known: architectures that NVRTC supports, 90 for compute capability 9.0.

    Returns:
        The GPU's own architecture. If NVRTC does not know it, as for a newer GPU, the newest older PTX.

    Raises:
        RuntimeError: if NVRTC knows neither the GPU nor an older one.
    """
    number = 10 * capability[0] + capability[1]
    if number in known:
        return f"sm_{number}"
    older = [architecture for architecture in known if architecture < number]
    if not older:
        raise RuntimeError(
            f"compute capability: got {capability[0]}.{capability[1]}, allowed by NVRTC: {sorted(known)}"
        )
    return f"compute_{max(older)}"


@functools.cache
def _known_architectures() -> tuple[int, ...]:
    from cuda.bindings import nvrtc

    status, architectures = nvrtc.nvrtcGetSupportedArchs()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"architectures of NVRTC: {status.name}")
    return tuple(architectures)


@dataclass
class Kernel:
    """A compiled kernel on one device."""

    handle: Any
    device: torch.device
    threads: int
    overlaps: bool
    """Whether a launch may begin before the previous kernel ends. Every kernel waits for that end before it reads."""
    _shared_bytes: int = 0

    def reserve_shared(self, num_bytes: int, blocks_per_sm: int | None = None) -> None:
        """Allows launches with up to `num_bytes` of dynamic shared memory.

        Args:
            num_bytes: bytes per thread block.
            blocks_per_sm: thread blocks that must fit a multiprocessor; None for as many as fit.

        Raises:
            ValueError: if the device has less shared memory.
        """
        from cuda.bindings import driver

        if num_bytes <= self._shared_bytes:
            return
        attributes = driver.CUfunction_attribute
        available = torch.cuda.get_device_properties(self.device).shared_memory_per_multiprocessor
        share = 100
        if blocks_per_sm:
            share = min(100, -(-100 * blocks_per_sm * (num_bytes + _RESERVED_SHARED_BYTES) // available))
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, num_bytes),
            # Without this, the driver may leave room for one thread block where two fit. The rest of the memory is
            # cache, which every load in flight uses.
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, share),
        ):
            status, *_ = driver.cuKernelSetAttribute(
                attribute,
                value,
                driver.CUkernel(int(self.handle.handle)),
                driver.CUdevice(_device_index(self.device)),
            )
            if status != driver.CUresult.CUDA_SUCCESS:
                raise ValueError(f"shared memory of a block: got {num_bytes} bytes, allowed: less ({status.name})")
        self._shared_bytes = num_bytes

    def launch(self, grid: tuple[int, int, int], params: ctypes.Structure, shared_bytes: int = 0) -> None:
        """Launches on torch's current stream.

        Args:
            grid: thread blocks in each dimension.
            params: the kernel's one argument.
            shared_bytes: dynamic shared memory of a thread block.

        Raises:
            RuntimeError: if the launch is refused.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self.device).cuda_stream
        if self.overlaps:
            config.attrs, config.numAttrs = _overlap(), 1
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function = driver.CUfunction(int(self.handle.handle))
        (status,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(argument), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launch of {grid} blocks with {shared_bytes} bytes of shared memory: {status.name}")


@functools.cache
def _overlap() -> list[Any]:
    """Returns the attribute of a launch that may begin before the previous kernel ends."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


def cluster_of(rows: int, width: int, least: int, device: torch.device) -> int:
    """Returns how many thread blocks share a row: about one wave in total, each with at least `least` pages.

    Args:
        rows: rows of the launch.
        width: pages of a row.
        least: the fewest pages of a thread block of a cluster.
        device: the GPU; without clusters the result is 1.
    """
    if torch.cuda.get_device_capability(device) < CLUSTER_CAPABILITY:
        return 1
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    cluster = 1
    while cluster < 8 and 2 * cluster * rows <= blocks and 2 * cluster * least <= width:
        cluster *= 2
    return cluster


def kernel(source: Path, device: torch.device, macros: dict[str, int], threads: int, name: str | None = None) -> Kernel:
    """Returns the entry function of a source file, compiled for a device.

    Args:
        source: the CUDA source.
        device: the device.
        macros: compile-time constants, see `compile_source`.
        threads: threads of a thread block.
        name: the name of the function; the name of the file's folder by default.

    Raises:
        RuntimeError: if the source does not compile.
    """
    where = torch.device("cuda", _device_index(device))
    return _kernel(source, where, tuple(sorted(macros.items())), threads, name or source.parent.name)


@functools.cache
def _kernel(source: Path, device: torch.device, macros: tuple[tuple[str, int], ...], threads: int, name: str) -> Kernel:
    from cuda.core import Device

    Device(device.index).set_current()
    capability = torch.cuda.get_device_capability(device)
    code = compile_source(source, architecture_of(capability, _known_architectures()), dict(macros))
    return Kernel(code.get_kernel(name), device, threads, overlaps=capability >= (9, 0))


def _device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index

"""Triton kernels on a machine without a GPU, in Triton's interpreter."""

import os
from importlib.util import find_spec

import numpy as np
import torch


def interpret_kernels() -> None:
    """Imports Triton and our kernels in interpreted form; to be called before anything else imports Triton.

    The variable that asks for it is gone afterwards: engines started by tests must not inherit it. No effect where
    kernels can be compiled, or without Triton.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import sparse_kernels.block_prefill.triton
        import sparse_kernels.page_score.triton
        import sparse_kernels.page_statistics.triton  # noqa: F401
        from triton.runtime import interpreter
    finally:
        del os.environ["TRITON_INTERPRET"]
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _dot


def _convert_float(values: np.ndarray, source, target, _rounding) -> np.ndarray:
    """Conversions between float types as GPUs round them: to the nearest, ties to even.

    Triton's own (3.6 to 3.9) truncates on the way to bfloat16; on the way to float8 it rounds ties up and loses the
    carry into the exponent.
    """
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}"))
    converted = bits.view(dtypes[source.name]).float().to(dtypes[target.name])
    width = target.primitive_bitwidth
    words = converted.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[width]).numpy()
    return words.view(f"uint{width}").reshape(values.shape)


def _dot(builder, a, b, accumulator, _precision, _most_imprecise):
    """The product of two matrices, of bfloat16 too, which Triton's own takes for the integers of their bits."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (torch.from_numpy(np.ascontiguousarray(x.data)) for x in (a, b))
    if a.dtype.scalar.name == "bf16":
        left, right = left.view(torch.bfloat16), right.view(torch.bfloat16)
    product = left.float() @ right.float() + torch.from_numpy(np.ascontiguousarray(accumulator.data))
    return TensorHandle(product.numpy().astype(accumulator.data.dtype), accumulator.dtype.scalar)

"""Triton kernels on a machine without a GPU, in Triton's interpreter."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import torch

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}


def interpret_kernels() -> None:
    """Imports Triton and the kernels in interpreted form. Call it before anything else imports Triton.

    The environment variable is removed afterwards, because engines of tests must not inherit it. No effect without
    Triton, or if kernels can be compiled.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import sparse_kernels.block_copy.triton
        import sparse_kernels.block_prefill.triton
        import sparse_kernels.compaction.held_triton
        import sparse_kernels.compaction.triton
        import sparse_kernels.hot_pages.triton
        import sparse_kernels.masked_attention.triton
        import sparse_kernels.multi_token_decode.triton
        import sparse_kernels.page_score.leveled_triton
        import sparse_kernels.page_score.triton
        import sparse_kernels.page_statistics.triton
        import sparse_kernels.rolling_attention.triton
        import sparse_kernels.token_prefill.triton  # noqa: F401
        from triton.runtime import interpreter
    finally:
        del os.environ["TRITON_INTERPRET"]
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    _repeat_less()


def _repeat_less() -> None:
    """Leaves out what the interpreter repeats, which takes half of its time.

    It patches Triton's language for each launch, and again for each call of a function within the launch. For each
    operation it makes a table of all types.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    # Functions of Triton itself, such as `tl.sum`, use the second module.
    of_every_function = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    known: dict[str, np.dtype] = {}

    def known_type(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = numpy_type(kind)
        return known[name]

    def call(function, *args, **kwargs):
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(of_every_function)
    interpreter._get_np_dtype = known_type
    interpreter.InterpretedFunction.__call__ = call


def _create_dot(_builder, a, b, d, _input_precision, _max_num_imprecise_acc):
    """Matrix products of elements that are exact in float32. Triton's version multiplies the bits of bfloat16."""
    from triton.runtime.interpreter import TensorHandle

    exact = [_float32(operand) for operand in (a, b)]
    return TensorHandle(np.matmul(*exact) + d.data, d.dtype.scalar)


def _float32(operand) -> np.ndarray:
    if operand.dtype.scalar.name == "fp32":
        return operand.data
    width = operand.dtype.primitive_bitwidth
    bits = torch.from_numpy(np.ascontiguousarray(operand.data).view(f"int{width}"))
    return bits.view(_DTYPES[operand.dtype.scalar.name]).float().numpy()


def _convert_float(values: np.ndarray, source, target, _rounding) -> np.ndarray:
    """Conversions between float types with the rounding of GPUs: to nearest, ties to even.

    Triton 3.6 to 3.9 truncates to bfloat16. To float8 it rounds ties up and loses the carry into the exponent.
    """
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}"))
    converted = bits.view(_DTYPES[source.name]).float().to(_DTYPES[target.name])
    width = target.primitive_bitwidth
    words = converted.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[width]).numpy()
    return words.view(f"uint{width}").reshape(values.shape)

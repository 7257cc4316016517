"""Other launch settings for the kernels of the soft mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from vllm_sparse_plugin.errors import ConfigurationError, choices

KERNELS = ("forward", "gradients", "scored_queries", "scored_records")
_FORM = "KERNEL=ROWSxCOLUMNSxWARPSxSTAGES"


class Trial(NamedTuple):
    """A kernel and its other launch settings."""

    kernel: str
    sizes: tuple[int, int, int, int]
    """Rows, columns, warps and stages."""

    def __str__(self) -> str:
        return f"{self.kernel}={'x'.join(map(str, self.sizes))}"


def parse_trials(texts: Sequence[str]) -> list[Trial]:
    """Parse texts such as `gradients=64x128x8x2`.

    Raises:
        ConfigurationError: for another text, or a size that is not a power of two; stages may be any number.
    """
    trials = []
    for text in texts:
        kernel, _, sizes = text.partition("=")
        numbers = tuple(int(size) if size.isdecimal() else 0 for size in sizes.split("x"))
        if kernel not in KERNELS:
            raise ConfigurationError(f"launch: got {text!r}, allowed: {_FORM} with the kernel {choices(KERNELS)}")
        if len(numbers) != 4 or min(numbers) < 1 or any(number & (number - 1) for number in numbers[:3]):
            raise ConfigurationError(f"launch: got {text!r}, allowed: {_FORM} with powers of two, and any stages")
        trials.append(Trial(kernel, numbers))
    return trials


@contextmanager
def launched(trial: Trial | None) -> Iterator[None]:
    """Launch a kernel with the settings of a trial in the block; with its own settings for None."""
    if trial is None:
        yield
        return
    from sparse_kernels.masked_attention.triton.launches import LAUNCHES, Launch

    before = LAUNCHES[trial.kernel]
    LAUNCHES[trial.kernel] = Launch(*trial.sizes)
    try:
        yield
    finally:
        LAUNCHES[trial.kernel] = before

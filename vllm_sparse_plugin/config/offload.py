"""Settings of offloading: keys and values in host memory."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ByteSize, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.policies.base import Section

AUTO = "auto"
"""The value of `host_memory` that takes a share of the free memory."""
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_MOST = 1 << 50


def bytes_of(text: str) -> int | None:
    """Returns the bytes of a size such as `200GiB`, at least 1 and less than 1 PiB; None for other text."""
    try:
        size = int(_SIZE.validate_python(text))
    except (ValidationError, OverflowError, ValueError):
        return None
    return size if 0 < size < _MOST else None


class Offload(Section):
    """Keys and values lie in pinned host memory. Page statistics stay on the GPU, so decode steps fetch only the pages
    that they select."""

    host_memory: Annotated[str, "auto, or a size such as 200GiB"] = AUTO
    """Host memory for keys and values of all workers, such as `200GiB`. `auto`: 70 % of the free memory; on a CPU
    what vLLM chooses."""

    hot_pages: Annotated[float, Field(ge=0, le=1024)] = 16.0
    """Copies of pages in free GPU memory, in multiples of what `max_num_seqs` requests read in a step. 0: none. Ignored
    on a CPU."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.host_memory != AUTO and bytes_of(self.host_memory) is None:
            raise PydanticCustomError(
                "sentence",
                "host_memory: got {got}, allowed: auto, or a size such as 200GiB",
                {"got": repr(self.host_memory[:80])},
            )
        return self

    @property
    def bytes(self) -> int | None:
        """The size in bytes; None for `auto`."""
        return None if self.host_memory == AUTO else bytes_of(self.host_memory)

"""Free host memory."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Pinned:
    """The memory that this process has pinned for caches."""

    size = 0
    """Bytes."""


def available_memory() -> int | None:
    """Returns the free bytes of this machine or container; None if unknown."""
    found = []
    with suppress(OSError, ValueError):
        match = re.search(r"^MemAvailable: +(\d+) kB", _MEMORY.read_text(encoding="utf-8"), re.MULTILINE)
        found += [int(match[1]) << 10] if match else []
    with suppress(OSError, ValueError):
        most, used = (int(_of_container(name)) for name in ("max", "current"))
        found.append(min(most, max(0, most - used) + _file_bytes()))
    return min(found, default=None)


def _of_container(name: str) -> str:
    return (_CGROUP / f"memory.{name}").read_text(encoding="utf-8")


def _file_bytes() -> int:
    """Returns the bytes of files that the container has read and that the system drops when a program needs memory."""
    with suppress(OSError):
        found = re.findall(r"^(?:in)?active_file (\d+)$", _of_container("stat"), re.MULTILINE)
        return sum(map(int, found))
    return 0

"""Free host memory."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Returns the free bytes of this machine or container; None if unknown."""
    found = []
    with suppress(OSError, ValueError):
        match = re.search(r"^MemAvailable: +(\d+) kB", _MEMORY.read_text(encoding="utf-8"), re.MULTILINE)
        found += [int(match[1]) << 10] if match else []
    with suppress(OSError, ValueError):
        most, used = (int((_CGROUP / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        found.append(max(0, most - used))
    return min(found, default=None)

"""Free host memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Names of limit and use of a control group, and what `memory.stat` puts before numbers of all groups inside: in
version 2 and in version 1."""


class Pinned:
    """The memory that this process has pinned for caches."""

    size = 0
    """Bytes."""
    free_before: int | None = None
    """Bytes that were free before any worker of this engine pinned its part; None if unknown."""


def note_free_memory() -> None:
    """Notes the free memory. Call it in each worker before any of them has its cache."""
    Pinned.free_before = available_memory()


def available_memory() -> int | None:
    """Returns the free bytes of this machine, or of the container or service around this process if it has fewer; None
    if unknown."""
    found = []
    with suppress(OSError, ValueError):
        match = re.search(r"^MemAvailable: +(\d+) kB", _MEMORY.read_text(encoding="utf-8"), re.MULTILINE)
        found += [int(match[1]) << 10] if match else []
    for group in _groups():
        for most_name, used_name, prefix in _FILES:
            with suppress(OSError, ValueError):
                most, used = (int((group / name).read_text(encoding="utf-8")) for name in (most_name, used_name))
                found.append(min(most, max(0, most - used) + _file_bytes(group, prefix)))
    return min(found, default=None)


def _groups() -> Iterator[Path]:
    """Yields the folders of the control groups around this process. The limit of each of them counts."""
    text = ""
    with suppress(OSError):
        text = _MEMBERSHIP.read_text(encoding="utf-8")
    paths = dict.fromkeys(("", "memory"), "")
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(.*)$", text, re.MULTILINE):
        if not controllers or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path
    for version, path in paths.items():
        # A container may see its group as the root, with a path that it does not see.
        folder = Path(path.strip("/"))
        for group in (folder, *folder.parents):
            yield _CGROUP / version / group


def _file_bytes(group: Path, prefix: str) -> int:
    """Returns the bytes of files that the group has read and that the system drops when a program needs memory."""
    with suppress(OSError):
        text = (group / "memory.stat").read_text(encoding="utf-8")
        return sum(map(int, re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", text, re.MULTILINE)))
    return 0

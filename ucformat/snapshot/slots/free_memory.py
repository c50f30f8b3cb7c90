"""How much memory a directory for snapshots can still take: the file system, the machine, the container.

On tmpfs a file is memory, and what is promised there and not touched yet may turn out not to be: the process then dies of it.
So slots are counted before they are made, and pages are taken at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are memory."""
PART = ".part"
_SLOT_PART = re.compile(r"slot-\d+\.safetensors\.part")
_CGROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Room:
    """What is free for new slots."""

    free: int
    """Bytes."""
    limit: str
    """What sets it, for messages."""
    kind: str
    """The file system: `tmpfs`, `ext4`…; empty when unknown."""

    @property
    def is_memory(self) -> bool:
        return self.kind in MEMORY_KINDS


def room(directory: str) -> Room:
    """What is free for the slots of one rank in an existing `directory`, less what other ranks are about to take there."""
    kind = filesystem(directory)
    status = os.statvfs(directory)
    limits: list[tuple[int, str]] = []
    if status.f_blocks:  # none: a tmpfs without a limit of its own
        limits.append((status.f_bavail * status.f_frsize, f"in its {kind or 'file system'}"))
    if kind in MEMORY_KINDS or not limits:
        limits += [(free, what) for free, what in (_machine(), _container()) if free is not None]
    free, limit = min(limits, default=(1 << 62, "no limit known"))
    return Room(free - sum(_promised(directory)), limit, kind)


def filesystem(directory: str) -> str:
    """Type of the file system that `directory` lies on, as /proc tells it; empty where it does not."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines("/proc/self/mountinfo"):
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return ""


def memory_mounts() -> list[str]:
    """Where file systems whose files are memory are mounted."""
    found: list[str] = []
    for line in _lines("/proc/self/mountinfo"):
        mount, _, rest = line.partition(" - ")
        if rest.split()[0] in MEMORY_KINDS:
            found.append(mount.split()[4].encode().decode("unicode_escape"))  # blanks are written \040
    return found


def _promised(directory: str) -> Iterator[int]:
    """Bytes that slots which are being made here will still take."""
    for folder in os.scandir(directory):
        if not folder.name.startswith("rank-"):
            continue
        try:
            for item in os.scandir(folder.path):
                if _SLOT_PART.fullmatch(item.name):
                    status = item.stat()
                    yield max(0, status.st_size - 512 * status.st_blocks)
        except (FileNotFoundError, NotADirectoryError):
            continue  # made or removed this moment


def _machine() -> tuple[int | None, str]:
    found = [int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    return (found[0] if found else None), "memory available on this machine"


def _container() -> tuple[int | None, str]:
    """What the tightest control group (version 2) above this process leaves; files in tmpfs count there too."""
    free: int | None = None
    inside = next((line[3:].strip() for line in _lines("/proc/self/cgroup") if line.startswith("0::")), None)
    while inside is not None:
        folder = _CGROUPS + inside.rstrip("/")
        limit, used = _lines(f"{folder}/memory.max"), _lines(f"{folder}/memory.current")
        if limit and used and limit[0].strip().isdigit():
            cached = sum(
                int(line.split()[1])
                for line in _lines(f"{folder}/memory.stat")
                if line.startswith(("active_file ", "inactive_file "))
            )
            left = int(limit[0]) - int(used[0]) + cached
            free = left if free is None else min(free, left)
        inside = os.path.dirname(inside) if inside.strip("/") else None
    return free, "of the container's memory limit"


def _lines(path: str) -> list[str]:
    """Lines of a file that may not be there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []

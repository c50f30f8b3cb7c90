"""Many small files that become durable together: to sync each before the next would wait for the disk thousands of times."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Sequence

_REPORTS_ERRORS = (5, 8)  # since this Linux, a sync of a whole file system says what could not be written


def write_together(files: Iterable[tuple[str, bytes]]) -> None:
    """Write files, (full path, bytes); all are durable once it returns, each may be seen half written before. Raises OSError."""
    folders, paths = set[str](), list[str]()
    for path, data in files:
        folder = os.path.dirname(path)
        if folder not in folders:
            os.makedirs(folder, exist_ok=True)
            folders.add(folder)
        _write(path, data)
        paths.append(path)
    above = {os.path.dirname(folder) for folder in folders}
    if paths and not _synced_at_once(os.path.dirname(paths[0])):
        _sync([*paths, *folders, *above])


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
    finally:
        os.close(fd)


def _synced_at_once(folder: str) -> bool:
    """Sync the file system of a directory: one wait for the disk. False where the system can't. Raises OSError."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release) if os.uname().sysname == "Linux" else None
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if release is None or call is None or (int(release[1]), int(release[2])) < _REPORTS_ERRORS:
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if call(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), folder)
    finally:
        os.close(fd)
    return True


def _sync(paths: Sequence[str]) -> None:
    """Make files, or the names in directories, durable."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

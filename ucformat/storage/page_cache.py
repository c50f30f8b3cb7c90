"""The page cache: what is in it, what goes there before it is read, and what leaves it once it is on the disk.

All of it are hints, to systems that take them: nothing here decides whether bytes are right or durable.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

FAR_BYTES = 2 << 20  # of reading ahead keep a disk busy; what the system reads by itself lies in larger pages
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_ALL = 7  # wait for what is under way, write the rest, wait for that
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def _system_call(name: str, *types: Any) -> Callable[..., int] | None:
    """A function of the C library that Python does not know; None where there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = types
    return found


_sync_file_range = _system_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
"""Has the kernel begin to write a range to disk, or waits for it (Linux)."""
_mincore = _system_call("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
"""Tells which pages of a mapping are in memory (not all systems; a file of somebody else's may count as there)."""


def send_on(fd: int, start: int, nbytes: int) -> None:
    """Send what was written on its way now, rather than all of it at the end. A hint: `fsync` is what makes it durable."""
    if _sync_file_range is not None:
        _sync_file_range(fd, start, nbytes, _SYNC_FILE_RANGE_WRITE)


def is_in_memory(fd: int, at: int) -> bool:
    """Whether byte `at` of a file is in the page cache. Unlike a read that must not wait, it brings nothing there."""
    if _mincore is None:
        return True
    page = mmap.ALLOCATIONGRANULARITY
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ, offset=at // page * page) as mapped:
            view, told = np.frombuffer(mapped, dtype=np.uint8), ctypes.create_string_buffer(1)
            here = _mincore(view.ctypes.data, 1, told) == 0 and bool(told.raw[0] & 1)
            del view  # a mapping in use can't be closed
    except (OSError, ValueError):
        return True  # a file that can't be mapped, or ends before
    return here


@cache
def reads_ahead(device: int) -> bool:
    """Whether the system reads far enough ahead of sequential readers on a device by itself; False where it does not tell."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for place in (f"dev/block/{number}/queue", f"dev/block/{number}/../queue", f"class/bdi/{number}"):
        try:
            with open(f"/sys/{place}/read_ahead_kb", encoding="ascii") as file:
                return int(file.read()) << 10 >= FAR_BYTES
        except (OSError, ValueError):
            pass  # a disk, a partition, or something else that has pages
    return False


def write_and_drop(fd: int, start: int, nbytes: int) -> None:
    """Wait until a range is on the disk, then take it out of the page cache. Raises OSError: `fsync` will not tell again."""
    if _sync_file_range is None or not hasattr(os, "posix_fadvise"):
        return
    if _sync_file_range(fd, start, nbytes, _SYNC_FILE_RANGE_ALL) < 0:
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
        return
    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)

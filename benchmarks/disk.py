"""The physical limit: the same bytes from an aligned buffer past the page cache, and files made cold or warm."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE = 4096  # bytes; direct I/O wants memory, offsets and lengths in multiples of the disk's block
CHUNK = 8 << 20  # bytes per call: beyond this no disk here got faster
THREADS = 2  # calls in flight per process: one leaves gaps between calls, more gain nothing


def touched_buffer(nbytes: int) -> NDArray[np.uint8]:
    """A page-aligned buffer of at least `nbytes`, rounded up to pages, every page in memory."""
    size = -(-nbytes // PAGE) * PAGE
    buffer = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    buffer[::PAGE] = 1
    return buffer


def raw_write(path: Path, buffer: NDArray[np.uint8]) -> None:
    """Write the buffer by direct I/O into a preallocated file and make it durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, len(buffer))
        _in_chunks(len(buffer), lambda start, stop: os.pwrite(fd, buffer.data[start:stop], start))
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, buffer: NDArray[np.uint8]) -> None:
    """Fill the buffer by direct I/O."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_chunks(len(buffer), lambda start, stop: os.preadv(fd, [buffer.data[start:stop]], start))
    finally:
        os.close(fd)


def _in_chunks(size: int, transfer: Callable[[int, int], int]) -> None:
    def one(start: int) -> None:
        stop = min(start + CHUNK, size)
        while start < stop:
            start += transfer(start, stop)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(0, size, CHUNK)))


def files(place: Path) -> Iterator[Path]:
    """All files in a directory and below, or the file itself."""
    if place.is_file():
        yield place
    else:
        yield from (path for path in sorted(place.rglob("*")) if path.is_file())


def size_of(place: Path) -> int:
    return sum(path.stat().st_size for path in files(place))


def sync(place: Path) -> None:
    """Make all files durable: peers that don't do so themselves are timed with it."""
    for path in files(place):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_cold(place: Path) -> None:
    """Drop all files from the page cache (they must be durable to be dropped)."""
    sync(place)
    for path in files(place):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def make_warm(place: Path) -> None:
    """Have all files in the page cache."""
    buffer = memoryview(bytearray(CHUNK))
    for path in files(place):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def clear(place: Path) -> None:
    """Remove a file or directory and let the disk come to rest."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    os.sync()


def require_space(place: Path, nbytes: float) -> None:
    """Raise RuntimeError unless the disk has room for `nbytes`."""
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise RuntimeError(
            f"{place}: {free / 1e9:.1f} GB free, {nbytes / 1e9:.1f} GB needed: choose another --dir or a smaller --size"
        )

"""Checksums of byte ranges: compute, compare, and put together when a range was read in parts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import xxhash

from ucformat.box import Ints
from ucformat.catalog import Algorithm, Checks
from ucformat.storage import Bytes

BLOCK_BYTES = 256 << 10  # small enough that a slice verifies little more than itself, long enough to hash at full speed


def digest(algorithm: Algorithm, data: Bytes) -> int:
    """The checksum of a buffer."""
    if algorithm == "xxh3-64":
        return int(xxhash.xxh3_64_intdigest(memoryview(data)))
    return zlib.crc32(memoryview(data))


def blocks(start: int, stop: int, size: int) -> tuple[Ints, Ints]:
    """Starts and stops of the blocks of `size` bytes that make up [start, stop), the last one shorter."""
    begin = np.arange(start, stop, size, dtype=np.int64)
    return begin, np.minimum(begin + size, stop)


def widen(checks: Checks, start: int, stop: int) -> tuple[int, int]:
    """[start, stop) widened to whole xxh3-64 blocks, so that every byte of it can be verified."""
    if checks.algorithm != "xxh3-64":
        return start, stop
    first = int(np.searchsorted(checks.stop, start, side="right"))
    last = int(np.searchsorted(checks.start, stop, side="left")) - 1
    if first > last:
        return start, stop
    return min(start, int(checks.start[first])), max(stop, int(checks.stop[last]))


def steps(checks: Checks | None, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in steps of about `size` bytes that end where xxh3-64 blocks end."""
    while start < stop:
        upto = min(start + size, stop)
        if checks is not None and checks.algorithm == "xxh3-64":
            i = int(np.searchsorted(checks.stop, upto, side="left"))
            if i < len(checks.start) and int(checks.start[i]) < upto:
                upto = min(int(checks.stop[i]), stop)
        yield start, upto
        start = upto


def inside(checks: Checks, start: int, stop: int) -> range:
    """Indices of the checked ranges that lie wholly within [start, stop)."""
    first = int(np.searchsorted(checks.start, start, side="left"))
    return range(first, max(first, int(np.searchsorted(checks.stop, stop, side="right"))))


def mismatches(checks: Checks, start: int, data: Bytes) -> Iterator[int]:
    """Indices of checked ranges wholly within `data` (bytes from `start` of the file) whose checksum differs."""
    for i in inside(checks, start, start + data.nbytes):
        begin = int(checks.start[i]) - start
        if digest(checks.algorithm, data[begin : int(checks.stop[i]) - start]) != int(checks.digest[i]):
            yield i


class Ledger:
    """crc32 of ranges that arrive in parts, in any order and from any thread.

    `add` returns the index of a range whose last part made it complete and wrong.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: Bytes) -> int | None:
        """Note bytes that were read from `start`. No byte may be noted twice."""
        checks, stop = self._checks, start + data.nbytes
        first = int(np.searchsorted(checks.stop, start, side="right"))
        wrong: int | None = None
        for i in range(first, len(checks.start)):
            low, high = max(start, int(checks.start[i])), min(stop, int(checks.stop[i]))
            if int(checks.start[i]) >= stop:
                break
            if low < high and not self._note(i, low, zlib.crc32(memoryview(data[low - start : high - start])), high - low):
                wrong = i if wrong is None else wrong
        return wrong

    def _note(self, index: int, start: int, crc: int, size: int) -> bool:
        begin, end = int(self._checks.start[index]), int(self._checks.stop[index])
        with self._lock:
            parts = self._parts.setdefault(index, {})
            parts[start] = (crc, size)
            if sum(n for _, n in parts.values()) < end - begin:
                return True
            del self._parts[index]
        total = 0
        for at in sorted(parts):
            total = crc32_combine(total, *parts[at])
        return total == int(self._checks.digest[index])


def crc32_combine(first: int, second: int, size: int) -> int:
    """crc32 of a + b from those of a and b, where `size` is the length of b in bytes."""
    return _times(_zeros(size), first) ^ second


@lru_cache(maxsize=64)  # parts come in a few sizes only
def _zeros(size: int) -> tuple[int, ...]:
    """The GF(2) matrix that advances a crc32 over `size` zero bytes."""
    power = [0xEDB88320, *(1 << n for n in range(31))]  # one zero bit: the reflected polynomial, then shifts
    for _ in range(3):
        power = [_times(power, row) for row in power]
    total = [1 << n for n in range(32)]
    while size:
        if size & 1:
            total = [_times(power, row) for row in total]
        size >>= 1
        if size:
            power = [_times(power, row) for row in power]
    return tuple(total)


def _times(matrix: Sequence[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= row
        vector >>= 1
    return total

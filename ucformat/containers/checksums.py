"""Checksums of byte ranges: compute, compare, and put together when a range was read in parts."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from zlib_ng import zlib_ng

from ucformat.box import Ints
from ucformat.catalog import Algorithm, Checks
from ucformat.storage.store import Bytes, Sheet

crc32, crc32_combine = zlib_ng.crc32, zlib_ng.crc32_combine
"""Three times as fast as zlib's; of a + b from those of a and b, and the length of b in bytes."""

BLOCK_BYTES = 256 << 10  # small enough that a slice verifies little more than itself, long enough to hash at full speed


def digest(algorithm: Algorithm, *parts: Bytes) -> int:
    """The checksum of bytes that lie in one buffer, or in several one after the other."""
    if algorithm == "crc32":
        crc = 0
        for part in parts:
            crc = crc32(memoryview(part), crc)
        return crc
    if len(parts) == 1:
        return int(xxhash.xxh3_64_intdigest(memoryview(parts[0])))
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(memoryview(part))
    return int(hasher.intdigest())


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
    if len(checks.start) and checks.algorithm == "xxh3-64":
        origin, size, count = int(checks.start[0]), int(checks.stop[0] - checks.start[0]), len(checks.start)
        first = max(0, -((origin - start) // size))
        last = count if stop >= int(checks.stop[-1]) else max(0, min(count - 1, (stop - origin) // size))
        return range(first, max(first, last))
    first = int(np.searchsorted(checks.start, start, side="left"))
    return range(first, max(first, int(np.searchsorted(checks.stop, stop, side="right"))))


def mismatches(checks: Checks, sheet: Sheet, start: int, stop: int) -> Iterator[int]:
    """Indices of checked ranges wholly within bytes [start, stop) of the file, whose memory `sheet` knows, that are wrong."""
    for i in inside(checks, start, stop):
        if digest(checks.algorithm, *sheet.cut(int(checks.start[i]), int(checks.stop[i]))) != int(checks.digest[i]):
            yield i


@dataclass(slots=True, eq=False)
class _Noted:
    """Bytes [start, stop) of a range, and their crc32 once it is computed."""

    start: int
    stop: int
    crc: int | None = None

    def join(self, after: _Noted) -> bool:
        """Become one with the part that follows, when they touch and both are known."""
        if self.stop != after.start or self.crc is None or after.crc is None:
            return False
        self.crc = crc32_combine(self.crc, after.crc, after.stop - after.start)
        self.stop = after.stop
        return True


class Ledger:
    """crc32 of ranges that arrive in parts, in any order and from any thread, some bytes perhaps more than once.

    `add` returns the index of a range whose last part made it complete and wrong.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._parts: dict[int, list[_Noted]] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()

    def add(self, start: int, data: Bytes) -> int | None:
        """Note bytes that were read from `start`."""
        checks, stop = self._checks, start + data.nbytes
        first = int(np.searchsorted(checks.stop, start, side="right"))
        wrong: int | None = None
        for i in range(first, len(checks.start)):
            low, high = max(start, int(checks.start[i])), min(stop, int(checks.stop[i]))
            if int(checks.start[i]) >= stop:
                break
            for part in self._claim(i, low, high) if low < high else ():
                crc = crc32(memoryview(data[part.start - start : part.stop - start]))
                if not self._note(i, part, crc) and wrong is None:
                    wrong = i
        return wrong

    def gaps(self, limit: int) -> list[tuple[int, int]]:
        """What is missing of ranges that were read but for at most `limit` bytes: padding, mostly."""
        found: list[tuple[int, int]] = []
        with self._lock:
            for i, parts in self._parts.items():
                stops = [int(self._checks.start[i]), *(part.stop for part in parts)]
                starts = [*(part.start for part in parts), int(self._checks.stop[i])]
                missing = [(a, b) for a, b in zip(stops, starts, strict=True) if a < b]
                if sum(b - a for a, b in missing) <= limit:
                    found += missing
        return found

    def _claim(self, index: int, start: int, stop: int) -> list[_Noted]:
        """The parts of [start, stop) that nobody has noted yet, from now on this caller's to compute."""
        fresh: list[_Noted] = []
        with self._lock:
            if index in self._done:
                return fresh
            parts = self._parts.setdefault(index, [])
            first = bisect.bisect_right(parts, start, key=lambda part: part.stop)
            at = start
            for other in parts[first:]:
                if other.start >= stop:
                    break
                if at < other.start:
                    fresh.append(_Noted(at, other.start))
                at = max(at, other.stop)
            if at < stop:
                fresh.append(_Noted(at, stop))
            for part in fresh:
                bisect.insort(parts, part, key=lambda part: part.start)
        return fresh

    def _note(self, index: int, part: _Noted, crc: int) -> bool:
        """Put in a claimed part's crc, merge it with its neighbours; False when it completes a range that is wrong."""
        with self._lock:
            part.crc = crc
            parts = self._parts[index]
            at = bisect.bisect_left(parts, part.start, key=lambda part: part.start)
            for left in (at, at - 1):
                if 0 <= left < len(parts) - 1 and parts[left].join(parts[left + 1]):
                    del parts[left + 1]
            whole = parts[0]
            if whole.crc is None or (whole.start, whole.stop) != (self._checks.start[index], self._checks.stop[index]):
                return True
            del self._parts[index]
            self._done.add(index)
        return whole.crc == int(self._checks.digest[index])

"""Writing files from pieces, without knowing where their bytes come from.

A file to be is literal bytes (headers, zip records) and pieces (row-major images of tensor boxes) at known offsets.
Whoever has the bytes gives a `Fill`: live tensors when saving, a read plan when converting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ucformat import process
from ucformat.box import Ints
from ucformat.containers import checksums
from ucformat.storage.local import aligned
from ucformat.storage.store import Bytes, Writer

CHUNK_BYTES = 4 << 20  # filled, hashed and written while it is in the cache; shorter ones cost conversions more planning
AHEAD = 3  # chunks that are ready, or nearly, for when the disk takes them faster than they come
STREAM_ALIGN = 64  # bytes; pieces that share a chunk start at multiples of it, so that any dtype can be viewed in place


@dataclass(frozen=True, slots=True)
class ByteRequest:
    """A request for bytes [start, stop) of the row-major image of piece `piece`, to be put into `out`."""

    piece: int
    start: int
    stop: int
    out: Bytes


ByteSource = Callable[[Sequence[ByteRequest]], None]
"""Puts the bytes of every part into its `out`; called from several threads at once."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The plan of a file: where its literals and pieces lie. Bytes that neither covers are zero."""

    size: int
    """Bytes [0, size) are written."""
    literals: Sequence[tuple[int, bytes]]
    """(file offset, bytes)."""
    piece: Ints
    """(P,) index by which the `Fill` knows a piece."""
    start: Ints
    """(P,) its file offset; ascending, disjoint."""
    nbytes: Ints
    """(P,) its length."""
    origin: int = 0
    """Chunks are cut at this offset and every `CHUNK_BYTES` after it."""

    def chunks(self) -> list[tuple[int, int]]:
        """File ranges that are written one at a time."""
        cuts = [*range(0, self.origin, CHUNK_BYTES), *range(self.origin, self.size, CHUNK_BYTES), self.size]
        return list(pairwise(cuts))


@dataclass(slots=True)
class _Writing:
    """One image on its way into a file."""

    image: FilePlan
    fill: ByteSource
    writer: Writer
    block_bytes: int | None
    on_bytes: Callable[[int], None] | None
    digests: NDArray[np.uint64]
    waiting: Iterator[tuple[int, tuple[int, int]]]
    """Numbered chunks that nobody has begun."""
    turn: threading.Condition = field(default_factory=threading.Condition)
    written: int = 0
    """Chunks that are written: they are filled side by side, and written in order."""
    failed: bool = False

    def work(self) -> None:
        """Fill, hash and write chunks until none is left. Several threads run it."""
        buffer = aligned(CHUNK_BYTES)
        try:
            for number, (start, stop) in self.waiting:
                data = buffer[: stop - start]
                moved = self._fill(start, stop, data)
                with self.turn:
                    self.turn.wait_for(lambda number=number: self.failed or self.written == number)  # type: ignore[misc]
                    if self.failed:
                        return
                self.writer.write(start, data)
                with self.turn:
                    self.written += 1
                    self.turn.notify_all()
                if self.on_bytes is not None and moved:
                    self.on_bytes(moved)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Have every thread end after what it is at."""
        with self.turn:
            self.failed = True
            self.turn.notify_all()

    def _fill(self, start: int, stop: int, data: Bytes) -> int:
        """Put bytes [start, stop) of the file into `data` and note their digests; how many are of pieces."""
        moved = self._put_pieces(start, stop, data)
        for at, literal in self.image.literals:
            low, high = max(at, start), min(at + len(literal), stop)
            if low < high:
                data[low - start : high - start] = np.frombuffer(literal, dtype=np.uint8)[low - at : high - at]
        if self.block_bytes is not None and start >= self.image.origin:
            first = (start - self.image.origin) // self.block_bytes
            for i, at in enumerate(range(0, len(data), self.block_bytes)):
                self.digests[first + i] = checksums.digest("xxh3-64", data[at : at + self.block_bytes])
        return moved

    def _put_pieces(self, start: int, stop: int, data: Bytes) -> int:
        """Fill in the pieces that lie in [start, stop), zero the rest; the bytes filled."""
        image = self.image
        first = int(np.searchsorted(image.start + image.nbytes, start, side="right"))
        last = int(np.searchsorted(image.start, stop, side="left"))
        parts: list[ByteRequest] = []
        at = start
        for i in range(first, last):
            begin, size = int(image.start[i]), int(image.nbytes[i])
            low, high = max(begin, start), min(begin + size, stop)
            if low >= high:
                continue
            data[at - start : low - start] = 0
            parts.append(ByteRequest(int(image.piece[i]), low - begin, high - begin, data[low - start : high - start]))
            at = high
        data[at - start :] = 0
        if parts:
            self.fill(parts)
        return sum(part.stop - part.start for part in parts)


def write_image(
    writer: Writer,
    image: FilePlan,
    fill: ByteSource,
    *,
    block_bytes: int | None = None,
    threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> NDArray[np.uint64]:
    """Write an image through `writer` in chunks, in order; `threads` (this process's share of the cores) fill the next ones.

    Returns the xxh3-64 digests of the blocks of `block_bytes` (a divisor of `CHUNK_BYTES`) from `image.origin` on, or an
    empty array without `block_bytes`. Memory: one chunk per thread, and what `fill` needs.
    """
    if block_bytes is not None and CHUNK_BYTES % block_bytes:
        raise ValueError(f"blocks of {block_bytes} bytes do not divide a chunk of {CHUNK_BYTES}")
    count = 0 if block_bytes is None else -(-(image.size - image.origin) // block_bytes)
    chunks = image.chunks()
    digests = np.zeros(count, dtype=np.uint64)
    writing = _Writing(image, fill, writer, block_bytes, on_bytes, digests, enumerate(chunks))
    threads = min(process.share() if threads is None else threads, len(chunks))
    if threads <= 1:
        writing.work()
        return digests
    with ThreadPoolExecutor(threads, thread_name_prefix="ucf-write") as pool:
        try:
            for future in [pool.submit(writing.work) for _ in range(threads)]:
                future.result()
        except BaseException:  # an interrupt reaches this thread alone
            writing.stop()
            raise
    return digests


@dataclass(frozen=True, slots=True)
class Filled:
    """Bytes of a piece, for writers that append."""

    piece: int
    start: int
    """Within the piece."""
    data: Bytes
    """Valid until the next are taken."""
    crc: int
    """Their crc32."""


def stream(
    sizes: Sequence[int], fill: ByteSource, chunk_bytes: int = CHUNK_BYTES, threads: int | None = None
) -> Iterator[Filled]:
    """The bytes of pieces 0, 1, … in order, while `threads` (this process's share of the cores) fill and hash the next ones.

    Small pieces share a chunk and one call of `fill`. Empty pieces yield nothing. Memory: a chunk per thread, and `AHEAD` more.
    """
    batches = _batches(sizes, chunk_bytes)
    threads = min(process.share() if threads is None else threads, max(1, len(batches)))
    ahead = threads + AHEAD
    buffers = [aligned(chunk_bytes) for _ in range(min(ahead + 1, len(batches)))]

    def ask(number: int) -> list[Filled]:
        buffer = buffers[number % len(buffers)]
        parts = [ByteRequest(piece, start, stop, buffer[at : at + stop - start]) for piece, start, stop, at in batches[number]]
        fill(parts)
        return [Filled(part.piece, part.start, part.out, checksums.crc32(part.out.data)) for part in parts]

    with ThreadPoolExecutor(threads, thread_name_prefix="ucf-stream") as pool:
        waiting = deque(pool.submit(ask, number) for number in range(min(ahead, len(batches))))
        try:
            for number in range(len(batches)):
                parts = waiting.popleft().result()
                if number + ahead < len(batches):
                    waiting.append(pool.submit(ask, number + ahead))
                yield from parts
        finally:
            for future in waiting:
                future.cancel()


def _batches(sizes: Sequence[int], chunk_bytes: int) -> list[list[tuple[int, int, int, int]]]:
    """(piece, start, stop, place in the chunk) of each chunk; places are aligned for any dtype."""
    batches: list[list[tuple[int, int, int, int]]] = []
    used = chunk_bytes
    for piece, size in enumerate(sizes):
        for start in range(0, size, chunk_bytes):
            stop = min(start + chunk_bytes, size)
            if used + stop - start > chunk_bytes:
                batches.append([])
                used = 0
            batches[-1].append((piece, start, stop, used))
            used += -(-(stop - start) // STREAM_ALIGN) * STREAM_ALIGN
    return batches

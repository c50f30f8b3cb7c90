"""Writing files from pieces, without knowing where their bytes come from.

A file to be is literal bytes (headers, zip records) and pieces (row-major images of tensor boxes) at known offsets.
Whoever has the bytes gives a `Fill`: live tensors when saving, a read plan when converting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ucformat import checks
from ucformat.box import Ints
from ucformat.localdisk import aligned
from ucformat.storage import Bytes, Writer

CHUNK_BYTES = 4 << 20  # filled, hashed and written by one thread: long enough for full disk speed
THREADS = 4  # chunks in flight
STREAM_ALIGN = 64  # bytes; pieces that share a chunk start at multiples of it, so that any dtype can be viewed in place


@dataclass(frozen=True, slots=True)
class Part:
    """A request for bytes [start, stop) of the row-major image of piece `piece`, to be put into `out`."""

    piece: int
    start: int
    stop: int
    out: Bytes


Fill = Callable[[Sequence[Part]], None]
"""Puts the bytes of every part into its `out`; called from several threads at once."""


@dataclass(frozen=True, slots=True)
class Image:
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

    image: Image
    fill: Fill
    writer: Writer
    block_bytes: int | None
    on_bytes: Callable[[int], None] | None
    digests: NDArray[np.uint64]
    memory: threading.local = field(default_factory=threading.local)

    def chunk(self, start: int, stop: int) -> None:
        if not hasattr(self.memory, "buffer"):
            self.memory.buffer = aligned(CHUNK_BYTES)
        data: Bytes = self.memory.buffer[: stop - start]
        moved = self._put_pieces(start, stop, data)
        for at, literal in self.image.literals:
            low, high = max(at, start), min(at + len(literal), stop)
            if low < high:
                data[low - start : high - start] = np.frombuffer(literal, dtype=np.uint8)[low - at : high - at]
        if self.block_bytes is not None and start >= self.image.origin:
            first = (start - self.image.origin) // self.block_bytes
            for i, at in enumerate(range(0, len(data), self.block_bytes)):
                self.digests[first + i] = checks.digest("xxh3-64", data[at : at + self.block_bytes])
        self.writer.write(start, data)
        if self.on_bytes is not None and moved:
            self.on_bytes(moved)

    def _put_pieces(self, start: int, stop: int, data: Bytes) -> int:
        """Fill in the pieces that lie in [start, stop), zero the rest; the bytes filled."""
        image = self.image
        first = int(np.searchsorted(image.start + image.nbytes, start, side="right"))
        last = int(np.searchsorted(image.start, stop, side="left"))
        parts: list[Part] = []
        at = start
        for i in range(first, last):
            begin, size = int(image.start[i]), int(image.nbytes[i])
            low, high = max(begin, start), min(begin + size, stop)
            if low >= high:
                continue
            data[at - start : low - start] = 0
            parts.append(Part(int(image.piece[i]), low - begin, high - begin, data[low - start : high - start]))
            at = high
        data[at - start :] = 0
        if parts:
            self.fill(parts)
        return sum(part.stop - part.start for part in parts)


def write_image(
    writer: Writer,
    image: Image,
    fill: Fill,
    *,
    block_bytes: int | None = None,
    threads: int = THREADS,
    on_bytes: Callable[[int], None] | None = None,
) -> NDArray[np.uint64]:
    """Write an image through `writer` in chunks, on threads where the storage allows it.

    Returns the xxh3-64 digests of the blocks of `block_bytes` (a divisor of `CHUNK_BYTES`) from `image.origin` on, or an
    empty array without `block_bytes`. Memory: one chunk per thread, and what `fill` needs.
    """
    if block_bytes is not None and CHUNK_BYTES % block_bytes:
        raise ValueError(f"blocks of {block_bytes} bytes do not divide a chunk of {CHUNK_BYTES}")
    count = 0 if block_bytes is None else -(-(image.size - image.origin) // block_bytes)
    work = _Writing(image, fill, writer, block_bytes, on_bytes, np.zeros(count, dtype=np.uint64))
    chunks = image.chunks()
    if writer.ordered or threads <= 1 or len(chunks) == 1:
        for start, stop in chunks:
            work.chunk(start, stop)
        return work.digests
    with ThreadPoolExecutor(threads, thread_name_prefix="ucf-write") as pool:
        futures = [pool.submit(work.chunk, start, stop) for start, stop in chunks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return work.digests


def stream(sizes: Sequence[int], fill: Fill, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int, Bytes]]:
    """The bytes of pieces 0, 1, … in order, for writers that append: (piece, start within it, bytes).

    The next chunk is filled on a thread while the caller uses this one; bytes are valid until the next are taken.
    Small pieces share a chunk and one call of `fill`. Empty pieces yield nothing.
    """
    batches = _batches(sizes, chunk_bytes)
    buffers = (aligned(chunk_bytes), aligned(chunk_bytes))

    def ask(number: int) -> list[Part]:
        buffer = buffers[number % 2]
        parts = [Part(piece, start, stop, buffer[at : at + stop - start]) for piece, start, stop, at in batches[number]]
        fill(parts)
        return parts

    with ThreadPoolExecutor(1, thread_name_prefix="ucf-stream") as pool:
        waiting: Future[list[Part]] | None = pool.submit(ask, 0) if batches else None
        for number in range(len(batches)):
            assert waiting is not None
            parts = waiting.result()
            if number + 1 < len(batches):
                waiting = pool.submit(ask, number + 1)
            for part in parts:
                yield part.piece, part.start, part.out


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

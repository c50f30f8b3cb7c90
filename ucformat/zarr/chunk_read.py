"""Part of a chunk as boxes of a tensor: what has to be read for it, and how that becomes its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.reshard.reading.lazy import read_bits
from ucformat.zarr.byte_range import boxes_of_items


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Bytes `start` to `stop` of a chunk of `shape` items of `dtype`, whose items within the tensor are `chunk`."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk: Box
    start: int
    stop: int

    def boxes(self) -> list[tuple[Box, Box | None]]:
        """Boxes of the chunk's items, in order, each with its part of the tensor; None where it lies beyond the edge."""
        size = self.dtype.itemsize
        found = boxes_of_items(self.shape, self.start // size, -(-self.stop // size)) if self.start < self.stop else ()
        return [(box, _within(box, self.chunk)) for box in found]

    def wanted(self) -> list[tuple[str, Box | None]]:
        """What `read_bits` is to read for it."""
        return [(self.name, stored) for _, stored in self.boxes() if stored is not None]

    def join(self, found: Iterator[NDArray[Any]]) -> memoryview:
        """Its bytes, from the next arrays of `found`. Items beyond the tensor's edge, which zarr's chunks have, are zero."""
        parts = [_padded(next(found), box) if stored else np.zeros(box.length, self.dtype) for box, stored in self.boxes()]
        flat = [part.reshape(-1) for part in parts]
        items = flat[0] if len(flat) == 1 else np.concatenate([np.zeros(0, self.dtype), *flat])
        skipped = self.start % self.dtype.itemsize
        return memoryview(items.view(np.uint8))[skipped : skipped + self.stop - self.start]


def read_all(catalog: Catalog, reads: list[ChunkRead]) -> list[memoryview | Exception]:
    """Several at once, in one plan, which costs little more than a single one. What fails, fails alone."""
    try:
        return list[memoryview | Exception](_read(catalog, reads))
    except Exception as error:  # of whichever of them
        if len(reads) == 1:
            return [error]
        return [outcome for one in reads for outcome in read_all(catalog, [one])]


def _read(catalog: Catalog, reads: list[ChunkRead]) -> list[memoryview]:
    wanted = [one for read in reads for one in read.wanted()]
    found = iter(read_bits(catalog, wanted) if wanted else ())
    return [read.join(found) for read in reads]


def _padded(bits: NDArray[Any], box: Box) -> NDArray[Any]:
    if bits.shape == box.length:
        return bits
    return np.pad(bits, [(0, whole - n) for n, whole in zip(bits.shape, box.length, strict=True)])


def _within(box: Box, chunk: Box) -> Box | None:
    length = tuple(min(n, size - o) for o, n, size in zip(box.offset, box.length, chunk.length, strict=True))
    if any(n <= 0 for n in length):
        return None
    return Box(tuple(o + c for o, c in zip(box.offset, chunk.offset, strict=True)), length)

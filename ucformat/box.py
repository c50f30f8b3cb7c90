"""Boxes: the only geometry there is. Intersect, cut flat ranges, prove coverage.

A box is a hyper-rectangle in the index space of a logical tensor. Scalars here are `Box` objects; on hot paths the
same geometry runs on int64 arrays of shape (N, D), one row per box, padded to D dimensions with offset 0, length 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and lengths per dimension; a 0-d box has volume 1."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor of `shape`."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        return math.prod(self.length)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.length, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when it is empty."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.length, other.offset, other.length, strict=True)]
        if any(h <= low for low, h in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))

    def relative_to(self, outer: Box) -> Box:
        """The same box in the index space of `outer`'s own elements."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.length)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of `shape`."""
        return len(shape) == len(self.offset) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.length, shape, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.length, strict=True)) + "]"


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements [start, stop) of the row-major order of `shape` into boxes, in that order.

    At most 2n-1 boxes for n dimensions, each contiguous in row-major order. Raises ValueError when the range is
    not within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start}-{stop} are not in a tensor of shape {list(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    return list(_cut((), tuple(shape), start, stop))


def _cut(prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes of [start, stop) within the sub-tensor `shape` at index `prefix`: head rows, whole rows, tail rows."""
    lead = (1,) * len(prefix)
    if len(shape) == 1:
        yield Box((*prefix, start), (*lead, stop - start))
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _cut((*prefix, first), shape[1:], start - first * row, stop - first * row)
        return
    whole_from, whole_to = -(-start // row), stop // row
    if start % row:
        yield from _cut((*prefix, first), shape[1:], start % row, row)
    if whole_from < whole_to:
        rest = (0,) * (len(shape) - 1)
        yield Box((*prefix, whole_from, *rest), (*lead, whole_to - whole_from, *shape[1:]))
    if stop % row:
        yield from _cut((*prefix, last), shape[1:], 0, stop % row)


def pad(rows: Sequence[Sequence[int]], ndim: int, fill: int) -> Ints:
    """Rows of up to `ndim` numbers as an (N, ndim) array, missing trailing columns set to `fill`."""
    out = np.full((len(rows), ndim), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def clip(a_offset: Ints, a_length: Ints, b_offset: Ints, b_length: Ints) -> tuple[Ints, Ints]:
    """Row-wise intersections of (N, D) boxes: offsets and lengths, a length of 0 or less where there is none."""
    low = np.maximum(a_offset, b_offset)
    return low, np.minimum(a_offset + a_length, b_offset + b_length) - low


def volumes(length: Ints) -> Ints:
    """Volume of each row of an (N, D) array of lengths."""
    product: Ints = np.prod(length, axis=1, dtype=np.int64)
    return product


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why boxes do not tile: `box` is held by no row (`overlap` False) or by several (`overlap` True)."""

    box: Box
    overlap: bool


def flaw(target: Box, offset: Ints, length: Ints) -> Flaw | None:
    """The first hole or overlap when (N, D) boxes are meant to tile `target`, or None when they do.

    The boxes must be clipped to `target`; empty ones are ignored. Sweeps the first dimension: between two cuts
    the set of boxes is constant, so each slab is the same question in one dimension less.
    """
    if target.volume == 0:
        return None
    alive = (length > 0).all(axis=1)
    offset, length = offset[alive], length[alive]
    return None if _is_grid(target, offset, length) else _flaw(target, offset, length)


def _is_grid(target: Box, offset: Ints, length: Ints) -> bool:
    """Whether the boxes are all cells of a grid over `target`, each once, as meshes cut tensors: cheap to see, however many."""
    cells = np.zeros(len(offset), dtype=np.int64)
    count = 1
    for dim, (first, extent) in enumerate(zip(target.offset, target.length, strict=True)):
        starts, at = np.unique(offset[:, dim], return_inverse=True)
        stops = np.append(starts[1:], first + extent)
        if not len(starts) or starts[0] != first or (offset[:, dim] + length[:, dim] != stops[at]).any():
            return False
        cells = cells * len(starts) + at
        count *= len(starts)
        if count > len(offset):
            return False
    return count == len(offset) and len(np.unique(cells)) == count


def _flaw(target: Box, offset: Ints, length: Ints) -> Flaw | None:
    if len(offset) == 0:
        return Flaw(target, overlap=False)
    same = (offset == target.offset).all(axis=1) & (length == target.length).all(axis=1)
    if same.any():
        if len(offset) == 1:
            return None
        other = 1 if same[0] else 0  # any other row lies inside the one that holds all
        return Flaw(Box(tuple(offset[other].tolist()), tuple(length[other].tolist())), overlap=True)
    start, stop = target.offset[0], target.offset[0] + target.length[0]
    cuts = np.unique(np.concatenate([offset[:, 0], offset[:, 0] + length[:, 0], [start, stop]]))
    order = np.argsort(offset[:, 0], kind="stable")
    lo, hi = offset[order, 0], offset[order, 0] + length[order, 0]
    rest = Box(target.offset[1:], target.length[1:])
    seen: int = 0
    active = np.empty(0, dtype=np.int64)
    for a, b in pairwise(cuts):
        upto = int(np.searchsorted(lo, a, side="right"))
        active = np.concatenate([active[hi[active] > a], np.arange(seen, upto)[hi[seen:upto] > a]])
        seen = upto
        rows = order[active]
        found = _flaw(rest, offset[rows, 1:], length[rows, 1:])
        if found is not None:
            slab = Box((int(a), *found.box.offset), (int(b - a), *found.box.length))
            return Flaw(slab, found.overlap)
    return None

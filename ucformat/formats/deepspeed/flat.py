"""Where elements of parameters lie in DeepSpeed's flat buffers: pure geometry on arrays, no files.

ZeRO-1, ZeRO-2 and BF16_Optimizer lay a group's parameters end to end (with padding after each, when alignment is asked for),
pad the whole, and cut it into equal slices: a rank's slice starts and ends anywhere. ZeRO-3 cuts every parameter
into equal slices, the last one padded: a rank's buffer is its slice of each parameter in turn. Either way a rank holds
runs of consecutive elements of parameters, and a run is at most 2n-1 boxes of an n-dimensional parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ucformat import box as boxes
from ucformat.box import Ints

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """N boxes of a group's parameters and where they lie in the ranks' flat buffers, as columns."""

    param: Ints
    """(N,) index of the parameter in the group."""
    rank: Ints
    """(N,) whose buffer."""
    at: Ints
    """(N,) element of that buffer where the box starts; the box is contiguous there."""
    offset: Ints
    """(N, D) box offsets, D being the most dimensions of any parameter in the group, padded with 0."""
    length: Ints
    """(N, D) box lengths, padded with 1."""


class Geometry(Protocol):
    """How one group's parameters lie in the ranks' flat buffers."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameters by name, in order."""
        ...

    def pieces(self, lengths: Sequence[int]) -> Pieces | None:
        """What the ranks hold, when their buffers have `lengths` elements; None when buffers of this group can't."""
        ...


@dataclass(frozen=True, slots=True)
class EvenSlices:
    """ZeRO-1, ZeRO-2, BF16_Optimizer: equal slices of all parameters end to end, `paddings[i]` elements after the i-th."""

    shapes: Mapping[str, Shape]
    paddings: Sequence[int]
    tail: int
    """The most padding that may stand at the end of the whole buffer."""

    def pieces(self, lengths: Sequence[int]) -> Pieces | None:
        """As in `Geometry`. Slices that hold padding at the end may be stored without it."""
        items = _items(self.shapes)
        ends = np.cumsum(items + np.asarray(self.paddings, dtype=np.int64))
        total = int(ends[-1]) if len(ends) else 0
        starts = starts_of_slices(lengths, total)
        if starts is None or sum(lengths) - total > self.tail:
            return None
        low = np.array(starts, dtype=np.int64)
        high = low + np.array(lengths, dtype=np.int64)
        begin = ends - items - np.asarray(self.paddings, dtype=np.int64)
        first = np.searchsorted(high, begin, side="right")
        count = np.maximum(np.searchsorted(low, begin + items, side="left") - first, 0)
        param = np.repeat(np.arange(len(items)), count)
        rank = np.arange(len(param)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        start = np.maximum(low[rank], begin[param])
        stop = np.minimum(high[rank], (begin + items)[param])
        return _pieces(self.shapes, param, rank, start - begin[param], stop - begin[param], start - low[rank])


@dataclass(frozen=True, slots=True)
class ParameterSlices:
    """ZeRO-3: every parameter cut into equal slices; a rank's buffer is its slice of each in turn."""

    shapes: Mapping[str, Shape]

    def pieces(self, lengths: Sequence[int]) -> Pieces | None:
        """As in `Geometry`. All buffers are equally long: the last slices are stored with their padding."""
        world, items = len(lengths), _items(self.shapes)
        size = -(-items // world)
        if set(lengths) != {int(size.sum())}:
            return None
        rank, param = np.divmod(np.arange(world * len(items)), max(1, len(items)))
        start = np.minimum(rank * size[param], items[param])
        stop = np.minimum(start + size[param], items[param])
        return _pieces(self.shapes, param, rank, start, stop, (np.cumsum(size) - size)[param])


def _items(shapes: Mapping[str, Shape]) -> Ints:
    return np.array([math.prod(shape) for shape in shapes.values()], dtype=np.int64)


def _pieces(shapes: Mapping[str, Shape], param: Ints, rank: Ints, start: Ints, stop: Ints, at: Ints) -> Pieces:
    """Elements [start, stop) of parameters, at element `at` of ranks' buffers, as boxes. Empty ranges are dropped."""
    ndim = max(map(len, shapes.values()), default=0)
    run, begin, offset, length = cut(boxes.pad(list(shapes.values()), ndim, 1)[param], start, stop)
    return Pieces(param[run], rank[run], at[run] + begin - start[run], offset, length)


def cut(shape: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut elements [start[i], stop[i]) of the row-major order of `shape[i]`, (N, D), into boxes: `box.flat_range` on arrays.

    Returns for every box the row i, its first element, and its offsets and lengths, (M, D). Going down from the
    first dimension, a range stays within one row for a while; then it splits into whole rows and a head and a tail of a row,
    which again are whole rows of the next dimension and a rest.
    """
    ndim = shape.shape[1]
    rows = np.flatnonzero(start < stop)
    if ndim == 0:
        empty = np.zeros((len(rows), 0), dtype=np.int64)
        return rows, np.zeros(len(rows), dtype=np.int64), empty, empty
    shape, low, high = shape[rows], start[rows], stop[rows]
    row_items = np.ones_like(shape)  # elements of a row, per dimension
    row_items[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    split = (low[:, None] // row_items != (high[:, None] - 1) // row_items) | ((high - low)[:, None] >= row_items)
    level = np.argmax(split, axis=1)
    found: list[tuple[Ints, Ints, Ints, Ints]] = []

    def add(k: int, which: Ints, begin: Ints, end: Ints) -> None:
        """Rows of dimension `k` from element `begin` to element `end`, where there are any."""
        kept = np.flatnonzero(begin < end)
        which, begin, end = which[kept], begin[kept], end[kept]
        length = shape[which].copy()
        length[:, :k] = 1
        length[:, k] = (end - begin) // row_items[which, k]
        digits = begin[:, None] // row_items[which] % shape[which]
        digits[:, k + 1 :] = 0
        found.append((which, begin, digits, length))

    for k in range(ndim):
        here = np.flatnonzero(level == k)
        step = row_items[here, k]
        add(k, here, -(-low[here] // step) * step, high[here] // step * step)
        below = np.flatnonzero(level < k)
        step, above = row_items[below, k], row_items[below, k - 1]
        add(k, below, -(-low[below] // step) * step, -(-low[below] // above) * above)
        add(k, below, high[below] // above * above, high[below] // step * step)
    which, begin, offset, length = (np.concatenate(part) for part in zip(*found, strict=True))
    return rows[which], begin, offset, length


def starts_of_slices(lengths: Sequence[int], total: int) -> list[int] | None:
    """Where each rank's slice starts in the flat buffer of `total` elements, given the lengths that are stored.

    All slices are equally long, but padding at the end of the buffer may have been cut off those that hold it. None when
    the lengths can't be such slices.
    """
    starts: list[int] = []
    at = 0
    for length in lengths:
        if length > lengths[0] or (length < lengths[0] and at + length < total):
            return None
        starts.append(at)
        at += length
    return starts if at >= total else None


def slice_elements(shapes: Mapping[str, Sequence[int]], world: int) -> int:
    """Elements of a rank's buffer for these parameters under ZeRO-3."""
    return sum(-(-math.prod(shape) // world) for shape in shapes.values())


def fill_buffers(shapes: Mapping[str, Shape], sizes: Sequence[int], world: int) -> list[dict[str, Shape]] | None:
    """Spread parameters, in order, over ZeRO-3 buffers of `sizes` elements; None when they do not fill them exactly."""
    filled: list[dict[str, Shape]] = []
    rest = list(shapes.items())[::-1]
    for size in sizes:
        members: dict[str, Shape] = {}
        room = size
        while rest and -(-math.prod(rest[-1][1]) // world) <= room:
            name, shape = rest.pop()
            members[name] = shape
            room -= -(-math.prod(shape) // world)
        if room:
            return None
        filled.append(members)
    return None if rest else filled

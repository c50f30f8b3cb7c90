"""From wanted boxes to byte ranges: pure array code that touches no file, process group or clock.

`plan` matches wanted boxes with fragments, proves that they are covered exactly once, cuts what is large, and orders the
result by file position. `execute` does the I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ucformat import box as boxes
from ucformat.box import Box, Ints
from ucformat.catalog import Catalog, FragmentTable, row_major
from ucformat.errors import CoverageError, OverlapError, UnsupportedError

PAIRS = 1 << 16  # fragment pairs matched at a time: bounds the planner's memory, and stays in the cache
EXPANDED_BYTES = 1 << 30  # a new tensor of more is made only where about as much is stored
_EXPANDED_TIMES = 16
TASK_BYTES = 8 << 20  # file bytes per read: long enough for full disk speed, short enough to spread over threads


@dataclass(frozen=True, slots=True)
class Wants:
    """M wanted boxes as columns; D and padding as in the catalog's fragment table."""

    tensor: NDArray[np.int32]
    """(M,) index into `Catalog.tensors`."""
    offset: Ints
    """(M, D)."""
    length: Ints
    """(M, D)."""

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """K pieces, each a box of one fragment that lies within one want; ascending by file and position."""

    catalog: Catalog
    wants: Wants
    want: NDArray[np.int64]
    """(K,) index into `wants`."""
    fragment: NDArray[np.int64]
    """(K,) row of the fragment table."""
    offset: Ints
    """(K, D) in the tensor's index space."""
    length: Ints
    """(K, D)."""
    start: Ints
    """(K,) first byte in the file."""
    stop: Ints
    """(K,) one past the last byte in the file."""
    contiguous: NDArray[np.bool_]
    """(K,) whether the bytes [start, stop) are just this piece, row-major."""

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted boxes that are read."""
        return int((boxes.volumes(self.length) * _itemsizes(self.catalog, self.wants)[self.want]).sum())


def refuse_expanded(catalog: Catalog, wanted: Wants) -> None:
    """Raise UnsupportedError for wants that would fill much memory with few stored bytes: a file of 1 KB can hold a view of 1 TB.

    For what is to become new tensors or files; memory that is there already may be filled.
    """
    table = catalog.fragments
    nbytes = np.prod(wanted.length, axis=1, dtype=np.float64) * _itemsizes(catalog, wanted)
    for index in np.flatnonzero(nbytes > EXPANDED_BYTES):
        tensor = int(wanted.tensor[index])
        rows = table.rows(tensor)
        stored = float((catalog.stops(rows) - table.start[rows]).sum())
        if nbytes[index] > _EXPANDED_TIMES * stored > 0:
            why = f"an expanded view of {stored:,.0f} stored bytes that would take {nbytes[index]:,.0f}: read slices of it"
            raise UnsupportedError(f"{catalog.url}: {catalog.tensors[tensor].name}", why)


def _itemsizes(catalog: Catalog, wanted: Wants) -> NDArray[np.int64]:
    """Of each want. Not of all tensors: conversions plan for a few bytes at a time."""
    return np.array([catalog.tensors[i].kind.itemsize for i in wanted.tensor.tolist()], dtype=np.int64)


def wants(catalog: Catalog, wanted: Iterable[tuple[str, Box | None]]) -> Wants:
    """Columns for (name, box) pairs; None is the whole tensor.

    Raises CoverageError for a name that is not stored or a box outside its tensor.
    """
    rows = []
    for name, box in wanted:
        try:
            index = catalog.find(name)
        except KeyError:
            raise CoverageError(name, box, catalog.url) from None
        shape = catalog.tensors[index].shape
        whole = Box.whole(shape) if box is None else box
        if not whole.inside(shape):
            raise CoverageError(name, whole, f"{catalog.url}: stored shape {list(shape)}")
        rows.append((index, whole))
    ndim = catalog.fragments.offset.shape[1]
    return Wants(
        np.array([index for index, _ in rows], dtype=np.int32),
        boxes.pad([box.offset for _, box in rows], ndim, 0),
        boxes.pad([box.length for _, box in rows], ndim, 1),
    )


def plan(catalog: Catalog, wanted: Wants) -> ReadPlan:
    """What to read for the wanted boxes. Raises CoverageError and OverlapError, naming tensor and box, before any read."""
    want, fragment, offset, length = _match(catalog.fragments, wanted)
    _prove(catalog, wanted, want, fragment, offset, length)
    pieces = _place(catalog, wanted, want, fragment, offset, length)
    pieces = cut(pieces, ~pieces.contiguous)
    return arrange(pieces)


def arrange(plan: ReadPlan) -> ReadPlan:
    """The same plan, ascending by file and position."""
    rows = np.lexsort((plan.start, plan.catalog.fragments.file[plan.fragment]))
    return ReadPlan(
        plan.catalog,
        plan.wants,
        plan.want[rows],
        plan.fragment[rows],
        plan.offset[rows],
        plan.length[rows],
        plan.start[rows],
        plan.stop[rows],
        plan.contiguous[rows],
    )


def _match(table: FragmentTable, wanted: Wants) -> tuple[NDArray[np.int64], NDArray[np.int64], Ints, Ints]:
    """All non-empty intersections of wants and fragments, by want: (want, fragment, offset, length)."""
    lo = np.searchsorted(table.tensor, wanted.tensor, side="left")
    count = np.searchsorted(table.tensor, wanted.tensor, side="right") - lo
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], Ints, Ints]] = []
    ends = np.cumsum(count)
    first = 0
    while first < len(wanted):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS, side="right")))
        number = count[first:last]
        want = np.repeat(np.arange(first, last), number)
        step = np.arange(len(want)) - np.repeat(np.cumsum(number) - number, number)
        fragment = np.repeat(lo[first:last], number) + step
        keep = _touching(table, wanted, want, fragment)
        want, fragment = want[keep], fragment[keep]
        offset, length = boxes.clip(table.offset[fragment], table.length[fragment], wanted.offset[want], wanted.length[want])
        found.append((want, fragment, offset, length))
        first = last
    if not found:
        none = np.empty(0, dtype=np.int64)
        return none, none, np.empty((0, table.offset.shape[1]), np.int64), np.empty((0, table.offset.shape[1]), np.int64)
    return (
        np.concatenate([f[0] for f in found]),
        np.concatenate([f[1] for f in found]),
        np.concatenate([f[2] for f in found]),
        np.concatenate([f[3] for f in found]),
    )


def _touching(table: FragmentTable, wanted: Wants, want: NDArray[np.int64], fragment: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the pairs that intersect; narrowed one dimension at a time, so most pairs cost one comparison."""
    keep = np.arange(len(want))
    for d in range(table.offset.shape[1]):
        w, f = want[keep], fragment[keep]
        low = np.maximum(table.offset[f, d], wanted.offset[w, d])
        high = np.minimum(table.offset[f, d] + table.length[f, d], wanted.offset[w, d] + wanted.length[w, d])
        keep = keep[high > low]
    return keep


def _prove(
    catalog: Catalog,
    wanted: Wants,
    want: NDArray[np.int64],
    fragment: NDArray[np.int64],
    offset: Ints,
    length: Ints,
) -> None:
    """Every want is tiled by its intersections, or an error names the hole or the overlap."""
    if not len(wanted):
        return
    held = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(held, want, boxes.volumes(length))
    count = np.bincount(want, minlength=len(wanted))
    suspects = np.flatnonzero((held != boxes.volumes(wanted.length)) | ~_disjoint_rows(want, count, offset, length))
    ends = np.cumsum(count)
    for index in suspects:
        rows = slice(int(ends[index] - count[index]), int(ends[index]))
        spec = catalog.tensors[wanted.tensor[index]]
        ndim = len(spec.shape)
        target = Box(tuple(map(int, wanted.offset[index, :ndim])), tuple(map(int, wanted.length[index, :ndim])))
        flaw = boxes.flaw(target, offset[rows, :ndim], length[rows, :ndim])
        if flaw is None:
            continue
        if not flaw.overlap:
            raise CoverageError(spec.name, flaw.box, catalog.url)
        _, size = boxes.clip(offset[rows, :ndim], length[rows, :ndim], np.array([flaw.box.offset]), np.array([flaw.box.length]))
        guilty = fragment[rows][(size > 0).all(axis=1)]
        raise OverlapError(spec.name, flaw.box, [catalog.files[i].path for i in catalog.fragments.file[guilty]])


def _disjoint_rows(want: NDArray[np.int64], count: NDArray[np.int64], offset: Ints, length: Ints) -> NDArray[np.bool_]:
    """(M,) whether a want's intersections are surely disjoint: one of them, or slices along a single dimension.

    False means "look closer", so that only unusual tilings cost a Python step.
    """
    sure = count <= 1
    if sure.all():
        return sure
    starts = np.cumsum(count) - count
    busy = np.flatnonzero(count > 0)
    spread = np.zeros((len(count), offset.shape[1]), dtype=bool)
    for d in range(offset.shape[1]):
        column = offset[:, d]
        low, high = np.minimum.reduceat(column, starts[busy]), np.maximum.reduceat(column, starts[busy])
        spread[busy, d] = low != high
    single = spread.sum(axis=1) == 1
    axis = spread.argmax(axis=1)[want]
    rows = np.arange(len(want))
    begin = offset[rows, axis]
    order = np.lexsort((begin, want))
    ends = begin + length[rows, axis]
    same = want[order][1:] == want[order][:-1]
    clash = same & (begin[order][1:] < ends[order][:-1])
    clean = np.ones(len(count), dtype=bool)
    clean[want[order][1:][clash]] = False
    proven: NDArray[np.bool_] = sure | (single & clean)
    return proven


def _place(
    catalog: Catalog, wanted: Wants, want: NDArray[np.int64], fragment: NDArray[np.int64], offset: Ints, length: Ints
) -> ReadPlan:
    """Where each piece lies in its file."""
    table = catalog.fragments
    size = _itemsizes(catalog, wanted)[want]
    stride = table.strides(fragment)
    start = table.start[fragment] + ((offset - table.offset[fragment]) * stride).sum(axis=1) * size
    span = ((length - 1) * stride).sum(axis=1) + 1
    dense = row_major(length)
    contiguous = ((length == 1) | (stride == dense)).all(axis=1)
    return ReadPlan(catalog, wanted, want, fragment, offset, length, start, start + span * size, contiguous)


def cut(plan: ReadPlan, which: NDArray[np.bool_]) -> ReadPlan:
    """Cut those pieces whose bytes are spread over more than a task into boxes that are not; unordered."""
    large = which & (plan.stop - plan.start > TASK_BYTES)
    if not large.any():
        return plan
    table = plan.catalog.fragments
    parts: list[tuple[int, Ints, Ints]] = []
    for k in np.flatnonzero(large):
        fragment = plan.fragment[k : k + 1]
        stride = table.strides(fragment)[0]
        size = plan.catalog.tensors[table.tensor[fragment[0]]].kind.itemsize
        for offset, length in _halves(plan.offset[k], plan.length[k], stride, size):
            parts.append((int(k), offset, length))
    origin = np.array([k for k, _, _ in parts], dtype=np.int64)
    rest = np.flatnonzero(~large)
    return _place(
        plan.catalog,
        plan.wants,
        np.concatenate([plan.want[rest], plan.want[origin]]),
        np.concatenate([plan.fragment[rest], plan.fragment[origin]]),
        np.concatenate([plan.offset[rest], np.stack([offset for _, offset, _ in parts])]),
        np.concatenate([plan.length[rest], np.stack([length for _, _, length in parts])]),
    )


def _halves(offset: Ints, length: Ints, stride: Ints, itemsize: int) -> Iterable[tuple[Ints, Ints]]:
    """Slice a strided box along its widest-reaching dimension until each slice spans at most a task."""
    reach = (length - 1) * stride
    if (int(reach.sum()) + 1) * itemsize <= TASK_BYTES:
        yield offset, length
        return
    axis = int(np.argmax(reach))
    inner = (int(reach.sum() - reach[axis]) + 1) * itemsize
    step = max(1, (TASK_BYTES - inner) // max(1, int(stride[axis]) * itemsize) + 1) if inner <= TASK_BYTES else 1
    for at in range(0, int(length[axis]), step):
        part_offset, part_length = offset.copy(), length.copy()
        part_offset[axis] += at
        part_length[axis] = min(step, int(length[axis]) - at)
        if inner <= TASK_BYTES:
            yield part_offset, part_length
        else:
            yield from _halves(part_offset, part_length, stride, itemsize)

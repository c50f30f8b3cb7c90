"""Tensors computed of others without reading them: renamed, cut, joined, stacked, permuted, reshaped and padded.

A `View` is a small table of fragments of one tensor to be. Its operations rewrite these rows (which box lies where, with
which strides), so that any box of the result is planned straight into the source's files and nothing is ever gathered.
Readers and maps between model families build a catalog from views with `Rewrite`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucformat.box import Ints
from ucformat.catalog import Catalog, File, FragmentTable, Notes, TensorSpec
from ucformat.dtypes import DTYPES

_ZEROS = 16  # bytes of the item that padding repeats: as wide as any dtype


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `dtype` and `shape` in N fragments. Operations raise ValueError for what they can't mean."""

    dtype: str
    shape: tuple[int, ...]
    file: NDArray[np.int32]
    """(N,) index into the files of the `Rewrite`."""
    start: Ints
    """(N,) byte offset of each fragment's first item."""
    offset: Ints
    """(N, D) box offsets, D being the number of dimensions."""
    length: Ints
    """(N, D) box lengths, none of them 0."""
    stride: Ints
    """(N, D) in items, 0 where an item is repeated."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def narrow(self, axis: int, start: int, length: int) -> View:
        """Items [start, start + length) along an axis, as `torch.narrow`."""
        if not 0 <= start <= start + length <= self.shape[axis]:
            raise ValueError(f"items {start}:{start + length} along axis {axis} of shape {list(self.shape)}")
        low = np.maximum(self.offset[:, axis], start)
        high = np.minimum(self.offset[:, axis] + self.length[:, axis], start + length)
        keep = np.flatnonzero(high > low)
        moved = self.start + (low - self.offset[:, axis]) * self.stride[:, axis] * self.itemsize
        offset, size = self.offset.copy(), self.length.copy()
        offset[:, axis], size[:, axis] = low - start, high - low
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return View(self.dtype, shape, self.file[keep], moved[keep], offset[keep], size[keep], self.stride[keep])

    def split(self, sizes: Sequence[int], axis: int = 0) -> list[View]:
        """Consecutive parts along an axis, which `sizes` add up to."""
        if sum(sizes) != self.shape[axis]:
            raise ValueError(f"parts of {list(sizes)} along axis {axis} of shape {list(self.shape)}")
        ends = np.cumsum(sizes).tolist()
        return [self.narrow(axis, end - size, size) for end, size in zip(ends, sizes, strict=True)]

    def permute(self, *axes: int) -> View:
        """Axes in another order, as `torch.permute`. Costs strided copies when it is read."""
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"axes {list(axes)} of {self.ndim}")
        order = list(axes)
        shape = tuple(self.shape[axis] for axis in axes)
        columns = (self.offset[:, order], self.length[:, order], self.stride[:, order])
        return View(self.dtype, shape, self.file, self.start, *columns)

    def transpose(self) -> View:
        """The transpose of a matrix."""
        return self.permute(1, 0)

    def unsqueeze(self, axis: int = 0) -> View:
        """One more axis, of length 1, before `axis`."""
        shape = (*self.shape[:axis], 1, *self.shape[axis:])
        return View(
            self.dtype,
            shape,
            self.file,
            self.start,
            np.insert(self.offset, axis, 0, axis=1),
            np.insert(self.length, axis, 1, axis=1),
            np.insert(self.stride, axis, 0, axis=1),
        )

    def select(self, axis: int, index: int) -> View:
        """One item along an axis, without that axis."""
        return self.narrow(axis, index, 1)._dropped(axis)

    def _dropped(self, axis: int) -> View:
        """Without an axis of length 1."""
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        columns = (np.delete(column, axis, axis=1) for column in (self.offset, self.length, self.stride))
        return View(self.dtype, shape, self.file, self.start, *columns)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> View:
        """One axis as several, row-major, as `torch.unflatten`."""
        if math.prod(sizes) != self.shape[axis] or not sizes:
            raise ValueError(f"sizes {list(sizes)} for axis {axis} of shape {list(self.shape)}")
        if len(sizes) == 1:
            return self
        return self._halved(axis, sizes[0], math.prod(sizes[1:])).unflatten(axis + 1, sizes[1:])

    def _halved(self, axis: int, outer: int, inner: int) -> View:
        """An axis of outer x inner items as two. A fragment becomes up to three: part of a row, whole rows, part of a row."""
        rows: list[tuple[int, int, int, int, int, int]] = []
        for row, (at, n) in enumerate(zip(self.offset[:, axis].tolist(), self.length[:, axis].tolist(), strict=True)):
            rows += [(row, *cut) for cut in _rows_of(at, n, inner)]
        table = np.array(rows, dtype=np.int64).reshape(-1, 6)
        which, skipped = table[:, 0], table[:, 1]
        step = self.stride[which, axis]
        shape = (*self.shape[:axis], outer, inner, *self.shape[axis + 1 :])
        offset, length, stride = (np.insert(c[which], axis, 0, axis=1) for c in (self.offset, self.length, self.stride))
        offset[:, axis], length[:, axis], stride[:, axis] = table[:, 2], table[:, 3], step * inner
        offset[:, axis + 1], length[:, axis + 1], stride[:, axis + 1] = table[:, 4], table[:, 5], step
        start = self.start[which] + skipped * step * self.itemsize
        return View(self.dtype, shape, self.file[which], start, offset, length, stride)

    def flatten(self, axis: int, count: int = 2) -> View:
        """`count` axes from `axis` on as one, row-major, as `torch.flatten`."""
        view = self
        for last in range(axis + count - 2, axis - 1, -1):
            view = view._merged(last)
        return view

    def _merged(self, axis: int) -> View:
        """Two neighbouring axes as one. Fragments whose items don't follow one another evenly are cut, one per outer index."""
        inner = self.shape[axis + 1]
        whole = (self.length[:, axis + 1] == inner) & (self.stride[:, axis] == self.stride[:, axis + 1] * inner)
        single = self.length[:, axis] == 1
        column = self.length[:, axis + 1] == 1 if inner == 1 else np.zeros(len(self.start), dtype=bool)
        view = self._exploded(axis, ~(whole | single | column))
        shape = (*self.shape[:axis], self.shape[axis] * inner, *self.shape[axis + 2 :])
        (o, p), (n, m), (s, t) = ((c[:, axis], c[:, axis + 1]) for c in (view.offset, view.length, view.stride))
        offset, length, stride = (np.delete(c, axis, axis=1) for c in (view.offset, view.length, view.stride))
        offset[:, axis], length[:, axis] = o * inner + p, n * m
        stride[:, axis] = np.where(m == 1, np.where(n == 1, 0, s), t)
        return View(self.dtype, shape, view.file, view.start, offset, length, stride)

    def _exploded(self, axis: int, which: NDArray[np.bool_]) -> View:
        """Those fragments cut into one for each index along an axis."""
        if not which.any():
            return self
        count = np.where(which, self.length[:, axis], 1)
        row = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        offset, length = self.offset[row], self.length[row]
        offset[:, axis] += step
        length[which[row], axis] = 1
        start = self.start[row] + step * self.stride[row, axis] * self.itemsize
        return View(self.dtype, self.shape, self.file[row], start, offset, length, self.stride[row])

    def reshape(self, *shape: int) -> View:
        """Another shape of the same items, row-major."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"shape {list(shape)} for {list(self.shape)}")
        flat = self.flatten(0, self.ndim) if self.ndim else self.unsqueeze()
        if not shape:
            return flat._dropped(0)
        return flat.unflatten(0, shape)

    def repeat(self, axis: int, times: int) -> View:
        """An axis of length 1 repeated, without storing it again."""
        if self.shape[axis] != 1:
            raise ValueError(f"axis {axis} of shape {list(self.shape)} is not 1")
        length, stride = self.length.copy(), self.stride.copy()
        length[:, axis], stride[:, axis] = times, 0
        shape = (*self.shape[:axis], times, *self.shape[axis + 1 :])
        view = View(self.dtype, shape, self.file, self.start, self.offset, length, stride)
        return view if times else view.narrow(axis, 0, 0)


def _rows_of(at: int, n: int, inner: int) -> Iterable[tuple[int, int, int, int, int]]:
    """Items [at, at + n) as boxes of rows of `inner`: (items before it, first row, rows, first column, columns)."""
    done = 0
    while done < n:
        row, column = divmod(at + done, inner)
        if column or n - done < inner:
            size = min(inner - column, n - done)
            yield done, row, 1, column, size
            done += size
        else:
            rows = (n - done) // inner
            yield done, row, rows, 0, inner
            done += rows * inner


def concat(views: Sequence[View], axis: int = 0) -> View:
    """Views one after another along an axis, as `torch.cat`."""
    if not views:
        raise ValueError("nothing to join")
    first = views[0]
    for view in views:
        fits = view.ndim == first.ndim and all(
            a == b for i, (a, b) in enumerate(zip(view.shape, first.shape, strict=True)) if i != axis
        )
        if view.dtype != first.dtype or not fits:
            raise ValueError(f"{view.dtype} {list(view.shape)} does not join {first.dtype} {list(first.shape)} along axis {axis}")
    if len(views) == 1:
        return first
    sizes = [view.shape[axis] for view in views]
    ends = np.cumsum(sizes)
    moved = []
    for view, end, size in zip(views, ends, sizes, strict=True):
        offset = view.offset.copy()
        offset[:, axis] += int(end) - size
        moved.append(offset)
    shape = (*first.shape[:axis], int(ends[-1]), *first.shape[axis + 1 :])
    return View(
        first.dtype,
        shape,
        np.concatenate([view.file for view in views]),
        np.concatenate([view.start for view in views]),
        np.concatenate(moved),
        np.concatenate([view.length for view in views]),
        np.concatenate([view.stride for view in views]),
    )


def stack(views: Sequence[View], axis: int = 0) -> View:
    """Views of one shape along a new axis, as `torch.stack`."""
    return concat([view.unsqueeze(axis) for view in views], axis)


class Extent(NamedTuple):
    """Contiguous items of a file: where they start, and in which file of the `Rewrite`."""

    file: int
    start: int


class Rewrite:
    """A catalog being rewritten: gives views of its tensors, and makes a catalog of views."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.files: list[File] = list(catalog.files)
        self._strides = catalog.fragments.strides()
        self._zeros: int | None = None

    def view(self, name: str) -> View:
        """The tensor of that name (or alias). Raises KeyError."""
        catalog, index = self.catalog, self.catalog.find(name)
        spec, table, rows = catalog.tensors[index], catalog.fragments, catalog.fragments.rows(index)
        ndim = len(spec.shape)
        columns = (column[rows, :ndim] for column in (table.offset, table.length, self._strides))
        return View(spec.dtype, spec.shape, table.file[rows], table.start[rows], *columns)

    def zeros(self, dtype: str, shape: Sequence[int]) -> View:
        """A tensor of zeros, which takes no room anywhere."""
        if self._zeros is None:
            self._zeros = len(self.files)
            self.files.append(File("zeros that fill up a tensor", _ZEROS, inline=bytes(_ZEROS)))
        count = 0 if 0 in shape else 1
        column = np.zeros((count, len(shape)), dtype=np.int64)
        length = np.array([shape], dtype=np.int64).reshape(1, -1)[:count]
        return View(
            dtype, tuple(shape), np.full(count, self._zeros, np.int32), np.zeros(count, np.int64), column, length, column.copy()
        )

    def padded(self, view: View, axis: int, size: int) -> View:
        """The view with zeros behind it, up to `size` along an axis."""
        if size < view.shape[axis]:
            raise ValueError(f"size {size} along axis {axis} of shape {list(view.shape)}")
        if size == view.shape[axis]:
            return view
        rest = (*view.shape[:axis], size - view.shape[axis], *view.shape[axis + 1 :])
        return concat([view, self.zeros(view.dtype, rest)], axis)

    def inline(self, dtype: str, shape: Sequence[int], data: bytes, origin: str) -> View:
        """A small tensor whose bytes are at hand, computed from what `origin` says."""
        self.files.append(File(origin, len(data), inline=data))
        return contiguous(dtype, shape, Extent(len(self.files) - 1, 0))

    def build(
        self,
        views: Mapping[str, View],
        aliases: Mapping[str, str] | None = None,
        values: object = None,
        notes: Notes | None = None,
    ) -> Catalog:
        """The catalog that holds those views by name; values and notes stay unless given."""
        names = sorted(views)
        ndim = max((view.ndim for view in views.values()), default=0)
        ordered = [views[name] for name in names]
        counts = [len(view.start) for view in ordered]
        total = sum(counts)
        offset, stride = np.zeros((total, ndim), np.int64), np.zeros((total, ndim), np.int64)
        length = np.ones((total, ndim), np.int64)
        at = 0
        for view, count in zip(ordered, counts, strict=True):
            for whole, column in ((offset, view.offset), (length, view.length), (stride, view.stride)):
                whole[at : at + count, : view.ndim] = column
            at += count
        table = FragmentTable(
            np.repeat(np.arange(len(names), dtype=np.int32), counts),
            np.concatenate([np.empty(0, np.int32), *(view.file for view in ordered)]),
            np.concatenate([np.empty(0, np.int64), *(view.start for view in ordered)]),
            offset,
            length,
            stride,
        )
        return replace(
            self.catalog,
            tensors=tuple(TensorSpec(name, view.dtype, view.shape) for name, view in zip(names, ordered, strict=True)),
            fragments=table,
            files=tuple(self.files),
            values=self.catalog.values if values is None else values,
            aliases=dict(aliases or {}),
            notes=notes or self.catalog.notes,
            _index={},
        )


def contiguous(dtype: str, shape: Sequence[int], at: Extent) -> View:
    """A tensor whose items lie row-major in one place of a file."""
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= n
    return strided(dtype, shape, stride, at)


def strided(dtype: str, shape: Sequence[int], stride: Sequence[int], at: Extent) -> View:
    """A tensor whose items lie in a file at strides, counted in items."""
    count = 0 if 0 in shape else 1
    rows = [np.array([row], dtype=np.int64).reshape(1, -1)[:count] for row in ([0] * len(shape), list(shape), list(stride))]
    return View(dtype, tuple(shape), np.full(count, at.file, np.int32), np.full(count, at.start, np.int64), *rows)

"""Which boxes of a logical tensor a local tensor holds, and where in the local tensor they lie.

Works on numbers alone: mesh shape, coordinate and placements in, boxes out. A dimension sharded over several mesh
axes, or by a strided shard (FSDP2 over TP), is a list of runs of indices; the boxes are the product of the runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ucformat.box import Box, flat_range

Run = tuple[int, int]
"""(first index, count) of consecutive indices of one dimension."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """One box of the logical tensor, and where it lies in the local one."""

    box: Box
    at: Box | int
    """A box of the local tensor, or the position in a flat (1-D) one from which it lies row-major."""


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """How a local tensor of shape `local` lies in the logical tensor of `shape`."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    held: tuple[HeldBox, ...]
    """No empty boxes."""
    replicated: bool = False
    """Other ranks are known to hold the same boxes."""

    def views(self, local: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box with the view of `local` (of the local shape, any strides) that holds it."""
        for held in self.held:
            if isinstance(held.at, Box) and held.at.length == self.local:
                yield held.box, local
            elif isinstance(held.at, Box):
                yield held.box, local[held.at.slices]
            else:
                yield held.box, local[held.at : held.at + held.box.volume].view(held.box.length)


def whole(shape: Sequence[int]) -> LocalPlacement:
    """The local tensor is the logical one, and any rank may hold it."""
    box = Box.whole(shape)
    return LocalPlacement(tuple(shape), tuple(shape), (HeldBox(box, box),) if box.volume else (), replicated=True)


def shard(shape: Sequence[int], offset: Sequence[int], length: Sequence[int], *, replicated: bool = False) -> LocalPlacement:
    """The local tensor is one box."""
    box = Box(tuple(offset), tuple(length))
    held = (HeldBox(box, Box.whole(box.length)),) if box.volume else ()
    return LocalPlacement(tuple(shape), box.length, held, replicated)


def flat(shape: Sequence[int], start: int, stop: int, local: int, at: int = 0, *, replicated: bool = False) -> LocalPlacement:
    """Elements [start, stop) of the row-major order lie from position `at` on in a 1-D tensor of `local` elements."""
    held = []
    for box in flat_range(shape, start, stop):
        held.append(HeldBox(box, at))
        at += box.volume
    return LocalPlacement(tuple(shape), (local,), tuple(held), replicated)


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis cuts dimension `dim` into `parts`, of which this rank has number `index`.

    With `factor` above 1 the cut is strided: the dimension is first cut into `factor` blocks, each of them into
    `parts`, and the rank has its part of every block.
    """

    dim: int
    parts: int
    index: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """A cut as seen by the whole mesh: by mesh axis `axis`, of `parts` ranks."""

    axis: int
    dim: int
    parts: int
    factor: int = 1

    def at(self, coordinate: Sequence[int]) -> Cut:
        return Cut(self.dim, self.parts, coordinate[self.axis], self.factor)


def inner_first(splits: Sequence[Split]) -> list[Split] | None:
    """The order in which strided splits came about, or None when their factors are no product of the splits to their right.

    FSDP2 over TP cuts what TP has cut: its strided split comes last then, and needs no factor. For sizes that don't divide
    evenly this is not the same as the strided split by definition, before the others.
    """
    order: list[Split] = []
    for split in reversed(splits):
        if split.factor == 1:
            order.insert(0, split)
        elif split.factor == math.prod(s.parts for s in order if s.dim == split.dim):
            order.append(replace(split, factor=1))
        else:
            return None
    return order


def is_even(shape: Sequence[int], splits: Sequence[Split]) -> bool:
    """Whether every strided split divides its dimension evenly, together with the others: then their order does not matter."""
    strided = {split.dim for split in splits if split.factor > 1}
    return all(shape[dim] % math.prod(s.parts for s in splits if s.dim == dim) == 0 for dim in strided)


def grid(shape: Sequence[int], cuts: Sequence[Cut], *, replicated: bool = False) -> LocalPlacement:
    """Apply `cuts` in order, each to what the ones before left, cutting as `torch.chunk` does."""
    runs: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for cut in cuts:
        pieces: list[Run] = []
        for block in range(cut.factor):
            pieces += _chunk(_chunk(runs[cut.dim], cut.factor, block), cut.parts, cut.index)
        runs[cut.dim] = _merge(pieces)
    local = tuple(sum(count for _, count in dim) for dim in runs)
    return LocalPlacement(tuple(shape), local, tuple(_boxes(runs)), replicated)


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[HeldBox]:
    """The product of the runs of each dimension, in row-major order of the local tensor."""
    located = [list(_locate(dim)) for dim in runs]
    for choice in itertools.product(*located):
        length = tuple(count for _, count, _ in choice)
        yield HeldBox(Box(tuple(first for first, _, _ in choice), length), Box(tuple(at for _, _, at in choice), length))


def _locate(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for first, count in runs:
        yield first, count, at
        at += count


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Part `index` of the indices in `runs`, sizes as `torch.chunk` makes them: all but the last equal, then empty ones."""
    total = sum(count for _, count in runs)
    size = -(-total // parts)
    start, stop = min(size * index, total), min(size * (index + 1), total)
    out: list[Run] = []
    for first, count, at in _locate(runs):
        lo, hi = max(start, at), min(stop, at + count)
        if lo < hi:
            out.append((first + lo - at, hi - lo))
    return out


def _merge(runs: Sequence[Run]) -> list[Run]:
    out: list[Run] = []
    for first, count in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((first, count))
    return out


def clip(placed: LocalPlacement, shape: Sequence[int]) -> LocalPlacement:
    """What of `placed` (unflattened boxes) lies in a logical tensor of another `shape` that starts at the same corner."""
    held = []
    for item in placed.held:
        inside = item.box.intersect(Box.whole(shape))
        if inside is not None and isinstance(item.at, Box):
            at = tuple(a + i - o for a, i, o in zip(item.at.offset, inside.offset, item.box.offset, strict=True))
            held.append(HeldBox(inside, Box(at, inside.length)))
    return LocalPlacement(tuple(shape), placed.local, tuple(held), placed.replicated)


def volume(placed: LocalPlacement) -> int:
    """Elements of the logical tensor that are held."""
    return sum(math.prod(held.box.length) for held in placed.held)

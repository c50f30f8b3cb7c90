"""Where the boxes of a tensor-parallel rank's shard lie in the whole tensor: pure geometry, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ucformat.box import flat_range

_MAX_RUNS = 1 << 20  # of one view: a map that needs more describes no layout that anybody trains with

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of a shard and the equal box of the whole tensor that it is."""

    shard: Shape
    """Offset in the shard."""
    whole: Shape
    """Offset in the whole tensor."""
    length: Shape


def along(dim: int, shards: Sequence[Shape], parts: Sequence[Sequence[int]]) -> tuple[Shape, list[list[Cut]]]:
    """Shards that each hold a share of every part of dimension `dim`: part p of rank r is `parts[p][r]` long.

    The whole has all ranks' shares of the first part, then those of the second, and so on. Returns its shape and each rank's
    cuts. Raises ValueError when shapes and lengths disagree.
    """
    first = shards[0]
    if not all(len(shape) == len(first) > dim for shape in shards):
        raise ValueError(f"shards of shapes {list(map(list, shards))} have no common dimension {dim}")
    for rank, shape in enumerate(shards):
        if shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            raise ValueError(f"shards of shapes {list(map(list, shards))} differ in more than dimension {dim}")
        if sum(part[rank] for part in parts) != shape[dim]:
            raise ValueError(f"the parts {[part[rank] for part in parts]} of rank {rank} do not add up to {shape[dim]}")
    cuts: list[list[Cut]] = [[] for _ in shards]
    at, used = 0, [0] * len(shards)
    for part in parts:
        for rank, n in enumerate(part):
            length = (*first[:dim], n, *first[dim + 1 :])
            zeros = (0,) * len(first)
            cuts[rank].append(Cut(_with(zeros, dim, used[rank]), _with(zeros, dim, at), length))
            at, used[rank] = at + n, used[rank] + n
    return (*first[:dim], at, *first[dim + 1 :]), cuts


def _with(shape: Shape, dim: int, value: int) -> Shape:
    return (*shape[:dim], value, *shape[dim + 1 :])


def chunks(length: int, number: int) -> list[int]:
    """Lengths of `number` chunks as torch.chunk makes them: all of the first one's length, until nothing is left."""
    size = -(-length // number)
    return [max(0, min(size, length - i * size)) for i in range(number)]


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a flat, row-major tensor: what `torch.as_strided` takes."""

    offset: int
    strides: Shape


def view_cuts(shape: Shape, shard: View, whole: View, shard_shape: Shape, whole_shape: Shape) -> list[Cut]:
    """The boxes that equal views of a shard and of the whole tensor are. Raises ValueError for views that are no boxes."""
    sides: list[tuple[View, Shape]] = [(shard, shard_shape), (whole, whole_shape)]
    for view, of in sides:
        last = view.offset + sum((n - 1) * step for n, step in zip(shape, view.strides, strict=True))
        if view.offset < 0 or min(view.strides, default=0) < 0 or (_items(shape) and last >= _items(of)):
            raise ValueError(f"a view of shape {list(shape)} reaches out of a tensor of shape {list(of)}")
    if not math.prod(shape):
        return []
    inner, run = _run(shape, shard, whole)
    if math.prod(shape) // run > _MAX_RUNS:
        raise ValueError(f"a view of {math.prod(shape) // run} runs of elements")
    found: list[Cut] = []
    for a, b in _starts(shape[:inner], shard, whole):
        found += _run_cuts(a, b, run, shard_shape, whole_shape)
    return _joined(found)


def _items(shape: Shape) -> int:
    return math.prod(shape)


def _run(shape: Shape, shard: View, whole: View) -> tuple[int, int]:
    """From which dimension on both views are contiguous, and how many elements that is."""
    inner, run = len(shape), 1
    while inner and (shape[inner - 1] == 1 or shard.strides[inner - 1] == run == whole.strides[inner - 1]):
        inner -= 1
        run *= shape[inner]
    return inner, run


def _starts(shape: Shape, shard: View, whole: View) -> list[tuple[int, int]]:
    starts = [(shard.offset, whole.offset)]
    for n, a, b in zip(shape, shard.strides, whole.strides, strict=False):
        starts = [(x + i * a, y + i * b) for x, y in starts for i in range(n)]
    return starts


def _run_cuts(a: int, b: int, run: int, shard_shape: Shape, whole_shape: Shape) -> list[Cut]:
    """Elements [a, a+run) of a shard that are [b, b+run) of the whole tensor, both row-major."""
    cuts: list[Cut] = []
    for box in flat_range(whole_shape, b, b + run):
        held = flat_range(shard_shape, a, a + box.volume)
        if len(held) != 1 or held[0].length != box.length:
            raise ValueError(f"a view of {box.length} elements that are no box of a shard of shape {list(shard_shape)}")
        cuts.append(Cut(held[0].offset, box.offset, box.length))
        a += box.volume
    return cuts


def _joined(cuts: Sequence[Cut]) -> list[Cut]:
    """Boxes that continue one another in one dimension, made one: rows of a column-parallel shard, say."""
    joined: list[Cut] = []
    for cut in cuts:
        last = joined[-1] if joined else None
        dim = None if last is None else _continues(last, cut)
        if last is None or dim is None:
            joined.append(cut)
        else:
            joined[-1] = Cut(last.shard, last.whole, _with(last.length, dim, last.length[dim] + cut.length[dim]))
    return joined


def _continues(last: Cut, cut: Cut) -> int | None:
    """The one dimension in which `cut` begins where `last` ends, in the shard and in the whole."""
    moved = [d for d in range(len(cut.whole)) if cut.whole[d] != last.whole[d]]
    if len(moved) != 1 or [d for d in range(len(cut.shard)) if cut.shard[d] != last.shard[d]] != moved:
        return None
    d = moved[0]
    same = cut.length[:d] + cut.length[d + 1 :] == last.length[:d] + last.length[d + 1 :]
    ends = cut.whole[d] == last.whole[d] + last.length[d] and cut.shard[d] == last.shard[d] + last.length[d]
    return d if same and ends else None

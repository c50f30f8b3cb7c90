"""Where the ranks' shards lie in a whole tensor, by a rule: pure geometry, from shards to the whole and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ucformat.layout.cuts import Cut, Shape, View, chunks, view_cuts
from ucformat.layout.filenames import Coords
from ucformat.layout.language import Rule

Segment = tuple[int, int, int]
"""Of one dimension: where it begins in the shard, where in the whole, and its length."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor over ranks."""

    shape: Shape
    """Of the whole tensor, without padding."""
    shards: Sequence[Shape]
    """Each rank's shape, padding included."""
    cuts: Sequence[Sequence[Cut]]
    """Each rank's boxes. What no box covers in a shard is padding. Ranks with equal boxes hold copies."""
    padding: int = 0
    """How much longer than the whole tensor the ranks' shards are together, along the padded dimension."""


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A dimension that axes cut: part p of rank r is `widths[p][r]` long."""

    widths: Sequence[Sequence[int]]

    @property
    def total(self) -> int:
        return sum(map(sum, self.widths))

    def length(self, rank: int) -> int:
        return sum(part[rank] for part in self.widths)

    def segments(self, rank: int) -> list[Segment]:
        found, at, held = [], 0, 0
        for part in self.widths:
            before = at + sum(part[:rank])
            found.append((held, before, part[rank]))
            held, at = held + part[rank], at + sum(part)
        return found


def from_shards(rule: Rule, mesh: Mapping[str, int], coords: Sequence[Coords], shards: Sequence[Shape]) -> Placed:
    """The whole tensor of shards that ranks at `coords` hold. Raises ValueError for shapes that don't fit the rule."""
    views = [_unflattened(rule, mesh, shape, whole=False) for shape in shards]
    first = views[0]
    cutting = _cutting(rule, mesh, len(first))
    numbers = [_numbers(cutting, mesh, at) for at in coords]
    lengths = {dim: _lengths(dim, cutting[dim], mesh, views, numbers) for dim in cutting}
    for view, at in zip(views, coords, strict=True):
        if len(view) != len(first) or any(n != first[d] for d, n in enumerate(view) if d not in cutting):
            raise ValueError(f"its shard at {_at(at)} has shape {list(view)}, another one {list(first)}")
    dims = {dim: _Dimension(_widths(rule, len(held), sum(held), held)) for dim, held in lengths.items()}
    for dim, held in lengths.items():
        if [dims[dim].length(r) for r in range(len(held))] != held:
            raise ValueError(
                f"its ranks hold {held} along dimension {dim}, and should {[dims[dim].length(r) for r in range(len(held))]}"
            )
    whole = tuple(dims[d].total if d in dims else n for d, n in enumerate(first))
    if rule.pad is not None:
        padded = whole[rule.pad.dim] if rule.pad.dim < len(whole) else -1
        if padded < rule.pad.size or rule.pad.to not in (None, padded):
            raise ValueError(
                f"'pad' says {rule.pad.size} padded to {rule.pad.to or 'more'} along dimension {rule.pad.dim} of {list(whole)}"
            )
    return _placed(rule, whole, views, shards, numbers, dims)


def from_whole(rule: Rule, mesh: Mapping[str, int], coords: Sequence[Coords], shape: Shape) -> Placed:
    """The shards of a tensor for ranks at `coords`. Raises ValueError for a shape that does not divide."""
    view = _unflattened(rule, mesh, shape, whole=True)
    cutting = _cutting(rule, mesh, len(view))
    padded = _padded(rule, view, cutting, mesh)
    dims = {}
    for dim, axes in cutting.items():
        dims[dim] = _Dimension(_widths(rule, math.prod(mesh[axis] for axis in axes), padded[dim], None))
    numbers = [_numbers(cutting, mesh, at) for at in coords]
    views = [tuple(dims[d].length(own[d]) if d in dims else n for d, n in enumerate(padded)) for own in numbers]
    shards = [_flattened(rule, held) for held in views]
    return _placed(rule, padded, views, shards, numbers, dims)


def _placed(
    rule: Rule,
    whole: Shape,
    views: Sequence[Shape],
    shards: Sequence[Shape],
    numbers: Sequence[Mapping[int, int]],
    dims: Mapping[int, _Dimension],
) -> Placed:
    """Boxes of each rank, cut off where padding begins, in the dimensions of the tensor itself."""
    true = whole if rule.pad is None else (*whole[: rule.pad.dim], rule.pad.size, *whole[rule.pad.dim + 1 :])
    known: dict[tuple[object, ...], list[Cut]] = {}
    cuts = []
    for view, shard, own in zip(views, shards, numbers, strict=True):
        key = (view, *own.values())
        if key not in known:
            each = [dims[d].segments(own[d]) if d in dims else [(0, 0, n)] for d, n in enumerate(view)]
            boxes = [_within(_box(segments), true) for segments in itertools.product(*each)]
            kept = [cut for cut in boxes if cut is not None]
            known[key] = kept if rule.unflatten is None else _as_stored(kept, view, true, shard, _flattened(rule, true))
        cuts.append(known[key])
    padding = 0 if rule.pad is None else whole[rule.pad.dim] - rule.pad.size
    return Placed(_flattened(rule, true), list(shards), cuts, padding)


def _box(segments: Sequence[Segment]) -> Cut:
    return Cut(*(tuple(segment[i] for segment in segments) for i in range(3)))


def _within(cut: Cut, shape: Shape) -> Cut | None:
    """What of a box is inside a shape; None when nothing is, or the box is empty."""
    length = tuple(min(n, limit - at) for n, at, limit in zip(cut.length, cut.whole, shape, strict=True))
    return None if any(n <= 0 for n in length) else replace(cut, length=length)


def _as_stored(cuts: Sequence[Cut], view: Shape, whole: Shape, shard: Shape, stored: Shape) -> list[Cut]:
    """Boxes of an unflattened tensor as boxes of the tensor itself."""
    of_view, of_whole = _strides(view), _strides(whole)
    found = []
    for cut in cuts:
        a = View(sum(at * step for at, step in zip(cut.shard, of_view, strict=True)), of_view)
        b = View(sum(at * step for at, step in zip(cut.whole, of_whole, strict=True)), of_whole)
        found += view_cuts(cut.length, a, b, shard, stored)
    return found


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _cutting(rule: Rule, mesh: Mapping[str, int], ndim: int) -> dict[int, list[str]]:
    """Dimension → the axes that cut it, in the order of the mesh."""
    cutting: dict[int, list[str]] = {}
    for axis in mesh:
        if axis in rule.shard:
            cutting.setdefault(rule.shard[axis], []).append(axis)
    if odd := [dim for dim in (*cutting, *([] if rule.pad is None else [rule.pad.dim])) if dim >= ndim]:
        raise ValueError(f"it has {ndim} dimensions, and the rule names dimension {odd[0]}")
    return cutting


def _numbers(cutting: Mapping[int, Sequence[str]], mesh: Mapping[str, int], at: Coords) -> dict[int, int]:
    """Dimension → which of its shards a rank has."""
    found = {}
    for dim, axes in cutting.items():
        number = 0
        for axis in axes:
            number = number * mesh[axis] + at[axis]
        found[dim] = number
    return found


def _lengths(
    dim: int, axes: Sequence[str], mesh: Mapping[str, int], views: Sequence[Shape], numbers: Sequence[Mapping[int, int]]
) -> list[int]:
    """The length of each of a dimension's shards."""
    held: dict[int, int] = {}
    for view, own in zip(views, numbers, strict=True):
        if len(view) <= dim or held.setdefault(own[dim], view[dim]) != view[dim]:
            raise ValueError(f"copies of its shard {own[dim]} along dimension {dim} differ in shape")
    number = math.prod(mesh[axis] for axis in axes)
    if missing := [r for r in range(number) if r not in held]:
        raise ValueError(f"no rank holds its shard {missing[0]} along dimension {dim} ({' x '.join(axes)})")
    return [held[r] for r in range(number)]


def _widths(rule: Rule, ranks: int, total: int, lengths: Sequence[int] | None) -> list[list[int]]:
    """The length of every part on every rank. `lengths`: of what ranks are known to hold."""
    parts: list[int | list[int]]
    if rule.parts is None:
        if rule.uneven:
            return [list(lengths) if lengths is not None else chunks(total, ranks)]
        parts = [total]
    elif isinstance(rule.parts, int):
        if total % rule.parts:
            raise ValueError(f"its length {total} is no multiple of {rule.parts} parts")
        parts = [total // rule.parts] * rule.parts
    else:
        known = sum(sum(part) if isinstance(part, list) else part for part in rule.parts if part != -1)
        parts = [total - known if part == -1 else part for part in rule.parts]
        if total < known or (-1 not in rule.parts and total != known):
            raise ValueError(f"its parts are {known} long together, and it is {total}")
    return [_shares(part, ranks, uneven=rule.uneven) for part in parts]


def _shares(part: int | list[int], ranks: int, *, uneven: bool) -> list[int]:
    if isinstance(part, list):
        if len(part) != ranks:
            raise ValueError(f"a part of lengths {part} for {ranks} ranks")
        return part
    if part % ranks and not uneven:
        raise ValueError(f"a length of {part} does not divide over {ranks} ranks (set 'uneven' where it is cut unevenly)")
    return chunks(part, ranks)


def _padded(rule: Rule, view: Shape, cutting: Mapping[int, Sequence[str]], mesh: Mapping[str, int]) -> Shape:
    pad = rule.pad
    if pad is None:
        return view
    if view[pad.dim] != pad.size:
        raise ValueError(f"'pad' says a true length of {pad.size} along dimension {pad.dim}, and it is {view[pad.dim]}")
    step = math.prod(mesh[axis] for axis in cutting.get(pad.dim, ()))
    step *= rule.parts if isinstance(rule.parts, int) else 1
    size = -(-pad.size // step) * step if pad.to is None else pad.to
    if size < pad.size:
        raise ValueError(f"'pad' says {pad.size} padded to {size}")
    return (*view[: pad.dim], size, *view[pad.dim + 1 :])


def _unflattened(rule: Rule, mesh: Mapping[str, int], shape: Shape, *, whole: bool) -> Shape:
    """The shape with one dimension as several; of a shard, those that are cut have a rank's length."""
    entry = rule.unflatten
    if entry is None:
        return shape
    if entry.dim >= len(shape):
        raise ValueError(f"it has {len(shape)} dimensions, and 'unflatten' names dimension {entry.dim}")
    sizes = list(entry.sizes)
    for axis, dim in rule.shard.items() if not whole else ():
        at = dim - entry.dim
        if 0 <= at < len(sizes) and sizes[at] != -1:
            if sizes[at] % mesh[axis]:
                raise ValueError(f"a length of {sizes[at]} in 'unflatten' does not divide over {mesh[axis]} ranks of {axis}")
            sizes[at] //= mesh[axis]
    known, total = math.prod(n for n in sizes if n != -1), shape[entry.dim]
    sizes = [total // known if n == -1 else n for n in sizes]
    if math.prod(sizes) != total:
        raise ValueError(f"its dimension {entry.dim} is {total} long, which 'unflatten' does not divide as {entry.sizes}")
    return (*shape[: entry.dim], *sizes, *shape[entry.dim + 1 :])


def _flattened(rule: Rule, view: Shape) -> Shape:
    entry = rule.unflatten
    if entry is None:
        return view
    last = entry.dim + len(entry.sizes)
    return (*view[: entry.dim], math.prod(view[entry.dim : last]), *view[last:])


def _at(coords: Coords) -> str:
    return " ".join(f"{axis} {n}" for axis, n in coords.items()) or "the only rank"

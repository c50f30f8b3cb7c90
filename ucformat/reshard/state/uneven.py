"""DTensors whose placements alone don't tell where a shard lies.

With `DTensor.from_local` users bring shards of sizes of their own: a rank's offset then depends on the others' sizes, and
sometimes each rank believes in another global shape. And when FSDP2 cuts uneven TP shards, the same strided placements can
mean two things, of which the sizes of all ranks tell the right one. So all ranks compare notes in one small exchange, and only
when any of them has such a tensor, in a second one about just these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucformat.errors import UnsupportedError
from ucformat.group import Group, word
from ucformat.reshard.state.leaf import Leaf
from ucformat.reshard.state.placement import LocalPlacement, Split, grid, inner_first, is_even, shard

MeshKey = str
"""Digest of a mesh: its shape and its ranks in order."""
_MESHES = 4  # of which a rank says in one exchange what it believes; more take another exchange
_WIDTH = 3 + 2 * _MESHES


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """What one rank says of its shard of a DTensor."""

    mesh: MeshKey
    sizes: tuple[int, ...]
    """Shape of the mesh."""
    coordinate: tuple[int, ...]
    splits: tuple[Split, ...]
    shape: tuple[int, ...]
    """Global shape as this rank believes."""
    local: tuple[int, ...]
    regular: bool
    replicated: bool


def claim(leaf: Leaf) -> ShardDescription:
    """The claim of a leaf that has a frame and a part."""
    frame = leaf.frame
    assert frame is not None
    local, placed = leaf.parts[0]
    size = tuple(local.shape)
    return ShardDescription(
        mesh=frame.key,
        sizes=frame.sizes,
        coordinate=frame.coordinate,
        splits=frame.splits,
        shape=leaf.shape,
        local=size,
        regular=size == placed.local and is_even(leaf.shape, frame.splits),
        replicated=frame.replicated,
    )


@dataclass(frozen=True, slots=True)
class Claims:
    """What the ranks said of the tensors that are uneven on any of them."""

    own: Mapping[str, ShardDescription]
    every: Sequence[Mapping[str, ShardDescription]] = ()
    """By rank; nothing when no tensor is uneven."""

    def place(self) -> dict[str, LocalPlacement]:
        """The placements of this rank's uneven tensors. Raises UnsupportedError when the shards don't add up."""
        out = {}
        for name in sorted({name for claims in self.every for name in claims} & self.own.keys()):
            mine = self.own[name]
            held = [claims[name] for claims in self.every if name in claims and claims[name].mesh == mine.mesh]
            if any(not claim.regular or claim.shape != mine.shape for claim in held):
                out[name] = _place(name, mine, held)
        return out


def compare(own: Mapping[str, ShardDescription], error: Exception | None, group: Group) -> Claims:
    """Learn what the other ranks hold of tensors that are uneven on any rank. Every rank of `group` calls it.

    `error` is what went wrong on this rank before: every rank raises it here, after all have met (see `Group.resolve`).
    """
    odd = {name for name, claim in own.items() if not claim.regular}
    beliefs = _beliefs(own)
    fits = len(beliefs) <= _MESHES
    row = [error is not None, bool(odd), not fits, *(number for belief in beliefs[:_MESHES] for number in belief)]
    rows = group.numbers([*row, *[0] * (_WIDTH - len(row))], "collecting the state")
    if rows[:, 0].any():
        group.resolve("collecting the state", error)
    every = rows[:1] if (rows == rows[0]).all() else rows
    every = every[:, 3:].reshape(-1, 2)
    if rows[:, 2].any():
        every = np.array([belief for brought in group.distinct(beliefs) for belief in brought], dtype=np.int64).reshape(-1, 2)
    disputed = _disputed(every)
    if not rows[:, 1].any() and not disputed:
        return Claims(own)
    suspects = {name for brought in group.distinct(sorted(odd)) for name in brought}
    suspects.update(name for name, claim in own.items() if _number(claim.mesh) in disputed)
    return Claims(own, group.all_gather({name: own[name] for name in sorted(suspects & own.keys())}))


def _beliefs(claims: Mapping[str, ShardDescription]) -> list[tuple[int, int]]:
    """(mesh, digest of what this rank believes of the global shapes of the tensors on it) for each mesh."""
    told: dict[MeshKey, list[str]] = {}
    for name in sorted(claims):
        told.setdefault(claims[name].mesh, []).append(f"{name}{claims[name].shape}")
    return [(_number(key), _number("\n".join(lines))) for key, lines in sorted(told.items())]


def _number(text: str) -> int:
    return word(xxhash.xxh3_64_intdigest(text.encode()))


def _disputed(beliefs: NDArray[np.int64]) -> set[int]:
    """Meshes of which ranks believe different things."""
    meshes, held = beliefs[np.argsort(beliefs[:, 0], kind="stable")].T
    differ = (meshes[1:] == meshes[:-1]) & (held[1:] != held[:-1])
    return set(meshes[1:][differ].tolist())


def _place(name: str, mine: ShardDescription, held: Sequence[ShardDescription]) -> LocalPlacement:
    """Where `mine` lies when shards follow each other in mesh order, each of the size that it has."""
    if any(split.factor > 1 for split in mine.splits):
        return _place_strided(name, mine, held)
    offset, shape = [0] * len(mine.local), list(mine.local)
    for dim in {split.dim for split in mine.splits}:
        axes = [split.axis for split in mine.splits if split.dim == dim]
        line = {_along(c, axes): c.local[dim] for c in held if _aside(c, axes) == _aside(mine, axes)}
        if len(line) != math.prod(mine.sizes[axis] for axis in axes):
            raise UnsupportedError(name, "not every rank of its mesh holds a shard of this DTensor: all must save it together")
        offset[dim] = sum(n for at, n in line.items() if at < _along(mine, axes))
        shape[dim] = sum(line.values())
    if len({c.shape for c in held}) == 1 and tuple(shape) != mine.shape:
        raise UnsupportedError(name, f"the shards of this DTensor make up {shape}, its global shape is {list(mine.shape)}")
    return shard(shape, offset, mine.local, replicated=mine.replicated)


def _place_strided(name: str, mine: ShardDescription, held: Sequence[ShardDescription]) -> LocalPlacement:
    """Where `mine` lies in that order of splits which gives every rank the size that it has."""
    for order in (inner_first(mine.splits), mine.splits):
        if order is not None and all(_cut(c, order).local == c.local and c.shape == mine.shape for c in held):
            return _cut(mine, order)
    raise UnsupportedError(name, "a DTensor with strided shards of sizes that no placement gives: redistribute it first")


def _cut(c: ShardDescription, order: Sequence[Split]) -> LocalPlacement:
    return grid(c.shape, [split.at(c.coordinate) for split in order], replicated=c.replicated)


def _along(c: ShardDescription, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(c.coordinate[axis] for axis in axes)


def _aside(c: ShardDescription, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(at for axis, at in enumerate(c.coordinate) if axis not in axes)

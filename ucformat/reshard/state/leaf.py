"""One tensor of the live state in the terms of its logical tensor: shape, dtype, and which parts the rank has where.

Every kind of tensor that a state may hold becomes a `Leaf` here (flat parameters of FSDP1 in `fsdp`, Megatron's in
`megatron`). Leaves share memory with the state: what is read from them is saved, what is written into them is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ucformat.errors import UnrepresentableError, UnsupportedError
from ucformat.reshard.state.markers import FlatShard, Shard
from ucformat.reshard.state.placement import LocalPlacement, Split, flat, grid, shard, whole

Part = tuple[torch.Tensor, LocalPlacement]


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlacement:
    """How a DTensor lies on its mesh."""

    mesh: DeviceMesh
    key: str
    """Digest of the mesh: its shape and its ranks in order."""
    sizes: tuple[int, ...]
    """Shape of the mesh."""
    coordinate: tuple[int, ...]
    """This rank's place on it."""
    splits: tuple[Split, ...]
    """The placements as splits, in the order in which they apply."""
    replicated: bool
    """Other ranks may hold the same boxes: on a mesh axis that repeats the tensor, or outside the mesh. That these are equal is
    what the mesh, or its being smaller than the world, suggests; saving compares them."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A live tensor, or one of the logical tensors that a flat parameter holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    """Local tensors and how they are placed; with a `frame`, one tensor whose placement is a first guess."""
    frame: MeshPlacement | None = None
    """What the one local tensor of a DTensor follows. Its sizes may need settling with other ranks."""
    first_rank_wins: bool = False
    """Replicas may differ, and the first rank's counts: buffers, as DDP broadcasts them."""
    name: str | None = None
    """The name of the tensor, when its place in the state does not tell."""
    allow_shape_mismatch: bool = False
    """May be stored with another global shape (padded vocabularies): the common corner is loaded, the rest is zero."""


def is_tensor(x: object) -> bool:
    """What `leaf` takes, numpy arrays apart."""
    return isinstance(x, (torch.Tensor, Shard, FlatShard)) or _is_sharded_tensor(x)


def leaf(x: object, at: str, *, first_rank_wins: bool = False) -> Leaf:
    """The leaf of a tensor of any kind. `at` is its path, for messages; `first_rank_wins` marks buffers.

    Raises UnsupportedError for tensors without plain bytes (meta, sparse, quantised, wrapper subclasses) and pending sums.
    """
    if isinstance(x, DTensor):
        return replace(spread(x, local_of(x, at), at), first_rank_wins=first_rank_wins)
    if isinstance(x, Shard):
        local = plain(x.tensor, at)
        return _single(local, shard(x.global_shape, x.offsets, local.shape, replicated=True))
    if isinstance(x, FlatShard):
        local = plain(x.tensor, at)
        return _single(local, flat(x.global_shape, x.start, x.start + local.numel(), local.numel(), replicated=True))
    if _is_sharded_tensor(x):
        return _sharded_tensor(x, at)
    if isinstance(x, np.ndarray):
        return _single(_array(x, at), whole(x.shape))
    assert isinstance(x, torch.Tensor)
    local = plain(x, at)
    return _single(local, whole(local.shape), first_rank_wins=first_rank_wins)


def _single(local: torch.Tensor, placed: LocalPlacement, *, first_rank_wins: bool = False) -> Leaf:
    return Leaf(placed.shape, local.dtype, ((local, placed),), first_rank_wins=first_rank_wins)


def plain(tensor: torch.Tensor, at: str) -> torch.Tensor:
    """`tensor` detached, sharing its memory. Raises UnsupportedError when it has no bytes of its own."""
    kind = type(tensor).__name__
    if hasattr(tensor, "__tensor_flatten__"):
        raise UnrepresentableError(at, f"tensor subclass {kind}", "give the plain tensors that it is made of")
    if tensor.is_meta:
        raise UnsupportedError(
            at,
            "a tensor on the meta device has no bytes: call to_empty(device=…), then tie weights again",
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnrepresentableError(at, f"{tensor.layout} {'quantised ' if tensor.is_quantized else ''}tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise UnrepresentableError(at, "lazily conjugated or negated view", "call resolve_conj().resolve_neg() on it")
    return tensor.detach()


def local_of(tensor: DTensor, at: str) -> torch.Tensor:
    """The local tensor of a DTensor, after any collective that is still under way."""
    with torch.no_grad():
        local = tensor.to_local()
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = cast(Any, local).wait()
    return plain(local, at)


def spread(tensor: DTensor, local: torch.Tensor, at: str) -> Leaf:
    """The leaf of `local`, a tensor that is sharded as `tensor` is."""
    shape = tuple(tensor.shape)
    order = getattr(tensor._spec, "shard_order", None) or ()  # has no public face yet
    try:
        frame = _frame(_Same(tensor.device_mesh), tuple(tensor.placements), order, len(shape), dist.get_world_size())
    except ValueError as error:
        raise UnsupportedError(at, f"a DTensor with placements {tensor.placements} {error}: redistribute it first") from None
    if frame is None:
        return Leaf(shape, local.dtype, ())
    return Leaf(shape, local.dtype, ((local, _placed(shape, frame)),), frame=frame)


class _Same:
    """A mesh as a key, by identity: on an equal mesh of an earlier process group this rank may have had another place."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.mesh is self.mesh

    def __hash__(self) -> int:
        return id(self.mesh)


@lru_cache(maxsize=256)  # a model's tensors lie on a few meshes, in a few ways
def _frame(same: _Same, placements: tuple[Placement, ...], order: Sequence[Any], ndim: int, world: int) -> MeshPlacement | None:
    """The frame of DTensors with these placements; None on ranks outside the mesh. Raises ValueError saying what is wrong."""
    mesh = same.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    if any(p.is_partial() for p in placements):
        raise ValueError("is a pending sum")
    sizes = tuple(mesh.shape)  # not `.mesh.shape`: that tensor is built anew each time
    axes = [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    if any(getattr(placements[axis], "dim", None) is None for axis in axes):
        raise ValueError("is not known")
    named = [axis for entry in order for axis in entry.mesh_dims]  # left to right, unless the DTensor says otherwise
    splits = tuple(
        Split(axis, cast(Any, placements[axis]).dim % max(ndim, 1), sizes[axis], getattr(placements[axis], "split_factor", 1))
        for axis in (named if sorted(named) == axes else axes)
    )
    # A model that is sharded on a `tp` mesh and repeated by DDP says nothing of the latter in its DTensors.
    repeated = any(p.is_replicate() and n > 1 for p, n in zip(placements, sizes, strict=True)) or math.prod(sizes) < world
    key = blake2b(repr(mesh.mesh.tolist()).encode(), digest_size=16).hexdigest()
    return MeshPlacement(mesh, key, sizes, tuple(coordinate), splits, repeated)


@lru_cache(maxsize=4096)  # layers repeat each other's shapes
def _placed(shape: tuple[int, ...], frame: MeshPlacement) -> LocalPlacement:
    return grid(shape, [split.at(frame.coordinate) for split in frame.splits], replicated=frame.replicated)


def forget() -> None:
    """Let go of the meshes that were met: they hold process groups, which must be able to end when the loop destroys them."""
    _frame.cache_clear()
    _placed.cache_clear()


def with_plain_strides(view: torch.Tensor) -> torch.Tensor:
    """`view`, seen so that torch can see it as bytes: the stride of a single element may be anything, and torch keeps it."""
    return view.as_strided(view.shape, [1] * view.dim()) if view.numel() == 1 else view


def refuse_unwritable(x: np.ndarray, at: str) -> None:
    """Raise UnsupportedError for an array that nothing can be loaded into: its leaf would be a copy."""
    if not x.flags.writeable:
        raise UnsupportedError(at, "a read-only array can't be loaded into: copy it first")
    if any(step < 0 for step in x.strides):
        raise UnsupportedError(at, "an array with negative strides can't be loaded into: copy it first")


def _array(x: np.ndarray, at: str) -> torch.Tensor:
    """A tensor that shares the array's memory, or a copy when it can't be written anyway."""
    if not x.flags.writeable or any(step < 0 for step in x.strides):
        return torch.from_numpy(x.copy())
    return torch.from_numpy(x)


def _is_sharded_tensor(x: object) -> bool:
    """The older ShardedTensor of torch.distributed._shard, recognised without importing it."""
    return hasattr(x, "local_shards") and hasattr(x, "sharding_spec")


def _sharded_tensor(x: Any, at: str) -> Leaf:
    size = tuple(x.size())
    parts: list[Part] = []
    for piece in x.local_shards():
        local = plain(piece.tensor, at)
        parts.append((local, shard(size, piece.metadata.shard_offsets, piece.metadata.shard_sizes, replicated=True)))
    return Leaf(size, x.dtype, tuple(parts))

"""Sharded tensors and objects of Megatron-core, recognised by their attributes: Megatron need not be installed.

They carry a key of their own, so the place in the state gives only the first component of a name.
"""

from __future__ import annotations

import io
import re
from typing import Any, Literal

import torch

from ucformat import values
from ucformat.box import Box
from ucformat.errors import UnsupportedError
from ucformat.reshard.state.leaf import Leaf, plain
from ucformat.reshard.state.placement import HeldBox, LocalPlacement, flat, shard

Kind = Literal["tensor", "object", "factory", "local"]

_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_RENAMED = {"param": "fp32", "fp32_param": "fp32"}  # to the canonical name of master weights


def kind_of(x: object) -> Kind | None:
    """Which of Megatron's marks `x` is: a sharded tensor, a sharded object, a factory of tensors, a non-persistent object."""
    if hasattr(x, "key") and hasattr(x, "data"):
        if hasattr(x, "build_fn") and hasattr(x, "merge_fn"):
            return "factory"
        if hasattr(x, "global_shape") and hasattr(x, "global_offset") and hasattr(x, "replica_id"):
            return "tensor" if hasattr(x, "local_shape") and hasattr(x, "axis_fragmentations") else "object"
    return "local" if type(x).__name__ == "LocalNonpersistentObject" else None


def tensor_name(top: str, key: str) -> str:
    """The name of the tensor with Megatron's `key` under the state's key `top`; optimizer states by parameter."""
    state = _STATE.fullmatch(key)
    if state is None:
        return values.join_name(top, key)
    return values.join_name(top, state[2], _RENAMED.get(state[1], state[1]))


def object_place(top: str, x: Any) -> tuple[str, str, str]:
    """Where a sharded object stands in the values: one place for each of the objects that share its key."""
    numbers = (".".join(map(str, part)) for part in (x.global_offset, x.global_shape))
    return top, x.key, "shard_" + "_".join(numbers)


def object_value(x: Any) -> object:
    """The data of a sharded object in types that values have."""
    return x.data.getvalue() if isinstance(x.data, io.BytesIO) else x.data


def put_object(x: Any, stored: object) -> None:
    x.data = io.BytesIO(stored) if isinstance(x.data, io.BytesIO) and isinstance(stored, bytes) else stored


def leaf(x: Any, top: str) -> Leaf:
    """The leaf of a sharded tensor. Raises UnsupportedError when it has no data or does not lie in its global tensor."""
    name = tensor_name(top, x.key)
    if not isinstance(x.data, torch.Tensor):
        raise UnsupportedError(name, "a ShardedTensor without data: call init_data first")
    local = plain(x.data, name)
    offset, shape = tuple(map(int, x.global_offset)), tuple(map(int, x.global_shape))
    extra = int(getattr(x, "prepend_axis_num", 0))
    length = (1,) * extra + tuple(map(int, x.local_shape))
    if not Box(offset, length).inside(shape):
        raise UnsupportedError(name, f"a ShardedTensor of shape {list(length)} at {list(offset)} is not inside {list(shape)}")
    part = getattr(x, "flattened_range", None)
    if part is None:
        placed = shard(shape, offset, length, replicated=True)
        local = local[(None,) * extra]
    else:
        placed = _flattened(shape, offset, length, part, local.numel())
    allow_shape_mismatch = bool(getattr(x, "allow_shape_mismatch", False)) and part is None
    return Leaf(shape, local.dtype, ((local, placed),), name=name, allow_shape_mismatch=allow_shape_mismatch)


def _flattened(
    shape: tuple[int, ...], offset: tuple[int, ...], length: tuple[int, ...], part: slice, count: int
) -> LocalPlacement:
    """A flat range within the box at `offset`, as older releases keep optimizer state."""
    inner = flat(length, part.start, part.stop, count)
    held = (HeldBox(Box(tuple(a + b for a, b in zip(h.box.offset, offset, strict=True)), h.box.length), h.at) for h in inner.held)
    return LocalPlacement(shape, (count,), tuple(held), replicated=True)


def build(x: Any, at: str, *, loading: bool) -> object:
    """The sharded tensors that a factory makes of its data; to load, they must be views of it."""
    built = x.build()
    if loading:
        memory = x.data.untyped_storage().data_ptr()
        if any(t.data.untyped_storage().data_ptr() != memory for t in _tensors(built)):
            raise UnsupportedError(
                at, "a ShardedTensorFactory that copies can't be loaded into: apply_factories first, then merge"
            )
    return built


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [t for item in tree.values() for t in _tensors(item)]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in _tensors(item)]
    return [tree] if kind_of(tree) == "tensor" else []

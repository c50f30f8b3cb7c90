"""What a user wraps a part of the state in when its placement can't be seen from the tensor: re-exported by `ucformat`.

`Shard` and `FlatShard` say which part of a logical tensor a plain tensor is; `rank_local` says that each rank has its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ucformat.box import Box

OnResize = Literal["error", "modulo", "keep", "gather"]
"""What a rank loads when as many ranks as saved are not there: nothing (an error), the item of rank `rank % saved`,
nothing (what it has stays), or the list of all ranks' items in rank order."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """`tensor` is the box at `offsets` of a logical tensor of `global_shape`. Raises ValueError when it can't be."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(map(int, self.global_shape)))
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        length = tuple(self.tensor.shape)
        if len(length) != len(self.offsets) or not Box(self.offsets, length).inside(self.global_shape):
            raise ValueError(
                f"a shard of shape {list(length)} at {list(self.offsets)} is not inside shape {list(self.global_shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """`tensor` (1-D) is elements [start, start + len) of the row-major order of a logical tensor of `global_shape`.

    Raises ValueError when the range is not inside, or the tensor is not 1-D.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(map(int, self.global_shape)))
        if self.tensor.dim() != 1:
            raise ValueError(f"a flat shard is 1-D, this tensor has shape {list(self.tensor.shape)}")
        stop = self.start + self.tensor.numel()
        if self.start < 0 or stop > math.prod(self.global_shape):
            raise ValueError(f"elements {self.start}-{stop} are not in a tensor of shape {list(self.global_shape)}")


@dataclass(slots=True, eq=False)
class RankLocalItem:
    """A part of the state of which each rank has its own: see `rank_local`. After a load, `value` is what was restored."""

    value: Any
    on_resize: OnResize = "error"


def rank_local(value: object, on_resize: OnResize = "error") -> RankLocalItem:
    """Mark `value` (any nest of tensors and plain values) as this rank's own: RNG state, data position.

    It is stored once per rank, keyed by the rank's mesh coordinates and number. Loaded by as many ranks as saved it,
    each gets its own back. `on_resize` says what holds otherwise:

    - ``"error"``: loading raises `RankLocalError`;
    - ``"modulo"``: rank r takes the item of rank ``r % saved``;
    - ``"keep"``: the value that each rank has stays as it is;
    - ``"gather"``: the value becomes the list of all saved items in rank order.

    Tensors of the same shape and dtype are restored in place; anything else is replaced: read ``.value`` after loading.
    Raises ValueError for an unknown policy.
    """
    if on_resize not in get_args(OnResize):
        raise ValueError(f"on_resize is one of {', '.join(get_args(OnResize))}, not {on_resize!r}")
    return RankLocalItem(value, on_resize)

"""One table of dtypes: safetensors name ↔ torch ↔ numpy view ↔ item size.

A `DType` counts *stored items*. For the sub-byte types an item is the packed group that torch and the file hold in
whole bytes: F4 packs two numbers into a byte (as `torch.float4_e2m1fn_x2`), F6 four into three bytes. Shapes in a
catalog count items; `header_shape` gives what a safetensors header says. C32 and C128 have no safetensors name:
a file holds them as F16 and F64 with a last dimension of 2, and the shard's metadata names the true dtype.

torch is loaded when a torch dtype is asked for: a process that only moves bytes, like a keeper of snapshots, does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor  # inside DType, `torch` is a property


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype and its three faces."""

    name: str
    """Name in catalogs: the safetensors name, or C32/C128."""
    itemsize: int
    """Bytes of one stored item."""
    torch_name: str
    """Name of `torch`, in torch."""
    stored: str
    """dtype in a safetensors header."""
    group: tuple[int, int] = (1, 1)
    """(numbers, items): that many numbers of the header's last dimension are so many items."""
    tail: tuple[int, ...] = ()
    """Dimensions that the header appends."""

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of a tensor that holds it; `torch.uint8` for F6, which torch lacks."""
        return _torch_dtype(self.torch_name)

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """A numpy dtype of the same width, for views that move bytes."""
        return np.dtype(f"u{self.itemsize}") if self.itemsize <= 8 else np.dtype(f"V{self.itemsize}")

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A new uninitialised CPU tensor of `shape` items."""
        import torch

        return torch.empty(math.prod(shape) * self.itemsize, dtype=torch.uint8).view(self.torch).view(tuple(shape))

    def header_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape a safetensors header gives to `shape` items."""
        numbers, items = self.group
        if (numbers, items) == (1, 1):
            return [*shape, *self.tail]
        if not shape or shape[-1] % items:
            raise ValueError(f"{self.name} packs {numbers} numbers into {items} bytes along the last dimension")
        return [*shape[:-1], shape[-1] // items * numbers]

    def item_shape(self, header_shape: Sequence[int]) -> tuple[int, ...]:
        """The inverse of `header_shape`. Raises ValueError when a last dimension is no whole number of items."""
        numbers, items = self.group
        if (numbers, items) == (1, 1):
            return tuple(header_shape)
        if not header_shape or header_shape[-1] % numbers:
            raise ValueError(f"{self.name} needs a last dimension that is a multiple of {numbers}")
        return (*header_shape[:-1], header_shape[-1] // numbers * items)


@cache
def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def _plain(name: str, itemsize: int, torch_name: str) -> DType:
    return DType(name, itemsize, torch_name, name)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in [
        _plain("BOOL", 1, "bool"),
        _plain("U8", 1, "uint8"),
        _plain("I8", 1, "int8"),
        _plain("U16", 2, "uint16"),
        _plain("I16", 2, "int16"),
        _plain("U32", 4, "uint32"),
        _plain("I32", 4, "int32"),
        _plain("U64", 8, "uint64"),
        _plain("I64", 8, "int64"),
        _plain("F16", 2, "float16"),
        _plain("BF16", 2, "bfloat16"),
        _plain("F32", 4, "float32"),
        _plain("F64", 8, "float64"),
        _plain("C64", 8, "complex64"),
        _plain("F8_E4M3", 1, "float8_e4m3fn"),
        _plain("F8_E5M2", 1, "float8_e5m2"),
        _plain("F8_E4M3FNUZ", 1, "float8_e4m3fnuz"),
        _plain("F8_E5M2FNUZ", 1, "float8_e5m2fnuz"),
        _plain("F8_E8M0", 1, "float8_e8m0fnu"),
        DType("F4", 1, "float4_e2m1fn_x2", "F4", group=(2, 1)),
        DType("F6_E2M3", 1, "uint8", "F6_E2M3", group=(4, 3)),
        DType("F6_E3M2", 1, "uint8", "F6_E3M2", group=(4, 3)),
        DType("C32", 4, "complex32", "F16", tail=(2,)),
        DType("C128", 16, "complex128", "F64", tail=(2,)),
    ]
}


@cache
def _by_torch() -> dict[torch.dtype, DType]:
    return {d.torch: d for d in DTYPES.values() if not d.name.startswith("F6_")}


def from_torch(dtype: torch.dtype) -> DType:
    """The table's row of a torch dtype. Raises KeyError for quantised and other opaque dtypes."""
    return _by_torch()[dtype]

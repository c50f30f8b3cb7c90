"""Where bytes that were read go: numpy arrays of stored items. Tensors are another kind, in `tensor_destination`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ucformat.catalog import TensorSpec
from ucformat.dtypes import DType
from ucformat.errors import DTypeMismatchError
from ucformat.storage.store import Bytes


class Destination(Protocol):
    """Takes the items of one wanted box."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def accepts_bytes(self, spec: TensorSpec, *, cast: bool) -> bool:
        """Whether stored bytes can go straight into `image`. Raises DTypeMismatchError where items don't fit at all."""
        ...

    def image(self) -> Bytes:
        """Its own memory, where it accepts bytes."""
        ...

    def put(self, low: Sequence[int], size: Sequence[int], data: Bytes, stride: Sequence[int], kind: DType) -> None:
        """Items of a box at `low`, of lengths `size`, out of `data`, where they lie `stride` items apart."""
        ...


class ArrayDestination:
    """An array of `DType.numpy`: of the items' bits."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def accepts_bytes(self, spec: TensorSpec, *, cast: bool) -> bool:
        if self._array.dtype != spec.kind.numpy:
            hint = f"its bits go into an array of {spec.kind.numpy}"
            raise DTypeMismatchError(spec.name, spec.dtype, str(self._array.dtype), hint)
        return self._array.flags.c_contiguous

    def image(self) -> Bytes:
        return self._array.reshape(-1).view(np.uint8)

    def put(self, low: Sequence[int], size: Sequence[int], data: Bytes, stride: Sequence[int], kind: DType) -> None:
        items = data[: data.nbytes // kind.itemsize * kind.itemsize].view(kind.numpy)
        source = np.lib.stride_tricks.as_strided(items, size, [step * kind.itemsize for step in stride], writeable=False)
        self._array[tuple(slice(at, at + n) for at, n in zip(low, size, strict=True))] = source

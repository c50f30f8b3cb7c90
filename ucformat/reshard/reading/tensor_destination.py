"""Where bytes that were read go: tensors of any strides, device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ucformat.catalog import TensorSpec
from ucformat.dtypes import DType
from ucformat.errors import DTypeMismatchError
from ucformat.storage.store import Bytes

WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorDestination:
    """A tensor that items are copied into, converted where its dtype is another one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def accepts_bytes(self, spec: TensorSpec, *, cast: bool) -> bool:
        tensor = self._tensor
        if tensor.dtype != spec.kind.torch:
            if not cast:
                raise DTypeMismatchError(spec.name, spec.dtype, str(tensor.dtype).removeprefix("torch."))
            if spec.kind.group != (1, 1):
                raise DTypeMismatchError(spec.name, spec.dtype, str(tensor.dtype), "packed numbers can't be converted")
            return False
        return tensor.device.type == "cpu" and tensor.is_contiguous()

    def image(self) -> Bytes:
        image: Bytes = self._tensor.reshape(-1).view(torch.uint8).numpy()
        return image

    def put(self, low: Sequence[int], size: Sequence[int], data: Bytes, stride: Sequence[int], kind: DType) -> None:
        source = _typed(data, kind).as_strided(size, stride)
        target = self._tensor
        for d, (at, n) in enumerate(zip(low, size, strict=True)):
            target = target.narrow(d, at, n)
        if target.dtype == kind.torch and kind.itemsize in WIDTH:
            width = WIDTH[kind.itemsize]  # move bits: copies between some exotic dtypes are not implemented
            source, target = source.view(width), target.view(width)
        with torch.no_grad():
            target.copy_(source)


def _typed(data: Bytes, kind: DType) -> torch.Tensor:
    """Bytes as a flat tensor of a dtype; copied when they are not aligned for it."""
    usable = data[: data.nbytes // kind.itemsize * kind.itemsize]
    if usable.ctypes.data % kind.itemsize or not usable.flags.writeable:
        usable = usable.copy()
    return torch.from_numpy(usable).view(kind.torch)

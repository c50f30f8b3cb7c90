"""Where the bytes of a file to be come from: live tensors when saving, another checkpoint when converting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucformat.box import Box, flat_range
from ucformat.catalog import Catalog
from ucformat.containers.file_image import ByteRequest
from ucformat.dtypes import DTYPES, DType
from ucformat.formats.target import OutputBox
from ucformat.lazy_torch import torch
from ucformat.reshard.reading.execute import execute
from ucformat.reshard.reading.plan import plan, wants
from ucformat.reshard.reading.seen import Seen
from ucformat.storage.store import Bytes


@dataclass(slots=True)
class _Window:
    """A part seen as whole items: `image` is the part's own memory where that is possible, else a copy to be put back."""

    part: ByteRequest
    image: NDArray[Any]
    first: int
    own: bool

    @classmethod
    def of(cls, part: ByteRequest, kind: DType) -> _Window:
        first, last = part.start // kind.itemsize, -(-part.stop // kind.itemsize)
        whole = first * kind.itemsize == part.start and last * kind.itemsize == part.stop
        if whole and part.out.ctypes.data % kind.itemsize == 0:
            return cls(part, part.out.view(kind.numpy), first, own=True)
        return cls(part, np.empty(last - first, dtype=kind.numpy), first, own=False)

    def boxes(self, length: Sequence[int]) -> Iterator[tuple[Box, NDArray[Any]]]:
        """Boxes of a piece of shape `length` that make up the window, each with its part of the image."""
        at = 0
        for box in flat_range(length, self.first, self.first + len(self.image)):
            yield box, self.image[at : at + box.volume].reshape(box.length)
            at += box.volume

    def put_back(self) -> None:
        if not self.own:
            skip = self.part.start - self.first * self.image.itemsize
            self.part.out[:] = self.image.view(np.uint8)[skip : skip + self.part.out.nbytes]


def _as_tensor(bits: NDArray[Any], kind: DType) -> torch.Tensor:
    """The same memory as a tensor of a dtype."""
    flat = torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(kind.torch)
    return flat.view(bits.shape)


class TensorFill:
    """A `Fill` that copies from live tensors of any strides and device: piece i is `tensors[i]`."""

    def __init__(self, tensors: Sequence[torch.Tensor], kinds: Sequence[DType]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._kinds = kinds
        self._images: dict[int, Bytes | None] = {}

    def __call__(self, parts: Sequence[ByteRequest]) -> None:
        for part in parts:
            image = self._image(part.piece)
            if image is not None:
                part.out[:] = image[part.start : part.stop]
            else:
                self._copy(part)

    def _image(self, i: int) -> Bytes | None:
        """The bytes of a tensor where they lie in order; looked at when first asked for, by the thread that copies."""
        if i not in self._images:
            t = self._tensors[i]
            plain = t.device.type == "cpu" and t.is_contiguous() and t.numel()
            self._images[i] = t.reshape(-1).view(torch.uint8).numpy() if plain else None
        return self._images[i]

    def _copy(self, part: ByteRequest) -> None:
        from ucformat.reshard.reading.tensor_destination import WIDTH

        source, kind = self._tensors[part.piece], self._kinds[part.piece]
        window = _Window.of(part, kind)
        for box, out in window.boxes(source.shape):
            chosen, into = source[box.slices], _as_tensor(out, kind)
            if kind.itemsize in WIDTH:
                width = WIDTH[kind.itemsize]  # move bits: copies of some exotic dtypes are not implemented
                chosen, into = chosen.view(width), into.view(width)
            into.copy_(chosen)
        window.put_back()


@dataclass(frozen=True, slots=True)
class CatalogFill:
    """A `Fill` that reads from a catalog: piece i is `targets[i]`, which the catalog has under `names[i]`.

    Targets whose dtype is not the stored one are converted.
    """

    catalog: Catalog
    targets: Sequence[OutputBox]
    names: Sequence[str]
    threads: int = 1
    """Reads at a time for each call; writers call from several threads already."""
    seen: Seen = field(default_factory=Seen)
    """Checksums, over all calls: each sees only a part of a file."""

    def __call__(self, parts: Sequence[ByteRequest]) -> None:
        windows = [_Window.of(part, DTYPES[self.targets[part.piece].spec.dtype]) for part in parts]
        wanted: list[tuple[str, Box | None]] = []
        dest: list[NDArray[Any]] = []
        kinds: list[DType] = []
        for window in windows:
            target = self.targets[window.part.piece]
            for box, out in window.boxes(target.box.length):
                moved = Box(tuple(a + b for a, b in zip(box.offset, target.box.offset, strict=True)), box.length)
                wanted.append((self.names[window.part.piece], moved))
                dest.append(out)
                kinds.append(target.spec.kind)
        columns = wants(self.catalog, wanted)
        same = all(self.catalog.tensors[i].kind is kind for i, kind in zip(columns.tensor, kinds, strict=True))
        into = dest if same else [_as_tensor(out, kind) for out, kind in zip(dest, kinds, strict=True)]
        execute(plan(self.catalog, columns), into, cast=True, threads=self.threads, seen=self.seen)
        for window in windows:
            window.put_back()

    def complete(self) -> None:
        """Check what can only be checked when all has been read. Raises ChecksumError."""
        self.seen.complete(self.catalog)

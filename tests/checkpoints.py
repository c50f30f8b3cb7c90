"""Small native checkpoints for tests: any tensors, cut into any boxes, spread over any shards; and a store that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ucformat.box import Box
from ucformat.catalog import Catalog, Notes, TensorSpec
from ucformat.dtypes import from_torch
from ucformat.formats import native
from ucformat.formats.source import Source
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import TensorFill
from ucformat.storage.local import LocalStore
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes, Reader, Store


def write_native(
    path: Path | str,
    tensors: Mapping[str, torch.Tensor],
    tiling: Mapping[str, Sequence[Box]] | None = None,
    shards: int = 1,
    values: object = None,
    aliases: Mapping[str, str] | None = None,
    notes: Notes | None = None,
) -> Store:
    """A checkpoint of `tensors`, each cut into its boxes (whole by default), pieces dealt over `shards` files."""
    targets: list[OutputBox] = []
    views: list[torch.Tensor] = []
    for name, tensor in tensors.items():
        spec = TensorSpec(name, from_torch(tensor.dtype).name, tuple(tensor.shape))
        for box in (tiling or {}).get(name, [Box.whole(spec.shape)]):
            targets.append(OutputBox(spec, box))
            views.append(tensor[box.slices])
    store = open_store(str(path))
    native.write(
        WriteJob(
            store,
            targets,
            TensorFill(views, [target.spec.kind for target in targets]),
            values={} if values is None else values,
            aliases=aliases or {},
            notes=notes or Notes(),
            layout=[list(range(i, len(targets), shards)) for i in range(shards)],
        )
    )
    return store


def shards_of(path: Path | str) -> Path:
    """The folder of shards and index of the only attempt at a native checkpoint."""
    (found,) = Path(path).glob("shards.*")
    return found


def open_native(store: Store) -> Catalog:
    return native.open_catalog(Source(store))


def bits(tensor: torch.Tensor) -> bytes:
    """All bytes of a tensor in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def flip(path: Path | str, at: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class CountingStore(LocalStore):
    """Counts the bytes that are read, per file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read_bytes: dict[str, int] = {}

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        self.read_bytes[path] = self.read_bytes.get(path, 0) + out.nbytes
        super().read_into(path, start, out)

    def reader(self, path: str) -> Reader:
        return _CountingReader(self, path, super().reader(path))

    @property
    def total(self) -> int:
        return sum(self.read_bytes.values())


class _CountingReader(Reader):
    def __init__(self, store: CountingStore, path: str, inner: Reader) -> None:
        super().__init__(store, path)
        self._counter, self._inner, self._name = store, inner, path

    def read_into(self, start: int, out: Bytes) -> None:
        self._counter.read_bytes[self._name] = self._counter.read_bytes.get(self._name, 0) + out.nbytes
        self._inner.read_into(start, out)

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)


def split_evenly(shape: Sequence[int], dim: int, parts: int) -> list[Box]:
    """Boxes of a tensor cut along one dimension, as `torch.chunk`-like uneven cuts; empty ones left out."""
    cuts = np.linspace(0, shape[dim], parts + 1).astype(int).tolist()
    boxes = []
    for a, b in pairwise(cuts):
        offset, length = [0] * len(shape), list(shape)
        offset[dim], length[dim] = a, b - a
        if b > a:
            boxes.append(Box(tuple(offset), tuple(length)))
    return boxes

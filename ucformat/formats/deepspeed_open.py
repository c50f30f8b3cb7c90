"""The files of a DeepSpeed checkpoint, opened, and the catalog that is built from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ucformat.box import Box
from ucformat.catalog import CatalogBuilder, File
from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.formats.deepspeed_flat import Run
from ucformat.safepickle import RefusedTensor, StoredTensor, open_torch_zip
from ucformat.storage import Store
from ucformat.torchzip import checks_of
from ucformat.values import join_name

_THREADS = 8  # opening is a handful of small reads per file: it waits for latency, not for bandwidth


def weight(fqn: str) -> str:
    """Canonical name of a parameter or buffer."""
    return join_name("model", fqn)


def state(fqn: str, key: str) -> str:
    """Canonical name of a parameter's optimizer state (`fp32` for the master weight)."""
    return join_name("optimizer", fqn, key)


class Opened:
    """Opens files, and adds the tensors that lie in them to a catalog."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.builder = CatalogBuilder(store)
        self.remarks: list[str] = []
        self._ids: dict[str, int] = {}
        self._inline: dict[tuple[str, bytes], int] = {}

    def trees(self, paths: Sequence[str]) -> list[Any]:
        """The decoded contents of files, opened side by side. Raises what `open_torch_zip` raises."""

        def load(path: str) -> tuple[Any, File]:
            opened = open_torch_zip(self.store, path)
            return opened.tree, File(path, self.store.size(path), checks_of(opened.entries.values()))

        with ThreadPoolExecutor(_THREADS) as pool:
            loaded = list(pool.map(load, paths))
        for path, (_, file) in zip(paths, loaded, strict=True):
            if path not in self._ids:
                self._ids[path] = self.builder.file(file)
        return [tree for tree, _ in loaded]

    def tensor(self, name: str, stored: StoredTensor) -> None:
        """Add a tensor that a file holds whole."""
        self.builder.tensor(name, stored.dtype, stored.shape)
        self.builder.fragment(name, self._ids[stored.file], stored.start, stride=None if stored.contiguous else stored.stride)

    def runs(self, name_of: Callable[[str], str], stored: StoredTensor, runs: Sequence[Run]) -> None:
        """Add what a rank's flat buffer holds of each parameter `p`, to the tensor `name_of(p)`."""
        file, itemsize = self._ids[stored.file], DTYPES[stored.dtype].itemsize
        for run in runs:
            name = name_of(run.name)
            self.builder.tensor(name, stored.dtype, run.shape)
            for at, box in run.boxes():
                self.builder.fragment(name, file, stored.start + at * itemsize, box)

    def inline(self, name: str, dtype: str, shape: Sequence[int], data: bytes, origin: str) -> None:
        """Add a small tensor whose bytes were computed here, from what `origin` says. Equal ones share them."""
        key = (origin, data)
        if key not in self._inline:
            self._inline[key] = self.builder.file(File(origin, len(data), inline=data))
        self.builder.tensor(name, dtype, shape)
        self.builder.fragment(name, self._inline[key], 0, Box.whole(tuple(shape)))

    def bytes_of(self, stored: Sequence[StoredTensor]) -> list[bytes]:
        """The bytes of small contiguous tensors, read side by side."""

        def read(tensor: StoredTensor) -> bytes:
            start = tensor.start
            return self.store.read(tensor.file, start, start + numel(tensor) * DTYPES[tensor.dtype].itemsize)

        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(read, stored))


def numel(tensor: StoredTensor) -> int:
    """Items of a tensor."""
    shape: tuple[int, ...] = tensor.shape
    return math.prod(shape)


def dense(value: object, file: str, what: str) -> StoredTensor | None:
    """`value` when it is a tensor, None when it is something else. Raises UnsupportedError for tensors that can't be read."""
    if isinstance(value, RefusedTensor):
        raise UnsupportedError(file, f"{what} is {value.kind}")
    return value if isinstance(value, StoredTensor) else None

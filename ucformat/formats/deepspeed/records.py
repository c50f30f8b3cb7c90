"""The files of a DeepSpeed checkpoint, opened, and the catalog that is built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, File, FragmentTable, Notes
from ucformat.containers.zip_read import checks_of
from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.formats.deepspeed.flat import Pieces
from ucformat.formats.unite import merge_tables, widen
from ucformat.lazy_torch import torch
from ucformat.pickles.unpickle import RefusedTensor, StoredTensor, open_torch_zip
from ucformat.storage.store import Store
from ucformat.values.tree import join_name

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
        self._blocks: list[tuple[Sequence[str], FragmentTable]] = []
        self._inline: dict[tuple[str, bytes], int] = {}

    def fork(self) -> Opened:
        """Another catalog in the making, over the same files: they have the same numbers in both. Remarks are shared."""
        other = Opened(self.store)
        other.builder.files, other.remarks, other._ids, other._inline = self.builder.files, self.remarks, self._ids, self._inline
        return other

    @property
    def files(self) -> tuple[File, ...]:
        """All files that were opened, by any fork."""
        return tuple(self.builder.files)

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

    def spread(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], parts: Sequence[StoredTensor], pieces: Pieces
    ) -> None:
        """Add tensors, one for each parameter of a group, that lie in the ranks' flat buffers `parts` of one dtype."""
        dtype = parts[0].dtype
        for name, shape in zip(names, shapes, strict=True):
            self.builder.tensor(name, dtype, shape)
        file = np.array([self._ids[part.file] for part in parts], dtype=np.int32)
        base = np.array([part.start for part in parts], dtype=np.int64)
        start = base[pieces.rank] + pieces.at * DTYPES[dtype].itemsize
        self._blocks.append(
            (names, FragmentTable(pieces.param.astype(np.int32), file[pieces.rank], start, pieces.offset, pieces.length))
        )

    def inline(self, name: str, dtype: str, shape: Sequence[int], data: bytes, origin: str) -> None:
        """Add a small tensor whose bytes were computed here, from what `origin` says. Equal ones share them."""
        self.builder.tensor(name, dtype, shape)
        self.builder.fragment(name, self.add_inline(data, origin), 0, Box.whole(tuple(shape)))

    def add_inline(self, data: bytes, origin: str) -> int:
        """The number of a file of bytes that were computed here, from what `origin` says."""
        key = (origin, data)
        if key not in self._inline:
            self._inline[key] = self.builder.file(File(origin, len(data), inline=data))
        return self._inline[key]

    def build(self, values: object = None, notes: Notes | None = None) -> Catalog:
        """The catalog of everything that was added."""
        catalog = self.builder.build(values, notes)
        number = {spec.name: i for i, spec in enumerate(catalog.tensors)}
        ndim = max((len(spec.shape) for spec in catalog.tensors), default=0)
        tables = [catalog.fragments]
        for names, table in self._blocks:
            tensor = np.array([number[name] for name in names], dtype=np.int32)[table.tensor]
            tables.append(replace(table, tensor=tensor, offset=widen(table.offset, ndim, 0), length=widen(table.length, ndim, 1)))
        return replace(catalog, fragments=merge_tables(tables))

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


def head(opened: Opened, tensor: StoredTensor, items: int, at: int = 0) -> torch.Tensor:
    """At most so many items of a contiguous tensor, from item `at` on."""
    kind = DTYPES[tensor.dtype]
    start = tensor.start + at * kind.itemsize
    stop = min(start + items * kind.itemsize, tensor.start + math.prod(tensor.shape) * kind.itemsize)
    data = bytearray(opened.store.read(tensor.file, start, stop))
    return torch.frombuffer(data, dtype=kind.torch) if data else torch.empty(0, dtype=kind.torch)

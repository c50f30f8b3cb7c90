"""An open checkpoint as a mapping of lazy tensors: indexing one reads just the bytes that are asked for."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.dtypes import DTYPES, DType
from ucformat.errors import UnsupportedError
from ucformat.lazy_torch import loaded, torch
from ucformat.reshard.reading.execute import execute
from ucformat.reshard.reading.numbers import in_numpy, widened
from ucformat.reshard.reading.plan import ReadPlan, plan, refuse_expanded, wants
from ucformat.storage.recent import RecentReads

Index = int | slice | EllipsisType


def read(catalog: Catalog, name: str, box: Box | None = None, *, verify: bool = True) -> torch.Tensor:
    """One box of a tensor (all of it by default) as a new CPU tensor of the stored dtype.

    Raises CoverageError before the first read when it is not wholly stored; ChecksumError when bytes are damaged;
    UnsupportedError for more than 1 GiB of an expanded view of a few stored bytes.
    """
    return read_many(catalog, [(name, box)], verify=verify)[0]


def read_many(
    catalog: Catalog,
    wanted: Sequence[tuple[str, Box | None]],
    *,
    verify: bool = True,
    threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Several boxes at once, in one plan. `on_bytes` is called with the number of bytes just read, from any thread."""
    loaded()  # where it is not installed, that is the error
    planned, boxes = _planned(catalog, wanted)
    out = [kind.empty(shape) for kind, shape in boxes]
    execute(planned, out, verify=verify, threads=threads, on_bytes=on_bytes)
    return out


def read_bits(
    catalog: Catalog, wanted: Sequence[tuple[str, Box | None]], *, verify: bool = True, threads: int | None = None
) -> list[NDArray[Any]]:
    """As `read_many`, without torch: arrays of `DType.numpy`, unsigned integers that hold the items' bits."""
    planned, boxes = _planned(catalog, wanted)
    out = [np.empty(shape, dtype=kind.numpy) for kind, shape in boxes]
    execute(planned, out, verify=verify, threads=threads)
    return out


def _planned(catalog: Catalog, wanted: Sequence[tuple[str, Box | None]]) -> tuple[ReadPlan, list[tuple[DType, tuple[int, ...]]]]:
    """The plan, and dtype and shape of what it fills."""
    columns = wants(catalog, wanted)
    planned = plan(catalog, columns)
    refuse_expanded(catalog, columns)
    boxes = []
    for index, length in zip(columns.tensor, columns.length, strict=True):
        spec = catalog.tensors[index]
        boxes.append((spec.kind, tuple(length[: len(spec.shape)].tolist())))
    return planned, boxes


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of an open checkpoint. Nothing is read until it is indexed."""

    catalog: Catalog
    name: str

    @property
    def spec(self) -> TensorSpec:
        return self.catalog.spec(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.spec.dtype].torch

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """A new CPU tensor, as torch's basic indexing gives it: ints, slices (any positive step) and one `...`.

        Raises IndexError, CoverageError before any read, ChecksumError when bytes are damaged.
        """
        box, after = _box(self.shape, index if isinstance(index, tuple) else (index,))
        return read(self.catalog, self.name, box)[after]

    def read(self) -> torch.Tensor:
        """All of it, as a new CPU tensor."""
        return read(self.catalog, self.name)

    @property
    def numpy(self) -> LazyArray:
        """The same as numpy arrays: `checkpoint["model/w"].numpy[0:8]`. torch need not be installed."""
        return LazyArray(self.catalog, self.name)

    def __array__(self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None) -> NDArray[np.generic]:
        """All of it as a new array, for `numpy.asarray`.

        Dtypes that numpy lacks (bfloat16, float8) come as those of the package ml_dtypes where it is installed, or as the
        `dtype` that is asked for, converted exactly to float32 first. Raises UnsupportedError without either, and for packed
        dtypes; ValueError for `copy=False`.
        """
        if copy is False:
            raise ValueError(f"{self.name!r} lies in a file: an array of it is always a copy")
        return np.asarray(_array(self.catalog, self.name, None, convert=dtype is not None), dtype=dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.spec.dtype}, {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class LazyArray:
    """A tensor of an open checkpoint, read as numpy arrays."""

    catalog: Catalog
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.catalog.spec(self.name).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the arrays. Raises UnsupportedError where neither numpy nor ml_dtypes has it."""
        return _numpy_dtype(self.catalog.spec(self.name))

    def __getitem__(self, index: Index | tuple[Index, ...]) -> NDArray[Any]:
        """A new array, as numpy's basic indexing gives it: ints, slices (any positive step) and one `...`.

        bfloat16 and float8 come as dtypes of the package ml_dtypes. Raises UnsupportedError where that is not installed, and for
        packed dtypes; IndexError, CoverageError before any read, ChecksumError when bytes are damaged.
        """
        box, after = _box(self.shape, index if isinstance(index, tuple) else (index,))
        found: NDArray[Any] = _array(self.catalog, self.name, box, convert=False)[after]
        return found

    def __array__(self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None) -> NDArray[np.generic]:
        return LazyTensor(self.catalog, self.name).__array__(dtype, copy)


def _array(catalog: Catalog, name: str, box: Box | None, *, convert: bool) -> NDArray[Any]:
    """A box as an array that holds the same numbers; with `convert` of a wider dtype where numpy lacks its own."""
    spec = catalog.spec(name)
    if convert and spec.kind.group == (1, 1):
        return widened(read_bits(catalog, [(name, box)])[0], spec.dtype)
    dtype = _numpy_dtype(spec)
    return read_bits(catalog, [(name, box)])[0].view(dtype)


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    found = in_numpy(spec.dtype)
    if found is not None:
        return found
    packed, kind = spec.kind.group != (1, 1), spec.kind.torch_name
    if not packed:
        with contextlib.suppress(ImportError, AttributeError):
            own: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), kind))
            return own
    how = "`.read()` gives a torch tensor"
    if not packed:
        how += ", numpy.asarray(…, dtype=numpy.float32) a wider dtype, and with ml_dtypes installed numpy has it"
    raise UnsupportedError(spec.name, f"numpy has no dtype {kind}: {how}")


def _box(shape: tuple[int, ...], index: tuple[Index, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """The box that an index touches, and what is left to index in it."""
    if sum(entry is Ellipsis for entry in index) > 1:
        raise IndexError("an index holds at most one ellipsis")
    if Ellipsis in index:
        at = index.index(Ellipsis)
        missing = len(shape) - (len(index) - 1)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} indices for a tensor of shape {list(shape)}")
    offset, length, after = list[int](), list[int](), list[int | slice]()
    for size, entry in zip(shape, (*index, *[slice(None)] * (len(shape) - len(index))), strict=True):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(size)
            if step < 1:
                raise IndexError("slices have a positive step")
            offset.append(start)
            length.append(max(0, stop - start))
            after.append(slice(None, None, step))
        else:
            at = int(entry)  # type: ignore[arg-type]  # an ellipsis was expanded above
            if not -size <= at < size:
                raise IndexError(f"index {at} is out of range for size {size}")
            offset.append(at % size)
            length.append(1)
            after.append(0)
    return Box(tuple(offset), tuple(length)), tuple(after)


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint of any format, opened: `checkpoint["model/wte.weight"][0:8]` reads just those rows.

    Names are canonical (`model/<fqn>`, `optimizer/<fqn>/<state>`), tied names included. As in every mapping, `keys()` are the
    names, and `values()` and `items()` give `LazyTensor`s; everything that is no tensor is in `values_tree`.
    """

    def __init__(self, catalog: Catalog) -> None:
        # tables of checksums and blocks are asked for once, where asking costs a round trip
        self.catalog = replace(catalog, store=RecentReads(catalog.store)) if catalog.store.streams else catalog
        self._names = catalog.names

    @property
    def values_tree(self) -> object:
        """Everything in the checkpoint that is no tensor: steps, hyper-parameters, states of schedulers, as nested dicts.

        Not `values`, which a mapping has as a method: it gives the tensors.
        """
        return self.catalog.values

    @property
    def step(self) -> int | None:
        return self.catalog.notes.step

    def __getitem__(self, name: str) -> LazyTensor:
        self.catalog.find(name)
        return LazyTensor(self.catalog, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Checkpoint({self.catalog.url!r}, {len(self)} tensors, {self.catalog.nbytes} bytes)"

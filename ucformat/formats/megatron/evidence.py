"""Proof of where the optimizer's state lies: master weights, rounded, must be the weights of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from ucformat.catalog import File
from ucformat.dtypes import DTYPES
from ucformat.lazy_torch import torch
from ucformat.storage.store import Store
from ucformat.views import View

_SAMPLE = 64  # items at either end of a parameter
_THREADS = 8

T = TypeVar("T")


def agree(store: Store, files: Sequence[File], pairs: Sequence[tuple[View, View]]) -> bool:
    """Whether of each (master, weight) the first and last items agree."""
    return not differing(store, files, dict(enumerate(pairs)))


def differing(store: Store, files: Sequence[File], pairs: Mapping[T, tuple[View, View]]) -> list[T]:
    """Keys of those (master, weight) whose first or last items don't agree."""

    def check(pair: tuple[View, View]) -> bool:
        master, weight = pair
        return master.shape == weight.shape and all(
            torch.equal(_items(store, files, a).to(DTYPES[weight.dtype].torch), _items(store, files, b))
            for a, b in zip(_ends(master), _ends(weight), strict=True)
        )

    with ThreadPoolExecutor(_THREADS) as pool:
        return [key for key, right in zip(pairs, pool.map(check, pairs.values()), strict=True) if not right]


def _ends(view: View) -> list[View]:
    """The first and the last items of a view, as rows."""
    if not view.numel:
        return []
    first, last = view, view
    while first.ndim > 1:
        first, last = first.select(0, 0), last.select(0, last.shape[0] - 1)
    if not first.ndim:
        return [first.unsqueeze()]
    n = min(_SAMPLE, first.shape[0])
    return [first.narrow(0, 0, n), last.narrow(0, last.shape[0] - n, n)]


def _items(store: Store, files: Sequence[File], row: View) -> torch.Tensor:
    """The items of a view of one dimension."""
    kind = DTYPES[row.dtype]
    out = kind.empty(row.shape)
    columns = (row.file, row.start, row.offset[:, 0], row.length[:, 0], row.stride[:, 0])
    for number, start, offset, length, stride in zip(*(column.tolist() for column in columns), strict=True):
        file, stop = files[number], start + ((length - 1) * stride + 1) * kind.itemsize
        data = store.read(file.path, start, stop) if file.inline is None else file.inline[start:stop]
        held = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(kind.torch)
        out[offset : offset + length] = held.as_strided((length,), (stride,))
    return out

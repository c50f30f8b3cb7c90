"""One catalog of several, for checkpoints whose parts lie in files of different kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ucformat.box import Ints
from ucformat.catalog import Catalog, FragmentTable
from ucformat.errors import FormatError
from ucformat.storage.store import Store


def widen(columns: Ints, ndim: int, fill: int) -> Ints:
    """(N, D) columns padded to (N, ndim)."""
    return np.pad(columns, ((0, 0), (0, ndim - columns.shape[1])), constant_values=fill)


def merge_tables(tables: Sequence[FragmentTable]) -> FragmentTable:
    """One table of all rows, sorted by tensor; all count the same tensors and files, and are equally wide."""
    tensor = np.concatenate([table.tensor for table in tables])
    order = np.argsort(tensor, kind="stable")
    stride = None
    if any(table.stride is not None for table in tables):
        stride = np.concatenate([table.strides() for table in tables])[order]
    return FragmentTable(
        tensor[order],
        np.concatenate([table.file for table in tables])[order],
        np.concatenate([table.start for table in tables])[order],
        np.concatenate([table.offset for table in tables])[order],
        np.concatenate([table.length for table in tables])[order],
        stride,
    )


def seen_from(catalog: Catalog, root: Store) -> Catalog:
    """The catalog with the paths of its files counted from `root`, in or at which its store lies."""
    if catalog.store.url == root.url:
        return catalog
    folder = catalog.store.url.removeprefix(root.url).strip("/")
    files = tuple(
        file if file.inline is not None or file.store is not None else replace(file, path=f"{folder}/{file.path}")
        for file in catalog.files
    )
    return replace(catalog, store=root, files=files)


def unite(first: Catalog, second: Catalog) -> Catalog:
    """Both catalogs' tensors, files and values, and the first one's notes. They have one store, and no name in common.

    Raises FormatError for a name that both have.
    """
    both = set(first.names) & set(second.names)
    values: dict[Any, Any] = {}
    for tree in (first.values, second.values):
        assert isinstance(tree, Mapping)
        both |= set(map(str, values.keys() & tree.keys()))
        values.update(tree)
    if both:
        raise FormatError(first.store.url, f"two of its files hold {min(both)!r}")
    tensors = tuple(sorted((*first.tensors, *second.tensors), key=lambda spec: spec.name))
    numbers = {spec.name: i for i, spec in enumerate(tensors)}
    ndim = max((len(spec.shape) for spec in tensors), default=0)
    tables = [_counted(first, numbers, 0, ndim), _counted(second, numbers, len(first.files), ndim)]
    return replace(
        first,
        tensors=tensors,
        fragments=merge_tables(tables),
        files=(*first.files, *second.files),
        values=values,
        aliases={**first.aliases, **second.aliases},
        _index={},
    )


def _counted(catalog: Catalog, numbers: Mapping[str, int], files: int, ndim: int) -> FragmentTable:
    """A catalog's fragments with tensors numbered by `numbers`, files from `files` on."""
    own = np.array([numbers[spec.name] for spec in catalog.tensors], dtype=np.int32)
    table = catalog.fragments
    stride = None if table.stride is None else widen(table.stride, ndim, 0)
    return FragmentTable(
        own[table.tensor] if len(own) else table.tensor,
        table.file + np.int32(files),
        table.start,
        widen(table.offset, ndim, 0),
        widen(table.length, ndim, 1),
        stride,
    )

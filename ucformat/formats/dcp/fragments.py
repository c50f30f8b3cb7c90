"""From the items of `.distcp` files to fragments of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ucformat.box import Box
from ucformat.catalog import CatalogBuilder, File
from ucformat.containers.zip_read import checks_of
from ucformat.errors import DTypeMismatchError, FormatError
from ucformat.formats.dcp.items import Item
from ucformat.formats.dcp.metadata import Chunk, StoredKey
from ucformat.pickles.unpickle import StoredTensor


def files_of(size: Callable[[str], int], opened: Mapping[Chunk, Item]) -> dict[str, File]:
    """Every file that holds items, with the CRCs of all tensor records in it."""
    entries: dict[str, dict[int, Any]] = {}
    for item in opened.values():
        held = entries.setdefault(item.path, {})
        held.update((entry.start, entry) for entry in item.data)
    for path, held in entries.items():
        stop = 0
        for start, entry in sorted(held.items()):
            if start < stop:
                raise FormatError(path, "two items share bytes", start, stop)
            stop = entry.stop
    return {path: File(path, size(path), checks_of(held.values())) for path, held in entries.items()}


def add_tensor(
    builder: CatalogBuilder, name: str, key: StoredKey, opened: Mapping[Chunk, Item], numbers: Mapping[str, int]
) -> None:
    """Declare a tensor and its chunks, each checked to be what the metadata promises. Raises FormatError, DTypeMismatchError."""
    builder.tensor(name, key.dtype, key.shape)
    for chunk in key.chunks:
        item = opened.get(chunk)
        if item is None:
            continue  # the metadata names no place for it: the planner reports the uncovered box when it is wanted
        tensor = _checked(builder, name, key, chunk, item)
        if tensor is not None:
            stride = None if tensor.contiguous else tensor.stride
            builder.fragment(name, numbers[item.path], tensor.start, Box(chunk.offset, chunk.length), stride)


def _checked(builder: CatalogBuilder, name: str, key: StoredKey, chunk: Chunk, item: Item) -> StoredTensor | None:
    """The tensor in an item when it is what the metadata promises; None for an empty one that took a chunk's place."""
    tensor = item.tree
    if not isinstance(tensor, StoredTensor):
        raise FormatError(item.path, f"tensor {name!r}: its item holds no tensor", item.start, item.stop)
    if tensor.dtype != key.dtype:
        hint = f"{item.path} and .metadata disagree (plan caching with changed dtypes does that): save it again"
        raise DTypeMismatchError(name, tensor.dtype, key.dtype, hint)
    if 0 in tensor.shape and 0 not in chunk.length:
        return None
    if tensor.shape != chunk.length:
        why = f"tensor {name!r}: its item has shape {list(tensor.shape)}, the metadata says {list(chunk.length)}"
        raise FormatError(item.path, why, item.start, item.stop)
    return tensor

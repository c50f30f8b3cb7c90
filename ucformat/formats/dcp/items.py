"""The items of `.distcp` files: complete torch.save zips back to back, opened by their heads and tails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ucformat.containers.zip_read import Peek, ZipEntry, tail_range
from ucformat.errors import FormatError
from ucformat.formats.dcp.metadata import Chunk, Metadata, Place
from ucformat.pickles.unpickle import open_torch_zip
from ucformat.storage.store import Store

_HEAD_BYTES = 2048  # of an item: its pickle and the local headers up to the tensor's data
_SMALL_BYTES = 8 << 10  # an item that is read whole: mostly values
_BATCH = 4096  # items whose heads and tails are in memory at once: at most 40 MiB


@dataclass(frozen=True, slots=True)
class Item:
    """An opened item: its decoded tree, and the records that hold tensor data."""

    path: str
    start: int
    stop: int
    tree: Any
    data: tuple[ZipEntry, ...]


def open_items(store: Store, metadata: Metadata) -> dict[Chunk, Item]:
    """Open all items, file by file in the order of their bytes.

    Raises MissingFileError for a file that is not there, FormatError for an item outside its file or damaged.
    """
    by_file: dict[str, list[tuple[Place, Chunk]]] = {}
    for chunk, place in metadata.places.items():
        by_file.setdefault(place.path, []).append((place, chunk))
    opened: dict[Chunk, Item] = {}
    for path, items in sorted(by_file.items()):
        size = store.size(path)
        items.sort(key=lambda item: (item[0].start, item[0].length))
        end = 0
        for place, chunk in items:
            if place.start < end:
                raise FormatError(path, f"item {chunk.key!r} shares bytes with another", place.start, end)
            end = place.start + place.length
            if place.start + place.length > size:
                why = f"item {chunk.key!r} lies outside the file of {size} bytes: it is truncated"
                raise FormatError(path, why, place.start, place.start + place.length)
        for first in range(0, len(items), _BATCH):
            opened.update(_open_batch(store, path, items[first : first + _BATCH]))
    return opened


def _open_batch(store: Store, path: str, items: Sequence[tuple[Place, Chunk]]) -> Iterator[tuple[Chunk, Item]]:
    peek = Peek(store, path)
    peek.prefetch(span for place, _ in items for span in _ends(place))
    for place, chunk in items:
        start, stop = place.start, place.start + place.length
        opened = open_torch_zip(store, path, start, stop, peek)
        data = tuple(entry for name, entry in opened.entries.items() if name.startswith("data/"))
        yield chunk, Item(path, start, stop, opened.tree, data)


def _ends(place: Place) -> list[tuple[int, int]]:
    start, stop = place.start, place.start + place.length
    if place.length <= _SMALL_BYTES:
        return [(start, stop)]
    return [(start, start + _HEAD_BYTES), tail_range(start, stop)]

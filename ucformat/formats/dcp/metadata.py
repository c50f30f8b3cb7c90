"""The `.metadata` of a DCP directory as plain records: tensors with their chunks, values, paths. Nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ucformat import dtypes
from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, MissingFileError, UnsupportedError, VersionError, brief
from ucformat.lazy_torch import torch
from ucformat.pickles.unpickle import Inert, unpickle
from ucformat.storage.store import Store

FILE = ".metadata"
_VERSION = "1."  # of DCP's metadata; older releases wrote none
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Chunk:
    """One item: a box of tensor `key`, or the value `key` (empty `offset` and `length`)."""

    key: str
    offset: tuple[int, ...]
    length: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: bytes [start, start + length) of the file `path`."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A tensor of the metadata: flat key, dtype name, global shape and chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that `.metadata` says."""

    tensors: tuple[StoredKey, ...]
    blobs: tuple[Chunk, ...]
    """Values, one item each."""
    places: dict[Chunk, Place]
    paths: dict[str, tuple[str | int, ...]]
    """Flat key → path in the nest; integers are list indices."""
    odd: dict[str, str]
    """Flat key → what it is, of entries that are neither values nor tensors of a dtype that we know."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """What Megatron adds for each tensor (`mcore_data`)."""


def read_metadata(store: Store) -> Metadata:
    """Read and check `.metadata`. Raises MissingFileError, FormatError, UnsafePickleError, VersionError, UnsupportedError."""
    if not store.exists(FILE):
        raise MissingFileError(f"{store.url}/{FILE}", "missing: an unfinished or foreign checkpoint")
    tree = unpickle(store.read(FILE), FILE)
    if isinstance(tree, Inert) and tree.class_name.startswith("bytecheckpoint."):
        why = "part of a ByteCheckpoint checkpoint, whose .distcp files hold bare bytes and are read by its own programs only"
        raise UnsupportedError(store.url, f"{why}: export it with its merge_bcp.py, and convert the safetensors files")
    if not isinstance(tree, Inert) or not tree.class_name.endswith(".Metadata"):
        raise FormatError(FILE, "the pickle is no DCP metadata")
    fields = tree.attributes
    version = fields.get("version")
    if isinstance(version, str) and not version.startswith(_VERSION):
        raise VersionError(FILE, version, "1.x")
    entries, infos = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(infos, dict):
        raise FormatError(FILE, "the metadata lacks state_dict_metadata or storage_data")
    places = _places(infos)
    tensors: list[StoredKey] = []
    blobs: list[Chunk] = []
    odd: dict[str, str] = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not isinstance(entry, Inert):
            raise FormatError(FILE, f"entry {brief(key)} is malformed")
        if entry.class_name.endswith(".BytesStorageMetadata"):
            blobs.append(Chunk(key, (), ()))
        elif not entry.class_name.endswith(".TensorStorageMetadata"):
            odd[key] = entry.class_name
        elif (dtype := _dtype(key, entry.attributes.get("properties"))) in DTYPES:
            tensors.append(_tensor(key, entry, dtype))
        else:
            odd[key] = f"a tensor of {dtype}"
    wanted = dict(_matched(tensors, blobs, places))
    added = fields.get("mcore_data")
    megatron = {str(key): value for key, value in added.items()} if isinstance(added, dict) else {}
    return Metadata(tuple(tensors), tuple(blobs), wanted, _paths(fields.get("planner_data")), odd, megatron)


_Index = tuple[str, "tuple[int, ...] | None"]


def _matched(tensors: list[StoredKey], blobs: list[Chunk], places: dict[_Index, Place]) -> Iterator[tuple[Chunk, Place]]:
    """Chunks with their places; a chunk without one is left to the planner, which reports what is uncovered."""
    for tensor in tensors:
        for chunk in tensor.chunks:
            place = places.get((tensor.name, chunk.offset))
            if place is not None:
                yield chunk, place
    for blob in blobs:
        place = places.get((blob.key, None))
        if place is not None:
            yield blob, place


def _ints(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, (tuple, list)) and all(type(n) is int and 0 <= n < _INT64 for n in value):
        return tuple(value)
    raise FormatError(FILE, f"{what}: {brief(value)} are no sizes or offsets")


def _tensor(key: str, entry: Inert, dtype: str) -> StoredKey:
    fields = entry.attributes
    shape = _ints(fields.get("size"), key)
    chunks: dict[Chunk, None] = {}  # replicas are listed once
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise FormatError(FILE, f"tensor {key!r} has no list of chunks")
    for record in listed:
        held = record.attributes if isinstance(record, Inert) else {}
        chunk = Chunk(key, _ints(held.get("offsets"), key), _ints(held.get("sizes"), key))
        if len(chunk.offset) != len(shape) or len(chunk.length) != len(shape):
            raise FormatError(FILE, f"tensor {key!r}: a chunk has other dimensions than {list(shape)}")
        if 0 in chunk.length and 0 not in shape:
            continue  # an empty shard says nothing, and must not take the place of a real one at the same offset
        chunks[chunk] = None
    return StoredKey(key, dtype, shape, tuple(chunks))


def _dtype(key: str, properties: object) -> str:
    """The dtype in TensorProperties, whose state is a tuple that starts with it (a dict in old releases).

    One that no checkpoint of ours can hold goes by torch's name of it.
    """
    state = properties.state if isinstance(properties, Inert) else None
    found = state[0] if isinstance(state, tuple) and state else None
    if isinstance(properties, Inert) and not isinstance(found, torch.dtype):
        found = properties.attributes.get("dtype")
    if not isinstance(found, torch.dtype):
        raise FormatError(FILE, f"tensor {key!r} has no dtype")
    try:
        return dtypes.from_torch(found).name
    except KeyError:
        return str(found)


def _places(infos: dict[Any, Any]) -> dict[_Index, Place]:
    """(key, chunk offset or None) → place."""
    places: dict[_Index, Place] = {}
    for index, info in infos.items():
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            raise FormatError(FILE, "storage_data is malformed")
        at, held = index.attributes, info.attributes
        key, offset = at.get("fqn"), at.get("offset")
        path, start, length = held.get("relative_path"), held.get("offset"), held.get("length")
        if not isinstance(key, str) or not isinstance(path, str) or type(start) is not int or type(length) is not int:
            raise FormatError(FILE, f"storage_data of {brief(key)} is malformed")
        if not path or path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"):
            raise FormatError(FILE, f"item {key!r} lies in {path!r}, outside the checkpoint")
        if start < 0 or length <= 0 or start + length >= _INT64:
            raise FormatError(FILE, f"item {key!r} lies at {length} bytes from {start} of {path}")
        if held.get("transform_descriptors"):
            raise UnsupportedError(path, f"item {key!r} is stored transformed ({brief(held['transform_descriptors'])})")
        places[key, None if offset is None else _ints(offset, key)] = Place(path, start, length)
    return places


def _paths(planned: object) -> dict[str, tuple[str | int, ...]]:
    """The default planner's data; other planners keep what they like there, and then keys are names as they are."""
    if not isinstance(planned, dict):
        return {}
    return {key: path for key, path in planned.items() if isinstance(key, str) and _is_path(path)}


def _is_path(path: object) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(part) in (str, int) for part in path)

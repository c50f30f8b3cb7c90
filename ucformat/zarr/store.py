"""A read-only zarr store over a catalog: chunks are boxes, read and verified when they are asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from ucformat.catalog import Catalog
from ucformat.look import StrPath
from ucformat.look import open as open_checkpoint
from ucformat.reshard.reading.lazy import Checkpoint, read_bits
from ucformat.zarr.dtypes import EXTENSIONS, register
from ucformat.zarr.layout import chunk_box, hierarchy, node_path

METADATA = "zarr.json"


def zarr_store(checkpoint: StrPath | Checkpoint, *, step: int | None = None) -> CheckpointStore:
    """A checkpoint of any format as a read-only zarr v3 store: `zarr.open_group(ucformat.zarr_store("runs/a"), mode="r")`.

    Every tensor is an array under its name, whatever its sharding; chunks follow the stored fragments where these are a regular
    grid, and are bounded otherwise. bfloat16 and float8 are data types of zarr-extensions and arrays of ml_dtypes; packed dtypes
    and complex32 are their bits (attribute `ucf:bits`). Values are the attribute `ucf:values` of the root, in the JSON of the
    specification. `step`: that step of a run directory.

    Raises what `open` raises, and UnsupportedError for names that zarr can't have.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, step=step)
    if any(spec.dtype in EXTENSIONS for spec in opened.catalog.tensors):
        register()
    return CheckpointStore(opened.catalog)


class CheckpointStore(Store):
    """What `zarr_store` returns."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True
    supports_partial_writes = False

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(read_only=True)
        self._catalog = catalog
        self._nodes = hierarchy(catalog)
        self._names = {node_path(name): name for name in catalog.names}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and self._catalog.url == other._catalog.url and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(self._catalog.url)

    def __repr__(self) -> str:
        return f"CheckpointStore({self._catalog.url!r})"

    def with_read_only(self, read_only: bool = False) -> Store:
        if not read_only:
            raise NotImplementedError(f"with_read_only is not implemented for the {type(self)} store type.")
        return CheckpointStore(self._catalog)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data = await asyncio.to_thread(self._read, key)
        return None if data is None else prototype.buffer.from_bytes(_cut(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        path, _, last = key.rpartition("/")
        return (last == METADATA and path in self._nodes) or self._chunk(key) is not None

    def _read(self, key: str) -> bytes | None:
        path, _, last = key.rpartition("/")
        if last == METADATA and path in self._nodes:
            return json.dumps(self._nodes[path]).encode()
        found = self._chunk(key)
        if found is None:
            return None
        name, index = found
        spec, shape = self._catalog.spec(name), self._grid(name)
        box = chunk_box(spec.shape, shape, index)
        assert box is not None
        (bits,) = read_bits(self._catalog, [(name, box)])
        if bits.shape != shape:  # chunks at the edge are stored whole
            bits = np.pad(bits, [(0, whole - n) for n, whole in zip(bits.shape, shape, strict=True)])
        return bits.tobytes()

    def _grid(self, name: str) -> tuple[int, ...]:
        return tuple(self._nodes[node_path(name)]["chunk_grid"]["configuration"]["chunk_shape"])

    def _chunk(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        """Name and chunk index that a key means."""
        path, separator, rest = f"{key}/".rpartition("/c/")
        name = self._names.get(path)
        if not separator or name is None:
            return None
        parts = rest.rstrip("/").split("/") if rest else []
        if not all(part.isascii() and part.isdigit() and str(int(part)) == part for part in parts):
            return None
        shape, index = self._catalog.spec(name).shape, tuple(map(int, parts))
        if len(index) != len(shape) or chunk_box(shape, self._grid(name), index) is None:
            return None
        return name, index

    async def list(self) -> AsyncIterator[str]:
        for path in self._nodes:
            yield f"{path}/{METADATA}" if path else METADATA
            if path in self._names:
                for key in self._chunk_keys(path):
                    yield key

    def _chunk_keys(self, path: str) -> Iterable[str]:
        shape = self._catalog.spec(self._names[path]).shape
        counts = [-(-n // chunk) for n, chunk in zip(shape, self._grid(self._names[path]), strict=True)]
        return ("/".join((path, "c", *map(str, index))) for index in np.ndindex(*counts))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        path = prefix.strip("/")
        below = f"{path}/" if path else ""
        found: set[str] = set()
        async for key in self.list_prefix(below):
            found.add(key[len(below) :].partition("/")[0])
        for name in sorted(found):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()


def _cut(data: bytes, part: ByteRequest | None) -> bytes:
    if part is None:
        return data
    if isinstance(part, RangeByteRequest):
        return data[part.start : part.end]
    if isinstance(part, OffsetByteRequest):
        return data[part.offset :]
    if isinstance(part, SuffixByteRequest):
        return data[max(0, len(data) - part.suffix) :]
    raise TypeError(f"Unexpected byte_range, got {part}.")

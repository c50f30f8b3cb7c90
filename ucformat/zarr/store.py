"""A read-only zarr store over a catalog: chunks are boxes, read and verified when they are asked for."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import numpy as np
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype

from ucformat.catalog import Catalog
from ucformat.look import StrPath
from ucformat.look import open as open_checkpoint
from ucformat.reshard.reading.lazy import Checkpoint
from ucformat.zarr.batches import Batches
from ucformat.zarr.byte_range import bounds
from ucformat.zarr.chunk_read import ChunkRead
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

    def __init__(self, catalog: Catalog, *, read_only: bool = True) -> None:
        if not read_only:
            raise ValueError(f"{catalog.url}: a checkpoint is a read-only store; pass read_only=True")
        super().__init__(read_only=True)
        self._catalog = catalog
        self._batches = Batches(catalog)
        self._nodes = hierarchy(catalog)
        self._names = {node_path(name): name for name in catalog.names}
        self._children: dict[str, list[str]] = {}
        for path in self._nodes:
            if path:
                parent, _, last = path.rpartition("/")
                self._children.setdefault(parent, []).append(last)

    def __getstate__(self) -> dict[str, Any]:
        """The catalog alone; the rest is made from it, in workers of dask for example."""
        return {"catalog": self._catalog, "open": self._is_open}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if any(spec.dtype in EXTENSIONS for spec in state["catalog"].tensors):
            register()
        self.__init__(state["catalog"])  # type: ignore[misc]
        self._is_open = state["open"]

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
        found = self._find(key, byte_range)
        if isinstance(found, ChunkRead):
            found = await self._batches.read(found)
        return None if found is None else prototype.buffer.from_bytes(found)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        path, _, last = key.rpartition("/")
        return (last == METADATA and path in self._nodes) or self._chunk(key) is not None

    async def getsize(self, key: str) -> int:
        size = self._size(key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    def _metadata(self, key: str) -> bytes | None:
        path, _, last = key.rpartition("/")
        return json.dumps(self._nodes[path]).encode() if last == METADATA and path in self._nodes else None

    def _size(self, key: str) -> int | None:
        """Bytes of a value, without reading it; None where there is none."""
        metadata = self._metadata(key)
        if metadata is not None:
            return len(metadata)
        found = self._chunk(key)
        return None if found is None else math.prod(self._grid(found[0])) * self._catalog.spec(found[0]).kind.itemsize

    def _find(self, key: str, part: ByteRequest | None) -> memoryview | ChunkRead | None:
        """Bytes of metadata, or what has to be read; None where there is nothing."""
        metadata = self._metadata(key)
        if metadata is not None:
            start, stop = bounds(len(metadata), part)
            return memoryview(metadata)[start:stop]
        found = self._chunk(key)
        if found is None:
            return None
        name, index = found
        spec, shape = self._catalog.spec(name), self._grid(name)
        chunk = chunk_box(spec.shape, shape, index)
        assert chunk is not None
        return ChunkRead(name, spec.kind.numpy, shape, chunk, *bounds(math.prod(shape) * spec.kind.itemsize, part))

    def _grid(self, name: str) -> tuple[int, ...]:
        return tuple(self._nodes[node_path(name)]["chunk_grid"]["configuration"]["chunk_shape"])

    def _chunk(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        """Name and chunk index that a key means."""
        path, separator, rest = f"{key}/".rpartition("/c/")
        name = self._names.get(path)
        if not separator or name is None:
            return None
        parts = rest.rstrip("/").split("/") if rest else []
        if not all(map(_is_index, parts)):
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

    def _chunk_counts(self, path: str) -> tuple[int, ...]:
        shape = self._catalog.spec(self._names[path]).shape
        return tuple(-(-n // chunk) for n, chunk in zip(shape, self._grid(self._names[path]), strict=True))

    def _chunk_keys(self, path: str) -> Iterator[str]:
        return ("/".join((path, "c", *map(str, index))) for index in np.ndindex(*self._chunk_counts(path)))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for path in self._nodes:
            key = f"{path}/{METADATA}" if path else METADATA
            if key.startswith(prefix):
                yield key
            chunks = f"{path}/c"
            if path in self._names and (chunks.startswith(prefix) or prefix.startswith(chunks)):
                for key in self._chunk_keys(path):
                    if key.startswith(prefix):
                        yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names right below a path, without a walk over what lies further down."""
        for name in sorted(set(self._below(prefix.strip("/")))):
            yield name

    def _below(self, path: str) -> Iterable[str]:
        if path in self._nodes:
            yield METADATA
            yield from self._children.get(path, ())
            if path in self._names and 0 not in self._chunk_counts(path):
                yield "c"
            return
        array, separator, index = f"{path}/".rpartition("/c/")
        if not separator or array not in self._names:
            return
        counts, above = self._chunk_counts(array), index.rstrip("/").split("/") if index else []
        inside = all(_is_index(part) and int(part) < n for part, n in zip(above, counts, strict=False))
        if inside and len(above) < len(counts) and 0 not in counts:
            yield from map(str, range(counts[len(above)]))

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()


def _is_index(text: str) -> bool:
    """Whether it is a number as keys of chunks have it: without signs, leading zeros and digits of other scripts."""
    return text.isascii() and text.isdigit() and str(int(text)) == text

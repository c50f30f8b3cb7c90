"""The checkpoint of `benchmarks.plan` in two forms, as far as planning looks at it: no tensor bytes are written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.plan import COLUMNS, READER, READERS, ROWS
from ucformat.box import Box
from ucformat.catalog import FragmentTable, TensorSpec
from ucformat.containers import checksums
from ucformat.formats import native
from ucformat.formats.native.manifest import MANIFEST, FileRecord, Record, build_index, encode_record
from ucformat.formats.native.shard import PAGE, ShardRecord, hex_digest
from ucformat.formats.source import locate
from ucformat.reshard.reading.plan import plan, wants
from ucformat.values.codec import encode

PIECE_BYTES = ROWS * COLUMNS * 2  # BF16


def tensor_names(count: int) -> list[str]:
    return [f"model/layers.{i:04d}.weight" for i in range(count)]


def write_native(place: Path, tensors: int, shards: int) -> None:
    """The commit record and the index, by the code that every save uses; shards are holes of the right size."""
    (place / "shards").mkdir(parents=True)
    rows = tensors * shards
    shard = np.tile(np.arange(shards, dtype=np.int32), tensors)
    tensor = np.repeat(np.arange(tensors, dtype=np.int32), shards)
    offset = np.zeros((rows, 2), dtype=np.int64)
    offset[:, 0] = shard.astype(np.int64) * ROWS
    length = np.tile(np.array([[ROWS, COLUMNS]], dtype=np.int64), (rows, 1))
    table = FragmentTable(tensor, shard, PAGE + tensor.astype(np.int64) * PIECE_BYTES, offset, length)
    index = build_index([TensorSpec(name, "BF16", (ROWS * shards, COLUMNS)) for name in tensor_names(tensors)], table)
    table_start = PAGE + tensors * PIECE_BYTES
    blocks = -(-tensors * PIECE_BYTES // checksums.BLOCK_BYTES)
    size = table_start + -(-8 * blocks // PAGE) * PAGE
    nothing = "0" * 16
    records = tuple(ShardRecord(f"shards/{i:05d}.safetensors", size, PAGE, table_start, nothing, nothing) for i in range(shards))
    for record in records:
        with (place / record.file).open("wb") as file:
            file.truncate(size)
    (place / "index.safetensors").write_bytes(index)
    about = FileRecord("index.safetensors", len(index), hex_digest(index))
    written = Record(index=about, shards=records, block_bytes=checksums.BLOCK_BYTES, values=msgspec.Raw(encode({})))
    (place / MANIFEST).write_bytes(encode_record(written))


def write_dcp(place: Path, tensors: int, shards: int) -> None:
    """The `.metadata` file, from torch's own classes by torch's own writer."""
    place.mkdir()
    metadata = Metadata({})
    results = []
    properties = TensorProperties(torch.bfloat16)
    for at, name in enumerate(tensor_names(tensors)):
        origins = [torch.Size([i * ROWS, 0]) for i in range(shards)]
        chunks = [ChunkStorageMetadata(origin, torch.Size([ROWS, COLUMNS])) for origin in origins]
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([ROWS * shards, COLUMNS]), chunks)
        for i, origin in enumerate(origins):
            info = _StorageInfo(f"__{i}_0.distcp", at * PIECE_BYTES, PIECE_BYTES)
            results.append(WriteResult(MetadataIndex(name, origin, i), PIECE_BYTES, info))
    writer = FileSystemWriter(place)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [results])


def open_and_plan(place: Path) -> int:
    """Open the native checkpoint and plan what one of `READERS` ranks reads; the number of pieces."""
    catalog = native.open_catalog(locate(str(place)))
    wanted = []
    for spec in catalog.tensors:
        rows, columns = spec.shape
        first, last = rows * READER // READERS, rows * (READER + 1) // READERS
        wanted.append((spec.name, Box((first, 0), (last - first, columns))))
    return len(plan(catalog, wants(catalog, wanted)).want)


def load_dcp_metadata(place: Path) -> int:
    """What `dcp.load` does first on every rank; the number of chunks. Planning would come on top."""
    metadata = FileSystemReader(place).read_metadata()
    return len(metadata.storage_data)

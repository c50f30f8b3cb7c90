"""ucf.json, the commit record, and index.safetensors, the fragment table as columns.

A checkpoint is committed when `ucf.json` exists. It is written last, names every other file, and holds their sizes and
digests; its own digest covers the record in it. specs/format.md is the normative text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from ucformat import box as boxes
from ucformat.box import Ints
from ucformat.catalog import MAX_BYTES, FragmentTable, TensorSpec
from ucformat.containers.envelope import VERSION, seal, unseal
from ucformat.containers.safetensors_header import MAX_DIMENSIONS, build_header, header_of
from ucformat.dtypes import DTYPES
from ucformat.errors import ChecksumError, FormatError
from ucformat.formats.native.shard import Count, Digest, ShardRecord, hex_digest
from ucformat.storage.store import Store, safe_path

MANIFEST = "ucf.json"
_DTYPE_CODES = sorted(DTYPES)
_UNSIGNED: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
}

_UNORDERED = -1
_THREADS = 3
_ROWS_AT_A_TIME = 1 << 16  # checked: what is computed for them stays in the cache
_COLUMNS = frozenset(
    [f"tensor.{key}" for key in ("name", "name_bytes", "dtype", "ndim", "shape", "fragments")]
    + [f"fragment.{key}" for key in ("shard", "start", "offset", "length")]
)
"""Others may be added by later minor versions, and are ignored."""


class FileRecord(msgspec.Struct, frozen=True):
    """A small file that is verified whole."""

    file: str
    """Path relative to the checkpoint."""
    size: Count
    digest: Digest
    """xxh3-64 of all its bytes, 16 hexadecimal digits."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a checkpoint is."""

    index: FileRecord
    shards: tuple[ShardRecord, ...]
    block_bytes: Count
    values: msgspec.Raw
    """The value tree, in the encoding that specs/format.md describes."""
    aliases: dict[str, str] = {}
    """alias → name of the tensor that it is."""
    step: int | None = None
    mesh: dict[str, int] = {}
    """Mesh axes of the run that wrote it, for information."""
    origin: str = "native"
    """The format that the state was converted from."""
    remarks: tuple[str, ...] = ()
    origin_layout: dict[str, str] = {}
    """How the origin arranged its files and names, see `catalog.Notes`."""
    companions: tuple[FileRecord, ...] = ()
    """Files that travel along (configuration, tokenizer); what follows the first `/` is their path beside the model."""
    created: str = ""
    """UTC, ISO 8601."""
    writer: str = ""
    """Program and version."""


def encode_record(record: Record) -> bytes:
    """The bytes of `ucf.json`."""
    return seal(msgspec.json.encode(record))


def decode_record(data: bytes, file: str) -> Record:
    """The record in the bytes of `ucf.json`.

    Raises what `unseal` raises, and FormatError when the record breaks the format. Unknown fields are ignored.
    """
    raw = unseal(data, file)
    try:
        record = msgspec.json.decode(raw, type=Record)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        clause = "record.required" if "missing required field" in str(error) else "record.types"
        raise FormatError(file, f"malformed commit record: {error}", 0, len(data), clause) from error
    for path in (record.index.file, *(shard.file for shard in record.shards), *(item.file for item in record.companions)):
        safe_path(path, file)
    if record.step is not None and not 0 <= record.step < 1 << 63:
        raise FormatError(file, f"step {record.step}", 0, len(data), "record.types")
    check_block_size(record.block_bytes, file)
    for shard in record.shards:
        check_sizes(shard, record.block_bytes, file)
    return record


def check_sizes(shard: ShardRecord, block_bytes: int, file: str) -> None:
    """Header, blocks and checksum table of a shard fit together. Raises FormatError naming `file`, which says so."""
    check_block_size(block_bytes, file)
    blocks = -(-(shard.table_start - shard.data_start) // block_bytes)
    if not 0 < shard.data_start <= shard.table_start or shard.size - shard.table_start < 8 * blocks:
        raise FormatError(
            file, f"shard {shard.file}: header, data and checksum table do not fit into {shard.size} bytes", clause="record.shard"
        )
    if (shard.size - shard.table_start) % 8:
        raise FormatError(file, f"shard {shard.file}: the checksum table is no whole number of entries", clause="record.shard")


def check_block_size(block_bytes: int, file: str) -> None:
    """Raises FormatError for a size that no block can have."""
    if block_bytes <= 0 or block_bytes % 4096:
        raise FormatError(file, f"block size {block_bytes} is not a multiple of 4096", clause="record.block-bytes")


@dataclass(frozen=True, slots=True)
class Index:
    """Tensors and fragments of a checkpoint; `fragments.file` counts the record's shards."""

    tensors: tuple[TensorSpec, ...]
    fragments: FragmentTable


def build_index(tensors: Sequence[TensorSpec], table: FragmentTable) -> bytes:
    """The bytes of `index.safetensors`; equal content gives equal bytes.

    `tensors` are sorted by name. Rows are put in order of tensor and box here.
    """
    ndim = table.offset.shape[1]
    keys: list[NDArray[Any]] = [*(table.offset[:, d] for d in reversed(range(ndim))), table.tensor]
    order = np.lexsort(keys)
    names = [spec.name.encode() for spec in tensors]
    columns: dict[str, NDArray[np.generic]] = {
        "tensor.name": np.frombuffer(b"".join(names), dtype=np.uint8),
        "tensor.name_bytes": np.array([len(name) for name in names], dtype=np.int64),
        "tensor.dtype": np.array([_DTYPE_CODES.index(spec.dtype) for spec in tensors], dtype=np.int64),
        "tensor.ndim": np.array([len(spec.shape) for spec in tensors], dtype=np.int64),
        "tensor.shape": np.array([n for spec in tensors for n in spec.shape], dtype=np.int64),
        "tensor.fragments": np.bincount(table.tensor, minlength=len(tensors)).astype(np.int64),
        "fragment.shard": table.file[order].astype(np.int64),
        "fragment.start": table.start[order],
        "fragment.offset": table.offset[order],
        "fragment.length": table.length[order],
    }
    packed = {name: _pack(column) for name, column in columns.items()}
    names_in_order = sorted(packed, key=lambda name: (-packed[name][1].itemsize, name))
    header = build_header(
        [(name, packed[name][0], packed[name][1].shape) for name in names_in_order],
        {"format": "pt", "ucf": json.dumps({"version": VERSION, "dtypes": _DTYPE_CODES})},
        align=4096,
    )
    return header + b"".join(packed[name][1].tobytes() for name in names_in_order)


def _pack(column: NDArray[np.generic]) -> tuple[str, NDArray[np.generic]]:
    """A column in the narrowest unsigned dtype that holds it: the index of a large run is read by every rank."""
    top = int(column.max()) if column.size else 0
    for name, dtype in _UNSIGNED.items():
        if top <= np.iinfo(dtype).max:
            return name, np.ascontiguousarray(column.astype(dtype))
    raise ValueError(f"{top} does not fit into 64 bits")


def read_index(store: Store, record: Record) -> Index:
    """Read and verify the index. Raises ChecksumError, FormatError, MissingFileError."""
    data = read_recorded(store, record.index, "digest of the index", "index.digest")
    return decode_index(data, f"{store.url}/{record.index.file}", record)


def read_recorded(store: Store, item: FileRecord, what: str, clause: str) -> NDArray[np.uint8]:
    """The bytes of a small file, verified. `what` is its digest in messages, `clause` of the specification asks for it.

    Raises ChecksumError, FormatError, MissingFileError.
    """
    where, size = f"{store.url}/{item.file}", store.size(item.file)
    if size != item.size:
        raise FormatError(where, f"has {size} bytes, was committed with {item.size}", 0, size, "file.size")
    data = np.empty(size, dtype=np.uint8)
    store.read_into(item.file, 0, data)
    if hex_digest(data) != item.digest:
        raise ChecksumError(where, 0, size, what=what, clause=clause)
    return data


def decode_index(data: NDArray[np.uint8], where: str, record: Record) -> Index:
    """Tensors and fragments from the bytes of an index, checked against the shards of `record`."""
    return _decode_index(data, where, [(shard.file, shard.data_start, shard.table_start) for shard in record.shards], apart=True)


def decode_index_of(data: NDArray[np.uint8], where: str, files: Sequence[tuple[str, int]]) -> Index:
    """The same for files of other programs, of which each is (path, size): fragments may lie anywhere in them, and share bytes
    (the step that all parameters have).
    """
    return _decode_index(data, where, [(path, 0, size) for path, size in files], apart=False)


def _decode_index(data: NDArray[np.uint8], where: str, room: Sequence[tuple[str, int, int]], *, apart: bool) -> Index:
    """`room`: files, and the bytes [start, stop) of each in which fragments may lie; `apart`: none shares bytes with another."""
    try:
        columns, dtypes = _columns(data, where)
        tensors = _tensors(columns, dtypes)
        table = _table(columns, tensors)
    except (KeyError, ValueError, IndexError, TypeError, RecursionError) as error:
        clause = getattr(error, "clause", "index.columns")
        raise FormatError(where, f"malformed index: {error}", 0, len(data), clause) from error
    stop = _check_rows(tensors, table, room, where)
    if apart:
        _check_apart(tensors, table, stop, room, where)
    return Index(tensors, table)


class _BrokenIndexError(ValueError):
    """What is wrong with the index, and the clause that says so."""

    def __init__(self, why: str, clause: str) -> None:
        self.clause = clause
        super().__init__(why)


def _columns(data: NDArray[np.uint8], where: str) -> tuple[dict[str, NDArray[np.generic]], list[str]]:
    """The known columns, as views of `data`, and the names that dtype codes stand for."""
    header = header_of(where, data)
    try:
        note = msgspec.json.decode(header.metadata["ucf"], type=dict[str, object])
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise _BrokenIndexError("no ucf metadata", "header.ucf") from error
    try:
        dtypes = msgspec.convert(note["dtypes"], type=list[str])
    except (KeyError, msgspec.ValidationError) as error:
        raise _BrokenIndexError("no dtypes", "index.dtype") from error
    columns: dict[str, NDArray[np.generic]] = {}
    for entry in header.entries:
        if entry.name in _COLUMNS:
            columns[entry.name] = data[entry.start : entry.stop].view(_UNSIGNED[entry.dtype]).reshape(entry.shape)
    return columns, dtypes


def _ints(column: NDArray[np.generic]) -> Ints:
    return column.astype(np.int64)


def _tensors(columns: dict[str, NDArray[np.generic]], dtypes: list[str]) -> tuple[TensorSpec, ...]:
    text, shape = columns["tensor.name"].tobytes(), _ints(columns["tensor.shape"]).tolist()
    try:
        names = [text[a:b].decode() for a, b in _cuts(columns["tensor.name_bytes"], len(text))]
    except UnicodeDecodeError as error:
        raise _BrokenIndexError(f"a name is not UTF-8: {error.reason}", "index.names") from error
    if any(b <= a for a, b in pairwise(names)):
        raise _BrokenIndexError("tensor names are not sorted or not unique", "index.names")
    codes = columns["tensor.dtype"]
    if codes.size and not 0 <= int(codes.max()) < len(dtypes):
        raise _BrokenIndexError("a dtype code without a name", "index.dtype")
    if set(dtypes) - DTYPES.keys():
        raise _BrokenIndexError(f"unknown dtypes {sorted(set(dtypes) - DTYPES.keys())}", "index.dtype")
    return tuple(
        TensorSpec(name, dtypes[code], tuple(shape[a:b]))
        for name, code, (a, b) in zip(names, codes.tolist(), _cuts(columns["tensor.ndim"], len(shape)), strict=True)
    )


def _cuts(counts: NDArray[np.generic], total: int) -> Iterator[tuple[int, int]]:
    """Where parts of so many items begin and end. Raises ValueError unless they make up `total`."""
    ends = [0, *accumulate(counts.tolist())]
    if ends[-1] != total:
        raise ValueError(f"columns of {total} items are said to have {ends[-1]}")
    return pairwise(ends)


def _table(columns: dict[str, NDArray[np.generic]], tensors: Sequence[TensorSpec]) -> FragmentTable:
    counts = _ints(columns["tensor.fragments"])
    if ((counts < 0) | (counts > columns["fragment.shard"].size)).any() or counts.sum() != columns["fragment.shard"].size:
        raise ValueError("tensors and fragments do not count up")  # before memory is taken for what they claim
    shards = columns["fragment.shard"]
    if shards.size and int(shards.max()) > np.iinfo(np.int32).max:
        raise _BrokenIndexError("a shard number beyond any count of files", "index.shard")
    with ThreadPoolExecutor(_THREADS) as pool:  # most of it is taking memory
        start, offset, length = pool.map(lambda key: _ints(columns[f"fragment.{key}"]), ("start", "offset", "length"))
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int32), counts)
    table = FragmentTable(tensor, shards.astype(np.int32), start, offset, length)
    rows = len(table.tensor)
    shapes = {len(table.file), len(table.start), len(table.offset), len(table.length)}
    if table.offset.ndim == 2 and table.offset.shape[1] > MAX_DIMENSIONS:
        raise ValueError(f"fragments of {table.offset.shape[1]} dimensions")
    if shapes != {rows} or table.offset.ndim != 2 or table.offset.shape != table.length.shape or len(counts) != len(tensors):
        raise ValueError("columns have different lengths")
    return table


def _check_rows(tensors: Sequence[TensorSpec], table: FragmentTable, room: Sequence[tuple[str, int, int]], where: str) -> Ints:
    """Every fragment lies inside its tensor and inside the blocks of its shard; (N,) where each ends in its file."""
    ndim = table.offset.shape[1]
    if any(len(spec.shape) > ndim for spec in tensors):
        raise FormatError(where, "fragments have fewer dimensions than their tensors", clause="index.columns")
    shapes = boxes.pad([spec.shape for spec in tensors], ndim, 1)
    huge = (shapes < 0).any(axis=1) | (np.prod(shapes, axis=1, dtype=np.float64) >= MAX_BYTES / 16)  # 16: the largest item
    if huge.any():
        spec = tensors[int(np.flatnonzero(huge)[0])]
        raise FormatError(where, f"tensor {spec.name!r} has an impossible shape {list(spec.shape)}", clause="index.size")
    size = np.array([spec.kind.itemsize for spec in tensors], dtype=np.int64)
    low = np.array([start for _, start, _ in room], dtype=np.int64)
    high = np.array([stop for _, _, stop in room], dtype=np.int64)
    stop = np.empty(len(table), dtype=np.int64)
    for first in range(0, len(table), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        tensor, file, start = table.tensor[rows], table.file[rows], table.start[rows]
        if (file < 0).any() or int(file.max()) >= len(room):
            raise FormatError(where, "a fragment names a shard that is not in the commit record", clause="index.shard")
        outside = np.zeros(len(tensor), dtype=np.bool_)
        nbytes = size[tensor].astype(np.float64)  # float: a hostile product may pass 2^63
        for dim in range(ndim):
            offset, length, whole = table.offset[rows, dim], table.length[rows, dim], shapes[tensor, dim]
            outside |= (offset < 0) | (length < 1) | (length > whole - np.minimum(offset, whole))
            nbytes = np.minimum(nbytes * length, MAX_BYTES)
        bad: NDArray[np.bool_] = outside | (start < low[file]) | (start + nbytes > high[file])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            _refuse(tensors, table, room, first + at, int(nbytes[at]), "index.box" if outside[at] else "index.bytes", where)
        stop[rows] = start + nbytes.astype(np.int64)
    return stop


def _refuse(
    tensors: Sequence[TensorSpec],
    table: FragmentTable,
    room: Sequence[tuple[str, int, int]],
    row: int,
    nbytes: int,
    clause: str,
    where: str,
) -> NoReturn:
    spec, start = tensors[table.tensor[row]], int(table.start[row])
    raise FormatError(
        f"{where}: shard {room[table.file[row]][0]}",
        f"tensor {spec.name!r}: box {table.box(row, len(spec.shape))} lies outside the tensor or the shard's data",
        start,
        start + nbytes,
        clause,
    )


def _check_apart(
    tensors: Sequence[TensorSpec], table: FragmentTable, stop: Ints, room: Sequence[tuple[str, int, int]], where: str
) -> None:
    """No two fragments share bytes: a small shard could pass for a large checkpoint, and one flip would damage many tensors."""
    order = _by_file(table)
    at = _first_shared(order, table, stop)
    if at == _UNORDERED:  # shards are not in the order of their tensors
        order = np.lexsort((table.start, table.file))
        at = _first_shared(order, table, stop)
    if at is not None:
        row, then = order[at : at + 2]
        one, other = (tensors[table.tensor[i]].name for i in (row, then))
        why = f"fragments of {one!r} and {other!r} share bytes"
        file = room[table.file[row]][0]
        raise FormatError(f"{where}: shard {file}", why, int(table.start[then]), int(stop[row]), "index.shared")


def _first_shared(order: NDArray[np.int64], table: FragmentTable, stop: Ints) -> int | None:
    """Where, in rows ordered by file, the first is that shares bytes with the next; `_UNORDERED` unless starts ascend."""
    for first in range(0, len(order), _ROWS_AT_A_TIME):
        rows = order[first : first + _ROWS_AT_A_TIME + 1]
        file, start = table.file[rows], table.start[rows]
        same = file[1:] == file[:-1]
        if (same & (start[1:] < start[:-1])).any():
            return _UNORDERED
        if len(shared := np.flatnonzero(same & (start[1:] < stop[rows[:-1]]))):
            return first + int(shared[0])
    return None


def _by_file(table: FragmentTable) -> NDArray[np.int64]:
    """The rows in order of their files. numpy sorts 16-bit numbers by counting, ten times as fast."""
    few = len(table) and int(table.file.max()) <= np.iinfo(np.uint16).max
    return np.argsort(table.file.astype(np.uint16) if few else table.file, kind="stable")

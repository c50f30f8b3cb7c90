"""Adopting: the index of a foreign checkpoint is put beside its files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec
import numpy as np
from numpy.typing import NDArray

from ucformat import process
from ucformat import values as trees
from ucformat.box import volumes
from ucformat.catalog import Catalog, Checks, FragmentTable, row_major
from ucformat.containers import checksums
from ucformat.errors import ExistsError, FormatError, MissingFileError, UnsupportedError
from ucformat.formats.adopted.noting_store import NotingStore
from ucformat.formats.adopted.record import (
    FOLDER,
    HEAD_BYTES,
    AdoptedRecord,
    SourceRecord,
    decode_record,
    encode_checks,
    encode_record,
    is_adopted,
)
from ucformat.formats.native.attempt import WRITER
from ucformat.formats.native.manifest import MANIFEST, FileRecord, build_index, decode_index_of
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.ownership import new_token
from ucformat.formats.target import shorten
from ucformat.storage.store import Store

_READ_BYTES = 4 << 20
_NONE = Checks("crc32", np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """What was indexed."""

    path: str
    """Where `ucf.json` lies now."""
    format: str
    """Of the foreign files."""
    tensors: int
    files: int
    """Foreign files that hold tensors."""
    written_bytes: int
    """By which the directory grew."""
    checksummed_bytes: int
    """Bytes whose digests were computed: 0 unless that was asked for."""
    remarks: tuple[str, ...] = ()


def adopt(store: Store, opened: NotingStore, catalog: Catalog, form: str, *, checksums_too: bool) -> AdoptReport:
    """Put `ucf.json` and the index of `catalog` into `store`. `opened` noted which files were read to open it.

    Raises UnsupportedError naming tensors that no index can describe, CheckpointChangedError, ExistsError, StorageError.
    """
    known = _refuse_others(store)
    sources, number, inline = _files(store, catalog)
    table = _table(catalog, number, inline)
    index = _index(catalog, table, [(item.file, item.size) for item in sources], inline)
    checks = [_checks(store, catalog, n, item, compute=checksums_too) for n, item in zip(number, sources, strict=True)]
    held = {item.file for item in sources}
    others = [_source(store, path) for path in sorted(opened.paths(store.url) - held)]
    for file in catalog.files:
        if file.guard is not None:
            file.guard()  # what was noted of the files is true of what was read
    folder = f"{FOLDER}.{new_token()}"
    files = {f"{folder}/index.safetensors": index, f"{folder}/checks.safetensors": encode_checks(checks)}
    if inline.data:
        files[f"{folder}/inline.bin"] = inline.data
    own = [FileRecord(path, len(data), hex_digest(data)) for path, data in files.items()]
    record = AdoptedRecord(
        adopts=form,
        index=own[0],
        sources=tuple(sources),
        others=tuple(others),
        checks=own[1],
        values=msgspec.Raw(trees.encode(catalog.values)),
        inline=own[2] if inline.data else None,
        aliases=dict(sorted(catalog.aliases.items())),
        step=catalog.notes.step,
        mesh=catalog.notes.mesh,
        remarks=catalog.notes.remarks,
        origin_layout=dict(sorted(catalog.notes.origin_layout.items())),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer=WRITER,
    )
    data = encode_record(record)
    decode_record(data, f"{store.url}/{MANIFEST}")  # what can't be read back is never committed
    _commit(store, folder, files, data, known)
    hashed = sum(item.size for item in sources) if checksums_too else 0
    written = len(data) + sum(map(len, files.values()))
    return AdoptReport(store.url, form, len(catalog.tensors), len(sources), written, hashed, catalog.notes.remarks)


def _refuse_others(store: Store) -> bytes | None:
    """The record of an index that is replaced, if there is one. Raises ExistsError for a native checkpoint."""
    try:
        known = store.read(MANIFEST)
    except MissingFileError:
        return None
    if not is_adopted(known[:HEAD_BYTES]):
        raise ExistsError(store.url, "is a native checkpoint itself, which has an index", "")
    return known


def _commit(store: Store, folder: str, files: dict[str, bytes], data: bytes, known: bytes | None) -> None:
    """Everything else first, `ucf.json` last, in one step. A failure removes what was written."""
    try:
        for path, content in files.items():
            store.put(path, content)
        done = store.put_if_absent(MANIFEST, data) if known is None else store.put_if_unchanged(MANIFEST, data, known)
        if not done:
            raise ExistsError(store.url, "was indexed by another process meanwhile", "")
    except BaseException:
        store.remove(folder)
        raise
    if known is not None:
        old = decode_record(known, f"{store.url}/{MANIFEST}").index.file.partition("/")[0]
        if old.startswith(f"{FOLDER}.") and old != folder:
            store.remove(old)


@dataclass(frozen=True, slots=True)
class _Inline:
    """Small tensors that the reader computed, in one file to be."""

    data: bytes
    start: dict[int, int]
    """File of the catalog → where its bytes begin."""


def _files(store: Store, catalog: Catalog) -> tuple[list[SourceRecord], list[int], _Inline]:
    """Foreign files that hold fragments, their numbers in the catalog, and what has no file."""
    used = np.unique(catalog.fragments.file).tolist()
    numbers = [n for n in used if catalog.files[n].inline is None]
    data, start = bytearray(), {}
    for n in used:
        content = catalog.files[n].inline
        if content is not None:
            start[n] = len(data)
            data += content + bytes(-len(content) % 16)
    return [_source(store, _path(store, catalog, n)) for n in numbers], numbers, _Inline(bytes(data), start)


def _path(store: Store, catalog: Catalog, number: int) -> str:
    """A file's path relative to `store`. Raises UnsupportedError for one that lies elsewhere."""
    url, path = catalog.store_of(number).url.rstrip("/"), catalog.files[number].path
    base = store.url.rstrip("/")
    if url != base and not url.startswith(f"{base}/"):
        raise UnsupportedError(f"{url}/{path}", f"lies outside {base}, so that no index there can lead to it")
    return f"{url.removeprefix(base).lstrip('/')}/{path}".lstrip("/")


def _source(store: Store, path: str) -> SourceRecord:
    return SourceRecord(path, store.size(path), store.stamp(path))


def _table(catalog: Catalog, numbers: Sequence[int], inline: _Inline) -> FragmentTable:
    """The fragments, with files counted anew. Raises UnsupportedError for those that are not stored in order."""
    table = catalog.fragments
    full = volumes(table.length) > 0
    if table.stride is not None:
        odd = ((table.stride != row_major(table.length)) & (table.length > 1)).any(axis=1) & full
        if odd.any():
            names = [catalog.tensors[i].name for i in np.unique(table.tensor[odd])]
            why = f"stored transposed or with gaps, which an index can't say: {shorten(names)}: convert to native instead"
            raise UnsupportedError(catalog.url, why)
    target = np.full(len(catalog.files), len(numbers), dtype=np.int32)
    target[numbers] = np.arange(len(numbers), dtype=np.int32)
    shift = np.zeros(len(catalog.files), dtype=np.int64)
    for n, at in inline.start.items():
        shift[n] = at
    file = table.file[full]
    return FragmentTable(
        table.tensor[full], target[file], table.start[full] + shift[file], table.offset[full], table.length[full]
    )


def _index(catalog: Catalog, table: FragmentTable, sizes: list[tuple[str, int]], inline: _Inline) -> bytes:
    """The index, which is as a reader demands. Raises UnsupportedError."""
    index = build_index(catalog.tensors, table)
    held = [*sizes, *([("small tensors", len(inline.data))] if inline.data else [])]
    try:
        decode_index_of(np.frombuffer(index, dtype=np.uint8), catalog.url, held)
    except FormatError as error:
        raise UnsupportedError(catalog.url, f"can't be indexed: {error.why}: convert to native instead") from error
    return index


def _checks(store: Store, catalog: Catalog, number: int, item: SourceRecord, *, compute: bool) -> Checks:
    """What tells damage of a file: digests of all its blocks, or the checksums that its own format has."""
    file = catalog.files[number]
    if not compute:
        return _NONE if file.checks is None else file.checks.load(catalog.store_of(number), file.path)
    starts = np.arange(0, item.size, checksums.BLOCK_BYTES, dtype=np.int64)
    stops = np.minimum(starts + checksums.BLOCK_BYTES, item.size)
    with ThreadPoolExecutor(process.share()) as pool:
        digests = [
            one for some in pool.map(lambda at: _digests(store, item, at), range(0, item.size, _READ_BYTES)) for one in some
        ]
    return Checks("xxh3-64", starts, stops, np.array(digests, dtype=np.uint64))


def _digests(store: Store, item: SourceRecord, at: int) -> list[int]:
    data: NDArray[np.uint8] = np.empty(min(_READ_BYTES, item.size - at), dtype=np.uint8)
    store.read_into(item.file, at, data)
    size = checksums.BLOCK_BYTES
    return [checksums.digest("xxh3-64", data[start : start + size]) for start in range(0, len(data), size)]

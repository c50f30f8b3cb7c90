"""Opening an adopted checkpoint: the index, after every file was found to be what it was."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ucformat import values as trees
from ucformat.catalog import Catalog, Checks, File, Notes
from ucformat.errors import ChecksumError, FormatError, MissingFileError, SourceChangedError, UcformatError
from ucformat.formats.adopted.record import AdoptedRecord, CheckColumns, SourceRecord, decode_checks, decode_record, is_adopted
from ucformat.formats.native.checkpoint import check_aliases
from ucformat.formats.native.manifest import MANIFEST, FileRecord, Index, decode_index_of
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.source import Source
from ucformat.storage.store import Store

_START = 256  # bytes of `ucf.json`, in which the word is that tells an adopted checkpoint
_LOOKS = 16  # files that are looked at side by side


def detect(source: Source) -> bool:
    """Whether a directory has the record of an adopted checkpoint. Never raises."""
    if source.file not in (None, MANIFEST):
        return False
    try:
        if MANIFEST not in source.store.list():
            return False
        size = source.store.size(MANIFEST)
        return is_adopted(source.store.read(MANIFEST, 0, min(size, _START)))
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of an adopted checkpoint: reads `ucf.json` and what lies beside it, no foreign file.

    Raises SourceChangedError or MissingFileError for foreign files that are not as they were, ChecksumError, FormatError.
    """
    store = source.store
    where = f"{store.url}/{MANIFEST}"
    record = decode_record(store.read(MANIFEST), where)
    prove_unchanged(store, (*record.sources, *record.others))
    sizes = [(item.file, item.size) for item in record.sources]
    files = [File(item.file, item.size, _AdoptedChecks(record, n)) for n, item in enumerate(record.sources)]
    if record.inline is not None:
        data = read_verified(store, record.inline, "digest of small tensors")
        files.append(File(record.inline.file, record.inline.size, inline=data.tobytes()))
        sizes.append((record.inline.file, record.inline.size))
    index = _index(store, record, sizes)
    check_aliases_of(record, index, where)
    notes = Notes(record.adopts, record.step, record.mesh, record.remarks, record.origin_layout)
    values = trees.decode(bytes(record.values), where)
    return Catalog(index.tensors, index.fragments, tuple(files), store, values, record.aliases, notes)


def _index(store: Store, record: AdoptedRecord, sizes: list[tuple[str, int]]) -> Index:
    data = read_verified(store, record.index, "digest of the index")
    return decode_index_of(data, f"{store.url}/{record.index.file}", sizes)


def check_aliases_of(record: AdoptedRecord, index: Index, where: str) -> None:
    """Raises FormatError for an alias of nothing."""
    check_aliases(record.aliases, {spec.name for spec in index.tensors}, where)


def prove_unchanged(store: Store, sources: Iterable[SourceRecord]) -> None:
    """Raises MissingFileError or SourceChangedError for the first file that is not as it was."""

    def look(item: SourceRecord) -> None:
        path = f"{store.url.rstrip('/')}/{item.file}"
        try:
            size = store.size(item.file)
        except MissingFileError as error:
            raise MissingFileError(path, f"missing, and the index in {store.url}/{MANIFEST} leads into it") from error
        if size != item.size:
            low, high = sorted((size, item.size))
            raise SourceChangedError(path, f"has {size} bytes, had {item.size} when it was indexed", low, high)
        if store.stamp(item.file) != item.stamp:
            raise SourceChangedError(path, "was written to since it was indexed", 0, size)

    with ThreadPoolExecutor(_LOOKS) as pool:
        list(pool.map(look, sources))


def read_verified(store: Store, item: FileRecord, what: str) -> NDArray[np.uint8]:
    """A small file of our own. Raises ChecksumError, FormatError, MissingFileError."""
    where, size = f"{store.url}/{item.file}", store.size(item.file)
    if size != item.size:
        raise FormatError(where, f"has {size} bytes, was written with {item.size}", 0, size)
    data = np.empty(size, dtype=np.uint8)
    store.read_into(item.file, 0, data)
    if hex_digest(data) != item.digest:
        raise ChecksumError(where, 0, size, what=what)
    return data


@dataclass(frozen=True, slots=True)
class _AdoptedChecks:
    """The checks of one source, out of the file that has those of all."""

    record: AdoptedRecord
    number: int

    def load(self, store: Store, path: str) -> Checks:
        item = self.record.checks
        return _columns(store, item, len(self.record.sources)).found[self.number]


@functools.lru_cache(maxsize=4)
def _columns(store: Store, item: FileRecord, count: int) -> CheckColumns:
    return decode_checks(read_verified(store, item, "digest of the checksums"), f"{store.url}/{item.file}", count)

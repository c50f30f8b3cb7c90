"""Opening an adopted checkpoint: the index, after every file was found to be what it was."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ucformat import values as trees
from ucformat.catalog import Catalog, Checks, File, Notes
from ucformat.errors import MissingFileError, SourceChangedError, UcformatError
from ucformat.formats.adopted.record import HEAD_BYTES, AdoptedRecord, SourceRecord, decode_checks, decode_record, is_adopted
from ucformat.formats.native.checkpoint import check_aliases
from ucformat.formats.native.manifest import MANIFEST, FileRecord, decode_index_of, read_recorded
from ucformat.formats.source import Source
from ucformat.storage.store import Store

_LOOKS = 16  # files that are looked at side by side


def detect(source: Source) -> bool:
    """Whether a directory has the record of an adopted checkpoint. Never raises."""
    if source.file not in (None, MANIFEST):
        return False
    try:
        if MANIFEST not in source.store.list():
            return False
        size = source.store.size(MANIFEST)
        return is_adopted(source.store.read(MANIFEST, 0, min(size, HEAD_BYTES)))
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
        data = read_recorded(store, record.inline, "digest of small tensors", "")
        files.append(File(record.inline.file, record.inline.size, inline=data.tobytes()))
        sizes.append((record.inline.file, record.inline.size))
    read = read_recorded(store, record.index, "digest of the index", "index.digest")
    index = decode_index_of(read, f"{store.url}/{record.index.file}", sizes)
    check_aliases(record.aliases, {spec.name for spec in index.tensors}, where)
    notes = Notes(record.adopts, record.step, record.mesh, record.remarks, record.origin_layout)
    values = trees.decode(bytes(record.values), where)
    return Catalog(index.tensors, index.fragments, tuple(files), store, values, record.aliases, notes)


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


@dataclass(frozen=True, slots=True)
class _AdoptedChecks:
    """The checks of one source, out of the file that has those of all."""

    record: AdoptedRecord
    number: int

    def load(self, store: Store, path: str) -> Checks:
        item = self.record.checks
        return _columns(store, item, len(self.record.sources))[self.number]


@functools.lru_cache(maxsize=4)
def _columns(store: Store, item: FileRecord, count: int) -> tuple[Checks, ...]:
    return decode_checks(read_recorded(store, item, "digest of the checksums", ""), f"{store.url}/{item.file}", count)

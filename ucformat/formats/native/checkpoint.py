"""The native format: find and open.

    step-00000100/ucf.json, shards.3f9c2a71d04b/00000.safetensors, shards.3f9c2a71d04b/index.safetensors …

A directory is a checkpoint when `ucf.json` is there; a run directory holds checkpoints named `step-<8 digits>` (see `run`).
Checkpoints change under their readers: a save may replace one, or remove an old step. So whoever finds that a file is missing
looks again, and fails only when the record that names it still stands.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from ucformat import values as trees
from ucformat.catalog import Catalog, File, Notes
from ucformat.errors import ChecksumError, FormatError, MissingFileError, NotACheckpointError
from ucformat.formats import ownership
from ucformat.formats.native.manifest import MANIFEST, Index, Record, decode_record, read_index
from ucformat.formats.native.run import is_committed, newest_step, step_name, step_numbers
from ucformat.formats.native.shard import ShardChecks
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NOTHING = f"no {MANIFEST}: nothing was committed here (an interrupted save leaves none)"
TORN = f"{MANIFEST} is empty or cut short: a write that was interrupted, nothing was committed here"
LOOKS = 20  # for a checkpoint that changes: each time another writer must have committed
_LOG = logging.getLogger(__name__)


def detect(source: Source) -> bool:
    if source.file is not None:
        return source.file == MANIFEST
    names = source.store.list()
    return MANIFEST in names or (bool(step_numbers(names)) and newest_step(source.store) is not None)


def is_unfinished(store: Store) -> bool:
    """Whether a directory looks as if a save had begun there, for messages."""
    names = store.list()
    shards = any(name.partition(".")[0].rstrip("/") == "shards" and name.endswith("/") for name in names)
    return shards or bool(step_numbers(names)) or any(map(ownership.is_marker, names))


def explain(source: Source) -> str | None:
    """For an error: a save that was interrupted here is why nothing is recognised."""
    return NOTHING if source.file is None and is_unfinished(source.store) else None


def find(source: Source) -> Store:
    """The checkpoint that a path means: itself, or the newest committed step of a run directory.

    Raises NotACheckpointError when nothing committed is there.
    """
    if source.file == MANIFEST or (source.file is None and is_committed(source.store)):
        if source.file is None and newest_step(source.store) is not None:
            _LOG.warning("%s: is a checkpoint and holds steps of a run, too: the former is opened, name a step", source.url)
        return source.store
    step = newest_step(source.store) if source.file is None else None
    if step is None:
        raise NotACheckpointError(source.url, TORN if source.store.exists(MANIFEST) else NOTHING)
    return source.store.sub(step_name(step))


def open_catalog(source: Source) -> Catalog:
    """The catalog of a committed checkpoint: reads `ucf.json` and the index, no shard."""
    for look in range(LOOKS):
        store = find(source)
        data: bytes | None = None
        try:
            data = store.read(MANIFEST)
            record = decode_record(data, f"{store.url}/{MANIFEST}")
            return catalog_of(store, record, read_index(store, record))
        except (MissingFileError, FormatError, ChecksumError):
            if look + 1 == LOOKS or (data is not None and not changed(store, data)):
                raise
    raise AssertionError


def changed(store: Store, data: bytes) -> bool:
    """Whether the checkpoint whose commit record is `data` was replaced or removed. Raises StorageError."""
    try:
        return store.read(MANIFEST) != data
    except MissingFileError:
        return True


def check_aliases(aliases: Mapping[str, str], names: Collection[str], where: str) -> None:
    """Raises FormatError for an alias that is no other name of one of the tensors `names`."""
    for alias, target in aliases.items():
        if target not in names or alias in names:
            why = f"alias {alias!r} of {target!r} does not name a stored tensor, or hides one"
            raise FormatError(where, why, clause="alias.name" if alias in names else "alias.target")


def catalog_of(store: Store, record: Record, index: Index) -> Catalog:
    """The catalog of a commit record and its index. Raises FormatError for aliases and values that break the format."""
    where = f"{store.url}/{MANIFEST}"
    check_aliases(record.aliases, {spec.name for spec in index.tensors}, where)
    files = tuple(File(shard.file, shard.size, ShardChecks(shard, record.block_bytes)) for shard in record.shards)
    notes = Notes(record.origin, record.step, record.mesh, record.remarks, record.origin_layout)
    values = trees.decode(bytes(record.values), where)
    return Catalog(index.tensors, index.fragments, files, store, values, record.aliases, notes)

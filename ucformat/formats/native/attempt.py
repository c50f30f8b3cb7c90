"""Writing a native checkpoint: prepare → shards → commit, or discard. Save, the keeper and the converter go this way.

Every attempt has a token; all its files lie in folders that are named by it, so no two attempts share a name. A marker that is
written first vouches for them (see `formats.ownership`). The commit is one step: `ucf.json` appears where none is, or replaces
the one that was there when the attempt began. Of several attempts one succeeds, the others raise ConflictError.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import msgspec

from ucformat import values as trees
from ucformat.catalog import Notes
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.containers.envelope import VERSION
from ucformat.containers.file_image import ByteRequest, ByteSource
from ucformat.errors import (
    ChecksumError,
    ConflictError,
    ExistsError,
    FormatError,
    MissingFileError,
    StorageError,
    UcformatError,
    VersionError,
)
from ucformat.formats import ownership
from ucformat.formats.native.fragments import ShardTable, merge, prove_whole, tabulate
from ucformat.formats.native.manifest import MANIFEST, FileRecord, Record, build_index, decode_record, encode_record
from ucformat.formats.native.run import ROLLBACK, is_committed, is_cut_short, step_numbers
from ucformat.formats.native.shard import ShardPiece, hex_digest, lay_out_all, write_shard
from ucformat.formats.source import Source
from ucformat.formats.target import OutputBox
from ucformat.storage.store import Hold, Store

NAME = "native"
WRITER = "ucformat 0.1.0"
LOOKS = 16  # shards looked at side by side before a commit: each is a round trip
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """Names of the files of one attempt."""

    token: str

    @property
    def folder(self) -> str:
        """The folder of index and shards."""
        return f"shards.{self.token}"

    @property
    def index(self) -> str:
        return f"{self.folder}/index.safetensors"

    @property
    def companions(self) -> str:
        """The folder of files that travel along, with a `/`."""
        return f"companions.{self.token}/"

    def shard(self, number: int, part: int = 0) -> str:
        """The file of writer `number`; further ones, when one can't hold all its pieces, have a `part`."""
        return f"{self.folder}/{number:05d}{f'-{part}' if part else ''}.safetensors"

    def wrote(self, record: Record) -> bool:
        """Whether a commit record is that of this attempt."""
        return ownership.carries(record.index.file.partition("/")[0], self.token)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint on its way, as the rank that commits it knows it."""

    store: Store
    generation: Generation
    claim: ownership.Claim
    before: bytes | None
    """The commit record that was there when it began, and is to be replaced."""

    def discard(self) -> None:
        """Remove what was written, unless it was committed. Never raises UcformatError: that is not the news."""
        try:
            done = committed_by(self.store, self.generation)
        except UcformatError as error:
            _LOG.warning("%s: can't tell whether this was committed, so nothing is removed: %s", self.store.url, error)
            self.claim.hold.release()
            return
        if not done:
            self.claim.discard()

    def give_up(self, error: BaseException, *, alone: bool) -> None:
        """After a failure: `discard`, unless the process was interrupted while other ranks may still be writing."""
        if alone or isinstance(error, Exception):
            self.discard()
        else:
            self.claim.hold.release()  # the next save or `prune` removes it


def files_of(record: Record) -> tuple[str, ...]:
    """All files that a commit record names, and so vouches for."""
    return (record.index.file, *(shard.file for shard in record.shards), *(item.file for item in record.companions))


def owned_files(source: Source) -> tuple[str, ...]:
    """The files of the checkpoint at a place; nothing where its record is damaged."""
    try:
        return (MANIFEST, *files_of(read_record(source.store)))
    except (FormatError, ChecksumError, MissingFileError):
        return ()


def read_record(store: Store) -> Record:
    """The commit record of a checkpoint."""
    return decode_record(store.read(MANIFEST), f"{store.url}/{MANIFEST}")


def torn_record(store: Store) -> bytes | None:
    """The bytes of a commit record that was not written to its end, which a commit may replace; None where there is none."""
    try:
        data = store.read(MANIFEST)
    except MissingFileError:
        return None
    return data if is_cut_short(data) else None


def committed_by(store: Store, generation: Generation) -> bool:
    """Whether the checkpoint that is committed here is that of an attempt. Raises what reading its record raises."""
    try:
        return generation.wrote(read_record(store))
    except MissingFileError:
        return False


# -- prepare -----------------------------------------------------------------------------------------------------------


def prepare(store: Store, overwrite: bool, what: str = "save", token: str = "") -> Attempt:
    """Remove what killed attempts left, and mark the place. One rank calls it.

    Raises ExistsError when something is there that may not be replaced, StorageError.
    """
    clear(store)
    before, replaces = _standing(store)
    names = ownership.unknown(store, store.list())
    if before is None and names:
        _refuse(store, names, overwrite)
    if not overwrite and is_committed(store):
        raise ExistsError(store.url)
    claim = ownership.begin(store, what, replaces=replaces, token=token)
    return Attempt(store, Generation(claim.token), claim, before)


def _standing(store: Store) -> tuple[bytes | None, tuple[str, ...]]:
    """The commit record that is there, and the files that it names. One that is damaged names none: these stay."""
    try:
        data = store.read(MANIFEST)
    except MissingFileError:
        return None, ()
    try:
        return data, files_of(decode_record(data, f"{store.url}/{MANIFEST}"))
    except VersionError:
        raise
    except UcformatError as error:
        _LOG.warning("%s: files of a checkpoint with a damaged record stay beside the new one: %s", store.url, error)
        return data, ()


def _refuse(store: Store, names: Sequence[str], overwrite: bool) -> None:
    if step_numbers(names) or ROLLBACK in names:
        raise ExistsError(store.url, "holds the steps of a run, and can't be a checkpoint itself", "pass step=")
    if not overwrite:
        shown = ", ".join(names[:4]) + ("…" if len(names) > 4 else "")
        raise ExistsError(store.url, f"holds files that are no part of a checkpoint of ours ({shown})")


@contextmanager
def joined(store: Store, generation: Generation) -> Iterator[Hold]:
    """Hold an attempt as one of its writers: while any rank does, nobody takes it for abandoned."""
    hold = ownership.join(store, generation.token)
    try:
        yield hold
    finally:
        hold.release()


# -- write -------------------------------------------------------------------------------------------------------------


def put_shards(
    store: Store,
    path: Callable[[int], str],
    targets: Sequence[OutputBox],
    fill: ByteSource,
    on_bytes: Callable[[int], None] | None = None,
) -> list[ShardTable]:
    """Write `targets` into one shard, or into several when they are too many for the header of one; at `path(part)`.

    `fill` counts them by their index here.
    """
    tables: list[ShardTable] = []
    for part, (run, layout) in enumerate(lay_out_all([(target.spec, target.box) for target in targets], VERSION)):
        held = targets[run.start : run.stop]
        own = fill if len(held) == len(targets) else functools.partial(_fill_from, fill, run.start)
        record = write_shard(store, path(part), layout, own, on_bytes)
        pieces = [ShardPiece(t.spec, t.box, int(s)) for t, s in zip(held, layout.starts(), strict=True)]
        tables.append(tabulate(record, pieces))
    return tables


def _fill_from(fill: ByteSource, first: int, parts: Sequence[ByteRequest]) -> None:
    """Fill a file whose piece 0 is piece `first` of `fill`."""
    fill([replace(part, piece=first + part.piece) for part in parts])


# -- commit ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """What a commit record says beside shards and index."""

    values: object
    aliases: Mapping[str, str]
    notes: Notes
    companions: tuple[FileRecord, ...] = ()


def commit(attempt: Attempt, tables: Sequence[ShardTable], contents: Contents) -> None:
    """Prove coverage, write the index, then the commit record. One rank calls it, after all shards are durable.

    Raises ConflictError when another attempt was committed since this one began, or when files of this one are gone;
    CoverageError, OverlapError, ValueConflictError, StorageError. What fails after the commit is logged.
    """
    store, generation = attempt.store, attempt.generation
    specs, table = merge(tables, store.url)
    prove_whole(specs, table, [t.record.file for t in tables], store.url)
    index = build_index(specs, table)
    store.put(generation.index, index)
    record = Record(
        index=FileRecord(generation.index, len(index), hex_digest(index)),
        shards=tuple(t.record for t in tables),
        block_bytes=BLOCK_BYTES,
        values=msgspec.Raw(trees.encode(contents.values)),
        aliases=dict(sorted(contents.aliases.items())),
        step=contents.notes.step,
        mesh=contents.notes.mesh,
        origin=contents.notes.origin or NAME,
        remarks=contents.notes.remarks,
        origin_layout=dict(sorted(contents.notes.origin_layout.items())),
        companions=contents.companions,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer=WRITER,
    )
    data = encode_record(record)
    decode_record(data, f"{store.url}/{MANIFEST}")  # what can't be read back is never committed
    _prove_there(attempt, record)
    if not _put_record(attempt, data) and not committed_by(store, generation):  # by ourselves: its answer got lost
        raise ConflictError(store.url)
    settle(attempt.claim, record)


def _prove_there(attempt: Attempt, record: Record) -> None:
    """All files are there, of the size that they were written with: nobody has taken this attempt for abandoned."""
    store = attempt.store
    wanted = [(shard.file, shard.size) for shard in record.shards] + [(item.file, item.size) for item in record.companions]

    def is_there(file: tuple[str, int]) -> bool:
        try:
            return store.size(file[0]) == file[1]
        except MissingFileError:
            return False

    with ThreadPoolExecutor(LOOKS) as pool:
        lost = [file for (file, _), there in zip(wanted, pool.map(is_there, wanted), strict=True) if not there]
    if lost or not attempt.claim.intact():
        what = f"{lost[0]} is not there as it was written" if lost else "its marker was removed"
        raise ConflictError(store.url, f"{what}: another process took this one for abandoned")


def _put_record(attempt: Attempt, data: bytes) -> bool:
    """Whether the record is in place now."""
    store, part = attempt.store, f"{attempt.generation.folder}/{MANIFEST}.part"
    try:
        if attempt.before is None:
            return store.put_if_absent(MANIFEST, data, part)
        return store.put_if_unchanged(MANIFEST, data, attempt.before, part)
    except StorageError as error:
        try:
            landed = store.read(MANIFEST) == data
        except MissingFileError:
            landed = False
        except StorageError:
            raise StorageError(store.url, f"may be committed or not, its {MANIFEST} can't be read: {error}") from error
        if not landed:
            raise
        _LOG.warning("%s: committed, although the storage said: %s", store.url, error)
        return True


# -- afterwards --------------------------------------------------------------------------------------------------------


def settle(claim: ownership.Claim, record: Record) -> None:
    """After a commit: remove what it replaced, and what other attempts left, then the marker. What fails is logged."""
    try:
        _remove_spare(claim.store, claim.token, record)
        _remove_replaced(claim.store, claim.marker, record)
        claim.done()
        clear(claim.store, lost=True)
    except UcformatError as error:
        claim.hold.release()
        _LOG.warning("%s: committed, but what it replaced could not be removed: %s", claim.store.url, error)


def _remove_spare(store: Store, token: str, record: Record) -> None:
    """Remove what an attempt has written and not committed: what ranks handed in, what writers that were killed left."""
    named = set(files_of(record))
    for name in store.list():
        if ownership.carries(name, token) and not ownership.is_marker(name):
            for path in list(store.files(name.rstrip("/"))):
                if path not in named:
                    store.remove(path)
            store.remove_folder(name.rstrip("/"))


def _remove_replaced(store: Store, marker: ownership.Marker, record: Record | None) -> None:
    """Remove the files that a marker says are replaced, but for those of the checkpoint that stands now."""
    kept = set() if record is None else set(files_of(record))
    store.remove_files([path for path in marker.replaces if path not in kept])


def clear(store: Store, *, lost: bool = False, own: str = "") -> list[str]:
    """Remove what killed attempts left in a checkpoint's directory, of which it returns the tokens. Raises StorageError.

    What was committed stays, and what a living process may still be writing, unless attempts that began before now have `lost`
    and the store can't tell who lives. `own` is a token that the caller answers for.
    """
    gone: list[str] = []
    found = [marker for marker in ownership.markers(store) if not marker.place]  # others are of something beside this one
    if not found:
        return gone
    try:
        record = _record_or_none(store)
    except StorageError:
        raise
    except UcformatError as error:
        _LOG.warning("%s: nothing is cleared up beside a record that is damaged: %s", store.url, error)
        return gone
    for marker in found:
        hold = Hold() if marker.token == own else ownership.claim(store, marker, lost=lost)
        if hold is not None:
            try:
                clear_one(store, marker, record)
                gone.append(marker.token)
            finally:
                hold.release()
    return gone


def _record_or_none(store: Store) -> Record | None:
    try:
        return read_record(store)
    except MissingFileError:
        return None


def clear_one(store: Store, marker: ownership.Marker, record: Record | None) -> None:
    """Remove what one attempt left, or what it was to remove. Its marker is held; `record` is of what stands there."""
    if record is not None and Generation(marker.token).wrote(record):
        _remove_spare(store, marker.token, record)
        _remove_replaced(store, marker, record)
        store.remove(marker.path)
    elif marker.what == "remove":
        if record is None:
            _remove_replaced(store, marker, None)
        ownership.remove_all(store, marker.token)
    else:
        ownership.remove_all(store, marker.token)

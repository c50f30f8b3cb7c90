"""Snapshots of a running job: the slots that its ranks leave on tmpfs, seen as one checkpoint.

    <directory>/rank-00000/slot-0.safetensors   a shard image of the pieces that rank 0 owns, overwritten for ever
    <directory>/rank-00000/slot-0.json          its record: there only while the slot holds one complete version

A version can be opened when all ranks of its world hold it; the newest such one is. `snapshot.slots` writes what is read here.
A directory whose job is still running changes under its reader: a slot's record is removed before the first byte of the next
version is written, so what was read is known to be right when the record is still the same afterwards (`SlotGuard`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from ucformat import values as trees
from ucformat.catalog import Catalog, File, Notes
from ucformat.containers.envelope import VERSION, seal, unseal
from ucformat.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    SnapshotChangedError,
    UcformatError,
)
from ucformat.formats import native
from ucformat.formats.native.fragments import ShardTable
from ucformat.formats.native.manifest import check_sizes
from ucformat.formats.native.shard import Count, Digest, ShardChecks, ShardPiece, ShardRecord, hex_digest, read_pieces
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NAME = "snapshot"
LOCK = "lock"
KEEPER_LOCK = "keeper.lock"
"""Held by a rank's keeper, which outlives its trainer until the version in hand is persisted."""
_RANK = re.compile(r"rank-(\d{5,})/")
_RECORD = re.compile(r"slot-(\d+)\.json")
_UNHASHED = "0" * 16  # stands where a digest is due, and is never compared
_LOOKS = 20  # at slots that change while they are opened: each takes milliseconds, and a step mostly longer
_TOLD = 4  # versions that a message tells of


def rank_name(rank: int) -> str:
    """Directory of a rank inside the snapshot directory."""
    return f"rank-{rank:05d}"


def rank_of(entry: str) -> int | None:
    """The rank whose directory an entry of a snapshot directory is, as `Store.list` names it; None for all else."""
    match = _RANK.fullmatch(entry)
    return None if match is None else int(match[1])


def slot_name(index: int) -> str:
    """File of a slot inside the rank's directory."""
    return f"slot-{index}.safetensors"


def record_name(index: int) -> str:
    """Record of a slot, beside it."""
    return f"slot-{index}.json"


def parity_name(index: int) -> str:
    """File of the parity that this rank keeps for the version in its slot `index`, inside the rank's directory."""
    return f"parity-{index}.xor"


def parity_record_name(index: int) -> str:
    """Record of that parity, beside it."""
    return f"parity-{index}.json"


class SlotRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a slot holds; stored in the envelope of `ucf.json`."""

    version: str
    step: Count
    rank: Count
    world: Count
    """Ranks that together hold the state."""
    file: str
    """Name of the slot's file, which lies beside the record."""
    size: Count
    data_start: Count
    table_start: Count
    block_bytes: Count
    """These four as in a shard's record."""
    header_digest: Digest
    values: msgspec.Raw
    """This rank's value tree."""
    table_digest: Digest | None = None
    """None: the table of checksums is not filled in yet."""
    aliases: dict[str, str] = {}
    mesh: dict[str, int] = {}
    coords: dict[str, int] | None = None
    """This rank's place on the axes of the mesh."""
    created: str = ""
    """UTC, ISO 8601, microseconds: tells two versions of one step apart."""
    run: str = ""
    """What all ranks of one start of the job agree on, so that versions of two starts are never mixed."""

    def shard(self, folder: str = "") -> ShardRecord:
        """The same as a native checkpoint says it of a shard whose path is `folder/file`."""
        digest = _UNHASHED if self.table_digest is None else self.table_digest
        path = f"{folder}/{self.file}" if folder else self.file
        return ShardRecord(path, self.size, self.data_start, self.table_start, self.header_digest, digest)

    def same_version(self, other: SlotRecord) -> bool:
        """Whether both are records of the same bytes, hashed or not."""
        return (self.step, self.rank, self.run, self.created, self.size, self.header_digest) == (
            other.step,
            other.rank,
            other.run,
            other.created,
            other.size,
            other.header_digest,
        )


def encode_slot(record: SlotRecord) -> bytes:
    """The bytes of a slot's record."""
    return seal(msgspec.json.encode(record))


def decode_slot(data: bytes, file: str) -> SlotRecord:
    """The record in the bytes of `file`. Raises VersionError, ChecksumError, FormatError."""
    raw = unseal(data, file)
    try:
        record = msgspec.json.decode(raw, type=SlotRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(file, f"malformed slot record: {error}", 0, len(data)) from error
    check_sizes(record.shard(), record.block_bytes, file)
    if record.rank >= record.world:
        raise FormatError(file, f"rank {record.rank} in a world of {record.world}")
    return record


# -- finding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A version in a slot."""

    folder: str
    index: int
    record: SlotRecord

    @property
    def path(self) -> str:
        """The slot's file, in the snapshot directory."""
        return f"{self.folder}/{self.record.file}"


@dataclass(frozen=True, slots=True)
class Version:
    """What all ranks hold of one step, by rank."""

    step: int
    world: int
    held: tuple[HeldShard, ...]

    @property
    def complete(self) -> bool:
        """Whether every rank holds its part here."""
        return len(self.held) == self.world

    def missing(self, limit: int = 8) -> list[int]:
        """The first ranks that hold nothing of it here; `world` may be any number that a record claims."""
        there = {item.record.rank for item in self.held}
        return list(islice((rank for rank in range(self.world) if rank not in there), limit))

    @property
    def created(self) -> str:
        return max(item.record.created for item in self.held)


def read_slot(store: Store, folder: str, index: int) -> HeldShard:
    """The version in a slot. Raises MissingFileError when it holds none, FormatError when record and file do not belong together.

    The file's header is only checked when the version is opened.
    """
    name = f"{folder}/{record_name(index)}"
    where = f"{store.url}/{name}"
    record = decode_slot(store.read(name), where)
    if folder != rank_name(record.rank) or record.file != slot_name(index):
        raise FormatError(where, f"is the record of {rank_name(record.rank)}/{record.file}")
    size = store.size(f"{folder}/{record.file}")
    if size != record.size:
        raise FormatError(where, f"{record.file} has {size} bytes, was committed with {record.size}")
    return HeldShard(folder, index, record)


def survey(store: Store) -> tuple[list[Version], list[str]]:
    """All versions of which any rank here holds its part, the newest first; and which records were ignored, and why."""
    found: dict[tuple[int, int, str], dict[int, HeldShard]] = {}
    ignored: list[str] = []
    for folder in (name.rstrip("/") for name in store.list() if rank_of(name) is not None):
        for index in (int(match[1]) for name in store.list(folder) if (match := _RECORD.fullmatch(name))):
            try:
                held = read_slot(store, folder, index)
            except UcformatError as error:
                ignored.append(f"ignored: {error}")
                continue
            record = held.record
            ranks = found.setdefault((record.step, record.world, record.run), {})
            before = ranks.get(record.rank)
            if before is None or before.record.created < record.created:  # a step that was taken twice
                ranks[record.rank] = held
    versions = [Version(step, world, tuple(ranks[r] for r in sorted(ranks))) for (step, world, _), ranks in found.items()]
    return sorted(versions, key=lambda version: (version.step, version.created), reverse=True), ignored


def complete_steps(store: Store) -> list[int]:
    """Steps that all ranks hold here, ascending."""
    return sorted({version.step for version in survey(store)[0] if version.complete})


def detect(source: Source) -> bool:
    if source.file is not None:
        return False
    names = source.store.list()
    if native.MANIFEST in names:  # a committed checkpoint, whatever else lies beside it
        return False
    folders = [name.rstrip("/") for name in names if rank_of(name) is not None]
    return any(_is_ours(source.store.list(name)) for name in folders)


def _is_ours(names: Sequence[str]) -> bool:
    """Whether a rank's directory has files of ours, or none at all."""
    return not names or LOCK in names or any(name.startswith("slot-") for name in names)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_catalog(source: Source, step: int | None = None) -> Catalog:
    """The catalog of the newest version (or of `step`) that all ranks hold; reads records and headers only.

    What is newer and can't be opened is told in the remarks. Raises NotACheckpointError, saying what is missing and which
    versions there are, when no version is complete.
    """
    store = source.store
    versions, ignored = survey(store)
    for _ in range(_LOOKS):
        try:
            return _open_newest(store, versions, ignored, step)
        except NotACheckpointError:
            before = versions
            versions, ignored = survey(store)
            if versions == before:
                raise
    raise NotACheckpointError(store.url, f"its slots were given to other versions each of {_LOOKS} times that they were opened")


def _open_newest(store: Store, versions: Sequence[Version], ignored: Sequence[str], step: int | None) -> Catalog:
    """Raises NotACheckpointError also when a version was replaced while it was opened: a newer one is there then."""
    told = list(ignored)
    for version in versions:
        if step is not None and version.step != step:
            continue
        if not version.complete:
            told.append(f"step {version.step} is incomplete: {_absent(version)} of {version.world} hold it here in no slot")
            continue
        try:
            return _catalog(store, version, told)
        except UcformatError as error:
            told.append(f"step {version.step} can't be opened: {error}")
            if not all(holds(store, item) for item in version.held):
                break
    wanted = "version" if step is None else f"version of step {step}"
    why = "; ".join(told[:_TOLD]) or "the slots are empty (a slot that is being filled has no record)"
    if step is not None:
        there = sorted({version.step for version in versions if version.complete})
        why = f"there are {', '.join(map(str, there)) or 'none'}" + (f"; {'; '.join(told[:_TOLD])}" if told else "")
    raise NotACheckpointError(store.url, f"no complete {wanted} in its slots: {why}")


def holds(store: Store, held: HeldShard) -> bool:
    """Whether a slot still holds the version that its record told of. Raises StorageError."""
    name = f"{held.folder}/{record_name(held.index)}"
    try:
        return decode_slot(store.read(name), name).same_version(held.record)
    except (MissingFileError, FormatError, ChecksumError):
        return False


@dataclass(frozen=True, slots=True)
class SlotGuard:
    """Proves, after a slot was read, that it held the version in `held` all the while. Raises SnapshotChangedError."""

    store: Store
    held: HeldShard

    def __call__(self) -> None:
        if not holds(self.store, self.held):
            raise SnapshotChangedError(f"{self.store.url}/{self.held.path}", self.held.record.step)


def _absent(version: Version) -> str:
    missing = version.missing()
    more = version.world - len(version.held) - len(missing)
    return f"ranks {', '.join(map(str, missing))}" + (f" and {more:,} more" if more else "")


def _catalog(store: Store, version: Version, told: Iterable[str]) -> Catalog:
    return assemble([describe(store, held) for held in version.held], store, told)


@dataclass(frozen=True, slots=True)
class DescribedShard:
    """A slot, what its header says of it, and where it lies."""

    held: HeldShard
    table: ShardTable
    store: Store
    guard: Callable[[], None]
    """Raises SnapshotChangedError once the slot holds something else."""


def describe(store: Store, held: HeldShard) -> DescribedShard:
    """Read the header of a slot, once it is known to be the one that was committed. Raises ChecksumError, FormatError."""
    table = native.tabulate(held.record.shard(held.folder), _pieces(store, held))
    return DescribedShard(held, table, store, SlotGuard(store, held))


def assemble(shards: Sequence[DescribedShard], root: Store, told: Iterable[str] = ()) -> Catalog:
    """The catalog of one version, whose slots may lie on several hosts, from the slots of all its ranks in rank order.

    Raises CoverageError, OverlapError, ValueConflictError, FormatError when they are not a whole state.
    """
    held = [shard.held for shard in shards]
    records = [item.record for item in held]
    specs, table = native.merge([shard.table for shard in shards], root.url)
    native.prove_whole(specs, table, [item.path for item in held], root.url)
    hashed = [record.table_digest is not None for record in records]
    files = [
        File(
            item.path,
            item.record.size,
            ShardChecks(item.record.shard(item.folder), item.record.block_bytes) if sure else None,
            guard=shard.guard,
            store=None if shard.store is root else shard.store,
        )
        for shard, item, sure in zip(shards, held, hashed, strict=True)
    ]
    remarks = list(told)
    if not all(hashed):
        remarks.append(f"{hashed.count(False)} of {len(hashed)} slots are not hashed yet: their bytes can't be verified")
    mesh = {axis: size for record in records for axis, size in record.mesh.items()}
    notes = Notes(NAME, records[0].step, mesh, tuple(remarks))
    aliases = _aliases(records, {spec.name for spec in specs}, root.url)
    return Catalog(specs, table, tuple(files), root, _values(records, root.url), aliases, notes)


def _pieces(store: Store, held: HeldShard) -> list[ShardPiece]:
    """What a slot's header says, once it is known to be the one that was committed."""
    record, where = held.record, f"{store.url}/{held.path}"
    if hex_digest(store.read(held.path, 0, record.data_start)) != record.header_digest:
        raise ChecksumError(where, 0, record.data_start, what="digest of the header")
    header, note, pieces = read_pieces(store, held.path, VERSION)
    if header.data_start != record.data_start or note.block_bytes != record.block_bytes:
        raise FormatError(where, "its header is not the one that was committed", 0, header.data_start)
    return pieces


def _values(records: Sequence[SlotRecord], where: str) -> object:
    """The ranks' trees as one; equal ones are decoded once."""
    known: dict[bytes, object] = {}
    raws = [bytes(record.values) for record in records]
    for raw in raws:
        if raw not in known:
            known[raw] = trees.decode(raw, where)
    return trees.merge([known[raw] for raw in raws])


def _aliases(records: Sequence[SlotRecord], names: set[str], where: str) -> dict[str, str]:
    """All ranks' aliases. Raises ValueConflictError when two ranks differ, FormatError for one that leads nowhere."""
    united = trees.unite_aliases((record.rank, record.aliases) for record in records)
    out = dict(sorted(united.items()))
    for alias, target in out.items():
        if target not in names or alias in names:
            raise FormatError(where, f"alias {alias!r} of {target!r} does not name a stored tensor, or hides one")
    return out

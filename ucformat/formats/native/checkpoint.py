"""The native format: open, write, commit, rebuild the index.

    step-00000100/ucf.json, index.safetensors, shards/00000.safetensors …

A directory is a checkpoint when `ucf.json` is there; a run directory holds checkpoints named `step-<8 digits>`.
When a checkpoint is replaced, the new files get a new generation (`shards.1/`, `index.1.safetensors`) and the switch is
the replacement of `ucf.json` alone, so at every moment one complete checkpoint is there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import msgspec
import numpy as np

from ucformat import box as boxes
from ucformat import values as trees
from ucformat.box import Box, Ints
from ucformat.catalog import Catalog, File, FragmentTable, Notes, TensorSpec
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.containers.file_image import ByteRequest, ByteSource
from ucformat.errors import (
    CoverageError,
    ExistsError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    OverlapError,
    UcformatError,
    ValueConflictError,
)
from ucformat.formats import owned, partial, sidecar_files
from ucformat.formats.native.manifest import (
    MANIFEST,
    VERSION,
    FileRecord,
    Record,
    build_index,
    decode_record,
    encode_record,
    read_index,
)
from ucformat.formats.native.shard import ShardChecks, ShardPiece, ShardRecord, hex_digest, lay_out_all, read_pieces, write_shard
from ucformat.formats.source import Source
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.storage.store import Store

NAME = "native"
WRITER = "ucformat 0.1.0"
OWNS = re.compile(r"ucf\.json|index(\.\d+)?\.safetensors|(shards|companions)(\.\d+)?(/.*)?", re.DOTALL)
_STEP = re.compile(r"step-(\d{8,})/")


# -- finding -----------------------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """Directory of a step inside a run directory."""
    return f"step-{step:08d}"


def committed_steps(store: Store) -> list[int]:
    """Steps of a run directory that are committed, ascending."""
    found = [int(match[1]) for name in store.list() if (match := _STEP.fullmatch(name))]
    return sorted(step for step in found if store.exists(f"{step_name(step)}/{MANIFEST}"))


def is_committed(store: Store) -> bool:
    return store.exists(MANIFEST)


def find(source: Source) -> Store:
    """The checkpoint that a path means: itself, or the newest committed step of a run directory.

    Raises NotACheckpointError when nothing committed is there.
    """
    if source.file == MANIFEST or (source.file is None and is_committed(source.store)):
        return source.store
    steps = committed_steps(source.store) if source.file is None else []
    if not steps:
        raise NotACheckpointError(source.url, f"no {MANIFEST}: nothing was committed here (an interrupted save leaves none)")
    return source.store.sub(step_name(steps[-1]))


def detect(source: Source) -> bool:
    if source.file is not None:
        return source.file == MANIFEST
    names = source.store.list()
    return MANIFEST in names or "shards/" in names or any(_STEP.fullmatch(name) for name in names)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_catalog(source: Source) -> Catalog:
    """The catalog of a committed checkpoint: reads `ucf.json` and the index, no shard."""
    store = find(source)
    where = f"{store.url}/{MANIFEST}"
    record = read_record(store)
    index = read_index(store, record)
    names = {spec.name for spec in index.tensors}
    for alias, target in record.aliases.items():
        if target not in names or alias in names:
            raise FormatError(where, f"alias {alias!r} of {target!r} does not name a stored tensor, or hides one")
    files = tuple(File(shard.file, shard.size, ShardChecks(shard, record.block_bytes)) for shard in record.shards)
    notes = Notes(record.origin, record.step, record.mesh, record.remarks, record.origin_layout)
    values = trees.decode(bytes(record.values), where)
    return Catalog(index.tensors, index.fragments, files, store, values, record.aliases, notes)


def read_record(store: Store) -> Record:
    """The commit record of a checkpoint."""
    return decode_record(store.read(MANIFEST), f"{store.url}/{MANIFEST}")


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generation:
    """Names of the files of one save into a directory: each save that replaces another has its own."""

    number: int

    @property
    def suffix(self) -> str:
        return f".{self.number}" if self.number else ""

    @property
    def index(self) -> str:
        return f"index{self.suffix}.safetensors"

    @property
    def companions(self) -> str:
        """The folder of files that travel along, with a `/`."""
        return f"companions{self.suffix}/"

    def shard(self, number: int, part: int = 0) -> str:
        """The file of writer `number`; further ones, when one can't hold all its pieces, have a `part`."""
        return f"shards{self.suffix}/{number:05d}{f'-{part}' if part else ''}.safetensors"

    def owns(self, name: str) -> bool:
        """Whether an entry of the checkpoint's directory belongs to this generation."""
        return name in (f"shards{self.suffix}/", self.index, self.companions)


_PART = re.compile(r"(?:(?:shards|companions)(?:\.(\d+))?/|index(?:\.(\d+))?\.safetensors)")


def prepare(store: Store, overwrite: bool) -> Generation:
    """Clear away what interrupted saves left, and choose the names of the next save. One rank calls it.

    Raises ExistsError when a committed checkpoint is there and may not be replaced.
    """
    if is_committed(store):
        if not overwrite:
            raise ExistsError(store.url)
    elif all(map(_PART.fullmatch, store.list())):  # else it may be a checkpoint of another format, with companions of its own
        for name in store.list():
            store.remove(name.rstrip("/"))
    taken = [int(match[1] or match[2] or 0) for name in store.list() if (match := _PART.fullmatch(name))]
    return Generation(max(taken, default=-1) + 1)


def sweep(store: Store, keep: Generation) -> None:
    """Remove the files of every other generation, after a commit."""
    for name in store.list():
        if _PART.fullmatch(name) and not keep.owns(name):
            store.remove(name.rstrip("/"))


def discard(store: Store, failed: Generation) -> None:
    """Remove what a save that failed has written, unless it was committed. Never raises StorageError: that is not the news."""
    try:
        if is_committed(store) and read_record(store).index.file == failed.index:
            return
        for name in store.list():
            if failed.owns(name):
                store.remove(name.rstrip("/"))
        if not store.list():
            store.remove()
    except UcformatError:
        pass


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The pieces of one written shard, as columns that travel to the rank that commits."""

    record: ShardRecord
    specs: tuple[TensorSpec, ...]
    """Distinct tensors."""
    tensor: Ints
    """(n,) index into `specs`."""
    start: Ints
    """(n,) file offsets."""
    offset: Ints
    """(n, D)."""
    length: Ints
    """(n, D)."""


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


def tabulate(record: ShardRecord, pieces: Sequence[ShardPiece]) -> ShardTable:
    """The columns of a shard's pieces; empty boxes keep their tensor but get no row."""
    specs = tuple(dict.fromkeys(piece.spec for piece in pieces))
    ids = {spec: i for i, spec in enumerate(specs)}
    full = [piece for piece in pieces if piece.box.volume]
    ndim = max((len(spec.shape) for spec in specs), default=0)
    return ShardTable(
        record,
        specs,
        np.array([ids[piece.spec] for piece in full], dtype=np.int64),
        np.array([piece.start for piece in full], dtype=np.int64),
        boxes.pad([piece.box.offset for piece in full], ndim, 0),
        boxes.pad([piece.box.length for piece in full], ndim, 1),
    )


def merge(tables: Sequence[ShardTable], url: str) -> tuple[tuple[TensorSpec, ...], FragmentTable]:
    """Tensors and fragments of all shards. Raises ValueConflictError when they disagree about a tensor."""
    known: dict[str, tuple[TensorSpec, int]] = {}
    for number, table in enumerate(tables):
        for spec in table.specs:
            first, where = known.setdefault(spec.name, (spec, number))
            if first != spec:
                told = f"{first.dtype} {list(first.shape)} and {spec.dtype} {list(spec.shape)}"
                raise ValueConflictError(f"{url}: {spec.name}", [where, number], told)
    specs = tuple(known[name][0] for name in sorted(known))
    ids = {spec.name: i for i, spec in enumerate(specs)}
    ndim = max((len(spec.shape) for spec in specs), default=0)
    tensor = [np.array([ids[s.name] for s in t.specs], dtype=np.int32)[t.tensor] for t in tables if len(t.tensor)]
    full = [(number, table) for number, table in enumerate(tables) if len(table.tensor)]
    columns = FragmentTable(
        np.concatenate(tensor) if tensor else np.empty(0, np.int32),
        np.repeat(np.array([n for n, _ in full], np.int32), [len(t.tensor) for _, t in full]),
        np.concatenate([t.start for _, t in full]) if full else np.empty(0, np.int64),
        np.concatenate([_widen(t.offset, ndim, 0) for _, t in full]) if full else np.empty((0, ndim), np.int64),
        np.concatenate([_widen(t.length, ndim, 1) for _, t in full]) if full else np.empty((0, ndim), np.int64),
    )
    order = np.argsort(columns.tensor, kind="stable")
    return specs, FragmentTable(
        columns.tensor[order], columns.file[order], columns.start[order], columns.offset[order], columns.length[order]
    )


def _widen(column: Ints, ndim: int, fill: int) -> Ints:
    return np.pad(column, ((0, 0), (0, ndim - column.shape[1])), constant_values=fill)


def prove_whole(specs: Sequence[TensorSpec], table: FragmentTable, files: Sequence[str], url: str) -> None:
    """Every tensor is tiled exactly by its fragments. Raises CoverageError or OverlapError naming the box."""
    volume = np.zeros(len(specs), dtype=np.int64)
    np.add.at(volume, table.tensor, boxes.volumes(table.length))
    count = np.bincount(table.tensor, minlength=len(specs))
    ends = np.cumsum(count)
    for i, spec in enumerate(specs):
        whole = Box.whole(spec.shape)
        if volume[i] == whole.volume and count[i] <= 1:
            continue
        rows, ndim = slice(int(ends[i] - count[i]), int(ends[i])), len(spec.shape)
        flaw = boxes.flaw(whole, table.offset[rows, :ndim], table.length[rows, :ndim])
        if flaw is not None and flaw.overlap:
            raise OverlapError(spec.name, flaw.box, [files[f] for f in np.unique(table.file[rows])])
        if flaw is not None:
            raise CoverageError(spec.name, flaw.box, url)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a commit record says beside shards and index."""

    values: object
    aliases: Mapping[str, str]
    notes: Notes
    companions: tuple[FileRecord, ...] = ()


def commit(store: Store, generation: Generation, tables: Sequence[ShardTable], contents: Contents) -> None:
    """Prove coverage, write the index, then the commit record. One rank calls it, after all shards are durable."""
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
    store.put(MANIFEST, data)
    sweep(store, generation)


# -- converting --------------------------------------------------------------------------------------------------------


def write(job: WriteJob) -> None:
    """Write a native checkpoint from the pieces of a job, its shards spread over the ranks of the group."""
    group, store = job.group, job.store
    generation, foreign = Generation(0), list[str]()
    with group.together(f"preparing {store.url}"):
        if group.rank == 0:
            partial.forget(store)
            generation = prepare(store, job.overwrite)
            foreign = owned.held(store) if job.overwrite and not is_committed(store) else []
    generation = group.broadcast(generation)
    try:
        tables = _write_shards(job, generation)
        with group.together(f"committing {store.url}"):
            if group.rank == 0:
                commit(store, generation, tables, Contents(job.values, job.aliases, job.notes, _carry(job, generation)))
                owned.remove(store, foreign)
    except BaseException as error:
        if group.rank == 0 and (isinstance(error, Exception) or group.size == 1):  # else other ranks may still be writing
            discard(store, generation)
        raise


def _write_shards(job: WriteJob, generation: Generation) -> list[ShardTable]:
    """Each rank writes its share of the shards; the tables of all, on every rank."""
    group, store, shards = job.group, job.store, job.shards()
    tables: dict[int, list[ShardTable]] = {}
    with group.together(f"writing {store.url}"):
        for number in range(group.rank, len(shards), group.size):
            pieces, path = shards[number], functools.partial(generation.shard, number)
            tables[number] = put_shards(store, path, [job.targets[i] for i in pieces], job.fill_of(pieces), job.on_bytes)
        if job.finish is not None:
            job.finish()
    merged = {number: held for part in group.all_gather(tables) for number, held in part.items()}
    return [table for number in sorted(merged) for table in merged[number]]


def _carry(job: WriteJob, generation: Generation) -> tuple[FileRecord, ...]:
    """Copy the files that travel along; their records."""
    records = []
    for path in sidecar_files.carry(job.companions, job.store, generation.companions, job.dtype):
        data = job.store.read(path)
        records.append(FileRecord(path, len(data), hex_digest(data)))
    return tuple(records)


# -- repair ------------------------------------------------------------------------------------------------------------


def reindex(store: Store) -> int:
    """Rebuild a lost or damaged index from the shards; the number of fragments.

    The rebuilt index has to match the digest in `ucf.json`: equal shards give equal bytes.
    Raises ChecksumError when a shard's header is damaged, FormatError when the result is not what was committed.
    """
    record = read_record(store)
    tables = [tabulate(shard, _pieces(store, shard)) for shard in record.shards]
    specs, table = merge(tables, store.url)
    prove_whole(specs, table, [shard.file for shard in record.shards], store.url)
    index = build_index(specs, table)
    if hex_digest(index) != record.index.digest:
        raise FormatError(f"{store.url}/{record.index.file}", "the shards do not give the index that was committed")
    store.put(record.index.file, index)
    return len(table)


def _pieces(store: Store, shard: ShardRecord) -> list[ShardPiece]:
    if not store.exists(shard.file):
        raise MissingFileError(f"{store.url}/{shard.file}")
    header, _, pieces = read_pieces(store, shard.file, VERSION)
    if header.data_start != shard.data_start or hex_digest(store.read(shard.file, 0, shard.data_start)) != shard.header_digest:
        raise FormatError(f"{store.url}/{shard.file}", "its header is not the one that was committed", 0, header.data_start)
    return pieces

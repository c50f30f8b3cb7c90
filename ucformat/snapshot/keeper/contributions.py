"""What ranks hand in of one version, and how rank 0 makes a checkpoint of it. Only the storage connects them.

    <run directory>/step-00000100/.ucf.<run>.json                  the marker that vouches for all of these
    <run directory>/step-00000100/shards.<run>/00003.safetensors   the shard of rank 3
    <run directory>/step-00000100/parts.<run>/00003.json           handed in once that shard is durable
    <run directory>/step-00000100/parts.<run>/00003.refused.json   instead, by a rank that gave up

All names carry the token of the start of the job, so what a former start left in the same directory is never mixed in.
When all are there, rank 0 commits, and `parts.<run>/` goes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from ucformat import box as boxes
from ucformat import values as trees
from ucformat.catalog import Notes, TensorSpec
from ucformat.containers.envelope import VERSION, seal, unseal
from ucformat.errors import FormatError, RankFailedError
from ucformat.formats import native, ownership
from ucformat.formats.native.shard import ShardRecord, read_pieces
from ucformat.formats.snapshot import SlotRecord
from ucformat.snapshot.keeper.slot_copy import HeldSlot
from ucformat.storage.store import Store, safe_path

_ANSWER = re.compile(r"(\d{5,})(\.refused)?\.json")


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A logical tensor of which a shard holds pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Columns(msgspec.Struct, frozen=True):
    """A `native.ShardTable` without its record, as JSON can hold it."""

    tensors: tuple[Tensor, ...]
    tensor: list[int]
    """(n,) index into `tensors`."""
    start: list[int]
    """(n,) file offsets."""
    offset: list[tuple[int, ...]]
    """(n,) offsets of the boxes."""
    length: list[tuple[int, ...]]


class Contribution(msgspec.Struct, frozen=True):
    """One rank's share of a version, its shard durable."""

    step: int
    rank: int
    world: int
    run: str
    """Of the slot's record: which start of the job took this version."""
    shard: ShardRecord
    columns: Columns
    values: msgspec.Raw
    aliases: dict[str, str]
    mesh: dict[str, int]


class Refusal(msgspec.Struct, frozen=True):
    """Left by a rank that gave up, so that the others need not wait until their time is over."""

    step: int
    rank: int
    why: str


P = TypeVar("P", Contribution, Refusal)


def parts_folder(run: str) -> str:
    """Where ranks hand in their parts of a version."""
    return f"parts.{run}"


def shard_path(rank: int, run: str) -> str:
    """Where a rank's shard lies in the directory of the version."""
    return native.Generation(run).shard(rank)


def part_path(rank: int, run: str) -> str:
    """Where a rank hands in its part."""
    return f"{parts_folder(run)}/{rank:05d}.json"


def refusal_path(rank: int, run: str) -> str:
    """Where a rank says that it gave up."""
    return f"{parts_folder(run)}/{rank:05d}.refused.json"


def begin(store: Store, run: str) -> ownership.Claim:
    """Mark the place, before anything of a version is written there. Every rank calls it. Raises StorageError."""
    return ownership.begin(store, "persist", token=run)


def make_part(slot: HeldSlot, path: str) -> Contribution:
    """The part of a hashed slot whose copy lies at `path`."""
    record = slot.record
    _, _, pieces = read_pieces(slot.store, f"{slot.folder}/{record.file}", VERSION)
    table = native.tabulate(_shard(record, path), pieces)
    ndims = [len(table.specs[i].shape) for i in table.tensor]
    columns = Columns(
        tuple(Tensor(spec.name, spec.dtype, spec.shape) for spec in table.specs),
        table.tensor.tolist(),
        table.start.tolist(),
        [tuple(row[:n]) for row, n in zip(table.offset.tolist(), ndims, strict=True)],
        [tuple(row[:n]) for row, n in zip(table.length.tolist(), ndims, strict=True)],
    )
    return Contribution(
        record.step, record.rank, record.world, record.run, table.record, columns, record.values, record.aliases, record.mesh
    )


def _shard(record: SlotRecord, path: str) -> ShardRecord:
    return msgspec.structs.replace(record.shard(), file=path)


def put_part(store: Store, run: str, part: Contribution | Refusal) -> None:
    """Hand a part in. Raises StorageError."""
    path = part_path(part.rank, run) if isinstance(part, Contribution) else refusal_path(part.rank, run)
    store.put(path, seal(msgspec.json.encode(part)))


def refuse(store: Store, run: str, refusal: Refusal) -> None:
    """Say that a rank gave up. Raises StorageError."""
    begin(store, run).hold.release()
    put_part(store, run, refusal)


def clear(store: Store, run: str, rank: int) -> None:
    """Remove what one start of the job has in a version's directory: for rank 0 what all ranks have, for others what they have
    themselves. Raises StorageError.
    """
    if rank:
        store.remove(shard_path(rank, run))
        store.remove(part_path(rank, run))
    else:
        ownership.remove_all(store, run)


def made_by(store: Store, run: str) -> bool:
    """Whether a committed version is that of this start of the job. Raises what reading the commit record raises."""
    return native.committed_by(store, native.Generation(run))


def read_part(store: Store, run: str, rank: int, step: int) -> Contribution:
    """What a rank handed in. Raises MissingFileError, StorageError; ChecksumError and FormatError when it is damaged."""
    return _read(store, part_path(rank, run), Contribution, rank, step)


def read_refusal(store: Store, run: str, rank: int, step: int) -> Refusal:
    """Why a rank gave up. Raises as `read_part`."""
    return _read(store, refusal_path(rank, run), Refusal, rank, step)


def _read(store: Store, path: str, kind: type[P], rank: int, step: int) -> P:
    where = f"{store.url}/{path}"
    raw = unseal(store.read(path), where)
    try:
        part = msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(where, f"malformed part: {error}") from error
    if (part.rank, part.step) != (rank, step):
        raise FormatError(where, f"is of rank {part.rank} and step {part.step}")
    return part


@dataclass(frozen=True, slots=True)
class Answers:
    """Which ranks have said something about a version."""

    parts: frozenset[int]
    refusals: frozenset[int]


def answers(store: Store, run: str) -> Answers:
    """Raises StorageError."""
    found = [match for name in store.list(parts_folder(run)) if (match := _ANSWER.fullmatch(name))]
    return Answers(frozenset(int(m[1]) for m in found if not m[2]), frozenset(int(m[1]) for m in found if m[2]))


def commit_parts(claim: ownership.Claim, step: int, parts: Sequence[Contribution]) -> None:
    """Make a checkpoint of all ranks' parts, in rank order. Running it again after it failed does no harm.

    Raises RankFailedError when ranks disagree on how many they are, ValueConflictError, CoverageError, OverlapError when their
    parts make no whole, ConflictError when the step was committed by somebody else, StorageError.
    """
    store = claim.store
    odd = {part.rank: f"handed in a part of {part.world} ranks" for part in parts if part.world != len(parts)}
    odd |= {part.rank: f"took it in run {part.run!r}, not {parts[0].run!r}" for part in parts if part.run != parts[0].run}
    if odd:
        raise RankFailedError(f"persisting step {step}", odd)
    known: dict[bytes, object] = {}
    for part in parts:  # most ranks hold the same values: equal trees are decoded once
        raw = bytes(part.values)
        if raw not in known:
            known[raw] = trees.decode(raw, store.url)
    merged = trees.merge([known[bytes(part.values)] for part in parts])
    mesh = {axis: size for part in parts for axis, size in part.mesh.items()}
    tables = [_table(part, store.url) for part in parts]
    contents = native.Contents(
        merged, trees.unite_aliases(enumerate(part.aliases for part in parts)), Notes(native.NAME, step, mesh)
    )
    native.commit(native.Attempt(store, native.Generation(claim.token), claim, native.torn_record(store)), tables, contents)


def _table(part: Contribution, url: str) -> native.ShardTable:
    columns = part.columns
    specs = tuple(TensorSpec(t.name, t.dtype, t.shape) for t in columns.tensors)
    ndim = max((len(spec.shape) for spec in specs), default=0)
    return native.ShardTable(
        msgspec.structs.replace(part.shard, file=safe_path(part.shard.file, url)),
        specs,
        np.array(columns.tensor, dtype=np.int64),
        np.array(columns.start, dtype=np.int64),
        boxes.pad(columns.offset, ndim, 0),
        boxes.pad(columns.length, ndim, 1),
    )

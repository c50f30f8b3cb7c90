"""The fragments of a checkpoint that is being written, as columns: shard by shard, merged into one table, proven to be whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from ucformat import box as boxes
from ucformat.box import Box, Ints
from ucformat.catalog import FragmentTable, TensorSpec
from ucformat.errors import CoverageError, OverlapError, ValueConflictError
from ucformat.formats.native.shard import ShardPiece, ShardRecord
from ucformat.group import Group, leaders, words


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


def gather_tables(tables: Sequence[ShardTable], group: Group) -> list[ShardTable]:
    """All ranks' tables in rank order, on rank 0; nothing elsewhere. Lists of tensors that ranks have alike travel once.

    Every rank of `group` calls it. Raises RankFailedError.
    """
    lists = tuple(table.specs for table in tables)
    key = "\n".join(f"{spec.name}\t{spec.dtype}\t{spec.shape}" for specs in lists for spec in specs)
    lengths = ",".join(str(len(specs)) for specs in lists)
    of = leaders(group.numbers(words(xxhash.xxh3_128_intdigest(f"{lengths}\n{key}".encode("utf-8", "surrogatepass")))))
    first: list[int] = np.unique(of).tolist()
    known = group.gather_from(lists if group.rank in first else None, first)
    gathered = group.gather([replace(table, specs=()) for table in tables])
    return [
        replace(table, specs=specs)
        for rank, theirs in enumerate(gathered)
        for table, specs in zip(theirs, known[int(of[rank])], strict=True)
    ]


def merge(tables: Sequence[ShardTable], url: str) -> tuple[tuple[TensorSpec, ...], FragmentTable]:
    """Tensors and fragments of all shards. Raises ValueConflictError when they disagree about a tensor."""
    known: dict[str, tuple[TensorSpec, int]] = {}
    lists: dict[int, tuple[TensorSpec, ...]] = {}
    for number, table in enumerate(tables):
        if id(table.specs) in lists:
            continue  # of ranks that hold parts of the same tensors
        lists[id(table.specs)] = table.specs
        for spec in table.specs:
            first, where = known.setdefault(spec.name, (spec, number))
            if first != spec:
                told = f"{first.dtype} {list(first.shape)} and {spec.dtype} {list(spec.shape)}"
                raise ValueConflictError(f"{url}: {spec.name}", [where, number], told)
    specs = tuple(known[name][0] for name in sorted(known))
    ids = {spec.name: i for i, spec in enumerate(specs)}
    ndim = max((len(spec.shape) for spec in specs), default=0)
    number_of = {key: np.array([ids[spec.name] for spec in held], dtype=np.int32) for key, held in lists.items()}
    tensor = [number_of[id(table.specs)][table.tensor] for table in tables if len(table.tensor)]
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

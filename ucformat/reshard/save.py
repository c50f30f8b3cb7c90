"""Saving a live state as a native checkpoint: every rank writes its own pieces, rank 0 commits.

Collect → agree who writes which replica → lay out and write one shard per rank → prove coverage and commit. An error
on any rank reaches every rank, and nothing is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Notes
from ucformat.formats import native
from ucformat.formats.hf.companions import companions_of
from ucformat.formats.target import Companions, OutputBox
from ucformat.group import Group
from ucformat.reshard.reading.fill import TensorFill
from ucformat.reshard.state.division import Division, divide
from ucformat.reshard.state.walk import collect
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; equal on every rank."""

    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = True
    """Compare tensors that several ranks hold, by digests of all their bytes, and refuse when they differ."""
    on_bytes: Callable[[int], None] | None = None
    companions: str | None = None
    """A model directory whose configuration, tokenizer and the like are stored, too."""


def save_state(store: Store, state: Mapping[str, object], options: SaveOptions, group: Group) -> None:
    """Write `state` into the directory `store`. Every rank of `group` calls it.

    Raises ExistsError, UnrepresentableError, ValueConflictError, CoverageError, OverlapError, StorageError, on every rank when
    any rank has the error; RankFailedError when a rank died.
    """
    division = divide(collect(state, group), group, check_replicas=options.check_replicas)
    attempt: native.Attempt | None = None
    beside = Companions()
    try:
        with group.together(f"preparing {store.url}"):
            if group.rank == 0:
                beside = _companions(options)
                attempt = native.prepare(store, options.overwrite)
        generation = group.broadcast(None if attempt is None else attempt.generation)
        assert generation is not None
        tables: list[native.ShardTable] = []
        with group.together(f"writing {store.url}"), native.joined(store, generation):
            tables = _write(store, generation, division, options, group)
        _commit(store, attempt, tables, division, options, beside, group)
    except BaseException as error:
        if attempt is not None:
            attempt.give_up(error, alone=group.size == 1)
        raise


def _write(
    store: Store, generation: native.Generation, division: Division, options: SaveOptions, group: Group
) -> list[native.ShardTable]:
    """Write what this rank has to write."""
    pieces = division.pieces
    targets = [OutputBox(piece.spec, piece.box) for piece in pieces]
    targets += [OutputBox(spec, Box.whole(spec.shape)) for spec in division.empty]
    fill = TensorFill([piece.view for piece in pieces], [piece.spec.kind for piece in pieces])
    return native.put_shards(store, partial(generation.shard, group.rank), targets, fill, options.on_bytes)


def _companions(options: SaveOptions) -> Companions:
    """The files to be stored beside the state; what of the directory is not among them is logged once."""
    if options.companions is None:
        return Companions()
    found = companions_of(options.companions)
    for text in found.remarks:
        told = f"{options.companions}: {text}"
        if told not in _warned:
            _warned.add(told)
            _LOG.warning("%s", told)
    return found


def _commit(
    store: Store,
    attempt: native.Attempt | None,
    tables: Sequence[native.ShardTable],
    division: Division,
    options: SaveOptions,
    beside: Companions,
    group: Group,
) -> None:
    """Rank 0 gathers tables and value trees (each different one once) and commits."""
    everyone = native.gather_tables(tables, group)
    trees = group.gather_from(division.tree, division.tree_holders)
    with group.together(f"committing {store.url}"):
        if attempt is not None:
            merged = values.merge([values.decode(tree, store.url) for tree in trees.values()], list(trees))
            notes = Notes(native.NAME, options.step, dict(division.mesh))
            carried = native.carry_companions(beside, store, attempt.generation)
            contents = native.Contents(merged, division.aliases, notes, carried)
            native.commit(attempt, everyone, contents)

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
from ucformat.containers.file_image import ByteSource
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


@dataclass(frozen=True, slots=True)
class Begun:
    """A save that all ranks have agreed on: what this rank writes, and where."""

    store: Store
    options: SaveOptions
    generation: native.Generation
    attempt: native.Attempt | None
    """On the rank that commits."""
    beside: Companions
    targets: tuple[OutputBox, ...]
    """What this rank writes, pieces of tensors first."""
    source: ByteSource
    """Of the bytes of `targets`."""
    aliases: Mapping[str, str]
    mesh: Mapping[str, int]
    tree: bytes
    tree_holders: tuple[int, ...]

    def give_up(self, error: BaseException, group: Group) -> None:
        """After a failure: remove what was written. Never raises UcformatError."""
        if self.attempt is not None:
            self.attempt.give_up(error, alone=group.size == 1)


def save_state(store: Store, state: Mapping[str, object], options: SaveOptions, group: Group) -> None:
    """Write `state` into the directory `store`. Every rank of `group` calls it.

    Raises ExistsError, UnrepresentableError, ValueConflictError, CoverageError, OverlapError, StorageError, on every rank when
    any rank has the error; RankFailedError when a rank died.
    """
    write(begin(store, state, options, group), group)


def begin(store: Store, state: Mapping[str, object], options: SaveOptions, group: Group) -> Begun:
    """Agree on a save, and mark its place. Every rank of `group` calls it. Raises as `save_state`."""
    division = divide(collect(state, group), group, check_replicas=options.check_replicas)
    attempt: native.Attempt | None = None
    beside = Companions()
    try:
        with group.together(f"preparing {store.url}"):
            if group.rank == 0:
                beside = _companions(options)
                attempt = native.prepare(store, options.overwrite)
        generation = group.broadcast(None if attempt is None else attempt.generation)
    except BaseException as error:
        if attempt is not None:
            attempt.give_up(error, alone=group.size == 1)
        raise
    assert generation is not None
    return _begun(store, options, division, generation, attempt, beside)


def _begun(
    store: Store,
    options: SaveOptions,
    division: Division,
    generation: native.Generation,
    attempt: native.Attempt | None,
    beside: Companions,
) -> Begun:
    pieces = division.pieces
    targets = [OutputBox(piece.spec, piece.box) for piece in pieces]
    targets += [OutputBox(spec, Box.whole(spec.shape)) for spec in division.empty]
    fill = TensorFill([piece.view for piece in pieces], [piece.spec.kind for piece in pieces])
    agreed = division.aliases, division.mesh, division.tree, division.tree_holders
    return Begun(store, options, generation, attempt, beside, tuple(targets), fill, *agreed)


def write(begun: Begun, group: Group) -> None:
    """Write what all ranks have agreed on, and commit. Every rank of `group` calls it. Raises as `save_state`."""
    store, options, generation = begun.store, begun.options, begun.generation
    try:
        tables: list[native.ShardTable] = []
        with group.together(f"writing {store.url}"), native.joined(store, generation):
            path = partial(generation.shard, group.rank)
            tables = native.put_shards(store, path, begun.targets, begun.source, options.on_bytes)
        _commit(begun, tables, group)
    except BaseException as error:
        begun.give_up(error, group)
        raise


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


def _commit(begun: Begun, tables: Sequence[native.ShardTable], group: Group) -> None:
    """Rank 0 gathers tables and value trees (each different one once) and commits."""
    store, attempt = begun.store, begun.attempt
    everyone = native.gather_tables(tables, group)
    trees = group.gather_from(begun.tree, begun.tree_holders)
    with group.together(f"committing {store.url}"):
        if attempt is not None:
            merged = values.merge([values.decode(tree, store.url) for tree in trees.values()], list(trees))
            notes = Notes(native.NAME, begun.options.step, dict(begun.mesh))
            carried = native.carry_companions(begun.beside, store, attempt.generation)
            contents = native.Contents(merged, begun.aliases, notes, carried)
            native.commit(attempt, everyone, contents)

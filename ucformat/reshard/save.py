"""Saving a live state as a native checkpoint: every rank writes its own pieces, rank 0 commits.

Collect → agree who writes which replica → lay out and write one shard per rank → prove coverage and commit. An error
on any rank reaches every rank, and nothing is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Notes, TensorSpec
from ucformat.containers.checksums import digest
from ucformat.formats import native
from ucformat.formats.hf.companions import companions_of
from ucformat.formats.target import Companions, OutputBox
from ucformat.group import Group
from ucformat.reshard.reading.fill import TensorFill
from ucformat.reshard.state.replicas import Assignment, Offer, Offers, assign_writers, content_digest
from ucformat.reshard.state.walk import Collected, Piece, collect
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)


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
class _Brought:
    """What a rank tells all others before anything is written."""

    offers: Offers
    aliases: dict[str, str]
    mesh: dict[str, int]
    tree_digest: int


@dataclass(frozen=True, slots=True)
class Division:
    """Who writes what, the same on every rank."""

    pieces: tuple[Piece, ...]
    """What this rank writes."""
    empty: tuple[TensorSpec, ...]
    """Tensors without elements: each rank's share keeps their name, dtype and shape."""
    ranks: tuple[_Brought, ...]
    tree: bytes
    """This rank's value tree as JSON."""

    @property
    def aliases(self) -> dict[str, str]:
        """All ranks' aliases. Raises ValueConflictError when two ranks tie one name to different tensors."""
        return values.unite_aliases((number, rank.aliases) for number, rank in enumerate(self.ranks))

    @property
    def mesh(self) -> dict[str, int]:
        return {axis: size for rank in self.ranks for axis, size in rank.mesh.items()}


def divide(collected: Collected, group: Group, *, check_replicas: bool) -> Division:
    """Agree with the other ranks on who writes which replica: one exchange. Every rank of `group` calls it.

    Raises ValueConflictError when replicas that should be equal are not, on every rank alike.
    """
    brought: _Brought | None = None
    tree = b""
    with group.together("preparing the save"):
        tree = values.encode(collected.values)
        brought = _bring(collected, tree, check_replicas and group.size > 1)
    assert brought is not None
    ranks = group.all_gather(brought)
    aliases = {alias: target for rank in ranks for alias, target in rank.aliases.items()}
    assignment = assign_writers([rank.offers for rank in ranks], aliases)
    if group.rank == 0:
        _warn_of_buffers(assignment)
    mine = iter(assignment.writes[group.rank])
    chosen = [piece for piece in collected.pieces if not piece.replicated or next(mine)]
    return Division(
        tuple(piece for piece in chosen if piece.spec.name not in aliases),
        tuple(spec for spec in collected.specs if 0 in spec.shape and spec.name not in aliases),
        tuple(ranks),
        tree,
    )


_warned: set[str] = set()


def _warn_of_buffers(assignment: Assignment) -> None:
    """Log once per process and tensor that the first rank's was stored where ranks differ."""
    names = sorted(set(assignment.first_of) - _warned)
    if names:
        _warned.update(names)
        _LOG.warning(
            "%d buffers differ between ranks and are stored as the first rank has them: %s%s",
            len(names), ", ".join(names[:8]), "…" if len(names) > 8 else "",
        )  # fmt: skip


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


def _bring(collected: Collected, tree: bytes, check: bool) -> _Brought:
    shared = [piece for piece in collected.pieces if piece.replicated]
    alone = sum(_nbytes(piece) for piece in collected.pieces if not piece.replicated)
    offers = tuple(
        Offer(
            piece.spec.name,
            piece.box.offset,
            piece.box.length,
            _nbytes(piece),
            content_digest(piece.view) if check else None,
            piece.first_rank_wins,
        )
        for piece in shared
    )
    return _Brought(
        Offers(alone, offers),
        dict(collected.aliases),
        dict(collected.mesh),
        digest("xxh3-64", np.frombuffer(tree, dtype=np.uint8)),
    )


def _nbytes(piece: Piece) -> int:
    return piece.box.volume * piece.spec.kind.itemsize


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
    digests = [rank.tree_digest for rank in division.ranks]
    first = digests.index(digests[group.rank]) == group.rank
    ranks = group.gather(tables)
    trees = group.gather(division.tree if first else None)
    with group.together(f"committing {store.url}"):
        if attempt is not None:
            known = {key: tree for key, tree in zip(digests, trees, strict=True) if tree is not None}
            merged = values.merge([values.decode(known[key], store.url) for key in digests])
            notes = Notes(native.NAME, options.step, division.mesh)
            carried = native.carry_companions(beside, store, attempt.generation)
            contents = native.Contents(merged, division.aliases, notes, carried)
            native.commit(attempt, [table for held in ranks for table in held], contents)

"""Saving a live state as a native checkpoint: every rank writes its own pieces, rank 0 commits.

Collect → agree who writes which replica → lay out and write one shard per rank → prove coverage and commit. An error
on any rank reaches every rank, and nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Notes
from ucformat.checks import digest
from ucformat.errors import ValueConflictError
from ucformat.formats import native
from ucformat.formats.target import Target
from ucformat.group import Group
from ucformat.reshard.collect import Collected, Piece, collect
from ucformat.reshard.fill import TensorFill
from ucformat.reshard.own import Offer, Offers, choose, sample
from ucformat.storage import Store


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; equal on every rank."""

    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = True
    """Compare plain tensors that several ranks hold (whole up to 64 KiB, sampled above) and refuse when they differ."""
    on_bytes: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class _Brought:
    """What a rank tells all others before anything is written."""

    offers: Offers
    aliases: dict[str, str]
    mesh: dict[str, int]
    tree_digest: int


def save_state(store: Store, state: Mapping[str, object], options: SaveOptions, group: Group) -> None:
    """Write `state` into the directory `store`. Every rank of `group` calls it.

    Raises ExistsError, UnrepresentableError, ValueConflictError, CoverageError, OverlapError, StorageError; RankFailedError
    where another rank has the error.
    """
    collected = collect(state, group)
    error: Exception | None = None
    brought: _Brought | None = None
    tree = b""
    try:
        tree = values.encode(collected.values)
        brought = _bring(collected, tree, options.check_replicas)
    except Exception as caught:
        error = caught
    group.settle("preparing the save", error)
    assert brought is not None
    ranks = group.all_gather(brought)
    generation = _prepare(store, options, group)
    pieces = _choose(collected, ranks, group)
    table: native.ShardTable | None = None
    with group.together(f"writing {store.url}"):
        targets = [Target(piece.spec, piece.box) for piece in pieces] + _empty(collected, ranks, group)
        fill = TensorFill([piece.view for piece in pieces], [piece.spec.kind for piece in pieces])
        table = native.put_shard(store, generation.shard(group.rank), targets, fill, options.on_bytes)
    _commit(store, generation, table, tree, ranks, options, group)


def _bring(collected: Collected, tree: bytes, check: bool) -> _Brought:
    shared = [piece for piece in collected.pieces if piece.replicated]
    alone = sum(_nbytes(piece) for piece in collected.pieces if not piece.replicated)
    offers = tuple(
        Offer(
            piece.spec.name,
            piece.box.offset,
            piece.box.length,
            _nbytes(piece),
            sample(piece.view) if check and piece.checked else None,
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


def _prepare(store: Store, options: SaveOptions, group: Group) -> native.Generation:
    generation = native.Generation(0)
    with group.together(f"preparing {store.url}"):
        if group.rank == 0:
            generation = native.prepare(store, options.overwrite)
    return group.broadcast(generation)


def _choose(collected: Collected, ranks: list[_Brought], group: Group) -> list[Piece]:
    """The pieces that this rank writes. All ranks compute the same division, or the same error."""
    aliases = {alias for rank in ranks for alias in rank.aliases}
    mine = iter(choose([rank.offers for rank in ranks])[group.rank])
    chosen = [piece for piece in collected.pieces if not piece.replicated or next(mine)]
    return [piece for piece in chosen if piece.spec.name not in aliases]


def _empty(collected: Collected, ranks: list[_Brought], group: Group) -> list[Target]:
    """Tensors without elements: rank 0's shard keeps their name, dtype and shape."""
    aliases = {alias for rank in ranks for alias in rank.aliases}
    return [Target(spec, Box.whole(spec.shape)) for spec in collected.specs if 0 in spec.shape and spec.name not in aliases]


def _commit(
    store: Store,
    generation: native.Generation,
    table: native.ShardTable,
    tree: bytes,
    ranks: list[_Brought],
    options: SaveOptions,
    group: Group,
) -> None:
    """Rank 0 gathers tables and value trees (each different one once) and commits."""
    first = [rank.tree_digest for rank in ranks].index(ranks[group.rank].tree_digest)
    tables = group.gather(table)
    trees = group.gather(tree if first == group.rank else None)
    with group.together(f"committing {store.url}"):
        if group.rank == 0:
            merged = values.merge([values.decode(item, store.url) for item in _spread(trees, ranks)])
            native.commit(
                store,
                generation,
                tables,
                native.Contents(merged, _aliases(ranks), Notes(native.NAME, options.step, _mesh(ranks))),
            )


def _spread(trees: list[bytes | None], ranks: list[_Brought]) -> list[bytes]:
    known = {rank.tree_digest: tree for rank, tree in zip(ranks, trees, strict=True) if tree is not None}
    return [known[rank.tree_digest] for rank in ranks]


def _aliases(ranks: list[_Brought]) -> dict[str, str]:
    """All ranks' aliases. Raises ValueConflictError when two ranks tie one name to different tensors."""
    out: dict[str, str] = {}
    for number, rank in enumerate(ranks):
        for alias, target in rank.aliases.items():
            if out.setdefault(alias, target) != target:
                raise ValueConflictError(alias, [number], f"tied to {out[alias]} and to {target}")
    return {alias: out.get(target, target) for alias, target in out.items()}


def _mesh(ranks: list[_Brought]) -> dict[str, int]:
    return {axis: size for rank in ranks for axis, size in rank.mesh.items()}

"""Dividing a state over the ranks: who writes which replica, agreed upon in a few numbers of each rank.

Every rank tells a digest of its structure (`replicas.Structure`), how much only it holds, and digests of its bytes. Only when
there are several structures, and not those of the last time, do they travel, once each, to rank 0, which decides.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ucformat import values
from ucformat.catalog import TensorSpec
from ucformat.group import Group, first_of_each, leaders, word, words
from ucformat.reshard.state import replicas
from ucformat.reshard.state.replicas import Key, Offer, Structure, content_digest
from ucformat.reshard.state.walk import Collected, Piece

Digests = NDArray[np.int64]
_WHAT = "agreeing who writes what"
_LOG = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Division:
    """Who writes what; aliases and mesh are the same on every rank."""

    pieces: tuple[Piece, ...]
    """What this rank writes."""
    empty: tuple[TensorSpec, ...]
    """Tensors without elements: each rank's share keeps their name, dtype and shape."""
    aliases: Mapping[str, str]
    mesh: Mapping[str, int]
    tree: bytes
    """This rank's value tree as JSON."""
    tree_holders: tuple[int, ...]
    """The first rank of those that have the same tree, for each different one."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """Who writes what, for all structures."""

    writers: list[NDArray[np.int32]]
    aliases: dict[str, str]
    mesh: dict[str, int]
    crossed: bool
    """Whether ranks of different structures hold the same box."""
    drifting: list[Key]
    """Boxes that may differ between ranks."""

    @classmethod
    def of(cls, structures: Sequence[Structure], ranks: Sequence[Sequence[int]], unique_bytes: Sequence[int]) -> _Decision:
        """Raises ValueConflictError."""
        aliases = replicas.unite(structures, ranks)
        own, tied = replicas.holders(structures, aliases)
        return cls(
            replicas.assign_writers(structures, ranks, unique_bytes, aliases),
            aliases,
            {axis: size for structure in structures for axis, size in structure.mesh.items()},
            bool(tied) or any(len(held) > 1 for held in own.values()),
            replicas.drifting(structures, aliases),
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was decided for ranks of certain structures."""

    key: tuple[int, int]
    """Digest of all ranks' structures and sizes: the plan is good for these."""
    rank: int
    """This rank then, and now, if the plan is to be followed again."""
    decision: _Decision
    own: int
    """Which of the structures this rank has."""
    of: NDArray[np.int64]
    """(ranks,) the first rank with the structure of each."""
    first: tuple[int, ...]
    """The first rank of each structure."""
    structures: tuple[Structure, ...]
    """On rank 0, all of them."""


class _Last(threading.local):
    """The plan that this thread's last division followed: a job saves one state again and again."""

    plan: _Plan | None = None


_LAST = _Last()


@dataclass(frozen=True, slots=True)
class _Own:
    """What one rank brings."""

    structure: Structure
    encoded: bytes
    unique_bytes: int
    digests: Digests
    """Of each offer's bytes; zeros when replicas are not compared."""
    tree: bytes

    def row(self, rank: int) -> tuple[int, ...]:
        """What it tells all others: digests of its structure and tree, of the bytes of its offers, and its last plan."""
        last = _LAST.plan
        loose = np.array([offer.first_rank_wins for offer in self.structure.offers], dtype=bool)
        return (
            *words(xxhash.xxh3_128_intdigest(self.encoded)), self.unique_bytes, _word(self.tree),
            _word(self.digests[~loose]), _word(self.digests[loose]), *((0, 0) if last is None or last.rank != rank else last.key),
        )  # fmt: skip


def _word(data: bytes | Digests) -> int:
    return word(xxhash.xxh3_64_intdigest(data))


def divide(collected: Collected, group: Group, *, check_replicas: bool) -> Division:
    """Agree with the other ranks on who writes which replica. Every rank of `group` calls it.

    Raises ValueConflictError when replicas that should be equal are not, on every rank alike.
    """
    own: _Own | None = None
    with group.together("preparing the save"):
        own = _bring(collected, check=check_replicas and group.size > 1)
    assert own is not None
    rows = group.numbers(own.row(group.rank), _WHAT)
    plan = _plan(own, rows, group)
    if group.size > 1:
        _compare(own, rows, plan, group)
    decision = plan.decision
    mine = iter(decision.writers[plan.own] == group.rank)
    chosen = [piece for piece in collected.pieces if not piece.replicated or next(mine)]
    return Division(
        tuple(piece for piece in chosen if piece.spec.name not in decision.aliases),
        tuple(spec for spec in collected.specs if 0 in spec.shape and spec.name not in decision.aliases),
        decision.aliases,
        decision.mesh,
        own.tree,
        tuple(first_of_each(rows[:, 3:4])),
    )


def _bring(collected: Collected, *, check: bool) -> _Own:
    shared = [piece for piece in collected.pieces if piece.replicated]
    offers = tuple(
        Offer(piece.spec.name, piece.box.offset, piece.box.length, _nbytes(piece), piece.first_rank_wins) for piece in shared
    )
    digests = [word(content_digest(piece.view)) if check else 0 for piece in shared]
    structure = Structure(offers, dict(collected.aliases), dict(collected.mesh))
    return _Own(
        structure,
        structure.encode(),
        sum(_nbytes(piece) for piece in collected.pieces if not piece.replicated),
        np.array(digests, dtype=np.int64),
        values.encode(collected.values),
    )


def _nbytes(piece: Piece) -> int:
    return piece.box.volume * piece.spec.kind.itemsize


def _plan(own: _Own, rows: NDArray[np.int64], group: Group) -> _Plan:
    """The plan for all ranks' rows: that of the last time where no rank has anything else."""
    last = _LAST.plan
    key = words(xxhash.xxh3_128_intdigest(np.ascontiguousarray(rows[:, :3])))
    if last is not None and (last.key, last.rank) == (key, group.rank) and (rows[:, 6:8] == key).all():
        return last
    of = leaders(rows[:, :2])
    first: list[int] = np.unique(of).tolist()
    structures = [own.structure]
    if len(first) > 1:
        sent = group.gather_from(own.encoded if group.rank in first else None, first, _WHAT)
        structures = [msgspec.msgpack.decode(data, type=Structure) for data in sent.values()]
    decision: _Decision | None = None
    with group.together(_WHAT):
        if group.rank == 0 or len(first) == 1:
            decision = _Decision.of(structures, _members(of, first), rows[:, 2].tolist())
    if len(first) > 1:
        decision = group.broadcast(decision, _WHAT)
    assert decision is not None
    _LAST.plan = _Plan(key, group.rank, decision, first.index(int(of[group.rank])), of, tuple(first), tuple(structures))
    return _LAST.plan


def _members(of: NDArray[np.int64], first: Sequence[int]) -> list[list[int]]:
    """The ranks of each structure, ascending."""
    ranks = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[ranks], first)
    return [part.tolist() for part in np.split(ranks, starts[1:])]


def _compare(own: _Own, rows: NDArray[np.int64], plan: _Plan, group: Group) -> None:
    """Compare replicas, and log which may differ and do. Raises ValueConflictError on all ranks alike."""
    decision = plan.decision
    strict, loose = (bool((rows[:, column] == rows[plan.of, column]).all()) for column in (4, 5))  # within each structure
    if decision.drifting and (decision.crossed or not loose):
        _name_drifted(own, decision, group)
    if strict and not decision.crossed:
        return
    # the digests of one rank of each structure stand for those of all where these are alike
    speakers = list(plan.first) if strict else list(range(group.size))
    known = group.gather_from(own.digests if group.rank in speakers else None, speakers, _WHAT)
    with group.together(_WHAT):
        if group.rank == 0:
            replicas.compare(plan.structures, _members(plan.of, plan.first), known, decision.aliases)


def _name_drifted(own: _Own, decision: _Decision, group: Group) -> None:
    """Log, once per process and tensor, what differs between ranks and is stored as the first rank has it."""
    at = {key: n for n, key in enumerate(decision.drifting)}
    extremes = np.full((2, len(at)), np.iinfo(np.int64).min)
    for offer, digest in zip(own.structure.offers, own.digests.tolist(), strict=True):
        n = at.get((decision.aliases.get(offer.name, offer.name), offer.offset, offer.length))
        if n is not None:
            extremes[:, n] = digest, ~digest  # the largest complement is that of the smallest digest
    highest, lowest = group.maximum(extremes, _WHAT)
    names = sorted({key[0] for key, differs in zip(decision.drifting, highest != ~lowest, strict=True) if differs} - _warned)
    if names and group.rank == 0:
        _warned.update(names)
        _LOG.warning(
            "%d buffers differ between ranks and are stored as the first rank has them: %s%s",
            len(names), ", ".join(names[:8]), "…" if len(names) > 8 else "",
        )  # fmt: skip

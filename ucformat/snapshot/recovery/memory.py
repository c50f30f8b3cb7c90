"""What snapshots lie in the memory of this host: directories, versions in them, and who is at work there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ucformat.errors import StorageError
from ucformat.snapshot.recovery.inventory import HostInventory, SlotSummary, scan
from ucformat.snapshot.recovery.leftovers import owner, rank_folders
from ucformat.snapshot.slots.free_memory import memory_mounts
from ucformat.storage.local import LocalStore

DEPTH = 4  # folders below a mount of memory that are looked into: a job's directory lies near the top
_SLOT_FILES, _PARITY_FILES = ".safetensors", ".xor"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank has in this host's memory."""

    rank: int
    nbytes: int
    """Of its slots, with versions in them or not."""
    parity_nbytes: int
    """Of the parity that it keeps for other ranks."""
    owner: str
    """The living process that fills these slots or persists one; empty when there is none."""


@dataclass(frozen=True, slots=True)
class VersionMemory:
    """What this host holds of one version."""

    step: int
    run: str
    """The start of the job that took it."""
    world: int
    """Ranks that together hold the state; the others' slots lie on other hosts, or are lost."""
    ranks: tuple[int, ...]
    """Whose slots are here."""
    nbytes: int
    hashed: int
    """Slots with checksums."""
    parity: tuple[int, ...]
    """Ranks whose parity of it is here."""
    created: str


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """A snapshot directory."""

    directory: str
    ranks: tuple[RankMemory, ...]
    versions: tuple[VersionMemory, ...]
    """The newest first."""
    ignored: tuple[str, ...]
    """Records that can't be used, and why."""

    @property
    def owners(self) -> tuple[str, ...]:
        """Living processes that work here."""
        return tuple(dict.fromkeys(rank.owner for rank in self.ranks if rank.owner))

    @property
    def nbytes(self) -> int:
        return sum(rank.nbytes + rank.parity_nbytes for rank in self.ranks)


def look(directory: str) -> SnapshotMemory:
    """What lies in a snapshot directory; changes nothing. Raises StorageError when it can't be looked at."""
    try:
        ranks = tuple(_rank(rank, folder) for rank, folder in rank_folders(directory).items())
    except OSError as error:
        raise StorageError(directory, error) from error
    found = scan(LocalStore(os.path.abspath(directory)))
    return SnapshotMemory(os.path.abspath(directory), ranks, tuple(_versions(found)), found.ignored)


def _rank(rank: int, folder: str) -> RankMemory:
    sizes = {_SLOT_FILES: 0, _PARITY_FILES: 0}
    with os.scandir(folder) as entries:
        for entry in entries:
            kind = os.path.splitext(entry.name)[1]
            if kind in sizes and entry.is_file(follow_symlinks=False):
                sizes[kind] += entry.stat(follow_symlinks=False).st_size
    return RankMemory(rank, sizes[_SLOT_FILES], sizes[_PARITY_FILES], owner(folder))


def _versions(found: HostInventory) -> Iterator[VersionMemory]:
    slots: dict[tuple[int, str, int], list[SlotSummary]] = {}
    for slot in found.slots:
        slots.setdefault((slot.key.step, slot.key.run, slot.key.world), []).append(slot)
    parity: dict[tuple[int, str, int], set[int]] = {}
    for stripe in found.stripes:
        of = stripe.members[0]
        parity.setdefault((of.step, of.run, of.world), set()).add(stripe.rank)
    for key in sorted(slots.keys() | parity.keys(), reverse=True):
        held = sorted(slots.get(key, ()), key=lambda slot: slot.rank)
        yield VersionMemory(
            *key,
            tuple(slot.rank for slot in held),
            sum(slot.key.size for slot in held),
            sum(slot.hashed for slot in held),
            tuple(sorted(parity.get(key, ()))),
            max((slot.key.created for slot in held), default=""),
        )


def find() -> list[str]:
    """Snapshot directories on the file systems of this host that are memory; what may not be looked into is left out."""
    found: set[str] = set()
    for mount in memory_mounts():
        found.update(_below(mount))
    return sorted(found)


def _below(mount: str) -> Iterator[str]:
    for folder, names, _ in os.walk(mount):  # follows no links
        if folder.removeprefix(mount).count("/") >= DEPTH:
            names.clear()
        try:
            if any(name.startswith("rank-") for name in names) and rank_folders(folder):
                yield folder
                names.clear()
        except OSError:  # removed meanwhile
            continue

"""Slots in memory whose job has ended: no process holds a lock in the snapshot directory any more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from ucformat.containers.envelope import VERSION
from ucformat.errors import SnapshotInUseError, StorageError, UcformatError
from ucformat.formats.native.shard import read_pieces
from ucformat.formats.snapshot import KEEPER_LOCK, LOCK, parity_record_name, rank_of, slot_name
from ucformat.reshard.prune import Leftover
from ucformat.snapshot.parity.record import decode_parity
from ucformat.snapshot.slots.filelock import FileLock, holder
from ucformat.snapshot.slots.slotfile import drop, drop_parity
from ucformat.storage.local import LocalStore

_PARITY = re.compile(r"parity-(\d+)\.xor")
_SLOT = re.compile(r"slot-(\d+)\.safetensors")


def rank_folders(directory: str) -> dict[int, str]:
    """The folders of ranks in a snapshot directory, ascending; none where it has no lock of ours."""
    found: dict[int, str] = {}
    for name in sorted(os.listdir(directory)):
        folder, rank = os.path.join(os.path.abspath(directory), name), rank_of(f"{name}/")
        if rank is not None and os.path.isfile(f"{folder}/{LOCK}") and not os.path.islink(folder):
            found[rank] = folder
    return found


def owner(folder: str) -> str:
    """The living process that fills a rank's slots, or persists one; empty when there is none. Raises StorageError."""
    return holder(f"{folder}/{LOCK}") or holder(f"{folder}/{KEEPER_LOCK}")


def prune_slots(path: str, *, dry_run: bool = False) -> list[Leftover]:
    """Remove the slots, and their parity, of jobs that have ended from a snapshot directory; what was removed, or is in use.

    All stays as long as any rank's process lives: its job may restore from what another rank left. A slot is a file whose own
    header says that it is one; others stay. Versions in these slots are lost: restore or persist them first. `dry_run` only
    lists. Nothing happens where `path` is no local directory with a lock of ours. Raises StorageError.
    """
    if "://" in path or not os.path.isdir(path):
        return []
    folders = list(rank_folders(path).values())
    with ExitStack() as stack:
        in_use = any(map(owner, folders)) if dry_run else not _lock_all(folders, stack)
        found = [item for folder in folders for item in _leftovers(folder)]
        if in_use:
            return [replace(leftover, what=leftover.what.split()[0], in_use=True) for leftover, _ in found]
        for leftover, index in () if dry_run else found:
            remove = drop if leftover.path.endswith(slot_name(index)) else drop_parity
            remove(os.path.dirname(leftover.path), index)
    return [leftover for leftover, _ in found]


def _lock_all(folders: list[str], stack: ExitStack) -> bool:
    """Keep trainers and keepers away until `stack` is left; False when there is one."""
    try:
        for folder in folders:
            stack.enter_context(FileLock.take(f"{folder}/{LOCK}"))
            if os.path.isfile(f"{folder}/{KEEPER_LOCK}"):
                stack.enter_context(FileLock.take(f"{folder}/{KEEPER_LOCK}"))
    except SnapshotInUseError:
        return False
    return True


def _leftovers(folder: str) -> Iterator[tuple[Leftover, int]]:
    """Slots and parity in a rank's folder, with their numbers."""
    store, rank = LocalStore(folder), int(os.path.basename(folder).removeprefix("rank-"))
    slots = dict(_slots(store))
    for index, size in slots.items():
        yield Leftover(f"{folder}/{slot_name(index)}", "slot of a job that has ended", size), index
    for match in filter(None, map(_PARITY.fullmatch, store.list())):
        index = int(match[1])  # unfinished, it has no record: then the slot that it belongs to vouches for it
        if not store.is_link(match[0]) and (index in slots or _is_parity(store, parity_record_name(index), rank)):
            yield Leftover(f"{folder}/{match[0]}", "parity of a job that has ended", store.size(match[0])), index


def _slots(store: LocalStore) -> Iterator[tuple[int, int]]:
    """(number, bytes) of the files that are slots."""
    for name in store.list():
        match = _SLOT.fullmatch(name)
        if match is None or store.is_link(name):
            continue
        try:
            read_pieces(store, name, VERSION)
        except StorageError:
            raise
        except UcformatError:
            continue
        yield int(match[1]), store.size(name)


def _is_parity(store: LocalStore, record: str, rank: int) -> bool:
    """Whether a file is the record of parity that this rank keeps."""
    try:
        return not store.is_link(record) and decode_parity(store.read(record), record).rank == rank
    except StorageError:
        raise
    except UcformatError:
        return False

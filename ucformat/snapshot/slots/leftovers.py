"""Slots in memory whose job has ended: nobody holds the lock of their rank's directory any more."""

from __future__ import annotations

import os
import re

from ucformat.containers.envelope import VERSION
from ucformat.errors import SnapshotInUseError, StorageError, UcformatError
from ucformat.formats.native.shard import read_pieces
from ucformat.formats.snapshot import LOCK, slot_name
from ucformat.reshard.prune import Leftover
from ucformat.snapshot.slots.filelock import FileLock
from ucformat.snapshot.slots.slotfile import drop
from ucformat.storage.local import LocalStore

_RANK = re.compile(r"rank-\d{5,}")
_SLOT = re.compile(r"slot-(\d+)\.safetensors")


def prune_slots(path: str, *, dry_run: bool = False) -> list[Leftover]:
    """Remove the slots of jobs that have ended from a snapshot directory; what was removed, or is in use.

    A slot is a file whose own header says that it is one; others stay. Versions in these slots are lost: restore or persist
    them first. `dry_run` only lists. Nothing happens where `path` is no local directory with a lock of ours. Raises StorageError.
    """
    found: list[Leftover] = []
    if "://" in path or not os.path.isdir(path):
        return found
    for name in sorted(os.listdir(path)):
        folder = os.path.join(os.path.abspath(path), name)
        if _RANK.fullmatch(name) and os.path.isfile(f"{folder}/{LOCK}") and not os.path.islink(folder):
            found.extend(_prune_rank(folder, dry_run=dry_run))
    return found


def _prune_rank(folder: str, *, dry_run: bool) -> list[Leftover]:
    try:
        with FileLock.take(f"{folder}/{LOCK}"):
            slots = _slots(folder)
            for index, _ in () if dry_run else slots:
                drop(folder, index)
            return [Leftover(f"{folder}/{slot_name(index)}", "slot of a job that has ended", size) for index, size in slots]
    except SnapshotInUseError:
        return [Leftover(f"{folder}/{slot_name(index)}", "slot", size, in_use=True) for index, size in _slots(folder)]


def _slots(folder: str) -> list[tuple[int, int]]:
    """(number, bytes) of the files that are slots."""
    store, found = LocalStore(folder), []
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
        found.append((int(match[1]), store.size(name)))
    return found

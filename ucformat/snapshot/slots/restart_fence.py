"""What a job leaves behind when it goes back to an older step: newer versions are forgotten, and keepers are told so.

It goes back with a restart, or within a process that loads an older step. A keeper outlives its trainer until the version in
hand is persisted: what the job has gone back from must not appear in storage beside, or instead of, the same step taken again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from datetime import datetime, timezone

import msgspec

from ucformat.errors import SnapshotInUseError, StorageError, UcformatError
from ucformat.formats.snapshot import LOCK, rank_name, rank_of, record_name
from ucformat.snapshot.slots.filelock import FileLock
from ucformat.snapshot.slots.free_memory import PART
from ucformat.snapshot.slots.slotfile import forget, read_record
from ucformat.storage.regular_file import open_regular

FENCE = "restored.json"
BESIDE_S = 5.0  # for other ranks that see to the same directory of a rank that is no more; each takes moments
_RECORD = re.compile(r"slot-(\d+)\.json")


class Fence(msgspec.Struct, frozen=True):
    """Stands in a rank's directory from a restart on, or since the job went back."""

    run: str
    """Token of what goes on from there."""
    step: int
    """It went on from this step: later ones with other tokens are abandoned."""
    created: str = ""
    """When that was decided, in UTC, as `SlotRecord.created`: a host that was away then still holds what is abandoned."""

    @classmethod
    def now(cls, run: str, step: int) -> Fence:
        return cls(run, step, datetime.now(timezone.utc).isoformat(timespec="microseconds"))


def read_fence(folder: str) -> Fence | None:
    """The fence in a rank's directory; None where there is none that can be read."""
    try:
        with open(f"{folder}/{FENCE}", "rb", opener=open_regular) as file:
            return msgspec.json.decode(file.read(), type=Fence)
    except (OSError, UcformatError, msgspec.DecodeError, RecursionError):
        return None


def write_fence(folder: str, fence: Fence) -> None:
    """Put a fence in place of the one before. Raises StorageError."""
    try:
        with open(f"{folder}/{FENCE}{PART}", "wb") as file:
            file.write(msgspec.json.encode(fence))
        os.replace(f"{folder}/{FENCE}{PART}", f"{folder}/{FENCE}")
    except OSError as error:
        raise StorageError(f"{folder}/{FENCE}", error) from error


def abandon(directory: str, rank: int, here: Collection[int], fence: Fence) -> list[int]:
    """Forget the versions of this rank that are newer than the fence; their steps. `here`: all ranks that share the directory.

    The lowest of these also looks after what ranks left there that do not exist any more, or run on another host now.
    Every rank calls it after restoring and before it takes anything. Raises SnapshotInUseError while a living process fills
    the slots, StorageError.
    """
    gone: list[int] = []
    try:
        names = os.listdir(directory) if os.path.isdir(directory) else []
        for name in names:
            found = rank_of(f"{name}/")
            if found is not None and (name == rank_name(rank) or (rank == min(here) and found not in here)):
                gone += _abandon(f"{directory}/{name}", fence)
    except OSError as error:
        raise StorageError(directory, error) from error
    return sorted(gone)


def _abandon(folder: str, fence: Fence) -> list[int]:
    gone: list[int] = []
    with FileLock.take(f"{folder}/{LOCK}", BESIDE_S):
        write_fence(folder, fence)
        for match in filter(None, map(_RECORD.fullmatch, os.listdir(folder))):
            index = int(match[1])
            try:
                record = read_record(f"{folder}/{record_name(index)}")
            except UcformatError:
                continue  # damaged: nobody takes it for a version
            if record is not None and record.step > fence.step:
                forget(folder, index)
                gone.append(record.step)
    return gone


def remove_others(here: Collection[int], directory: str) -> None:
    """Remove the directories of ranks that do not run here, or nowhere any more, unless a living process fills them."""
    for name in os.listdir(directory):
        folder = f"{directory}/{name}"
        if not name.startswith("rank-") or not name[5:].isdigit() or int(name[5:]) in here:
            continue
        try:
            with FileLock.take(f"{folder}/{LOCK}"):
                shutil.rmtree(folder, ignore_errors=True)
        except (SnapshotInUseError, StorageError):
            continue

"""A lock is held by whoever has it, whatever the file system has room for."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ucformat.errors import SnapshotInUseError
from ucformat.snapshot.slots.filelock import FileLock


def test_a_lock_is_held_though_there_is_no_room_to_say_by_whom(tmp_path: Path) -> None:
    path, limits = str(tmp_path / "lock"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow
    try:
        held = FileLock.take(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with held, pytest.raises(SnapshotInUseError):
        FileLock.take(path)
    FileLock.take(path).release()

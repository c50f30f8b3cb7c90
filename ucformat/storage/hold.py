"""Files that living processes hold: how what a killed process left is told from what another is still writing.

A hold is a shared lock on a file: the system ends it with the process, also on most network file systems. A claim is an
exclusive one. Where a file system has no locks, nothing is ever known to be abandoned.
"""

from __future__ import annotations

import os

from ucformat.errors import MissingFileError, StorageError
from ucformat.storage import locks
from ucformat.storage.store import Hold


class LocalHold(Hold):
    """A lock on an open file."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd = path, fd
        locks.keep(fd)

    def intact(self) -> bool:
        try:
            return locks.is_at(self._fd, self._path)
        except OSError as error:
            raise StorageError(self._path, error) from error

    def release(self) -> None:
        locks.release(self._fd)
        self._fd = -1


def hold(path: str) -> Hold:
    """Hold a file together with others. Raises MissingFileError, StorageError."""
    fd = _open(path)
    _lock(path, fd, shared=True)  # without a lock, others wait until the file is old enough
    return LocalHold(path, fd)


def claim(path: str) -> Hold | None:
    """Hold a file alone; None where a living process holds it, or where that can't be known. Raises as `hold`."""
    try:
        fd = _open(path)
    except StorageError:
        return None  # somebody else's: not ours to remove either
    if not _lock(path, fd, shared=False):
        os.close(fd)
        return None
    return LocalHold(path, fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFileError(path) from None
    except OSError as error:
        raise StorageError(path, error) from error


def _lock(path: str, fd: int, *, shared: bool) -> bool | None:
    """As `locks.try_lock`. Raises StorageError; then the file is closed."""
    try:
        return locks.try_lock(fd, shared=shared)
    except OSError as error:
        os.close(fd)
        raise StorageError(path, error) from error

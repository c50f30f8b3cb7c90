"""Files that living processes hold: how what a killed process left is told from what another is still writing.

A hold is a shared lock (`flock`) on a file: the system ends it with the process, also on most network file systems. A claim is
an exclusive one. Where a file system has no locks, nothing is ever known to be abandoned.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from ucformat.errors import MissingFileError, StorageError
from ucformat.storage.store import Hold

_held: set[int] = set()  # descriptors


def _release_in_child() -> None:
    """A forked child (a data loader's worker) must not hold what a parent that died has held."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class LocalHold(Hold):
    """A lock on an open file."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd = path, fd
        _held.add(fd)

    def intact(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageError(self._path, error) from error

    def release(self) -> None:
        if self._fd in _held:
            _held.discard(self._fd)
            os.close(self._fd)
        self._fd = -1


def hold(path: str) -> Hold:
    """Hold a file together with others. Raises MissingFileError, StorageError."""
    fd = _open(path)
    _lock(path, fd, fcntl.LOCK_SH)  # without a lock, others wait until the file is old enough
    return LocalHold(path, fd)


def claim(path: str) -> Hold | None:
    """Hold a file alone; None where a living process holds it, or where that can't be known. Raises as `hold`."""
    try:
        fd = _open(path)
    except StorageError:
        return None  # somebody else's: not ours to remove either
    if not _lock(path, fd, fcntl.LOCK_EX):
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


def _lock(path: str, fd: int, kind: int) -> bool:
    """Whether the lock was to be had. Raises StorageError; then the file is closed."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        os.close(fd)
        raise StorageError(path, error) from error
    return True

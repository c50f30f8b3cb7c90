"""Locks that a process holds until it releases them or ends, so that one job at a time fills a directory's slots."""

from __future__ import annotations

import os
import time

from ucformat.errors import SnapshotInUseError, StorageError
from ucformat.storage import locks

_POLL_S = 0.01  # between tries of a lock that others hold for moments only
_NO_LOCKS = "this file system has no locks"


class FileLock:
    """An exclusive flock on a file made for that; the file says who holds it, and stays when the lock is gone."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self._fd = path, fd

    @classmethod
    def take(cls, path: str, timeout_s: float = 0.0) -> FileLock:
        """Raises SnapshotInUseError when a living process keeps it longer than `timeout_s`, StorageError."""
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if _try(fd, path):
                    if locks.is_at(fd, path):
                        break
                    os.close(fd)  # its directory was removed and made again meanwhile
                    continue
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
                os.close(fd)
                if time.monotonic() >= deadline:
                    raise SnapshotInUseError(os.path.dirname(path), holder)
                time.sleep(_POLL_S)
        except OSError as error:
            raise StorageError(path, error) from error
        locks.keep(fd)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
        except OSError:
            pass  # the memory is full: who holds it is not said, but it is held
        return cls(path, fd)

    def release(self) -> None:
        """End it. Nothing happens the second time."""
        locks.release(self._fd)
        self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder(path: str) -> str:
    """Who holds the lock at `path`, as `process 12`; empty when nobody does, or there is no such file. Raises StorageError.

    Nothing is written. For a moment the file is locked as it is read, which `FileLock.take` has to have patience for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(path, error) from error
    try:
        locked = locks.try_lock(fd, shared=True)
        if locked is None:
            raise StorageError(path, _NO_LOCKS)
        return "" if locked else os.pread(fd, 64, 0).decode(errors="replace").strip() or "another process"
    except OSError as error:
        raise StorageError(path, error) from error
    finally:
        os.close(fd)


def _try(fd: int, path: str) -> bool:
    locked = locks.try_lock(fd)
    if locked is None:
        raise StorageError(path, _NO_LOCKS)
    return locked

"""Locks that a process holds until it lets go or dies, so that one job at a time fills a directory's slots."""

from __future__ import annotations

import fcntl
import os
import time

from ucformat.errors import SnapshotInUseError, StorageError

_POLL_S = 0.01  # between tries of a lock that others hold for moments only
_held: set[int] = set()  # descriptors


def _let_go_in_child() -> None:
    """A forked child (a data loader's worker) must not hold the lock of a parent that died."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


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
                if _try(fd):
                    if _is_at(fd, path):
                        break
                    os.close(fd)  # its directory was removed and made again meanwhile
                    continue
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
                os.close(fd)
                if time.monotonic() >= deadline:
                    raise SnapshotInUseError(os.path.dirname(path), holder)
                time.sleep(_POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
        except OSError as error:
            raise StorageError(path, error) from error
        _held.add(fd)
        return cls(path, fd)

    def release(self) -> None:
        """Let go; nothing happens the second time."""
        if self._fd in _held:
            _held.discard(self._fd)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False

"""Locks on open files (`flock`): held until they are released or the process ends, however it ends.

Forked children do not inherit them. Holds of a store, replacements of a file, and slots of snapshots use them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
_held: set[int] = set()  # descriptors


def _release_in_child() -> None:
    """A forked child (a data loader's worker) must not hold what a parent that died has held."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Lock an open file; False while another process has it, None where the file system has no locks. Raises OSError."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def keep(fd: int) -> None:
    """Have forked children close the file, and with it their share of the lock."""
    _held.add(fd)


def release(fd: int) -> None:
    """Unlock and close a file that was given to `keep`. Nothing happens the second time."""
    if fd in _held:
        _held.discard(fd)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where something else has the same open file
        os.close(fd)


def is_at(fd: int, path: str) -> bool:
    """Whether an open file is still the one that has this name. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False

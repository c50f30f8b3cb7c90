"""Changes of a local directory that happen in one step: a file appears, is replaced, or names are given, or nothing happens.

Nothing here relies on exclusive creation of files, which some network file systems only pretend: a file gets its name by `link`,
which fails where the name is taken, or by `rename`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ucformat.errors import ConflictError, StorageError
from ucformat.storage import locks

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_NOREPLACE, _EXCHANGE = 1, 2  # Linux: flags of renameat2
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EXDEV)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
LOCK_S = 30.0  # for another process that replaces the same file; it needs milliseconds
_POLL_S = 0.01
_LOG = logging.getLogger(__name__)


def put(path: str, data: bytes, part: str = "") -> None:
    """Write a small file durably under its name, replacing one of that name. Raises OSError."""
    with _written(path, data, part) as new:
        os.replace(new, path)
    sync_directory(os.path.dirname(path))


def put_if_absent(path: str, data: bytes, part: str = "") -> bool:
    """As `put`, where no file has that name; whether it did. Raises OSError; once the file is there, it only logs.

    Where the system has files without names, and `part` is not given, a process that is killed leaves no half-written file.
    """
    named = None if part else _put_unnamed(path, data)
    if named is None:
        with _written(path, data, part) as new:
            named = _name(new, path)
    if not named:
        return False
    sync_or_warn(os.path.dirname(path))
    return True


def put_if_unchanged(path: str, data: bytes, known: bytes, part: str = "") -> bool:
    """As `put`, where the file still holds `known`; whether it did. Raises OSError; once it is replaced, it only logs."""
    with _written(path, data, part) as new, _alone(path) as fd:
        if fd is None or os.pread(fd, len(known) + 1, 0) != known:
            return False
        os.replace(new, path)
    sync_or_warn(os.path.dirname(path))
    return True


@contextmanager
def _written(path: str, data: bytes, part: str) -> Iterator[str]:
    """The data, durable, under a name that nobody else uses, which is gone at the end. Permissions are those of any new file."""
    if not part:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.{secrets.token_hex(6)}.part"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)
        yield part
    finally:
        with suppress(FileNotFoundError):  # it has its final name
            os.unlink(part)


def _put_unnamed(path: str, data: bytes) -> bool | None:
    """Write a file that gets its only name once it is durable; False where another has it, None where the system can't."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):
        return None
    try:
        _write_all(fd, data)
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)  # with src_dir_fd, Python calls linkat
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (*_NO_LINKS, errno.ENOENT):
            return None
        raise
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    os.fsync(fd)


def _name(part: str, path: str) -> bool:
    """Give the file `part` the name `path`, too, or instead; False where another file has it."""
    try:
        os.link(part, path)
    except FileExistsError:
        return _same(part, path)  # a server may have done it, and its answer got lost: the second try then fails
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_where_free(part, path)
    return True


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except FileNotFoundError:
        return False


def _rename_where_free(path: str, to: str) -> bool:
    done = _renameat2(path, to, _NOREPLACE)
    if done is None:  # neither links nor this: two processes that come here within microseconds can't be told apart
        if os.path.lexists(to):
            return False
        os.rename(path, to)
    return done is not False


def _renameat2(path: str, to: str, flags: int) -> bool | None:
    """Linux's call; False where a name is taken, None where the system or file system has it not. Raises OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return None
    if call(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(to), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _TAKEN:
        return False
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, 0):
        return None
    raise OSError(code, os.strerror(code), path, None, to)


@contextmanager
def _alone(path: str) -> Iterator[int | None]:
    """The file at `path`, open and locked against others that would replace it; None where there is none.

    Where the file system has no locks, it is open only: then two replacements within microseconds can't be told apart.
    """
    deadline = time.monotonic() + LOCK_S
    while True:
        fd = _open(path)
        if fd is None:
            yield None
            return
        try:
            _lock(fd, path, deadline)
            if locks.is_at(fd, path):
                yield fd
                return
        finally:
            os.close(fd)  # the lock goes with it


def _open(path: str) -> int | None:
    for flags in (os.O_RDWR, os.O_RDONLY):  # network file systems lock only what may be written
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if flags == os.O_RDONLY or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    raise AssertionError


def _lock(fd: int, path: str, deadline: float) -> None:
    """Lock the file, where the file system has locks."""
    while locks.try_lock(fd) is False:
        if time.monotonic() > deadline:
            raise StorageError(path, f"another process has kept it locked for {LOCK_S:.0f} s")
        time.sleep(_POLL_S)


def rename(path: str, to: str) -> None:
    """Give a file or directory a name that is free, or that of an empty directory. Raises ConflictError, OSError."""
    if _renameat2(path, to, _NOREPLACE):
        return
    if stat.S_ISDIR(os.lstat(path).st_mode):
        try:
            os.rename(path, to)  # never takes the place of a file, nor of a directory that is not empty
        except OSError as error:
            if error.errno in (*_TAKEN, errno.ENOTDIR):
                raise ConflictError(to, "something else has this name by now") from error
            raise
        return
    if not _name(path, to):
        raise ConflictError(to, "another file has this name by now")
    with suppress(FileNotFoundError):
        os.unlink(path)


def exchange(path: str, other: str) -> bool:
    """Swap two names; False where the system can't. Raises OSError."""
    return bool(_renameat2(path, other, _EXCHANGE))


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_or_warn(path: str) -> None:
    """After a change that everybody sees by now: that it may not outlive a power cut is no failure."""
    try:
        sync_directory(path)
    except OSError as error:
        _LOG.warning("%s: what was written is there, but this directory could not be synced: %s", path, error)

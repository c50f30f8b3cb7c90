"""The local disk as a Store: what the page cache holds is copied from there, the rest goes past it.

Direct I/O needs memory, offsets and lengths in multiples of `ALIGNMENT`; whatever does not fit goes through an aligned
bounce buffer (reads) or the page cache (writes).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence

import numpy as np

from ucformat.errors import FormatError, MissingFileError, StorageError
from ucformat.storage import Bytes, Reader, Store, Writer, safe_path

ALIGNMENT = 4096  # bytes; the page size, a multiple of every disk's logical block
HUGE_BYTES = 2 << 20  # the size of a huge page
BOUNCE_BYTES = 1 << 20  # stays in the L2 cache between the disk's write and our copy
DIRECT_BYTES = 1 << 40
_CACHESTAT = 451  # Linux ≥ 6.5, the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def aligned(nbytes: int) -> Bytes:
    """A zeroed buffer of `nbytes` bytes that starts at a multiple of `ALIGNMENT`, on huge pages where there are any."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)  # one page for the disk to address instead of 512
        except OSError:
            pass  # a kernel without huge pages
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


class _Bounce(threading.local):
    """One aligned buffer per thread."""

    def __init__(self) -> None:
        self.buffer = aligned(BOUNCE_BYTES)


_bounce = _Bounce()


def _open_direct(path: str, flags: int) -> int | None:
    """A direct-I/O descriptor, or None where the file system has none (tmpfs, some network disks)."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise


def _resident(fd: int, start: int, nbytes: int) -> bool:
    """Whether most of a range is in the page cache. Asking must not start a read-ahead, which would fight direct I/O."""
    asked = (ctypes.c_uint64 * 2)(start, nbytes)
    told = (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, fd, asked, told, 0) == 0:
        return 2 * int(told[0]) * ALIGNMENT > nbytes
    return _resident_by_mapping(fd, start, nbytes)


def _resident_by_mapping(fd: int, start: int, nbytes: int) -> bool:
    """The same for kernels before 6.5, which tell only of mapped pages."""
    first = start // ALIGNMENT * ALIGNMENT
    try:
        with mmap.mmap(fd, start + nbytes - first, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first) as view:
            memory = np.frombuffer(view, dtype=np.uint8)
            pages = np.zeros(-(-len(memory) // ALIGNMENT), dtype=np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data)
            )
            del memory
    except (OSError, ValueError, AttributeError):
        return False  # past the end of the file, not mappable, or another system: the read itself will tell
    return not failed and 2 * int((pages & 1).sum()) > len(pages)


def _read_plain(fd: int, start: int, out: memoryview) -> int:
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], start + done)
        if got == 0:
            break
        done += got
    return done


def _read_direct(fd: int, start: int, out: memoryview) -> int:
    """Read past the page cache: straight into `out` where it is aligned, else through the thread's bounce buffer."""
    buffer = memoryview(_bounce.buffer)
    address = np.frombuffer(out, dtype=np.uint8).ctypes.data
    if start % ALIGNMENT == 0 and address % ALIGNMENT == 0:
        body = len(out) // ALIGNMENT * ALIGNMENT
        done = _read_plain(fd, start, out[:body])
        if done < body:
            return done
    else:
        done = 0
    while done < len(out):
        at = start + done
        skip = at % ALIGNMENT
        want = min(len(out) - done, BOUNCE_BYTES - skip)
        span = -(-(skip + want) // ALIGNMENT) * ALIGNMENT
        got = max(0, min(os.preadv(fd, [buffer[:span]], at - skip) - skip, want))
        if got == 0:
            break
        out[done : done + got] = buffer[skip : skip + got]
        done += got
    return done


class LocalReader(Reader):
    """Two descriptors of one file: the page cache's and, once needed, one that passes it by."""

    def __init__(self, store: LocalStore, path: str, full: str) -> None:
        super().__init__(store, path)
        self._full = full
        self._direct: int | None = None
        self._tried = False
        try:
            self._plain = os.open(full, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(full) from None
        except OSError as error:
            raise StorageError(full, error) from error

    def read_into(self, start: int, out: Bytes) -> None:
        view = memoryview(out)
        try:
            done = self._read(start, view)
        except IsADirectoryError:
            raise MissingFileError(self._full, "is a directory") from None
        except OSError as error:
            raise StorageError(self._full, error, start, start + len(view)) from error
        if done < len(view):
            raise FormatError(self._full, f"the file ends at byte {start + done}", start, start + len(view))

    def prefetch(self, start: int, nbytes: int) -> bool:
        if not _resident(self._plain, start, nbytes):
            os.posix_fadvise(self._plain, start, nbytes, os.POSIX_FADV_WILLNEED)
        return True

    def _read(self, start: int, view: memoryview) -> int:
        done = 0
        if len(view) >= DIRECT_BYTES and not _resident(self._plain, start, len(view)):
            if not self._tried:
                self._tried, self._direct = True, _open_direct(self._full, os.O_RDONLY)
            if self._direct is not None:
                done = _read_direct(self._direct, start, view)
        return done + _read_plain(self._plain, start + done, view[done:])

    def __exit__(self, *_: object) -> None:
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)


class LocalWriter(Writer):
    """A file written under `<path>.part` and renamed once it is durable."""

    ordered = False

    def __init__(self, path: str, size: int) -> None:
        self.path, self.part, self.size = path, path + ".part", size
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._direct: int | None = None
        try:
            self._plain = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            if size:
                self._reserve(size)
            self._direct = _open_direct(self.part, os.O_WRONLY)
        except OSError as error:
            if hasattr(self, "_plain"):
                self.abort()
            raise StorageError(path, error) from error

    def _reserve(self, size: int) -> None:
        """Take the disk space now, so that a full disk is known before the first byte is written."""
        try:
            os.posix_fallocate(self._plain, 0, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self._plain, size)

    def write(self, start: int, data: Bytes) -> None:
        fits = start % ALIGNMENT == 0 and data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0
        fd = self._direct if fits and self._direct is not None else self._plain
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], start + done)
        except OSError as error:
            raise StorageError(self.path, error, start, start + len(view)) from error

    def close(self) -> None:
        try:
            if os.fstat(self._plain).st_size != self.size:
                os.ftruncate(self._plain, self.size)
            os.fsync(self._plain)
            self._release()
            os.replace(self.part, self.path)
            sync_directory(os.path.dirname(self.path))
        except OSError as error:
            self.abort()
            raise StorageError(self.path, error) from error

    def abort(self) -> None:
        self._release()
        try:
            os.unlink(self.part)
        except OSError:
            pass

    def _release(self) -> None:
        for fd in (self._plain, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._plain, self._direct = -1, None


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LocalStore(Store):
    """A directory of the local file system."""

    alignment = ALIGNMENT

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(path))

    def _full(self, path: str) -> str:
        return os.path.join(self.url, safe_path(path, self.url)) if path else self.url

    def size(self, path: str) -> int:
        try:
            status = os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(self._full(path)) from None
        except OSError as error:
            raise StorageError(self._full(path), error) from error
        return status.st_size

    def exists(self, path: str) -> bool:
        return os.path.exists(self._full(path))

    def list(self, path: str = "") -> Sequence[str]:
        try:
            with os.scandir(self._full(path)) as entries:
                return sorted(entry.name + "/" * entry.is_dir() for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(self._full(path), error) from error

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        with self.reader(path) as reader:
            reader.read_into(start, out)

    def reader(self, path: str) -> Reader:
        return LocalReader(self, path, self._full(path))

    def put(self, path: str, data: bytes) -> None:
        full = self._full(path)
        folder = os.path.dirname(full)
        try:
            os.makedirs(folder, exist_ok=True)
            fd, part = tempfile.mkstemp(prefix=os.path.basename(full) + ".", suffix=".part", dir=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    os.fchmod(fd, 0o644)
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                os.replace(part, full)
            except BaseException:
                os.unlink(part)
                raise
            sync_directory(folder)
        except OSError as error:
            raise StorageError(full, error) from error

    def writer(self, path: str, size: int) -> Writer:
        return LocalWriter(self._full(path), size)

    def remove(self, path: str = "") -> None:
        full = self._full(path)
        try:
            if os.path.isdir(full) and not os.path.islink(full):
                shutil.rmtree(full)
            elif os.path.lexists(full):
                os.unlink(full)
        except OSError as error:
            raise StorageError(full, error) from error

    def sub(self, path: str) -> LocalStore:
        return LocalStore(self._full(path))

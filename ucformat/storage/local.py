"""The local disk as a Store, through the page cache, with hints of what comes next.

Reads are announced before their turn where the system does not read far ahead itself, and every write is sent on its way at
once, so the disk works while we verify, hash and copy. Direct I/O was measured to be slower: memory that the disk has just
filled or read is in no cache of ours.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ucformat.errors import FormatError, MissingFileError, StorageError, UnsupportedError
from ucformat.storage import atomic, hold, page_cache, stamps
from ucformat.storage.atomic import sync_directory
from ucformat.storage.regular_file import open_regular, refuse_special
from ucformat.storage.store import COPIED_BYTES, Bytes, Hold, Reader, Store, Writer, safe_path
from ucformat.storage.together import write_together

ALIGNMENT = 4096  # bytes; the page size, a multiple of every disk's logical block
HUGE_BYTES = 2 << 20  # the size of a huge page
IN_FLIGHT_BYTES = 32 << 20  # of one file that are on their way to the disk; what has arrived leaves the page cache
READ_BYTES = 1 << 20  # at a time, of a file that is read to its end
_VIEWS = 1024  # buffers that one call takes (IOV_MAX)
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


def _copy_range(fd: int, to: int, start: int, nbytes: int) -> int:
    """Have the kernel copy a range to the same place of another file; the bytes copied, 0 where it can't."""
    try:
        return os.copy_file_range(fd, to, nbytes, start, start)
    except (OSError, AttributeError):
        return 0


class LocalReader(Reader):
    """One open file, read through the page cache: the kernel reads ahead there while we verify and copy."""

    def __init__(self, store: LocalStore, path: str, full: str) -> None:
        super().__init__(store, path)
        self._full = full
        try:
            self.fd = open_regular(full, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(full) from None
        except OSError as error:
            raise StorageError(full, error) from error

    def prefetch(self, start: int, nbytes: int) -> None:
        if (
            hasattr(os, "posix_fadvise")
            and not page_cache.reads_ahead(os.fstat(self.fd).st_dev)
            and not self.is_here(start, nbytes)
        ):
            os.posix_fadvise(self.fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def is_here(self, start: int, nbytes: int) -> bool:
        """Whether both ends of a range are in the page cache. Asking for all of it would look at every page."""
        return all(page_cache.is_in_memory(self.fd, at) for at in (start, start + max(nbytes, 1) - 1))

    def drop_cached(self, start: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, start, nbytes, os.POSIX_FADV_DONTNEED)

    def read_into(self, start: int, out: Bytes) -> None:
        self.read_parts(start, [out])

    def read_parts(self, start: int, parts: Sequence[Bytes]) -> None:
        views = [memoryview(part) for part in parts if part.nbytes]
        at, stop = start, start + sum(len(view) for view in views)
        try:
            while views:
                got = os.preadv(self.fd, views[:_VIEWS], at)
                if got == 0:
                    raise FormatError(self._full, f"the file ends at byte {at}", start, stop)
                at += got
                views = _after(views, got)
        except IsADirectoryError:
            raise MissingFileError(self._full, "is a directory") from None
        except OSError as error:
            raise StorageError(self._full, error, start, stop) from error

    def read_on(self, start: int) -> bytes:
        """All bytes from `start` to the end. Raises what `read_into` does."""
        found = bytearray()
        try:
            while data := os.pread(self.fd, READ_BYTES, start + len(found)):
                found += data
        except IsADirectoryError:
            raise MissingFileError(self._full, "is a directory") from None
        except OSError as error:
            raise StorageError(self._full, error, start) from error
        return bytes(found)

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `views` after their first `nbytes` bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


class LocalWriter(Writer):
    """A file written under a name that no other writer uses, `<path>.<token>.part`, and renamed once it is durable."""

    ordered = False

    def __init__(self, path: str, size: int) -> None:
        self.path, self.part, self.size = path, f"{path}.{secrets.token_hex(6)}.part", size
        self._sent: deque[tuple[int, int]] = deque()
        """(start, bytes) of what is on its way, oldest first."""
        self._lock = threading.Lock()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if size:
                self._reserve(size)
        except OSError as error:
            if hasattr(self, "_fd"):
                self.abort()
            raise StorageError(path, error) from error

    def _reserve(self, size: int) -> None:
        """Take the disk space now, so that a full disk is known before the first byte is written."""
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self._fd, size)

    def write(self, start: int, data: Bytes) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], start + done)
            page_cache.send_on(self._fd, start, len(view))
            for range_ in self._oldest(start, len(view)):
                page_cache.write_and_drop(self._fd, *range_)
        except OSError as error:
            raise StorageError(self.path, error, start, start + len(view)) from error

    def copy_from(self, reader: LocalReader) -> None:
        """Write all of another file, as shared blocks where the file system has them. Raises StorageError."""
        at = 0
        while at < self.size:
            done = _copy_range(reader.fd, self._fd, at, self.size - at)
            if not done:
                out = np.empty(min(COPIED_BYTES, self.size - at), dtype=np.uint8)
                reader.read_into(at, out)
                self.write(at, out)
                done = out.nbytes
            at += done

    def _oldest(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """One more write is on its way: those that are to be waited for now."""
        with self._lock:
            self._sent.append((start, nbytes))
            under_way, old = sum(size for _, size in self._sent), []
            while under_way > IN_FLIGHT_BYTES:
                old.append(self._sent.popleft())
                under_way -= old[-1][1]
        return old

    def close(self) -> None:
        try:
            if os.fstat(self._fd).st_size != self.size:
                os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
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
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


@contextmanager
def _failing_as_storage(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(path, error) from error


def _make_folder_like(old: str, new: str) -> None:
    """Make a directory with the permissions and times of another one, and those above it. Raises OSError."""
    if not os.path.isdir(new):
        _make_folder_like(os.path.dirname(old), os.path.dirname(new))
        os.mkdir(new)
        shutil.copystat(old, new)


class LocalStore(Store):
    """A directory of the local file system."""

    alignment = ALIGNMENT
    appears_whole = renames = excludes = holds = True

    def __init__(self, path: str) -> None:
        if "\0" in path:
            raise MissingFileError(path, "a path can't hold a zero byte")
        self.url = os.path.abspath(os.path.expanduser(path))

    def _full(self, path: str) -> str:
        full = os.path.join(self.url, safe_path(path, self.url)) if path else self.url
        try:
            os.fsencode(full)
        except UnicodeEncodeError:  # half a character, out of some JSON: no file is called so
            raise MissingFileError(full, "no file can have this name") from None
        return full

    def size(self, path: str) -> int:
        try:
            status = os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(self._full(path)) from None
        except OSError as error:
            raise StorageError(self._full(path), error) from error
        refuse_special(self._full(path), status.st_mode)
        return status.st_size

    def exists(self, path: str) -> bool:
        try:
            os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # a disk or server that does not answer says nothing about the file
            raise StorageError(self._full(path), error) from error
        return True

    def list(self, path: str = "") -> Sequence[str]:
        return self._entries(path, follow=True)

    def _entries(self, path: str, *, follow: bool) -> Sequence[str]:
        try:
            with os.scandir(self._full(path)) as entries:
                return sorted(entry.name + "/" * entry.is_dir(follow_symlinks=follow) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(self._full(path), error) from error

    def files(self, path: str = "") -> Iterator[str]:
        folder = f"{path}/" if path else ""
        for name in self._entries(path, follow=False):
            if name.endswith("/"):
                yield from self.files(folder + name.rstrip("/"))
            else:
                yield folder + name

    def is_link(self, path: str = "") -> bool:
        return os.path.islink(self._full(path))

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        with self.reader(path) as reader:
            reader.read_into(start, out)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None:
            return super().read(path, start, stop)
        with LocalReader(self, path, self._full(path)) as reader:  # its size, asked by name, may be that of the file before
            return reader.read_on(start)

    def reader(self, path: str) -> Reader:
        return LocalReader(self, path, self._full(path))

    def put(self, path: str, data: bytes) -> None:
        with _failing_as_storage(full := self._full(path)):
            atomic.put(full, data)

    def put_all(self, files: Iterable[tuple[str, bytes]]) -> None:
        with _failing_as_storage(self.url):
            write_together((self._full(path), data) for path, data in files)

    def put_if_absent(self, path: str, data: bytes, part: str = "") -> bool:
        with _failing_as_storage(full := self._full(path)):
            return atomic.put_if_absent(full, data, part and self._full(part))

    def put_if_unchanged(self, path: str, data: bytes, known: bytes, part: str = "") -> bool:
        with _failing_as_storage(full := self._full(path)):
            return atomic.put_if_unchanged(full, data, known, part and self._full(part))

    def copy(self, path: str, to: str) -> None:
        writer = LocalWriter(self._full(to), self.size(path))
        with writer, LocalReader(self, path, self._full(path)) as reader:
            writer.copy_from(reader)

    def rename(self, path: str, to: str) -> None:
        with _failing_as_storage(full := self._full(to)):
            os.makedirs(os.path.dirname(full), exist_ok=True)
            atomic.rename(self._full(path), full)
        atomic.sync_or_warn(os.path.dirname(full))

    def replace(self, path: str, to: str) -> None:
        with _failing_as_storage(full := self._full(to)):
            os.replace(self._full(path), full)
        atomic.sync_or_warn(os.path.dirname(full))

    def exchange(self, path: str, other: str) -> None:
        with _failing_as_storage(full := self._full(other)):
            if not atomic.exchange(self._full(path), full):
                raise UnsupportedError(full, "can't be exchanged in one step on this system")
        atomic.sync_or_warn(os.path.dirname(full))

    def identity(self, path: str) -> str | None:
        return stamps.identity(self._full(path))

    def stamp(self, path: str) -> str:
        return stamps.stamp(self._full(path))

    def link(self, path: str, to: str) -> None:
        one, other = self._full(path), self._full(to)
        with _failing_as_storage(other):
            _make_folder_like(os.path.dirname(one), os.path.dirname(other))
            try:
                os.link(one, other, follow_symlinks=False)
            except (OSError, NotImplementedError):
                shutil.copy2(one, other, follow_symlinks=False)
            sync_directory(os.path.dirname(other))

    def hold(self, path: str) -> Hold:
        return hold.hold(self._full(path))

    def claim(self, path: str) -> Hold | None:
        return hold.claim(self._full(path))

    def writer(self, path: str, size: int) -> Writer:
        return LocalWriter(self._full(path), size)

    def remove(self, path: str = "") -> None:
        full = self._link_on_the_way(path) or self._full(path)
        with _failing_as_storage(full):
            try:
                if stat.S_ISDIR(os.lstat(full).st_mode):
                    shutil.rmtree(full)
                else:
                    os.unlink(full)
            except (FileNotFoundError, NotADirectoryError):
                pass

    def remove_folder(self, path: str = "") -> None:
        try:
            os.rmdir(self._full(path))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):
                raise StorageError(self._full(path), error) from error

    def _link_on_the_way(self, path: str) -> str | None:
        """The first symbolic link that `path` leads through, below this directory."""
        parts = path.split("/")
        found = (self._full("/".join(parts[:n])) for n in range(1, len(parts)))
        return next((full for full in found if os.path.islink(full)), None)

    def sub(self, path: str) -> LocalStore:
        return LocalStore(self._full(path))

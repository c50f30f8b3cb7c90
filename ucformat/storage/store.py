"""Storage: byte ranges in, whole files out, at any fsspec URL. Local disks take a fast path.

A `Store` is one directory (or object prefix). Reads are by range and may run on many threads. Writes are atomic per
file for `put`; larger files go through a `Writer`, which is durable once closed and leaves nothing once aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import FormatError, MissingFileError, UnsupportedError

COPIED_BYTES = 8 << 20  # at a time, where a file is copied through this process
_PUT_AT_A_TIME = 8  # small files
Bytes = NDArray[np.uint8]
"""A flat writable or readable byte buffer."""


class Sheet:
    """Where consecutive bytes of a file go: buffers one after the other, the first for byte `start` of the file."""

    def __init__(self, start: int, *buffers: Bytes) -> None:
        self.stop = start
        self._starts: list[int] = []
        self._buffers: list[Bytes] = []
        for buffer in buffers:
            self.add(buffer)

    def add(self, buffer: Bytes) -> None:
        """Let the next bytes go to `buffer`."""
        self._starts.append(self.stop)
        self._buffers.append(buffer)
        self.stop += buffer.nbytes

    def cut(self, start: int, stop: int) -> list[Bytes]:
        """The memory of bytes [start, stop) of the file, which lie in the sheet."""
        parts = []
        i = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, buffer = self._starts[i], self._buffers[i]
            parts.append(part := buffer[start - begin : stop - begin])
            start += part.nbytes
            i += 1
        return parts


class Writer(ABC):
    """One new file being written. Use as a context manager: an exception inside aborts it."""

    ordered: bool
    """True when writes must arrive in ascending order without gaps (object stores)."""

    @abstractmethod
    def write(self, start: int, data: Bytes) -> None:
        """Write bytes at `start`. Thread-safe unless `ordered`. Raises StorageError."""

    @abstractmethod
    def close(self) -> None:
        """Make the file durable and visible under its name. Raises StorageError."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind. Never raises."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Reader:
    """One file kept open for several reads. Use as a context manager."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Store.read_into`."""
        self._store.read_into(self._path, start, out)

    def read_parts(self, start: int, parts: Sequence[Bytes]) -> None:
        """Fill several buffers with the bytes from `start` on, one after the other. Raises what `read_into` does."""
        data = np.empty(sum(part.nbytes for part in parts), dtype=np.uint8)  # one request, however many buffers
        self.read_into(start, data)
        at = 0
        for part in parts:
            part[:] = data[at : at + part.nbytes]
            at += part.nbytes

    def prefetch(self, start: int, nbytes: int) -> None:
        """Have a range brought into memory in the background. A hint."""

    def is_here(self, start: int, nbytes: int) -> bool:
        """Whether a range is in this host's memory, so that no disk has to be asked; True where nobody can tell."""
        return True

    def drop_cached(self, start: int, nbytes: int) -> None:
        """Drop a range from this host's page cache, where it has one. A hint."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open unless a store overrides this."""


class Hold:
    """A file that this process has marked as in use: until `release`, or until the process ends, however it ends."""

    def intact(self) -> bool:
        """Whether the file is still there, and still the one that was marked. Raises StorageError."""
        return True

    def release(self) -> None:
        """End it. Nothing happens the second time."""


class Store(ABC):
    """A directory or object prefix. Paths are relative, `/`-separated, and never leave it.

    What not every store can do is told by fields: formats ask for these, never for the class of a store.
    """

    url: str
    alignment: int = 1
    """Reads and writes that start, end and lie in memory at multiples of this many bytes are fastest."""
    streams: int = 0
    """Requests at a time that are fastest, each of some MiB. 0: a disk, which wants to be read in order, in small steps."""
    appears_whole: bool = False
    """Whether a file is visible under its name only once its writer was closed, even if the process is killed before."""
    renames: bool = False
    """Whether `rename`, `replace`, `exchange` and `link` work. Without them, directories can't be put into place in one step."""
    excludes: bool = False
    """Whether of several writers that call `put_if_absent` or `put_if_unchanged` at the same moment exactly one succeeds."""
    holds: bool = False
    """Whether `hold` and `claim` tell files of living processes from those that nobody uses any more."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file. Raises MissingFileError."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""

    @abstractmethod
    def list(self, path: str = "") -> Sequence[str]:
        """Names in a directory, sorted, directories with a trailing `/`; empty when it does not exist."""

    @abstractmethod
    def read_into(self, path: str, start: int, out: Bytes) -> None:
        """Fill `out` from byte `start`. Raises MissingFileError, StorageError, FormatError when the file is shorter."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small file atomically and durably, replacing one of that name. Raises StorageError."""

    @abstractmethod
    def writer(self, path: str, size: int) -> Writer:
        """Start a new file of `size` bytes. Raises StorageError (disk full shows here where it can be known)."""

    @abstractmethod
    def remove(self, path: str = "") -> None:
        """Remove a file or a whole directory; nothing happens when it is not there.

        Symbolic links are never followed: where `path` is one, or leads through one, the link goes and what it leads to stays.
        """

    def remove_folder(self, path: str = "") -> None:
        """Remove a directory if it is empty. Raises StorageError."""
        if not self.list(path):
            self.remove(path)

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files, and the folders that they leave empty. Raises StorageError."""
        for path in paths:
            self.remove(path)
        for folder in folders_of(paths):
            self.remove_folder(folder)

    def abort_uploads(self, token: str = "") -> None:  # noqa: B027  # most stores have nothing like it
        """Abort uploads below here that nobody has completed, of files that have `token` in their path; all by default.

        Killed writers leave them on object stores, invisible and paid for. A writer that is still at it fails.
        Raises StorageError.
        """

    @abstractmethod
    def sub(self, path: str) -> Store:
        """The store of a directory inside this one."""

    def files(self, path: str = "") -> Iterator[str]:
        """Paths of all files below a directory, relative to the store. A symbolic link is a file, wherever it leads."""
        folder = f"{path}/" if path else ""
        for name in self.list(path):
            if name.endswith("/"):
                yield from self.files(folder + name.rstrip("/"))
            else:
                yield folder + name

    def is_folder(self, path: str) -> bool:
        """Whether a path is a directory, or a link to one. Raises StorageError."""
        parent, _, name = path.rpartition("/")
        return f"{name}/" in self.list(parent)

    def is_link(self, path: str = "") -> bool:
        """Whether a path is a symbolic link, where the store has any."""
        return False

    def put_all(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Write many small files, (path, bytes), which are durable together once it returns: into directories that nobody reads
        yet, since each may be seen half written before. Raises StorageError; then some may be there.
        """
        with ThreadPoolExecutor(_PUT_AT_A_TIME) as pool:
            under_way: deque[Future[None]] = deque()
            for path, data in files:
                under_way.append(pool.submit(self.put, path, data))
                if len(under_way) >= 2 * _PUT_AT_A_TIME:
                    under_way.popleft().result()
            for future in under_way:
                future.result()

    def put_if_absent(self, path: str, data: bytes, part: str = "") -> bool:
        """As `put`, unless a file of that name is there: then nothing happens. Whether it was written.

        Of several processes that do this at the same time one succeeds, where the store can tell them apart. `part` is the
        name under which a store that needs one keeps the bytes before; its folder must exist. Raises StorageError; then the
        file may be there all the same. When it is there but could not be made durable, that is logged.
        """
        if self.exists(path):
            return False
        self.put(path, data)
        return True

    def put_if_unchanged(self, path: str, data: bytes, known: bytes, part: str = "") -> bool:
        """Replace a small file atomically if its content is still `known`; whether it was replaced.

        Otherwise as `put_if_absent`.
        """
        try:
            if self.read(path) != known:
                return False
        except MissingFileError:
            return False
        self.put(path, data)
        return True

    def copy(self, path: str, to: str) -> None:
        """Copy a file within the store, by the store itself or as shared blocks where it can.

        Raises MissingFileError, StorageError.
        """
        size = self.size(path)
        with self.writer(to, size) as writer:
            for start in range(0, size, COPIED_BYTES):
                out = np.empty(min(COPIED_BYTES, size - start), dtype=np.uint8)
                self.read_into(path, start, out)
                writer.write(start, out)

    def rename(self, path: str, to: str) -> None:
        """Give a file or directory another name in one step. Only an empty directory may have that name before.

        Raises ConflictError when something else has it, StorageError. Only where `renames`.
        """
        raise UnsupportedError(f"{self.url}/{path}", "can't be renamed: this storage has no such operation")

    def exchange(self, path: str, other: str) -> None:
        """Swap the names of two files or directories in one step.

        Raises UnsupportedError where the system can't, StorageError.
        """
        raise UnsupportedError(f"{self.url}/{path}", "can't be exchanged: this storage has no such operation")

    def replace(self, path: str, to: str) -> None:
        """Give a file the name of another one, which goes, in one step. Raises StorageError. Only where `renames`."""
        raise UnsupportedError(f"{self.url}/{path}", "can't be renamed: this storage has no such operation")

    def identity(self, path: str) -> str | None:
        """What tells a file or directory from another that has its name later; None where nothing is, or nothing tells.

        A symbolic link is not followed. Raises StorageError.
        """
        return None

    def stamp(self, path: str) -> str:
        """What differs once a file was written to, and stays when its directory is moved; empty where nothing tells.

        Raises MissingFileError, StorageError.
        """
        return self.identity(path) or ""

    def link(self, path: str, to: str) -> None:
        """Let a file have another name, too; a copy where there are no such links. A symbolic link is made again.

        Raises StorageError. Only where `renames`.
        """
        raise UnsupportedError(f"{self.url}/{path}", "can't be linked: this storage has no such operation")

    def hold(self, path: str) -> Hold:
        """Mark a file as in use by this process. Several processes may hold the same. Raises MissingFileError, StorageError."""
        return Hold()

    def claim(self, path: str) -> Hold | None:
        """Hold a file alone; None while a living process holds it. Where the store has no `holds`: as `hold`."""
        return Hold()

    def reader(self, path: str) -> Reader:
        """Keep a file open for several reads by one thread."""
        return Reader(self, path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, to its end by default."""
        out = np.empty((self.size(path) if stop is None else stop) - start, dtype=np.uint8)
        self.read_into(path, start, out)
        return out.tobytes()


def folders_of(paths: Sequence[str]) -> list[str]:
    """The folders that files lie in, the deepest first."""
    return sorted({path[:at] for path in paths for at, char in enumerate(path) if char == "/"}, key=len, reverse=True)


def safe_path(path: str, file: str = "") -> str:
    """`path` if it is relative and stays inside; file names come from checkpoints that may be hostile.

    Raises FormatError, naming `file` as the place where the path was found.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise FormatError(file or path, f"file name {path!r} does not stay inside the checkpoint", clause="path.safe")
    return path

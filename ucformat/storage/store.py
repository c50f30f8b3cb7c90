"""Storage: byte ranges in, whole files out, at any fsspec URL. Local disks take a fast path.

A `Store` is one directory (or object prefix). Reads are by range and may run on many threads. Writes are atomic per
file for `put`; larger files go through a `Writer`, which is durable once closed and leaves nothing once aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import FormatError

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
        for part in parts:
            self.read_into(start, part)
            start += part.nbytes

    def prefetch(self, start: int, nbytes: int) -> None:
        """Have a range brought into memory in the background. A hint."""

    def is_here(self, start: int, nbytes: int) -> bool:
        """Whether a range is in this host's memory, so that no disk has to be asked; True where nobody can tell."""
        return True

    def let_go(self, start: int, nbytes: int) -> None:
        """A range need not stay in this host's memory. A hint."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open unless a store overrides this."""


class Store(ABC):
    """A directory or object prefix. Paths are relative, `/`-separated, and never leave it."""

    url: str
    alignment: int = 1
    """Reads and writes that start, end and lie in memory at multiples of this many bytes are fastest."""
    streams: int = 0
    """Requests at a time that are fastest, each of some MiB. 0: a disk, which wants to be read in order, in small steps."""

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
        """Remove a file or a whole directory; nothing happens when it is not there."""

    @abstractmethod
    def sub(self, path: str) -> Store:
        """The store of a directory inside this one."""

    def reader(self, path: str) -> Reader:
        """Keep a file open for several reads by one thread."""
        return Reader(self, path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, to its end by default."""
        out = np.empty((self.size(path) if stop is None else stop) - start, dtype=np.uint8)
        self.read_into(path, start, out)
        return out.tobytes()


def safe_path(path: str, file: str = "") -> str:
    """`path` if it is relative and stays inside; file names come from checkpoints that may be hostile.

    Raises FormatError, naming `file` as the place where the path was found.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise FormatError(file or path, f"file name {path!r} does not stay inside the checkpoint")
    return path

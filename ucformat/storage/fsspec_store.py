"""Any fsspec file system as a Store: S3, GCS, HDFS, memory://…

Object stores have no rename: a file appears whole when its upload completes, which is what atomicity rests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec

from ucformat.errors import FormatError, MissingFileError, StorageError
from ucformat.storage.store import Bytes, Store, Writer, safe_path

_FOLDERLESS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos"})
"""Protocols without folders: making one would make a bucket, which is never ours to do."""


def _folderless(filesystem: Any) -> bool:
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    return bool(protocols & _FOLDERLESS)


def make_folder(filesystem: Any, path: str) -> None:
    """Make the folder that a file goes into, where there are folders."""
    if not _folderless(filesystem):
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)


class FsspecWriter(Writer):
    """A sequential upload: bytes arrive in order, the object appears on close."""

    ordered = True

    def __init__(self, filesystem: Any, path: str) -> None:  # fsspec is untyped
        self.path, self._filesystem, self._at = path, filesystem, 0
        try:
            make_folder(filesystem, path)
            self._file = filesystem.open(path, "wb")
        except Exception as error:
            raise StorageError(path, error) from error

    def write(self, start: int, data: Bytes) -> None:
        if start != self._at:
            raise StorageError(self.path, f"write at {start}, expected {self._at}: uploads are sequential")
        try:
            self._file.write(memoryview(data))
        except Exception as error:
            raise StorageError(self.path, error, start, start + data.nbytes) from error
        self._at += data.nbytes

    def close(self) -> None:
        try:
            self._file.close()
        except Exception as error:
            raise StorageError(self.path, error) from error

    def abort(self) -> None:
        try:
            self._file.discard()
            self._file.closed = True  # closing it now would upload the part that was written
        except Exception:
            pass  # some file systems have nothing to discard; the partial object goes below
        try:
            if self._filesystem.exists(self.path):
                self._filesystem.rm_file(self.path)
        except Exception:
            pass  # abort never raises: the error that led here is the one to report


class FsspecStore(Store):
    """A prefix of an fsspec file system."""

    streams = 8  # requests in flight: an object store answers each slowly and many at once

    def __init__(self, filesystem: Any, root: str, url: str) -> None:  # fsspec is untyped
        self.filesystem, self.root, self.url = filesystem, root.rstrip("/"), url.rstrip("/")
        self.appears_whole = _folderless(filesystem)

    @classmethod
    def open(cls, url: str) -> FsspecStore:
        """Raises StorageError for a scheme that is unknown or whose package is not installed."""
        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise StorageError(url, error) from error
        return cls(filesystem, root, url)

    def _full(self, path: str) -> str:
        return f"{self.root}/{safe_path(path, self.url)}" if path else self.root

    def size(self, path: str) -> int:
        full = self._full(path)
        try:
            size = self.filesystem.info(full)["size"]
        except FileNotFoundError:
            raise MissingFileError(f"{self.url}/{path}") from None
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error) from error
        return int(size or 0)

    def exists(self, path: str) -> bool:
        full = self._full(path)
        try:
            return bool(self.filesystem.exists(full))
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error) from error

    def list(self, path: str = "") -> Sequence[str]:
        full = self._full(path)
        try:
            self.filesystem.invalidate_cache(full)
            entries = self.filesystem.ls(full, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error) from error
        prefix = full.strip("/") + "/"
        return sorted(
            entry["name"].strip("/").removeprefix(prefix) + "/" * (entry["type"] == "directory")
            for entry in entries
            if entry["name"].strip("/") != full.strip("/")
        )

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        full, stop = self._full(path), start + out.nbytes
        if start == stop:
            return
        try:
            data = self.filesystem.cat_file(full, start=start, end=stop)
        except FileNotFoundError:
            raise MissingFileError(f"{self.url}/{path}") from None
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error, start, stop) from error
        if len(data) != out.nbytes:
            raise FormatError(f"{self.url}/{path}", f"the file ends at byte {start + len(data)}", start, stop)
        memoryview(out)[:] = data

    def put(self, path: str, data: bytes) -> None:
        full = self._full(path)
        try:
            make_folder(self.filesystem, full)
            self.filesystem.pipe_file(full, data)
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error) from error

    def copy(self, path: str, to: str) -> None:
        full = self._full(to)
        try:
            make_folder(self.filesystem, full)
            self.filesystem.cp_file(self._full(path), full)
        except NotImplementedError:
            super().copy(path, to)
        except Exception as error:
            raise StorageError(f"{self.url}/{to}", error) from error

    def move(self, path: str, to: str) -> None:
        """Rename a file to a name that is free, or copy and remove it where there is no rename. Raises StorageError."""
        try:
            self.filesystem.mv(self._full(path), self._full(to))
        except Exception as error:
            raise StorageError(f"{self.url}/{to}", error) from error

    def writer(self, path: str, size: int) -> Writer:
        return FsspecWriter(self.filesystem, self._full(path))

    def remove(self, path: str = "") -> None:
        full = self._full(path)
        try:
            if self.filesystem.exists(full):
                self.filesystem.rm(full, recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise StorageError(f"{self.url}/{path}", error) from error

    def sub(self, path: str) -> FsspecStore:
        return FsspecStore(self.filesystem, self._full(path), f"{self.url}/{path}")

"""Any fsspec file system as a Store: GCS, Azure, HDFS, SFTP, memory://… (S3 has a client of its own, see `storage.s3`).

Object stores have no rename: a file appears whole when its upload completes, which is what atomicity rests on. What fsspec
remembers of listings is never relied on: who has committed what is decided by what the storage says now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.asyn import sync as wait_for
from fsspec.exceptions import FSTimeoutError

from ucformat.errors import FormatError, MissingFileError, StorageError
from ucformat.storage.store import Bytes, Store, Writer, safe_path

WAIT_SECONDS = 300  # for one request of a file system that works asynchronously; others have limits of their own, or none
REMOVE_SECONDS = 3600  # for a folder with everything in it
_FOLDERLESS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos"})
"""Protocols without folders: making one would make a bucket, which is never ours to do."""


def _folderless(filesystem: Any) -> bool:
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    return bool(protocols & _FOLDERLESS)


class FsspecWriter(Writer):
    """A sequential upload: bytes arrive in order, the object appears on close.

    fsspec's files upload what they hold when they are garbage-collected. Ours can't, but while they write or close: `forced` is
    how fsspec marks files of which nothing is left to be uploaded.
    """

    ordered = True

    def __init__(self, store: FsspecStore, path: str) -> None:
        self._store, self._path, self._at = store, path, 0
        with store.explaining(path):
            store.make_folder(path)
            self._file = store.filesystem.open(store.full(path), "wb")
        self._dead = False
        self._set(forced=True)

    def _set(self, **fields: bool) -> None:
        for name, value in fields.items():
            with suppress(Exception):  # files that keep nothing back have no such fields
                setattr(self._file, name, value)

    @contextmanager
    def _alive(self, start: int | None = None, stop: int | None = None) -> Iterator[None]:
        with self._store.explaining(self._path, start, stop):
            if self._dead:
                raise StorageError(self._store.url_of(self._path), "this upload has ended or failed")
            self._set(forced=False)
            try:
                yield
            except BaseException:
                self._dead = True
                raise
            finally:
                self._set(forced=True)

    def write(self, start: int, data: Bytes) -> None:
        if start != self._at:
            raise StorageError(self._store.url_of(self._path), f"write at {start}, expected {self._at}: uploads are sequential")
        with self._alive(start, start + data.nbytes):
            self._file.write(memoryview(data))
        self._at += data.nbytes

    def close(self) -> None:
        with self._alive():
            self._file.close()
        self._dead = True

    def abort(self) -> None:
        self._dead = True
        self._set(forced=True, closed=True)
        with suppress(Exception):  # the error that led here is the one to report
            self._file.discard()
        if not self._store.appears_whole:  # else nothing of it has appeared, and what has that name is somebody else's
            with suppress(Exception):
                self._file.close()
            with suppress(Exception):
                self._store.filesystem.rm_file(self._store.full(self._path))


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
        except Exception as error:  # file systems connect, and look for credentials, when they are made
            raise StorageError(url, error) from error
        return cls(filesystem, root, url)

    def full(self, path: str) -> str:
        """A path as the file system knows it."""
        return f"{self.root}/{safe_path(path, self.url)}" if path else self.root

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @contextmanager
    def explaining(self, path: str, start: int | None = None, stop: int | None = None) -> Iterator[None]:
        """Turn errors of the file system into ours, about a path."""
        try:
            yield
        except (StorageError, MissingFileError, FormatError):
            raise
        except FSTimeoutError as error:
            raise StorageError(self.url_of(path), f"no answer within {WAIT_SECONDS} s", start, stop) from error
        except PermissionError as error:
            why = f"access denied ({error}): check the credentials, and what they may do there"
            raise StorageError(self.url_of(path), why, start, stop) from error
        except Exception as error:
            raise StorageError(self.url_of(path), error, start, stop) from error

    def _ask(self, operation: str, *args: object, seconds: float = WAIT_SECONDS, **options: object) -> Any:
        """The answer of the file system, within a time limit where it works asynchronously."""
        filesystem = self.filesystem
        later = getattr(filesystem, f"_{operation}", None)
        if isinstance(filesystem, AsyncFileSystem) and later is not None and not filesystem.asynchronous:
            return wait_for(filesystem.loop, later, *args, timeout=seconds, **options)
        return getattr(filesystem, operation)(*args, **options)

    def _info(self, path: str) -> Any:
        """What the file system says about a path now. Raises MissingFileError, StorageError."""
        full = self.full(path)
        with self.explaining(path):
            self.filesystem.invalidate_cache(full)
            try:
                return self._ask("info", full)
            except (FileNotFoundError, NotADirectoryError):
                raise MissingFileError(self.url_of(path)) from None

    def make_folder(self, path: str) -> None:
        """Make the folder that a file goes into, where there are folders."""
        if not self.appears_whole:
            self.filesystem.makedirs(self.full(path).rpartition("/")[0], exist_ok=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        return int(self._info(path)["size"] or 0)

    def exists(self, path: str) -> bool:
        try:
            self._info(path)  # fsspec's own `exists` takes every error for "no"
        except MissingFileError:
            return False
        return True

    def list(self, path: str = "") -> Sequence[str]:
        full = self.full(path)
        with self.explaining(path):
            self.filesystem.invalidate_cache(full)
            try:
                entries = self._ask("ls", full, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                self._look_at_bucket(path)
                return []
        prefix = full.strip("/") + "/"
        return sorted(
            entry["name"].strip("/").removeprefix(prefix) + "/" * (entry["type"] == "directory")
            for entry in entries
            if entry["name"].strip("/") != full.strip("/")
        )

    def _look_at_bucket(self, path: str) -> None:
        """Raises StorageError when it is the bucket that is missing, where there are buckets."""
        if not self.appears_whole:
            return
        bucket = self.full(path).strip("/").split("/", 1)[0]
        try:
            self._ask("info", bucket)
        except FileNotFoundError:
            why = f"the bucket {bucket!r} does not exist: create it, or check its name"
            raise StorageError(self.url_of(path), why) from None
        except PermissionError:
            pass  # who may not look at the bucket may still use what is in it

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        full, stop = self.full(path), start + out.nbytes
        if start == stop:
            return
        with self.explaining(path, start, stop):
            try:
                data = self._ask("cat_file", full, start=start, end=stop)
            except FileNotFoundError:
                raise MissingFileError(self.url_of(path)) from None
        if len(data) != out.nbytes:
            raise FormatError(self.url_of(path), f"the file ends at byte {start + len(data)}", start, stop)
        memoryview(out)[:] = data

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        with self.explaining(path):
            self.make_folder(path)
            self._ask("pipe_file", self.full(path), data)

    def put_if_absent(self, path: str, data: bytes, part: str = "") -> bool:
        """As the contract says. The server decides where fsspec's implementation for it can create exclusively."""
        if self.exists(path):
            return False
        with self.explaining(path):
            self.make_folder(path)
            try:
                self._ask("pipe_file", self.full(path), data, mode="create")
            except FileExistsError:
                # the answer to an earlier attempt may have been lost: then it is ours that is there
                return self.read(path) == data
            except (TypeError, ValueError, NotImplementedError):  # knows no such mode
                self._ask("pipe_file", self.full(path), data)
        return True

    def copy(self, path: str, to: str) -> None:
        with self.explaining(to):
            self.make_folder(to)
            try:
                self._ask("cp_file", self.full(path), self.full(to), seconds=REMOVE_SECONDS)
            except NotImplementedError:
                super().copy(path, to)

    def writer(self, path: str, size: int) -> Writer:
        return FsspecWriter(self, path)

    def remove(self, path: str = "") -> None:
        with self.explaining(path), suppress(FileNotFoundError):
            if self.exists(path):
                self._ask("rm", self.full(path), recursive=True, seconds=REMOVE_SECONDS)

    def sub(self, path: str) -> FsspecStore:
        return FsspecStore(self.filesystem, self.full(path), self.url_of(path))

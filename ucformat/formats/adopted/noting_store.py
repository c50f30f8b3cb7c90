"""A store that notes which files are read through it: what a reader opened a checkpoint by."""

from __future__ import annotations

from collections.abc import Sequence

from ucformat.errors import UnsupportedError
from ucformat.formats.adopted.record import FOLDER
from ucformat.formats.native.manifest import MANIFEST
from ucformat.storage.store import Bytes, Reader, Store, Writer


class NotingStore(Store):
    """Reads through another store, and notes what. Nothing can be written."""

    def __init__(self, inner: Store, noted: set[str] | None = None, *, hides_index: bool = False) -> None:
        self.url, self.alignment, self.streams = inner.url, inner.alignment, inner.streams
        self._inner = inner
        self._noted: set[str] = set() if noted is None else noted
        self._hides = hides_index

    def _is_hidden(self, name: str) -> bool:
        return self._hides and (name == MANIFEST or name.startswith(f"{FOLDER}."))

    def forget(self) -> None:
        """Note anew."""
        self._noted.clear()

    def paths(self, base: str) -> set[str]:
        """What was read, relative to the directory `base`."""
        folder = f"{base.rstrip('/')}/"
        return {url.removeprefix(folder) for url in self._noted if url.startswith(folder)}

    def _note(self, path: str) -> None:
        self._noted.add(f"{self.url.rstrip('/')}/{path}")

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def exists(self, path: str) -> bool:
        return not self._is_hidden(path.split("/", maxsplit=1)[0]) and self._inner.exists(path)

    def list(self, path: str = "") -> Sequence[str]:
        return [name for name in self._inner.list(path) if path or not self._is_hidden(name)]

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        self._note(path)
        self._inner.read_into(path, start, out)

    def reader(self, path: str) -> Reader:
        self._note(path)
        return self._inner.reader(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        self._note(path)
        return self._inner.read(path, start, stop)

    def sub(self, path: str) -> NotingStore:
        return NotingStore(self._inner.sub(path), self._noted)

    def is_folder(self, path: str) -> bool:
        return self._inner.is_folder(path)

    def is_link(self, path: str = "") -> bool:
        return self._inner.is_link(path)

    def identity(self, path: str) -> str | None:
        return self._inner.identity(path)

    def stamp(self, path: str) -> str:
        return self._inner.stamp(path)

    def put(self, path: str, data: bytes) -> None:
        raise UnsupportedError(f"{self.url}/{path}", "is only read")

    def writer(self, path: str, size: int) -> Writer:
        raise UnsupportedError(f"{self.url}/{path}", "is only read")

    def remove(self, path: str = "") -> None:
        raise UnsupportedError(f"{self.url}/{path}", "is only read")

"""Where a checkpoint lies: a directory, or one file in it, at any fsspec URL."""

from __future__ import annotations

from dataclasses import dataclass

from ucformat.errors import MissingFileError
from ucformat.storage.open import open_store
from ucformat.storage.store import Store


@dataclass(frozen=True, slots=True)
class Source:
    """A directory (`file` None) or the single file `file` inside it."""

    store: Store
    file: str | None = None

    @property
    def url(self) -> str:
        return self.store.url if self.file is None else f"{self.store.url.rstrip('/')}/{self.file}"


def locate(url: str) -> Source:
    """The source at `url`. Raises MissingFileError when nothing is there."""
    if not url:
        raise MissingFileError("an empty path", "names nothing")
    trimmed = url.rstrip("/") or "/"
    store = open_store(trimmed)
    if store.list():
        return Source(store)
    parent, _, name = trimmed.rpartition("/")
    beside = open_store(parent or ("/" if trimmed.startswith("/") else "."))
    if name in beside.list():
        return Source(beside, name)
    raise MissingFileError(url, "no such file or directory, or an empty one")

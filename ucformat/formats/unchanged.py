"""Checkpoints whose files a writer replaces while they are read: what was read is of one of them, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ucformat.catalog import Catalog, File
from ucformat.errors import CheckpointChangedError
from ucformat.formats.source import Source
from ucformat.storage.store import Store

_LOOKS = 10  # a directory is replaced in one step, so one look more is enough unless that happens all the time


@dataclass(frozen=True, slots=True)
class FileGuard:
    """Proves, after a file was read, that it was the same file all the while. Raises CheckpointChangedError."""

    store: Store
    path: str
    identity: str

    def __call__(self) -> None:
        if self.store.identity(self.path) != self.identity:
            raise CheckpointChangedError(f"{self.store.url.rstrip('/')}/{self.path}")


def opened_unchanged(source: Source, open_once: Callable[[], Catalog]) -> Catalog:
    """The catalog that `open_once` gives, of one state of the source; its files get a guard.

    Not for formats that notice it themselves: see `Reader.detects_changes`.

    Raises what opening raises, CheckpointChangedError when the source is replaced again and again.
    """
    name = source.file or ""
    for _ in range(_LOOKS):
        before = source.store.identity(name)
        try:
            catalog = open_once()
            guarded = replace(catalog, files=tuple(_guarded(file, catalog.store) for file in catalog.files))
        except Exception:
            if source.store.identity(name) == before:
                raise
            continue
        if source.store.identity(name) == before:
            return guarded
    raise CheckpointChangedError(source.url)


def _guarded(file: File, store: Store) -> File:
    if file.guard is not None or file.inline is not None:
        return file
    identity = store.identity(file.path)
    return file if identity is None else replace(file, guard=FileGuard(store, file.path, identity))

"""The store that a path or URL means."""

from __future__ import annotations

from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.s3.s3_store import SCHEMES, S3Store
from ucformat.storage.store import Store


def open_store(url: str) -> Store:
    """The directory at a local path or any fsspec URL; it need not exist yet. Raises StorageError for unknown schemes."""
    if url.startswith("file://"):
        return LocalStore(url[len("file://") :])
    if url.startswith(SCHEMES):
        return S3Store(url)
    if "://" in url or "::" in url:
        return FsspecStore.open(url)
    return LocalStore(url)

"""The store that a path or URL means. Clients of remote storage are imported once a URL needs them: most programs never do."""

from __future__ import annotations

from ucformat.storage.local import LocalStore
from ucformat.storage.store import Store


def open_store(url: str) -> Store:
    """The directory at a local path or any fsspec URL; it need not exist yet. Raises StorageError for unknown schemes."""
    if url.startswith("file://"):
        return LocalStore(url[len("file://") :])
    if "://" in url or "::" in url:
        return _remote(url)
    return LocalStore(url)


def _remote(url: str) -> Store:
    from ucformat.storage.fsspec_store import FsspecStore
    from ucformat.storage.s3.s3_store import SCHEMES, S3Store

    return S3Store(url) if url.startswith(SCHEMES) else FsspecStore.open(url)

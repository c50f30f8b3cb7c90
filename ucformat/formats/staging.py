"""A directory that appears only when it is complete: how foreign formats are written.

On local disks everything goes into a hidden sibling, which takes the final name by one rename (an exchange of names
when a checkpoint is replaced). Object stores have no rename: there the file that readers look for comes last. What
replaces something on an object store is written beside it first, and copied into place by the store itself when it is
complete, so that the old checkpoint is there until the new one is, and nothing half new and half old is ever readable.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ucformat.errors import ExistsError, StorageError
from ucformat.formats.target import WriteJob
from ucformat.localdisk import LocalStore, sync_directory
from ucformat.objectstore import FsspecStore
from ucformat.storage import Store, Writer

PARTIAL = ".partial"
"""Where, on an object store, the new checkpoint stands until it is complete."""

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # Linux: swap two names in one step
_COMMITS = ("ucf.json", ".metadata", ".index.json")  # ends of names of files without which a checkpoint is none


def publish(job: WriteJob, write: Callable[[Store], None], commit: Callable[[Store], None], last: str) -> None:
    """Fill `job.store`: `write(store)` on every rank, then `commit(store)` on rank 0, which puts the last files there.

    `last` is the file that makes it readable. Every rank calls this. A failure on any rank raises on all of them and leaves
    what was there before. What an earlier, killed attempt left is cleared away. Raises ExistsError when the directory
    is in use and `job.overwrite` is not set, StorageError, RankFailedError.
    """
    group = job.group
    with group.together("preparing the output"):
        replaces = group.rank == 0 and _prepare(job)
    staging = _staging(job.store, group.broadcast(replaces))
    try:
        with group.together("writing"):
            write(staging)
            if job.finish is not None:
                job.finish()
        with group.together("committing"):
            if group.rank == 0:
                commit(staging)
    except BaseException:
        if group.rank == 0:
            _discard(staging)
        raise
    with group.together("putting the output into its place"):
        if group.rank == 0 and staging is not job.store:
            (_reveal if isinstance(job.store, LocalStore) else _replace)(job.store, staging, last)


@contextmanager
def replacing(store: Store, path: str, size: int) -> Iterator[Writer]:
    """A writer of one file that takes the name `path` only when it is complete: until then the old file is there."""
    beside = path if isinstance(store, LocalStore) or not store.exists(path) else path + PARTIAL
    with store.writer(beside, size) as writer:
        yield writer
    if beside != path:
        assert isinstance(store, FsspecStore)
        try:
            store.copy(beside, path)
        finally:
            store.remove(beside)


def _staging(store: Store, replaces: bool) -> Store:
    if isinstance(store, LocalStore):
        parent, name = os.path.split(store.url)
        return LocalStore(os.path.join(parent, f".{name}{PARTIAL}"))
    return store.sub(PARTIAL) if replaces else store


def _prepare(job: WriteJob) -> bool:
    """Clear the way; whether there is something to be replaced."""
    store = job.store
    if isinstance(store, LocalStore) and os.path.isfile(store.url):
        raise StorageError(store.url, "a file is in the way of the directory to be written")
    replaces = any(name != PARTIAL + "/" for name in store.list())
    if replaces and not job.overwrite:
        raise ExistsError(store.url)
    _staging(store, replaces=True).remove()
    return replaces


def _discard(staging: Store) -> None:
    try:
        staging.remove()
    except StorageError:
        pass  # the error that led here is the one to report; the next attempt clears up


def _replace(store: Store, staging: Store, last: str) -> None:
    """Put complete objects where others are: those go, then the new ones are copied, `last` at the end.

    A failure in between leaves no checkpoint at `store`, and the whole new one in `staging`, where the error says it is.
    """
    assert isinstance(store, FsspecStore)
    new = sorted(_files(staging), key=lambda path: (path == last, path))
    try:
        for name in sorted(store.list(), key=lambda name: (not name.endswith(_COMMITS), name)):
            if name != PARTIAL + "/":
                store.remove(name.rstrip("/"))
        for path in new:
            store.copy(f"{PARTIAL}/{path}", path)
    except StorageError as error:
        raise StorageError(store.url, f"not replaced ({error}): the new checkpoint is complete in {staging.url}") from error
    _discard(staging)


def _files(store: Store, folder: str = "") -> Iterator[str]:
    for name in store.list(folder.rstrip("/")):
        if name.endswith("/"):
            yield from _files(store, folder + name)
        else:
            yield folder + name


def _reveal(store: Store, staging: Store, last: str) -> None:
    """Give the staged directory its final name, durably."""
    parent = os.path.dirname(store.url)
    try:
        sync_directory(staging.url)
        if os.path.isdir(store.url) and os.listdir(store.url):
            _exchange(staging.url, store.url)
            sync_directory(parent)
            shutil.rmtree(staging.url)
        else:
            os.rename(staging.url, store.url)
            sync_directory(parent)
    except OSError as error:
        _discard(staging)
        raise StorageError(store.url, error) from error


def _exchange(new: str, old: str) -> None:
    """Swap two directories' names; in two steps where the system can't do it in one."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    aside = new + ".old"
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)

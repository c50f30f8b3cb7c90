"""A directory that appears only when it is complete: how foreign formats are written.

On local disks everything goes into a hidden sibling, which takes the final name by one rename (an exchange of names
when a checkpoint is replaced). Object stores have no rename: there the file that readers look for comes last, and
what is replaced is removed first, so that nothing half new and half old is ever readable.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable

from ucformat.errors import ExistsError, StorageError
from ucformat.formats.target import WriteJob
from ucformat.localdisk import LocalStore, sync_directory
from ucformat.storage import Store

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # Linux: swap two names in one step


def publish(job: WriteJob, write: Callable[[Store], None], commit: Callable[[Store], None]) -> None:
    """Fill `job.store`: `write(store)` on every rank, then `commit(store)` on rank 0, which puts the last files there.

    Every rank calls it. A failure on any rank raises on all of them and leaves what was there before (on object
    stores: nothing). What an earlier, killed attempt left is cleared away. Raises ExistsError when the directory
    is in use and `job.overwrite` is not set, StorageError, RankFailedError.
    """
    group = job.group
    staging = _staging(job.store)
    with group.together("preparing the output"):
        if group.rank == 0:
            _prepare(job, staging)
    try:
        with group.together("writing"):
            write(staging)
            if job.finish is not None:
                job.finish()
        with group.together("committing"):
            if group.rank == 0:
                commit(staging)
                _reveal(job.store, staging)
    except BaseException:
        if group.rank == 0:
            _discard(staging)
        raise


def _staging(store: Store) -> Store:
    if not isinstance(store, LocalStore):
        return store
    parent, name = os.path.split(store.url)
    return LocalStore(os.path.join(parent, f".{name}.partial"))


def _prepare(job: WriteJob, staging: Store) -> None:
    if job.store.list():
        if not job.overwrite:
            raise ExistsError(job.store.url)
        if staging is job.store:
            staging.remove()
    elif isinstance(job.store, LocalStore) and os.path.isfile(job.store.url):
        raise StorageError(job.store.url, "a file is in the way of the directory to be written")
    if staging is not job.store:
        staging.remove()


def _discard(staging: Store) -> None:
    try:
        staging.remove()
    except StorageError:
        pass  # the error that led here is the one to report; the next attempt clears up


def _reveal(store: Store, staging: Store) -> None:
    """Give the staged directory its final name, durably."""
    if not isinstance(store, LocalStore) or staging is store:
        return
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

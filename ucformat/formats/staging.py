"""A directory that appears only when it is complete: how foreign formats are written.

On local disks everything goes into a hidden sibling, which takes the final name by one rename (an exchange of names
when a checkpoint is replaced). Object stores have no rename: see `partial`. Files beside a checkpoint that are no part of it
stay when it is replaced.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ucformat.errors import ExistsError, StorageError, UnsupportedError
from ucformat.formats import partial
from ucformat.formats.owned import Owns, owner, walk
from ucformat.formats.partial import PARTIAL, check_kept
from ucformat.formats.target import WriteJob
from ucformat.storage.atomic import sync_directory
from ucformat.storage.local import LocalStore
from ucformat.storage.store import Store, Writer

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # Linux: swap two names in one step
_ASIDE = ".old"  # where the old directory is between two renames
_TOLD = 6  # names in a message
_LOG = logging.getLogger(__name__)


class Attempt(Protocol):
    """A directory being written out of sight."""

    def finish(self, last: str) -> list[str]:
        """Put it into its place, the file `last` at the end where there is an order; the other files that stayed there."""

    def discard(self) -> None:
        """Remove it. Never raises StorageError."""


def publish(job: WriteJob, write: Callable[[Store], None], commit: Callable[[Store], None], last: str) -> None:
    """Fill `job.store`: `write(store)` on every rank, then `commit(store)` on rank 0, which puts the last files there.

    `last` is the file that makes it readable. Every rank calls this. A failure on any rank raises on all of them and leaves
    what was there before. What an earlier, killed attempt left is cleared away. Raises ExistsError when the directory
    is in use and `job.overwrite` is not set, UnsupportedError when something may not be replaced at all, StorageError,
    RankFailedError.
    """
    group, store = job.group, _place(job.store)
    attempt: Attempt | None = None
    with group.together("preparing the output"):
        if group.rank == 0:
            attempt = _begin(store, job.overwrite)
    staging = _staging(store)
    try:
        with group.together("writing"):
            write(staging)
            if job.finish is not None:
                job.finish()
        with group.together("committing"):
            if group.rank == 0:
                commit(staging)
    except BaseException:
        if attempt is not None:
            attempt.discard()
        raise
    with group.together("putting the output into its place"):
        if attempt is not None:
            _finish(attempt, store, last)


def _finish(attempt: Attempt, store: Store, last: str) -> None:
    try:
        stayed = attempt.finish(last)
    except (ExistsError, UnsupportedError):
        attempt.discard()
        raise
    if stayed:
        told = ", ".join(stayed[:_TOLD]) + ("…" if len(stayed) > _TOLD else "")
        _LOG.warning("%s: kept, being no part of the checkpoint that was replaced: %s", store.url, told)


@contextmanager
def replacing(store: Store, path: str, size: int) -> Iterator[Writer]:
    """A writer of one file that takes the name `path` only when it is complete: until then the old file is there."""
    replaces = store.exists(path)
    if store.renames or (store.appears_whole and not replaces):
        with store.writer(path, size) as writer:
            yield writer
        return
    beside = path + PARTIAL
    with store.writer(beside, size) as writer:
        yield writer
    try:
        store.copy(beside, path)
    finally:
        store.remove(beside)


def _place(store: Store) -> Store:
    """The directory itself, where the name is a symbolic link to it."""
    return LocalStore(os.path.realpath(store.url)) if isinstance(store, LocalStore) and os.path.islink(store.url) else store


def _staging(store: Store) -> Store:
    if isinstance(store, LocalStore):
        parent, name = os.path.split(store.url)
        return LocalStore(os.path.join(parent, f".{name}{PARTIAL}"))
    return partial.staging_of(store)


def _begin(store: Store, overwrite: bool) -> Attempt:
    if not store.renames:
        return partial.begin(store, overwrite)
    assert isinstance(store, LocalStore)
    return _begin_beside(store, overwrite)


# -- local disks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sibling:
    """An attempt on a local disk: the directory `new` beside the one to be, `old`, of whose files `owns` tells which go."""

    new: str
    old: str
    owns: Owns

    def discard(self) -> None:
        try:
            LocalStore(self.new).remove()
        except StorageError:
            pass  # the error that led here is the one to report; the next attempt clears up

    def finish(self, last: str) -> list[str]:
        parent = os.path.dirname(self.old)
        stayed: list[str] = []
        try:
            in_use = os.path.isdir(self.old) and bool(os.listdir(self.old))
            if in_use:
                stayed = self._keep()
            sync_directory(self.new)
            if in_use:
                _exchange(self.new, self.old)
                sync_directory(parent)
                shutil.rmtree(self.new)
            else:
                os.rename(self.new, self.old)
                sync_directory(parent)
        except OSError as error:
            self.discard()
            raise StorageError(self.old, error) from error
        return stayed

    def _keep(self) -> list[str]:
        """Let the files of the old directory that are no part of its checkpoint be in the new one, too; their paths.

        Links are made again, and never followed. Raises UnsupportedError when the new checkpoint has a file of that name.
        """
        stay = [path for path in walk(LocalStore(self.old)) if not self.owns(path)]
        both = [path for path in stay if os.path.lexists(os.path.join(self.new, path))]
        check_kept(LocalStore(self.old), both)
        stay = sorted(set(stay).difference(both))
        for path in stay:
            self._folder(os.path.dirname(path))
            _link(os.path.join(self.old, path), os.path.join(self.new, path))
        for folder in {os.path.dirname(path) for path in stay}:
            sync_directory(os.path.join(self.new, folder))
        return stay

    def _folder(self, path: str) -> None:
        """Make a folder like the old one."""
        new = os.path.join(self.new, path)
        if path and not os.path.isdir(new):
            self._folder(os.path.dirname(path))
            os.mkdir(new)
            shutil.copystat(os.path.join(self.old, path), new)


def _begin_beside(store: LocalStore, overwrite: bool) -> _Sibling:
    """Clear the way."""
    if os.path.isfile(store.url):
        raise StorageError(store.url, "a file is in the way of the directory to be written")
    staging = _staging(store)
    _restore(staging.url, store.url)
    in_use = bool(store.list())
    if in_use and not overwrite:
        raise ExistsError(store.url)
    attempt = _Sibling(staging.url, store.url, owner(store))
    staging.remove()
    return attempt


def _link(path: str, to: str) -> None:
    """The same file under another name; a copy where the file system has no links."""
    try:
        os.link(path, to, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(path, to, follow_symlinks=False)


def _exchange(new: str, old: str) -> None:
    """Swap two directories' names; in steps where the system can't do it in one: `_restore` undoes half of them."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    aside = new + _ASIDE
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _restore(new: str, old: str) -> None:
    """Undo or end an exchange in steps that was interrupted. Raises StorageError when that can't be told."""
    aside = new + _ASIDE
    if not os.path.lexists(aside):
        return
    if os.path.lexists(new) and os.path.lexists(old):
        raise StorageError(
            aside, f"is what an interrupted conversion was to replace, and something else is at {old}: move it away"
        )
    try:
        os.rename(aside, new if os.path.lexists(old) else old)
    except OSError as error:
        raise StorageError(aside, error) from error

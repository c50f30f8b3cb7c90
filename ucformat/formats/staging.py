"""A directory that appears only when it is complete: how foreign formats are written.

Where the store can rename, everything goes into a hidden sibling, which takes the final name in one step: see `beside`. Object
stores have no rename: see `partial`. Files beside a checkpoint that are no part of it stay when it is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ucformat.errors import ConflictError, ExistsError, UnsupportedError
from ucformat.formats import beside, ownership, partial
from ucformat.formats.target import WriteJob
from ucformat.storage.open import open_store
from ucformat.storage.store import Store, Writer

_TOLD = 6  # names in a message
_LOG = logging.getLogger(__name__)


class Attempt(Protocol):
    """A directory being written out of sight."""

    @property
    def staging(self) -> Store:
        """Where it is written."""

    def finish(self, last: str) -> list[str]:
        """Put it into its place, the file `last` at the end where there is an order; the other files that stayed there."""

    def discard(self) -> None:
        """Remove it. Never raises StorageError."""


def publish(
    job: WriteJob,
    write: Callable[[Store], None],
    commit: Callable[[Store], None],
    last: str,
    written: Callable[[], None] | None = None,
) -> None:
    """Fill `job.store`: `write(store)` on every rank, then `commit(store)` on rank 0, which puts the last files there.

    `last` is the file that makes it readable; `written` is called in between, on every rank, and may be collective. Every rank
    calls this. A failure on any rank raises on all of them and leaves what was there before. What an earlier, killed attempt left
    is cleared away. Raises ExistsError when the directory is in use and `job.overwrite` is not set, ConflictError when another
    process came first, UnsupportedError when something may not be replaced at all, StorageError, RankFailedError.
    """
    group, store = job.group, _place(job.store)
    attempt: Attempt | None = None
    try:
        with group.together("preparing the output"):
            if group.rank == 0:
                attempt = _begin(store, job.overwrite)
        staging = open_store(group.broadcast("" if attempt is None else attempt.staging.url))
        with group.together("writing"):
            write(staging)
            if job.finish is not None:
                job.finish()
        if written is not None:
            written()
        with group.together("committing"):
            if attempt is not None:
                commit(attempt.staging)
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
    except (ConflictError, ExistsError, UnsupportedError):
        attempt.discard()
        raise
    if stayed:
        told = ", ".join(stayed[:_TOLD]) + ("…" if len(stayed) > _TOLD else "")
        _LOG.warning("%s: kept, being no part of the checkpoint that was replaced: %s", store.url, told)


@contextmanager
def replacing(store: Store, path: str, size: int, *, overwrite: bool = True) -> Iterator[Writer]:
    """A writer of one file that takes the name `path` only when it is complete: until then the old file is there.

    Raises ExistsError when there is one and no `overwrite`, ConflictError when another process came first, StorageError.
    """
    if store.renames:
        attempt = beside.begin_file(store, path, overwrite)
        try:
            with store.writer(attempt.staged, size) as writer:
                yield writer
            attempt.finish()
        except BaseException:
            attempt.claim.discard()
            raise
        return
    if not overwrite and store.exists(path):
        raise ExistsError(f"{store.url}/{path}")
    if store.appears_whole:  # what it replaces is there until then
        with store.writer(path, size) as writer:
            yield writer
        return
    other = f"{path}.{ownership.new_token()}{partial.PARTIAL}"
    with store.writer(other, size) as writer:
        yield writer
    try:
        store.copy(other, path)
    finally:
        store.remove(other)


def _place(store: Store) -> Store:
    """The directory itself, where the name is a symbolic link to it."""
    return open_store(os.path.realpath(store.url)) if store.is_link() else store


def _begin(store: Store, overwrite: bool) -> Attempt:
    return beside.begin(store, overwrite) if store.renames else partial.begin(store, overwrite)

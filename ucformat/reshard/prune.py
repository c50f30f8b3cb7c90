"""Removing what nobody needs any more: what killed saves and conversions left, and old steps.

Only what a marker or a commit record vouches for is ever listed: see `formats.ownership`. What a living process may still be
writing is listed as in use, and stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ucformat.errors import MissingFileError
from ucformat.formats import beside, native, ownership, partial
from ucformat.formats.ownership import Marker
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

_KINDS = {
    "save": "unfinished save",
    "convert": "unfinished conversion",
    "persist": "unfinished snapshot",
    "remove": "unfinished removal",
}


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that can be removed."""

    path: str
    """The checkpoint or step that it was to be."""
    what: str
    """`unfinished save`, `unfinished conversion`, `unfinished snapshot`, `unfinished removal` or `old step`."""
    nbytes: int
    in_use: bool = False
    """A living process may still be writing it, or it is too young to tell: it stays."""


@dataclass(frozen=True, slots=True)
class _Found:
    leftover: Leftover
    store: Store
    """The directory of the marker, or the run directory of an old step."""
    marker: Marker | None = None
    step: int = -1


def prune(path: str | os.PathLike[str], *, keep: int | None = None, dry_run: bool = False) -> list[Leftover]:
    """Remove what killed saves and conversions left at `path`, and with `keep` old steps; what was removed, or is in use.

    `path` is a checkpoint, or a run directory with all its steps, or what a conversion was to write. With `keep` the newest step
    stays with the `keep - 1` before it, as in `save(keep=)`. `dry_run` only lists. Files that ucformat did not write are never
    removed, nor is anything that a living process is writing.

    Raises StorageError, FormatError for a damaged `rollback.json`.
    """
    if keep is not None and keep < 1:
        raise ValueError("keep must be ≥ 1: the newest checkpoint always stays")
    store = open_store(os.fspath(path))
    found = [*_unfinished(store), *([] if keep is None else _old_steps(store, keep))]
    for item in found:
        if not dry_run and not item.leftover.in_use:
            _remove(item)
    return [item.leftover for item in found]


def _unfinished(store: Store) -> Iterator[_Found]:
    names = store.list()
    if store.renames:
        parent, name = beside.split(store)
        for marker in ownership.markers(parent):
            if marker.place == name:
                yield _found(parent, marker)
    else:
        for marker in partial.leftovers(store):
            found = _found(partial.folder_of(store), marker)
            yield replace(found, leftover=replace(found.leftover, path=store.url))
    for marker in ownership.markers(store, names):
        yield _found(store, marker)
    for step in native.step_numbers(names):
        name = native.step_name(step)
        if not store.is_link(name):
            inner = store.sub(name)
            for marker in ownership.markers(inner):
                yield _found(inner, marker)


def _found(store: Store, marker: Marker) -> _Found:
    hold = ownership.claim(store, marker)
    if hold is not None:
        hold.release()
    tokens = [name.rstrip("/") for name in store.list() if ownership.carries(name, marker.token)]
    replaced = [] if marker.place else [path for path in marker.replaces if store.exists(path)]
    nbytes = sum(map(store.size, replaced)) if marker.what == "remove" else sum(_size(store, name) for name in tokens)
    where = f"{store.url}/{marker.place}" if marker.place else store.url
    return _Found(Leftover(where, _KINDS.get(marker.what, marker.what), nbytes, hold is None), store, marker)


def _size(store: Store, name: str) -> int:
    """Bytes of a file, or of all files in a directory; 0 for what has gone meanwhile."""
    total = 0
    for path in list(store.files(name)) or [name]:
        try:
            total += 0 if store.is_link(path) or store.is_folder(path) else store.size(path)
        except MissingFileError:
            continue
    return total


def _old_steps(run: Store, keep: int) -> Iterator[_Found]:
    newest = native.newest_step(run)
    if newest is None:
        return
    passed = native.passed_over(run, run.list())
    for step in native.expired(native.committed_steps(run), newest, keep, None, passed):
        name = native.step_name(step)
        size = 0 if run.is_link(name) else _size(run, name)
        yield _Found(Leftover(f"{run.url}/{name}", "old step", size), run, step=step)


def _remove(item: _Found) -> None:
    """Remove one, if it is still nobody's. Raises StorageError."""
    store, marker = item.store, item.marker
    if marker is None:
        native.remove_step(store, item.step)
        return
    hold = ownership.claim(store, marker)
    if hold is None:
        return
    try:
        if not marker.place:
            native.clear_one(store, marker, _record(store))
        elif store.renames:
            beside.clear_one(store, marker)
        else:
            ownership.remove_all(store, marker.token, keep_folder=True)
    finally:
        hold.release()


def _record(store: Store) -> native.Record | None:
    try:
        return native.read_record(store)
    except MissingFileError:
        return None

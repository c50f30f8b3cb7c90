"""`.partial/`: where a directory on an object store is written first, and how it gets from there to its place.

Object stores have no rename. So everything is written below `.partial/`, and when it is complete the store itself copies
each object into place, the one that makes it readable last. A marker in `.partial/` comes first and goes last: where it
is, an interrupted conversion can be run again. Without `overwrite` nothing that is visible is ever removed or changed, only
added to, and only when all that is there are bytes of the very files that are to come. To replace a checkpoint, the marker
first tells which files are to go, so that whoever is interrupted while removing them can go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from ucformat.errors import ExistsError, StorageError
from ucformat.formats import owned
from ucformat.storage.store import Store

PARTIAL = ".partial"
MARKER = "ucformat.json"
_COMMITS = ("ucf.json", ".metadata", ".index.json")  # ends of names of files without which a checkpoint is none
_WEIGHTS = (".safetensors", ".bin", ".distcp")
_COMPARED_BYTES = 8 << 20  # at a time


class Marker(msgspec.Struct, frozen=True):
    """The marker's content: files of the place that the conversion was allowed to remove, and has begun to."""

    replaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to write into `store`."""

    store: Store
    overwrite: bool
    marker: Marker
    again: bool
    """Whether an interrupted one was there: then its marker outlives a failure of this one, too."""

    @property
    def staging(self) -> Store:
        return staging_of(self.store)

    def finish(self, last: str) -> list[str]:
        """Put what is staged into its place, `last` at the end; the files beside it that stayed.

        Raises ExistsError and UnsupportedError for what may not be replaced, StorageError.
        """
        return _exchange(self, last) if self.overwrite else _add(self, last)

    def discard(self) -> None:
        """Remove what was staged. Never raises StorageError: that is not the news, and the next attempt clears up."""
        try:
            _clear(self.staging)
            if not self.again:
                self.staging.remove()
        except StorageError:
            pass


def staging_of(store: Store) -> Store:
    return store.sub(PARTIAL)


def interrupted(store: Store) -> bool:
    """Whether a conversion to here was interrupted, or is under way."""
    return not store.renames and store.exists(f"{PARTIAL}/{MARKER}")


def begin(store: Store, overwrite: bool) -> Attempt:
    """Clear away what an interrupted attempt has staged, and mark the place as ours.

    Raises ExistsError when something is there that may not be replaced, UnsupportedError for a checkpoint that never is,
    StorageError when `.partial/` is not ours.
    """
    staging, again = staging_of(store), interrupted(store)
    if not again and staging.list():
        raise StorageError(staging.url, "is in the way, and no interrupted conversion has left it: remove it yourself")
    in_use = any(name != PARTIAL + "/" for name in store.list())
    if in_use and not again and not overwrite:
        raise ExistsError(store.url)
    if in_use and overwrite:
        owned.owner(store)
    attempt = Attempt(store, overwrite, _read(staging) if again else Marker(), again)
    if again:
        _clear(staging)
    else:
        staging.put(MARKER, msgspec.json.encode(attempt.marker))
    return attempt


def forget(store: Store) -> None:
    """Remove what interrupted conversions have staged at `store`, marker last."""
    if interrupted(store):
        staging = store.sub(PARTIAL)
        _clear(staging)
        staging.remove()


def _add(attempt: Attempt, last: str) -> list[str]:
    """Copy beside nothing but what is the same."""
    store, new = attempt.store, _staged(attempt)
    there = list(owned.walk(store, PARTIAL + "/"))
    if not set(there).issubset(new) or not all(_begins(attempt, path) for path in there):
        raise ExistsError(store.url)
    whole = {path for path in there if store.size(path) == attempt.staging.size(path)}
    _copy(attempt, [path for path in new if path not in whole], last)
    return []


def _exchange(attempt: Attempt, last: str) -> list[str]:
    """Remove the checkpoint that is there, then copy."""
    store, new, owns = attempt.store, set(_staged(attempt)), owned.owner(attempt.store)
    there = list(owned.walk(store, PARTIAL + "/"))
    known = set(attempt.marker.replaces)
    stay = [path for path in there if path not in known and not owns(path)]
    owned.check_kept(store, [path for path in stay if path in new])
    going = [path for path in there if path in known or owns(path) or path in new]
    attempt.staging.put(MARKER, msgspec.json.encode(Marker(tuple(sorted(known.union(going, new))))))
    try:
        for path in sorted(going, key=lambda path: (not path.endswith(_COMMITS), not path.endswith(_WEIGHTS), path)):
            store.remove(path)
    except StorageError as error:
        raise _unplaced(attempt, error) from error
    _copy(attempt, new, last)
    return [path for path in stay if path not in new]


def _copy(attempt: Attempt, paths: Iterable[str], last: str) -> None:
    """Configuration and the like first, then weights: where all weights are, nothing of the model is missing."""
    try:
        for path in sorted(paths, key=lambda path: (path == last, path.endswith(_WEIGHTS), path)):
            attempt.store.copy(f"{PARTIAL}/{path}", path)
    except StorageError as error:
        raise _unplaced(attempt, error) from error
    try:
        forget(attempt.store)
    except StorageError:
        pass  # it is in its place; the next conversion clears up


def _unplaced(attempt: Attempt, error: StorageError) -> StorageError:
    return StorageError(
        attempt.store.url, f"not complete ({error}): run it again; the new checkpoint lies in {attempt.staging.url}"
    )


def _staged(attempt: Attempt) -> list[str]:
    return [path for path in owned.walk(attempt.staging) if path != MARKER]


def _begins(attempt: Attempt, path: str) -> bool:
    """Whether a file in the place is the staged one of that name, or its beginning: some stores copy byte by byte."""
    size = attempt.store.size(path)
    if size > attempt.staging.size(path):
        return False
    ours, theirs = np.empty((2, min(size, _COMPARED_BYTES)), dtype=np.uint8)
    for start in range(0, size, _COMPARED_BYTES):
        n = min(_COMPARED_BYTES, size - start)
        attempt.store.read_into(path, start, theirs[:n])
        attempt.staging.read_into(path, start, ours[:n])
        if not np.array_equal(ours[:n], theirs[:n]):
            return False
    return True


def _clear(staging: Store) -> None:
    """Remove all but the marker."""
    staging.abort_uploads()
    for name in staging.list():
        if name != MARKER:
            staging.remove(name.rstrip("/"))


def _read(staging: Store) -> Marker:
    try:
        return msgspec.json.decode(staging.read(MARKER), type=Marker)
    except (msgspec.DecodeError, RecursionError):
        return Marker()  # half written, where uploads are visible before they are complete: nothing was removed yet

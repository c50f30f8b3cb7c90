"""`.partial/`: where a directory on an object store is written first, and how it gets from there to its place.

    .partial/.ucf.3f9c2a71d04b.json     the marker of an attempt: see `ownership`
    .partial/3f9c2a71d04b/…             what it has written

Object stores have no rename. So everything is written below `.partial/`, and when it is complete the store itself copies
each object into place, the one that makes it readable last. The marker comes first and goes last: where it is and its writer
has ended, the conversion can be run again. Without `overwrite` nothing that is visible is ever removed or changed, only
added to, and only when all that is there are bytes of the very files that are to come. Before the first file of the place
changes, the marker lists those that are to come or to go, so that whoever is interrupted in between can go on.

Only one attempt at a time: whoever finds the marker of another that may be alive gives way, so that of two which begin at the
same moment at most one goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from ucformat.containers.envelope import seal
from ucformat.errors import ConflictError, ExistsError, StorageError
from ucformat.formats import owned, ownership
from ucformat.storage.store import Store

PARTIAL = ".partial"
LEASE_S = 900.0  # after which a marker that nobody renews is that of a dead process, wherever it ran
RENEW_S = 60.0
_COMMITS = ("ucf.json", ".metadata", ".index.json")  # ends of names of files without which a checkpoint is none
_WEIGHTS = (".safetensors", ".bin", ".distcp")
_COMPARED_BYTES = 8 << 20  # at a time
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to write into `store`."""

    store: Store
    overwrite: bool
    claim: ownership.Claim
    renewal: _Renewal
    again: bool
    """Whether an interrupted one was there, so that files in the place may be ours: a failure of this one leaves its marker."""
    replacing: tuple[ownership.Marker, ...]
    """Of attempts that were interrupted while they replaced what was there: what they staged stays until the end."""

    @property
    def staging(self) -> Store:
        return folder_of(self.store).sub(self.claim.token)

    def finish(self, last: str) -> list[str]:
        """Put what is staged into its place, `last` at the end; the files beside it that stayed.

        Raises ExistsError and UnsupportedError for what may not be replaced, ConflictError when another process has taken this
        one for dead, StorageError.
        """
        if not folder_of(self.store).exists(self.claim.marker.path):
            raise ConflictError(self.store.url, "another conversion to here took this one for abandoned: run it again")
        return _exchange(self, last) if self.overwrite else _add(self, last)

    def discard(self) -> None:
        """Remove what was staged. Never raises StorageError: that is not the news, and the next attempt clears up."""
        self.renewal.stop()
        if not self.again:
            self.claim.discard()
            return
        with suppress(StorageError):
            self.staging.remove()
            self.renewal.change(process="", created="")


class _Renewal:
    """The marker of an attempt, renewed by a thread as long as the process lives: others may be on other machines."""

    def __init__(self, folder: Store, marker: ownership.Marker) -> None:
        self.folder, self.marker = folder, marker
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._run, name="ucf-renew", daemon=True).start()

    def change(self, **changes: object) -> None:
        """Change what the marker says. Raises StorageError."""
        with self._lock:
            self.marker = msgspec.structs.replace(self.marker, **changes)
            self.folder.put(self.marker.path, seal(msgspec.json.encode(self.marker)))

    def stop(self) -> None:
        """Renew it no more: from here on it may be removed."""
        self._ended.set()
        with self._lock:
            pass

    def _run(self) -> None:
        while not self._ended.wait(RENEW_S):
            with self._lock, suppress(StorageError):
                if self._ended.is_set() or not self.folder.exists(self.marker.path):
                    return  # another process took it for dead: `finish` finds out
                self.marker = msgspec.structs.replace(self.marker, created=ownership.now())
                self.folder.put(self.marker.path, seal(msgspec.json.encode(self.marker)))


def folder_of(store: Store) -> Store:
    return store.sub(PARTIAL)


def interrupted(store: Store) -> bool:
    """Whether a conversion to here was interrupted, or is under way."""
    return not store.renames and any(map(ownership.is_marker, folder_of(store).list()))


def begin(store: Store, overwrite: bool) -> Attempt:
    """Mark the place as ours.

    Raises ExistsError when something is there that may not be replaced, UnsupportedError for a checkpoint that never is,
    ConflictError when another process is writing there, StorageError when something in `.partial/` is not ours.
    """
    folder = folder_of(store)
    if unknown := ownership.unknown(folder, folder.list()):
        raise StorageError(
            f"{folder.url}/{unknown[0]}", "is in the way, and no interrupted conversion has left it: remove it yourself"
        )
    in_use = any(name != PARTIAL + "/" for name in store.list())
    if in_use and not overwrite and not interrupted(store):
        raise ExistsError(store.url)
    if in_use and overwrite:
        owned.owner(store)
    claim = ownership.begin(folder, "convert", lease_s=LEASE_S)
    try:
        again, replacing = _take_over(folder, claim.token)
        return Attempt(store, overwrite, claim, _Renewal(folder, claim.marker), again, tuple(replacing))
    except BaseException:
        claim.discard()
        raise


def forget(store: Store) -> None:
    """Remove what interrupted conversions have staged at `store`, but those that had begun to replace what was there.

    Raises ConflictError when one may be alive, StorageError.
    """
    if interrupted(store):
        _take_over(folder_of(store))


def leftovers(store: Store) -> list[ownership.Marker]:
    """Of interrupted conversions that can be removed: one that has begun to replace a checkpoint is to be run again instead."""
    return [] if store.renames else [marker for marker in ownership.markers(folder_of(store)) if not marker.replaces]


def _take_over(folder: Store, own: str = "") -> tuple[bool, list[ownership.Marker]]:
    """Remove what attempts have left that ended before they replaced anything; whether there was one, and markers of the others.

    Raises ConflictError when one may be alive, StorageError.
    """
    others = [marker for marker in ownership.markers(folder) if marker.token != own]
    for marker in others:
        if ownership.claim(folder, marker) is None:
            who = f"another process, begun {marker.created}, may be converting to here"
            raise ConflictError(folder.url, f"{who}: wait for it, or remove this folder if it is dead")
    gone = [marker for marker in others if not marker.replaces]
    for marker in gone:
        ownership.remove_all(folder, marker.token)
    return bool(gone), [marker for marker in others if marker.replaces]


def _add(attempt: Attempt, last: str) -> list[str]:
    """Copy beside nothing but what is the same."""
    store, new = attempt.store, _staged(attempt)
    there = list(owned.walk(store, PARTIAL + "/"))
    if not set(there).issubset(new) or not all(_begins(attempt, path) for path in there):
        raise ExistsError(store.url)
    whole = {path for path in there if store.size(path) == attempt.staging.size(path)}
    attempt.renewal.change(replaces=tuple(sorted(new)))  # from here on `prune` leaves it: what is in place would be nobody's
    _copy(attempt, [path for path in new if path not in whole], last)
    return []


def _exchange(attempt: Attempt, last: str) -> list[str]:
    """Remove the checkpoint that is there, then copy."""
    store, new, owns = attempt.store, set(_staged(attempt)), owned.owner(attempt.store)
    there = list(owned.walk(store, PARTIAL + "/"))
    known = {path for marker in attempt.replacing for path in marker.replaces}
    stay = [path for path in there if path not in known and not owns(path)]
    owned.check_kept(store, [path for path in stay if path in new])
    going = [path for path in there if path in known or owns(path) or path in new]
    attempt.renewal.change(replaces=tuple(sorted(known.union(going, new))))
    with _given_up(attempt):
        for path in sorted(going, key=lambda path: (not path.endswith(_COMMITS), not path.endswith(_WEIGHTS), path)):
            store.remove(path)
    _copy(attempt, new, last)
    return [path for path in stay if path not in new]


def _copy(attempt: Attempt, paths: Iterable[str], last: str) -> None:
    """Configuration and the like first, then weights: where all weights are, nothing of the model is missing."""
    with _given_up(attempt):
        for path in sorted(paths, key=lambda path: (path == last, path.endswith(_WEIGHTS), path)):
            attempt.store.copy(f"{PARTIAL}/{attempt.claim.token}/{path}", path)
    attempt.renewal.stop()
    try:
        for marker in (*attempt.replacing, attempt.claim.marker):
            ownership.remove_all(folder_of(attempt.store), marker.token)
    except StorageError as error:
        _LOG.warning("%s: complete; what it was copied from could not be removed (%s)", attempt.store.url, error)


@contextmanager
def _given_up(attempt: Attempt) -> Iterator[None]:
    """Where this fails, the place is not whole, and what is staged stays: whoever runs the conversion again may go on at once."""
    try:
        yield
    except BaseException as error:
        attempt.renewal.stop()
        with suppress(StorageError):
            attempt.renewal.change(process="", created="")
        if not isinstance(error, StorageError):
            raise
        raise StorageError(
            attempt.store.url, f"not complete ({error}): run it again; the new checkpoint lies in {attempt.staging.url}"
        ) from error


def _staged(attempt: Attempt) -> list[str]:
    return list(owned.walk(attempt.staging))


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

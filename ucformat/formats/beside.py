"""Directories and files that are written beside their place, under a name with a token, and take it in one step when complete.

    .out.3f9c2a71d04b.partial/    what is to become `out`; afterwards, for moments, what `out` was before
    .ucf.3f9c2a71d04b.json        the marker of the attempt

For stores that can rename. What is replaced was looked at when the attempt began, and must still be what it was: of two
attempts that replace the same thing one succeeds, the other raises ConflictError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ucformat.errors import ConflictError, ExistsError, StorageError, UcformatError, UnsupportedError
from ucformat.formats import owned, ownership
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)


def split(store: Store) -> tuple[Store, str]:
    """The store around a directory, and the directory's name in it."""
    parent, _, name = store.url.rstrip("/").rpartition("/")
    return open_store(parent or "/"), name


def staged_name(name: str, token: str) -> str:
    return f".{name}.{token}.partial"


def _sign(token: str) -> str:
    """A file in the new directory, by which it is told from the old one, whatever their names are."""
    return f".ucf.{token}.new"


def is_new_one(parent: Store, marker: ownership.Marker) -> bool:
    """Whether what has the name of a staged directory or file is what was written, or nothing. Raises StorageError."""
    staged = staged_name(marker.place, marker.token)
    if not parent.is_folder(staged):
        return True
    sign = _sign(marker.token)
    files = list(parent.files(staged))
    return parent.exists(f"{staged}/{sign}") or all(path.startswith(f"{staged}/{sign}") for path in files)


def _aside_name(name: str, token: str) -> str:
    """Where the old directory is between two renames, on systems that can't exchange names."""
    return f".{name}.{token}.old"


@dataclass(frozen=True, slots=True)
class DirectoryAttempt:
    """A directory on its way to `parent/name`."""

    parent: Store
    name: str
    claim: ownership.Claim
    before: str | None
    """Identity of the directory that is to be replaced; None: there is none, or an empty one."""
    owns: Callable[[str], bool]
    """Which files of the old directory are its checkpoint's, and go."""

    @property
    def staged(self) -> str:
        return staged_name(self.name, self.claim.token)

    @property
    def staging(self) -> Store:
        return self.parent.sub(self.staged)

    def discard(self) -> None:
        """Remove what was written, if it is not in its place; undo half an exchange. Never raises UcformatError."""
        try:
            clear_one(self.parent, self.claim.marker)
        except UcformatError as error:
            _LOG.warning("%s/%s: left as it is: %s", self.parent.url, self.staged, error)
        finally:
            self.claim.hold.release()

    def finish(self, last: str) -> list[str]:
        """Put it into its place; the files there that are no part of the old checkpoint, and stayed.

        Raises ConflictError, UnsupportedError, StorageError. Then the place is as it was, and the attempt is discarded.
        """
        stayed: list[str] = []
        try:
            if self.before is None:
                self.parent.rename(self.staged, self.name)
            else:
                stayed = self._keep()
                self._exchange()
        except BaseException:
            self.discard()
            raise
        try:
            settle(self.parent, self.claim.marker)
            self.claim.done()
        except UcformatError as error:
            self.claim.hold.release()
            _LOG.warning("%s/%s: committed, but what it replaced could not be removed: %s", self.parent.url, self.name, error)
        return stayed

    def _keep(self) -> list[str]:
        """Let the files of the old directory that are no part of its checkpoint be in the new one, too; their paths.

        Links are made again, and never followed. Raises UnsupportedError when the new checkpoint has a file of that name.
        """
        old, new = self.parent.sub(self.name), self.staging
        stay = [path for path in old.files() if not self.owns(path)]
        both = [path for path in stay if new.is_link(path) or new.exists(path)]
        owned.check_kept(old, both)
        stay = sorted(set(stay).difference(both))
        for path in stay:
            self.parent.link(f"{self.name}/{path}", f"{self.staged}/{path}")
        return stay

    def _exchange(self) -> None:
        """Swap old and new. Raises ConflictError when the old one is no longer what it was."""
        self._prove(self.name)
        try:
            self.parent.exchange(self.staged, self.name)
        except UnsupportedError:
            aside = _aside_name(self.name, self.claim.token)
            self.parent.rename(self.name, aside)
            self.parent.rename(self.staged, self.name)
            self.parent.rename(aside, self.staged)
        _prove_exchanged(self.parent, self.staged, self.name, self.before)

    def _prove(self, name: str) -> None:
        if self.parent.identity(name) != self.before:
            raise ConflictError(f"{self.parent.url}/{name}")


def begin(store: Store, overwrite: bool) -> DirectoryAttempt:
    """Clear away what killed attempts left, and mark the place.

    Raises ExistsError when the directory is in use and may not be replaced, UnsupportedError when it never is, StorageError.
    """
    parent, name = split(store)
    clear(parent, name)
    names = ownership.unknown(store, store.list())
    if not store.list() and parent.exists(name) and not parent.is_folder(name):
        raise StorageError(store.url, "a file is in the way of the directory to be written")
    if names and not overwrite:
        raise ExistsError(store.url)
    owns = owned.owner(store)
    before = parent.identity(name) if store.list() else None
    replaces = tuple(path for path in store.files() if owns(path)) if before else ()
    claim = ownership.begin(parent, "convert", place=name, replaces=replaces, identity=before or "")
    attempt = DirectoryAttempt(parent, name, claim, before, owns)
    try:
        attempt.staging.put(_sign(claim.token), b"")
    except BaseException:
        attempt.discard()  # else it would be held, and so in use, for as long as this process lives
        raise
    return attempt


def _prove_exchanged(parent: Store, staged: str, name: str, before: str | None) -> None:
    """After an exchange: what was replaced is what was to be, else it is undone. Raises ConflictError, StorageError."""
    try:
        replaced = parent.identity(staged)
    except BaseException:
        parent.exchange(staged, name)  # what can't be looked at is not removed
        raise
    if replaced != before:  # another attempt came between
        parent.exchange(staged, name)
        raise ConflictError(f"{parent.url}/{name}")


@dataclass(frozen=True, slots=True)
class FileAttempt:
    """A file on its way to `parent/name`."""

    parent: Store
    name: str
    claim: ownership.Claim
    before: str | None

    @property
    def staged(self) -> str:
        return staged_name(self.name, self.claim.token)

    def finish(self) -> None:
        """Put it into its place. Raises ConflictError, StorageError; then the place is as it was."""
        parent, where = self.parent, f"{self.parent.url}/{self.name}"
        if self.before is None:
            parent.rename(self.staged, self.name)
        elif parent.identity(self.name) != self.before:
            raise ConflictError(where)
        else:
            try:
                parent.exchange(self.staged, self.name)
            except UnsupportedError:
                parent.replace(self.staged, self.name)
            else:
                _prove_exchanged(parent, self.staged, self.name, self.before)
        try:
            ownership.remove_all(parent, self.claim.token)
        except UcformatError as error:
            _LOG.warning("%s: committed, but what it replaced could not be removed: %s", where, error)
        self.claim.hold.release()


def begin_file(parent: Store, name: str, overwrite: bool) -> FileAttempt:
    """Clear away what killed attempts left, and mark the place. Raises ExistsError, StorageError."""
    clear(parent, name)
    before = parent.identity(name)
    if before is not None and not overwrite:
        raise ExistsError(f"{parent.url}/{name}")
    return FileAttempt(parent, name, ownership.begin(parent, "convert", place=name), before)


# -- what was left -----------------------------------------------------------------------------------------------------


def clear(parent: Store, name: str) -> list[str]:
    """Remove what killed attempts left beside `name`; tokens of those. Raises StorageError."""
    gone: list[str] = []
    for marker in ownership.markers(parent):
        hold = ownership.claim(parent, marker) if marker.place == name else None
        if hold is not None:
            try:
                clear_one(parent, marker)
                gone.append(marker.token)
            finally:
                hold.release()
    return gone


def clear_one(parent: Store, marker: ownership.Marker) -> None:
    """Undo or end what a killed attempt was at. Its marker is held."""
    staged, aside = staged_name(marker.place, marker.token), _aside_name(marker.place, marker.token)
    if parent.exists(aside):
        if parent.exists(marker.place) and parent.exists(staged):
            raise StorageError(
                f"{parent.url}/{aside}", f"was to be replaced, and something else is at {marker.place}: move it away"
            )
        parent.rename(aside, staged if parent.exists(marker.place) else marker.place)
    if marker.identity and parent.identity(staged) == marker.identity:
        settle(parent, marker)
    elif not parent.exists(staged):  # it is in its place, or was never written
        parent.sub(marker.place).remove(_sign(marker.token))
    elif not is_new_one(parent, marker):
        where = f"{parent.url}/{staged}"
        raise StorageError(
            where, f"is neither what was replaced at {marker.place} nor what was to come: look at it, then remove it"
        )
    else:
        _remove_staged(parent.sub(staged), _sign(marker.token))
    ownership.remove_all(parent, marker.token, keep_folder=True)


def _remove_staged(new: Store, sign: str) -> None:
    """Remove what was written, its sign last: a removal that is cut short can then be taken up again."""
    for name in new.list():
        if not name.startswith(sign):
            new.remove(name.rstrip("/"))


def settle(parent: Store, marker: ownership.Marker) -> None:
    """After a directory was put into its place: remove what it replaced. Files that came meanwhile move to the new one."""
    new, staged = parent.sub(marker.place), staged_name(marker.place, marker.token)
    new.remove(_sign(marker.token))
    old = parent.sub(staged)
    for path in list(old.files()):
        if path in marker.replaces or new.is_link(path) or new.exists(path):
            old.remove(path)
        else:
            parent.rename(f"{staged}/{path}", f"{marker.place}/{path}")
    if not any(True for _ in old.files()):
        old.remove()

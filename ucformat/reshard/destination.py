"""Where a conversion may write: not into its source, and not over what is no checkpoint."""

from __future__ import annotations

import os

from ucformat import formats
from ucformat.errors import ExistsError, NotACheckpointError, UnsupportedError
from ucformat.formats import native, owned, ownership, partial
from ucformat.formats.contract import Writer
from ucformat.formats.source import locate
from ucformat.storage.open import open_store
from ucformat.storage.store import Store


def place(dst: str, writer: Writer) -> tuple[Store, str | None]:
    """The directory to be, or the directory around the file to be, and its name.

    Raises UnsupportedError for a path that can't be what the format writes.
    """
    if not dst:
        raise UnsupportedError("an empty path", "can't be written to: name the destination")
    store = open_store(dst)
    if writer.single_file:
        if store.list() or os.path.isdir(store.url):
            why = f"is a directory, and {writer.name} is written as one file: name that, as `model.pt` in it"
            raise UnsupportedError(dst, why)
        parent, _, name = dst.rstrip("/").rpartition("/")
        return open_store(parent or ("/" if dst.startswith("/") else ".")), name
    if dst.endswith(writer.not_a_directory):
        raise UnsupportedError(dst, f"{writer.name} is written as a directory: name that")
    return store, None


def check(src: str, dst: str, writer: Writer, store: Store, file: str | None, *, overwrite: bool) -> None:
    """Refuse to write where something is, unless it is a checkpoint that may be replaced.

    Raises ExistsError without `overwrite`, UnsupportedError for what is never replaced, and when source and destination overlap.
    """
    _check_apart(src, dst, store, file)
    if not (store.list() if file is None else store.exists(file)) or (file is None and _is_leftover(store)):
        return
    again = file is None and writer.staged and partial.interrupted(store)  # the writer looks closely at what is there
    if not overwrite and not again:
        raise ExistsError(dst)
    if file is None and native.newest_step(store) is not None:
        raise UnsupportedError(dst, "holds a run's checkpoints: they are not replaced, name one of them or another place")
    try:
        if not again:
            formats.detect(locate(dst))
        if file is None and overwrite:
            owned.owner(store)
    except NotACheckpointError:
        raise UnsupportedError(dst, "holds something that is no checkpoint: it is not replaced; remove it yourself") from None


def _check_apart(src: str, dst: str, store: Store, file: str | None) -> None:
    """Source and destination are not one, nor is one inside the other."""
    whole = store.url if file is None else f"{store.url.rstrip('/')}/{file}"
    one, other = (_true_url(url).rstrip("/") + "/" for url in (open_store(src).url, whole))
    if one == other:
        raise UnsupportedError(dst, "source and destination are the same")
    if other.startswith(one):
        raise UnsupportedError(dst, f"lies inside the source {src}: choose a place outside it")
    if one.startswith(other):
        raise UnsupportedError(dst, f"the source {src} lies inside it: choose another place")


def _true_url(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)


def _is_leftover(store: Store) -> bool:
    """Whether a directory holds only what markers vouch for, which interrupted attempts leave."""
    names = store.list()
    unknown = ownership.unknown(store, names)
    return not unknown or (unknown == [f"{partial.PARTIAL}/"] and partial.interrupted(store))

"""Which files of a directory belong to the checkpoint in it: those go when it is replaced, all others stay.

`Reader.owned_files` says it of each format that may be replaced; `by_pattern` is for those that know their files by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ucformat import formats
from ucformat.errors import NotACheckpointError, UcformatError, UnsupportedError
from ucformat.formats import sidecar_files
from ucformat.formats.contract import Owns
from ucformat.formats.source import Source
from ucformat.storage.store import Store


def owner(store: Store) -> Owns:
    """What belongs to the checkpoint at `store`; nothing, where none is.

    Raises UnsupportedError for a checkpoint of a format that is never replaced: what belongs to it isn't known here.
    """
    source = Source(store)
    try:
        reader = formats.detect(source)
    except NotACheckpointError:
        return lambda path: False
    if reader.owned_files is None:
        why = f"holds a checkpoint of the format {reader.name}, which is never replaced: remove it yourself"
        raise UnsupportedError(store.url, why)
    return reader.owned_files(source)


def by_pattern(
    pattern: str,
    weights: Callable[[Source], Collection[str]] = lambda source: (),
    folders: Callable[[Store], Sequence[str]] = lambda store: (),
) -> Callable[[Source], Owns]:
    """For `Reader.owned_files`: paths that match a regular expression as a whole, and what travels along with the model.

    `weights`: further files that the reader takes, where their names are free; `folders`: those that are parts of the model.
    """
    matches = re.compile(pattern, re.DOTALL).fullmatch

    def owned_files(source: Source) -> Owns:
        named = frozenset(_known(lambda: weights(source)))
        travels = sidecar_files.owner(source.store.list(), tuple(_known(lambda: folders(source.store))))
        return lambda path: matches(path) is not None or path in named or travels(path)

    return owned_files


def held(store: Store) -> list[str]:
    """The files of the checkpoint at `store`."""
    owns = owner(store)
    return [path for path in walk(store) if owns(path)]


def check_kept(store: Store, paths: Iterable[str]) -> None:
    """Refuse to write over `paths`, which are not the old checkpoint's, unless as one model's configuration over another's."""
    for path in paths:
        if not sidecar_files.is_companion(path.rpartition("/")[2]):
            why = "is no part of the checkpoint that is to be replaced, and the new one has a file of that name: move it away"
            raise UnsupportedError(f"{store.url}/{path}", why)


def _known(ask: Callable[[], Collection[str]]) -> Collection[str]:
    """What a reader says; nothing where the directory is not whole enough to tell."""
    try:
        return ask()
    except UcformatError:
        return ()


def walk(store: Store, skip: str = "") -> Iterator[str]:
    """Paths of all files below `store`, but for the top folder `skip`. A symbolic link is a file, wherever it leads."""
    return (path for path in store.files() if not (skip and path.startswith(skip)))

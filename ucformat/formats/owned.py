"""Which files of a directory belong to the checkpoint in it: those go when it is replaced, all others stay.

A format that may be replaced has `owned_files(source)`, which names them all, or `OWNS`, a pattern of paths in the directory,
and where names are free `weight_files(source)`, the files that its reader takes. Files that travel along with the model belong
to the checkpoint, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from ucformat import formats
from ucformat.errors import NotACheckpointError, UcformatError, UnsupportedError
from ucformat.formats import sidecar_files
from ucformat.formats.source import Source
from ucformat.storage.store import Store

Owns = Callable[[str], bool]
"""Whether a path in the directory belongs to the checkpoint."""


def owner(store: Store) -> Owns:
    """What belongs to the checkpoint at `store`; nothing, where none is.

    Raises UnsupportedError for a checkpoint of a format that is never replaced: what belongs to it isn't known here.
    """
    source = Source(store)
    try:
        module = formats.detect(source)
    except NotACheckpointError:
        return lambda path: False
    if hasattr(module, "owned_files"):
        files = frozenset(module.owned_files(source))
        return lambda path: path in files
    pattern = getattr(module, "OWNS", None)
    if pattern is None:
        why = f"holds a checkpoint of the format {module.NAME}, which is never replaced: remove it yourself"
        raise UnsupportedError(store.url, why)
    named, travels = _chosen(module, source), sidecar_files.owner(store.list(), _folders(module, source))
    return lambda path: pattern.fullmatch(path) is not None or path in named or travels(path)


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


def _chosen(module: ModuleType, source: Source) -> frozenset[str]:
    """The files that the format's reader takes, where the directory is whole enough to tell."""
    if not hasattr(module, "weight_files"):
        return frozenset()
    try:
        files: frozenset[str] = module.weight_files(source)
    except UcformatError:
        return frozenset()
    return files


def _folders(module: ModuleType, source: Source) -> tuple[str, ...]:
    """The folders that are parts of the model there."""
    try:
        folders: tuple[str, ...] = module.folders_of(source.store) if hasattr(module, "folders_of") else ()
    except UcformatError:
        return ()
    return folders


def walk(store: Store, skip: str = "") -> Iterator[str]:
    """Paths of all files below `store`, but for the top folder `skip`. A symbolic link is a file, wherever it leads."""
    return (path for path in store.files() if not (skip and path.startswith(skip)))

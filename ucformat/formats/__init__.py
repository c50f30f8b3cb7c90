"""Formats: each module reads one kind of checkpoint into a Catalog, and some write one. Verbs come here to open a path.

What a format has to offer is in `contract`, which formats there are in `registry`; how to add one is in docs/extending.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ucformat.catalog import Catalog
from ucformat.errors import AmbiguousFormatError, MissingFileError, NotACheckpointError
from ucformat.formats import strangers
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.native.run import step_name
from ucformat.formats.registry import known_names, own_readers, reader, registered_readers, writer, writer_names
from ucformat.formats.source import Source, locate
from ucformat.formats.target import WriteJob
from ucformat.formats.unchanged import opened_unchanged

__all__ = [
    "Reader",
    "Source",
    "WriteJob",
    "Writer",
    "bookkeeping",
    "detect",
    "has_masters",
    "holds_steps",
    "is_there",
    "locate",
    "names_advice",
    "open_catalog",
    "open_named",
    "open_source",
    "reader",
    "writer",
    "writer_names",
]
_LOG = logging.getLogger("ucformat")


@dataclass(frozen=True, slots=True)
class Recognised:
    """Which readers take a source, and which of other packages failed while they looked at it."""

    readers: tuple[Reader, ...]
    failures: tuple[str, ...]


def recognise(source: Source) -> Recognised:
    """Ask the readers. Of ours, the first one that accepts counts; those of other packages that fail are logged."""
    own = next((one for one in own_readers() if one.detect(source)), None)
    found = [] if own is None else [own]
    failures: list[str] = []
    for one in registered_readers():
        try:
            found += [one] if one.detect(source) else []
        except Exception as error:  # of any kind: it is somebody else's code
            failures.append(f"the reader {one.name!r} failed: {type(error).__name__}: {error}")
            _LOG.warning("%s: %s", source.url, failures[-1])
    preceded = {name for one in found for name in one.precedes}
    return Recognised(tuple(one for one in found if one.name not in preceded), tuple(failures))


def detect(source: Source) -> Reader:
    """The reader of a source. Raises NotACheckpointError when none recognises it, AmbiguousFormatError when several do."""
    found = recognise(source)
    if len(found.readers) == 1:
        return found.readers[0]
    if found.readers:
        raise AmbiguousFormatError(source.url, [one.name for one in found.readers])
    raise NotACheckpointError(source.url, "; ".join((_why_not(source), *found.failures)))


def _why_not(source: Source) -> str:
    near = (one.explain(source) for one in own_readers())
    known = next(filter(None, near), None) or strangers.describe(source)
    return known or f"no reader recognises it (known: {', '.join(known_names())})"


def is_there(url: str) -> bool:
    """Whether a path or URL holds a checkpoint, or a run with a committed one.

    False when nothing is there, or only what no reader and nobody else knows as a checkpoint: the log says what. Raises
    NotACheckpointError for checkpoints that ucformat does not read, AmbiguousFormatError, and StorageError.
    """
    try:
        source = locate(url)
    except MissingFileError:
        return False
    found = recognise(source)
    if not found.readers and not found.failures and strangers.describe(source) is None:
        shown = ", ".join(source.store.list()[:5])
        _LOG.warning("%s: taken for a place without a checkpoint, since no reader recognises what is there (%s…)", url, shown)
        return False
    detect(source)
    return True


def open_catalog(url: str, step: int | None = None) -> Catalog:
    """The catalog of a checkpoint of any format, as `open_named`. Reads metadata only."""
    return open_named(url, step)[1]


def open_named(url: str, step: int | None = None) -> tuple[str, Catalog]:
    """The name of a checkpoint's format, and its catalog (whose notes may name an earlier origin).

    `step`: that step of a run directory, or of a checkpoint that holds several, as the slots of a snapshot do.
    """
    source = locate(url)
    if step is not None and not _holds_steps(source):
        return open_named(f"{url.rstrip('/')}/{step_name(step)}")
    found, catalog = open_source(source, step)
    return found.name, catalog


def open_source(source: Source, step: int | None = None) -> tuple[Reader, Catalog]:
    """The reader of a source and its catalog; `step` where the checkpoint itself holds several."""
    found = detect(source)

    def open_once() -> Catalog:
        return found.open_catalog(source) if step is None or found.open_step is None else found.open_step(source, step)

    catalog = open_once() if found.detects_changes else opened_unchanged(source, open_once)
    if source.file is not None and catalog.store.url == source.store.url:
        catalog = replace(catalog, file=source.file)
    return found, catalog


def _holds_steps(source: Source) -> bool:
    """Whether a source is a checkpoint that holds several steps itself.

    No other readers are asked: of a run, steps that nobody wants may be unreadable.
    """
    return any(one.open_step is not None and one.detect(source) for one in (*own_readers(), *registered_readers()))


def holds_steps(name: str) -> bool:
    """Whether a checkpoint of this format holds several steps at once."""
    found = reader(name)
    return found is not None and found.open_step is not None


def has_masters(origin: str) -> bool:
    """Whether weights of this origin are rounded from master weights that lie beside them."""
    found = reader(origin)
    return found is not None and found.has_masters


def names_advice(origin: str) -> str:
    """What to do when names of this origin differ from those in memory; empty where nothing special is known."""
    found = reader(origin)
    return "" if found is None else found.names_advice


def bookkeeping(origin: str) -> frozenset[str]:
    """First components of names under which a framework keeps its own records: nobody has to have a place for them.

    `origin` is that of a catalog's notes: it stays with what was converted. Unknown ones have none.
    """
    found = reader(origin)
    return frozenset() if found is None else found.bookkeeping

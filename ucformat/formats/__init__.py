"""Formats: every module reads one kind of checkpoint into a Catalog, and some write one.

A reader has `NAME`, `detect(source)` and `open_catalog(source)`; a writer module has `write(job)`. To add a format,
write one file and list it here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

from ucformat.catalog import Catalog
from ucformat.errors import MissingFileError, NotACheckpointError, UnsupportedError
from ucformat.formats import strangers
from ucformat.formats.source import Source, locate
from ucformat.formats.target import WriteJob
from ucformat.formats.unchanged import opened_unchanged

_LOG = logging.getLogger("ucformat")

READERS = ("snapshot", "native", "dcp", "deepspeed", "megatron", "dcp_hf", "fsdp_folders", "hf", "hf_bin", "torchsave")
"""Modules that recognise checkpoints, the most specific first."""

WRITERS = ("native", "hf", "dcp", "torchsave")
"""Modules that can write, by the names that users give."""


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"ucformat.formats.{name}")


def detect(source: Source) -> ModuleType:
    """The reader of a source. Raises NotACheckpointError when none knows it."""
    for name in READERS:
        module = _module(name)
        if module.detect(source):
            return module
    native = _module("native")
    if source.file is None and native.is_unfinished(source.store):
        raise NotACheckpointError(source.url, native.NOTHING)
    known = strangers.describe(source)
    if known is not None:
        raise NotACheckpointError(source.url, known)
    known = ", ".join(_module(name).NAME for name in READERS)
    raise NotACheckpointError(source.url, f"no reader recognises it (known: {known})")


def is_there(url: str) -> bool:
    """Whether a path or URL holds a checkpoint, or a run with a committed one.

    False when nothing is there, or only what no reader and nobody else knows as a checkpoint: the log says what. Raises
    NotACheckpointError for checkpoints that ucformat does not read, and StorageError.
    """
    try:
        source = locate(url)
    except MissingFileError:
        return False
    if strangers.describe(source) is None and not any(_module(name).detect(source) for name in READERS):
        shown = ", ".join(source.store.list()[:5])
        _LOG.warning("%s: taken for a place without a checkpoint, since no reader recognises what is there (%s…)", url, shown)
        return False
    reader = detect(source)
    if reader.NAME != "native":
        return True
    from ucformat.formats import native

    return source.file is not None or native.is_committed(source.store) or native.newest_step(source.store) is not None


def open_catalog(url: str, step: int | None = None) -> Catalog:
    """The catalog of a checkpoint of any format, as `open_named`. Reads metadata only."""
    return open_named(url, step)[1]


def open_named(url: str, step: int | None = None) -> tuple[str, Catalog]:
    """The name of a checkpoint's format, and its catalog (whose notes may name an earlier origin).

    `step`: that step of a run directory, or of the slots of a snapshot directory.
    """
    source = locate(url)
    if step is not None and not _module("snapshot").detect(source):
        return open_named(f"{url.rstrip('/')}/{_module('native').step_name(step)}")
    module = detect(source)
    arguments = (source,) if step is None else (source, step)
    if module.NAME == "native":
        catalog: Catalog = module.open_catalog(*arguments)
    else:
        catalog = opened_unchanged(source, lambda: module.open_catalog(*arguments))
    if source.file is not None and catalog.store.url == source.store.url:
        catalog = replace(catalog, file=source.file)
    return str(module.NAME), catalog


def writer(name: str) -> Callable[[WriteJob], None]:
    """The `write` of a format. Raises UnsupportedError for one that can't be written."""
    if name not in WRITERS:
        raise UnsupportedError(name, f"not a format that can be written (choose from {', '.join(WRITERS)})")
    write: Callable[[WriteJob], None] = _module(name).write
    return write


def bookkeeping(origin: str) -> frozenset[str]:
    """First components of names under which a framework keeps its own records: nobody has to have a place for them.

    `origin` is that of a catalog's notes: it stays with what was converted. Unknown ones have none.
    """
    module = origin.replace("-", "_")  # readers' names have a hyphen where those of modules can't
    found: frozenset[str] = getattr(_module(module), "BOOKKEEPING", frozenset()) if module in READERS else frozenset()
    return found


VALUELESS = frozenset({"hf"})
"""Formats that hold tensors only: the value tree has no place in them."""

PICKLED = frozenset({"dcp", "torchsave"})
"""Formats whose values are pickles: stand-ins of unknown classes have no place in them."""


def taken(name: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that a format has a place for; converting leaves the others out and says so."""
    module = _module(name)
    choose: Callable[[Sequence[str]], list[str]] = getattr(module, "takes", list)
    return choose(names)

"""Which formats there are: our own, and those that other packages register as entry points of the group `ucformat.formats`.

    [project.entry-points."ucformat.formats"]
    toy = "toy_format"                          # a module with READER, WRITER or both

A package whose module can't be imported, or has neither, is skipped with a warning: it never costs the other formats.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from ucformat.errors import UnsupportedError
from ucformat.formats.contract import Reader, Writer

GROUP = "ucformat.formats"
_LOG = logging.getLogger("ucformat")

_OWN = MappingProxyType(
    {
        "snapshot": "ucformat.snapshot.recovery.folder",
        "adopted": "adopted",
        "native": "native",
        "megatron": "megatron",
        "dcp": "dcp",
        "ucp": "ucp",
        "deepspeed": "deepspeed",
        "dcp-hf": "dcp_hf",
        "fsdp-folders": "fsdp_folders",
        "hf": "hf",
        "hf-bin": "hf_bin",
        "torchsave": "torchsave",
        "snapshot-hosts": "ucformat.snapshot.recovery.gathered",
    }
)
"""Name → module, of this package unless it has dots: slots of snapshots are read by what restores them.

The first that recognises a source reads it, so the most specific come first.
"""
_OWN_WRITERS = ("native", "hf", "dcp", "torchsave", "megatron", "deepspeed", "ucp")


@dataclass(frozen=True, slots=True)
class Format:
    """What a module offers."""

    reader: Reader | None
    writer: Writer | None

    @property
    def name(self) -> str:
        found = self.reader or self.writer
        assert found is not None
        return found.name


@functools.cache
def _own(name: str) -> Format:
    place = _OWN[name]
    module = importlib.import_module(
        place if "." in place else f"ucformat.formats.{place}"
    )  # only once it is needed: some are large
    return Format(module.READER, getattr(module, "WRITER", None))


def own_readers() -> Iterator[Reader]:
    """Our readers, in the order in which they are asked."""
    for name in _OWN:
        reader = _own(name).reader
        assert reader is not None
        yield reader


@functools.cache
def registered() -> MappingProxyType[str, Format]:
    """The formats of other packages, by name. Whatever can't be used is logged once, at WARNING, and left out."""
    found: dict[str, Format] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            offered = _offered(point)
        except Exception as error:  # of any kind: it is somebody else's code
            _LOG.warning("%s: skipped, it can't be used: %s: %s", _shown(point), type(error).__name__, error)
            continue
        if offered.name in _OWN or offered.name in found:
            _LOG.warning("%s: skipped, there is another format with the name %r", _shown(point), offered.name)
            continue
        found[offered.name] = offered
    return MappingProxyType(found)


def registered_readers() -> list[Reader]:
    """The readers of other packages."""
    return [offered.reader for offered in registered().values() if offered.reader is not None]


def _offered(point: EntryPoint) -> Format:
    module = point.load()
    reader, writer = getattr(module, "READER", None), getattr(module, "WRITER", None)
    if not isinstance(reader, Reader | None) or not isinstance(writer, Writer | None):
        raise TypeError("READER must be a ucformat.formats.Reader, and WRITER a ucformat.formats.Writer")
    if reader is None and writer is None:
        raise TypeError(f"{point.value} has neither READER nor WRITER")
    if reader is not None and writer is not None and reader.name != writer.name:
        raise TypeError(f"its reader is called {reader.name!r}, its writer {writer.name!r}")
    return Format(reader, writer)


def _shown(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"entry point {point.name!r}{package}"


def reader(name: str) -> Reader | None:
    """The reader of that name, as `Notes.origin` has it; None for one that is not installed here."""
    found = _own(name) if name in _OWN else registered().get(name)
    return None if found is None else found.reader


def writer_names() -> list[str]:
    """Formats that can be written."""
    return [*_OWN_WRITERS, *(name for name, offered in registered().items() if offered.writer is not None)]


def writer(name: str) -> Writer:
    """The writer of that name. Raises UnsupportedError for a format that can't be written."""
    found = _own(name) if name in _OWN else registered().get(name)
    if found is None or found.writer is None:
        raise UnsupportedError(name, f"not a format that can be written (choose from {', '.join(writer_names())})")
    return found.writer


def known_names() -> list[str]:
    """Formats that can be read."""
    return [*_OWN, *(one.name for one in registered_readers())]

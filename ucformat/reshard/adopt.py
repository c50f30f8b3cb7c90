"""The verb `index`: a foreign checkpoint gets an index beside its files, by which it opens like a native one."""

from __future__ import annotations

from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import ChecksumError, FormatError, MissingFileError, UnsupportedError
from ucformat.formats.adopted.noting_store import NotingStore
from ucformat.formats.adopted.reader import detect
from ucformat.formats.adopted.record import NAME
from ucformat.formats.adopted.write import AdoptReport, adopt
from ucformat.formats.contract import Reader
from ucformat.formats.source import Source, locate
from ucformat.formats.unchanged import opened_unchanged
from ucformat.reshard.verify import verify

_OWN = ("native", "snapshot", NAME)


def index(where: str, *, checksums: bool = False) -> AdoptReport:
    """Put `ucf.json` and an index beside the files at `where`; see `ucformat.index`."""
    source = locate(where)
    if source.file is not None:
        raise UnsupportedError(source.url, "is one file: an index lies beside the files of a directory. Convert it to native")
    found, opened, catalog = _opened(source)
    if checksums:
        _prove_sound(catalog)
    return adopt(source.store, opened, catalog, found.name, checksums_too=checksums)


def _opened(source: Source) -> tuple[Reader, NotingStore, Catalog]:
    """The foreign reader, the store that noted what it read, and the catalog; an index that is there already is passed by."""
    opened = NotingStore(source.store, hides_index=detect(source))
    found = formats.detect(Source(opened))
    if found.name in _OWN:
        raise UnsupportedError(source.url, f"is a checkpoint of the format {found.name}, which has an index")
    opened.forget()  # what readers looked at to find out that it is not theirs
    return found, opened, opened_unchanged(Source(opened), lambda: found.open_catalog(Source(opened)))


def _prove_sound(catalog: Catalog) -> None:
    """Digests of damaged bytes would make them look right for ever. Raises ChecksumError, FormatError, MissingFileError."""
    damages = verify(catalog).damages
    if not damages:
        return
    first = damages[0]
    path = f"{catalog.url}/{first.file}" if first.file else catalog.url
    if first.start is not None and first.stop is not None:
        raise ChecksumError(path, first.start, first.stop, what=first.what)
    raise MissingFileError(path, first.what) if "missing" in first.what else FormatError(path, first.what)

"""A model as a whole: the weights at the top of its directory, and those in the folders that are parts of it.

Tensors at the top are `model/<name>`, those in a folder `model/<folder>/<name>`. The names of the weight files are
remembered in the notes (`origin_layout`), so that the writer gives each folder what its library looks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucformat import values as value_tree
from ucformat.catalog import Catalog, CatalogBuilder, File, Notes
from ucformat.containers.safetensors_header import Header, HeaderEntry
from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, MissingFileError, UcformatError, UnsupportedError
from ucformat.formats.hf import bins, files, folders, stems
from ucformat.formats.hf.files import INDEX_SUFFIX, SUFFIX, FileSet
from ucformat.formats.hf.layout import LAYOUT_KEY, MODEL
from ucformat.formats.source import Source
from ucformat.formats.torchsave import add_leaves, is_tensor, placeholders
from ucformat.naming import FILE_METADATA
from ucformat.storage.store import Store

_SHOWN = 6  # names in a remark


@dataclass(frozen=True, slots=True)
class Part:
    """The weights of one folder: `chosen` has paths from the top."""

    folder: str
    """Empty for the top."""
    chosen: FileSet
    pickled: bool
    """In `.bin` files rather than safetensors."""


def open_catalog(source: Source, name: str) -> Catalog:
    """The catalog of a directory, a file or an index; `name` is that of the reader. Reads headers, indices and pickles only.

    Raises FormatError (malformed, index and files disagree), MissingFileError, UnsupportedError, and for `.bin` files
    ChecksumError and UnsafePickleError.
    """
    store, chosen = source.store, parts(source)
    builder = CatalogBuilder(store)
    metadata: dict[str, object] = {}
    remarks: list[str] = []
    pickled: dict[str, Any] = {}
    opened: dict[str, File] = {}
    for part in chosen:
        if part.pickled:
            state, held, said = bins.read_state(store, part.chosen)
            _below(pickled, part.folder).update(state)
            opened.update(held)
        else:
            own, said = _add_part(builder, part)
            metadata.update({part.folder + "/": own} if part.folder and own else own)
        remarks += said
    kept, leaves = value_tree.split({MODEL: pickled} if pickled else {}, is_tensor)
    add_leaves(builder, leaves, opened)
    values: dict[str, object] = dict(kept) if isinstance(kept, dict) and any(part.pickled for part in chosen) else {}
    if metadata:
        values[FILE_METADATA] = metadata
    remarks += [*_without_weights(source, chosen), *placeholders(kept)]
    return builder.build(values, Notes(name, remarks=tuple(remarks), origin_layout=_layout(chosen)))


def parts(source: Source) -> tuple[Part, ...]:
    """The weights at `source` and, of a directory, in the folders that are parts of the model, the top first.

    Raises MissingFileError, FormatError, UnsupportedError when it can't be told which files are meant.
    """
    if source.file is not None:
        pickled = source.file.endswith(bins.INDEX_SUFFIX)
        return (Part("", bins.choose(source) if pickled else files.choose(source), pickled),)
    found = [part for folder in ("", *folders.parts(source.store)) if (part := _part(source.store, folder)) is not None]
    if not found:
        raise MissingFileError(source.url, "no weights here, nor in the folders that are parts of the model")
    return tuple(found)


def weight_files(source: Source) -> frozenset[str]:
    """All files of the weights, and all others of that kind in the folders that are parts of the model."""
    chosen = parts(source)
    beside = (
        f"{part.folder}/{name}"
        for part in chosen
        if part.folder
        for name in source.store.list(part.folder)
        if name.endswith((SUFFIX, INDEX_SUFFIX, bins.INDEX_SUFFIX)) or (name.endswith(bins.SUFFIX) and bins.has_weights([name]))
    )
    return frozenset([*(path for part in chosen for path in part.chosen.paths), *beside])


def has_parts(store: Store) -> bool:
    """Whether there are weights in folders that are parts of a model. Never raises on foreign input."""
    try:
        return any(_kind(store.list(folder)) is not None for folder in folders.parts(store))
    except UcformatError:
        return False


def _kind(names: Sequence[str]) -> str | None:
    """The suffix of the weights in a directory with these names; safetensors are preferred."""
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return SUFFIX
    return bins.SUFFIX if bins.has_weights(names) else None


def _part(store: Store, folder: str) -> Part | None:
    inner = store.sub(folder) if folder else store
    kind = _kind(inner.list())
    if kind is None:
        return None
    chosen = files.choose(Source(inner)) if kind == SUFFIX else bins.choose(Source(inner))
    return Part(folder, chosen.within(folder), kind == bins.SUFFIX)


def _below(tree: dict[str, Any], folder: str) -> dict[str, Any]:
    for name in folder.split("/") if folder else ():
        tree = tree.setdefault(name, {})
    return tree


def _add_part(builder: CatalogBuilder, part: Part) -> tuple[dict[str, object], Sequence[str]]:
    """Add the tensors in a set of safetensors files; what else their metadata says, and remarks."""
    headers = files.read_headers(builder.store, part.chosen)
    owners, remarks = files.owners(builder.store, part.chosen, headers)
    first = len(builder.files)
    for header in headers:
        builder.file(File(header.path, header.size))
    for number, entry in owners.values():
        _add(builder, first + number, part.folder, entry)
    tied = _aliases(headers, owners)
    for alias, target in tied.items():
        builder.alias(_canonical(part.folder, alias), _canonical(part.folder, target))
    return _metadata(headers, tied), (*part.chosen.remarks, *remarks)


def _canonical(folder: str, name: str) -> str:
    return value_tree.join_name(MODEL, *(folder.split("/") if folder else ()), name)


def _add(builder: CatalogBuilder, number: int, folder: str, entry: HeaderEntry) -> None:
    path = f"{builder.store.url}/{builder.files[number].path}"
    try:
        shape = DTYPES[entry.dtype].item_shape(entry.shape)
    except ValueError as error:
        raise UnsupportedError(path, f"tensor {entry.name!r}: {error}") from error
    if not entry.name:
        raise FormatError(path, "a tensor without a name", entry.start, entry.stop)
    canonical = _canonical(folder, entry.name)
    builder.tensor(canonical, entry.dtype, shape)
    builder.fragment(canonical, number, entry.start)


def _aliases(headers: Sequence[Header], owners: Mapping[str, object]) -> dict[str, str]:
    """Alias → kept name, from every file's metadata: entries whose value is a tensor and whose key is none."""
    pairs = (pair for header in headers for pair in header.metadata.items())
    return {alias: kept for alias, kept in pairs if kept in owners and alias and alias not in owners}


def _metadata(headers: Sequence[Header], aliases: Mapping[str, str]) -> dict[str, object]:
    """What else the files' metadata says (quantisation, model card keys); the first file that has a key counts."""
    merged: dict[str, object] = {}
    for header in headers:
        for key, value in header.metadata.items():
            if key != "format" and aliases.get(key) != value:
                merged.setdefault(key, value)
    return merged


def _layout(chosen: Sequence[Part]) -> dict[str, str]:
    """The notes on which folders hold weights and what the files there are called, as safetensors files."""
    named = {part.folder: part.chosen.stem or stems.DEFAULT for part in chosen}
    return {
        LAYOUT_KEY + part.folder: stems.of_pickled(named[part.folder]) if part.pickled else named[part.folder] for part in chosen
    }


def _without_weights(source: Source, chosen: Sequence[Part]) -> Iterator[str]:
    """Parts of a pipeline that are models by their configuration, and have no weights."""
    if source.file is not None:
        return
    held = {part.folder for part in chosen}
    bare = [
        folder
        for folder in folders.parts(source.store)
        if folder not in held and "/" not in folder and "config.json" in (names := source.store.list(folder)) and _is_model(names)
    ]
    if folders.PIPELINE in source.store.list() and bare:
        yield f"no weights that can be read in {', '.join(bare[:_SHOWN])}{'…' if len(bare) > _SHOWN else ''}"


def _is_model(names: Sequence[str]) -> bool:
    """Whether a component with these files has weights in its library: others have a preprocessor or a vocabulary."""
    return not any(name.startswith(("preprocessor", "tokenizer", "vocab")) for name in names)

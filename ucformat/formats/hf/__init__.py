"""Hugging Face safetensors: one file, several, or several with an index.

Reading: tensors are `model/<name>`; tied names come from `__metadata__`, where safetensors' own `save_model` puts
them. Writing (see `hf.writer`): model tensors whole, in files that `from_pretrained` loads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ucformat import values as value_tree
from ucformat.catalog import Catalog, CatalogBuilder, File, Notes
from ucformat.containers.safetensors_header import LENGTH_BYTES, Header, HeaderEntry
from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, UcformatError, UnsupportedError
from ucformat.formats.hf import files
from ucformat.formats.hf.writer import METADATA_KEY, MODEL, takes, write
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NAME = "hf"
BOOKKEEPING = frozenset({METADATA_KEY})
OWNS = re.compile(
    r"((diffusion_pytorch_|pytorch_)?model(-\d+-of-\d+)?\.safetensors|(diffusion_)?pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?"
)
"""The weights that libraries look for, pickled ones beside them included: they are of the same model."""
choose = files.choose
__all__ = ["BOOKKEEPING", "NAME", "OWNS", "choose", "detect", "open_catalog", "takes", "write"]

_OTHERS = (b"DCP_SHARDING_INFO", b'"ucf":"{')
"""Metadata keys of formats that also keep fragments in safetensors files: DCP's distributed HF form, our shards."""
_SNIFF_BYTES = 4096  # __metadata__ comes first in a header


def detect(source: Source) -> bool:
    """Whether this is a Hugging Face file or directory; never raises on foreign input."""
    try:
        if source.file is not None:
            named = source.file.endswith((files.SUFFIX, files.INDEX_SUFFIX))
            return named and not _foreign(source.store, source.file)
        names = source.store.list()
        if "ucf.json" in names or ".metadata" in names:
            return False
        weights = [name for name in names if name.endswith(files.SUFFIX)]
        if not weights:
            return any(name.endswith(files.INDEX_SUFFIX) for name in names)
        return not _foreign(source.store, weights[0])
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of a file or directory. Reads headers and the index only.

    Raises FormatError (malformed, index and files disagree), MissingFileError, UnsupportedError.
    """
    chosen = files.choose(source)
    headers = files.read_headers(source.store, chosen)
    owners, remarks = files.owners(source.store, chosen, headers)
    builder = CatalogBuilder(source.store)
    for header in headers:
        builder.file(File(header.path, header.size))
    for name, (number, entry) in owners.items():
        _add(builder, number, name, entry)
    kept = _aliases(headers, owners)
    for alias, target in kept.items():
        builder.alias(_canonical(alias), _canonical(target))
    metadata = _metadata(headers, kept)
    values: dict[str, object] = {METADATA_KEY: metadata} if metadata else {}
    return builder.build(values, Notes(origin=NAME, remarks=(*chosen.remarks, *remarks)))


def _canonical(name: str) -> str:
    return value_tree.join_name(MODEL, name)


def _add(builder: CatalogBuilder, number: int, name: str, entry: HeaderEntry) -> None:
    path = f"{builder.store.url}/{builder.files[number].path}"
    try:
        shape = DTYPES[entry.dtype].item_shape(entry.shape)
    except ValueError as error:
        raise UnsupportedError(path, f"tensor {name!r}: {error}") from error
    if not name:
        raise FormatError(path, "a tensor without a name", entry.start, entry.stop)
    canonical = _canonical(name)
    builder.tensor(canonical, entry.dtype, shape)
    builder.fragment(canonical, number, entry.start)


def _aliases(headers: Sequence[Header], owners: Mapping[str, object]) -> dict[str, str]:
    """Alias → kept name, from every file's metadata: entries whose value is a tensor and whose key is none."""
    pairs = (pair for header in headers for pair in header.metadata.items())
    return {alias: kept for alias, kept in pairs if kept in owners and alias and alias not in owners}


def _metadata(headers: Sequence[Header], aliases: Mapping[str, str]) -> dict[str, str]:
    """What else the files' metadata says (quantisation, model card keys); the first file that has a key counts."""
    merged: dict[str, str] = {}
    for header in headers:
        for key, value in header.metadata.items():
            if key != "format" and aliases.get(key) != value:
                merged.setdefault(key, value)
    return merged


def _foreign(store: Store, path: str) -> bool:
    """Whether the file's leading metadata belongs to another format built on safetensors."""
    lead = store.read(path, 0, min(store.size(path), LENGTH_BYTES + _SNIFF_BYTES))
    return any(marker in lead for marker in _OTHERS)

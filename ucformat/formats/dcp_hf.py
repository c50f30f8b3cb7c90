"""DCP's distributed Hugging Face form: safetensors shards whose metadata says which box of a tensor each entry is.

There is no index and no global shape: a tensor's shape is the extent of its boxes. So a lost last shard can't be told
from a smaller tensor (a remark says when shard numbers are missing); a hole is reported by the planner before anything
is read. What DCP consolidates out of these files is a plain Hugging Face directory, which `hf` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from ucformat import values
from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, File, Notes
from ucformat.containers.safetensors_header import Header, HeaderEntry, distinct, is_safetensors, read_header
from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, UcformatError, UnsupportedError
from ucformat.formats import owned
from ucformat.formats.contract import Reader
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NAME = "dcp-hf"
KEY = "DCP_SHARDING_INFO"
_SUFFIX = ".safetensors"
_SNIFF_BYTES = 4096  # __metadata__ comes first in a header
_SHARD = re.compile(r"shard-(\d{1,9})-.*\.safetensors")  # numbers start at 1
_INT64 = 1 << 63
_SHOWN = 5  # missing numbers in a remark


def detect(source: Source) -> bool:
    """Whether this is a directory of shards that DCP's Hugging Face writer left; never raises on foreign input."""
    if source.file is not None:
        return False
    try:
        shards = _shards(source.store)
        return bool(shards) and _has_boxes(source.store, shards[0])
    except UcformatError:
        return False


def _shards(store: Store) -> list[str]:
    return [name for name in store.list() if name.endswith(_SUFFIX)]


def _has_boxes(store: Store, path: str) -> bool:
    return is_safetensors(store, path) and KEY.encode() in store.read(path, 0, min(_SNIFF_BYTES, store.size(path)))


def open_catalog(source: Source) -> Catalog:
    """The catalog of a directory of shards. Reads headers only.

    Raises FormatError when entries and boxes disagree, UnsupportedError.
    """
    names = _shards(source.store)
    headers = [read_header(source.store, name) for name in names]
    boxes: dict[str, list[tuple[int, HeaderEntry, Box]]] = {}
    for number, header in enumerate(headers):
        offsets = _offsets(header)
        for entry in header.entries:
            boxes.setdefault(entry.name, []).append((number, entry, _box(header, entry, offsets.get(entry.name))))
    builder = CatalogBuilder(source.store)
    for header in headers:
        builder.file(File(header.path, header.size))
    for name, held in boxes.items():
        _add(builder, name, held)
    inferred = "tensor shapes are inferred from the shards: this format does not record them"
    return builder.build({}, Notes(NAME, remarks=(inferred, *_gaps(names))))


def _gaps(names: Iterable[str]) -> Iterator[str]:
    """A remark when shard numbers are missing: their ranks had nothing to write, or their files are lost."""
    held = {int(found.group(1)) for found in map(_SHARD.fullmatch, names) if found}
    last = max(held, default=0)
    if len(held) < last:
        missing = [number for number in range(1, min(last, len(held) + _SHOWN + 1)) if number not in held][:_SHOWN]
        yield f"no files of shards {', '.join(map(str, missing))}… of at least {last}: nothing to write there, or lost"


def _offsets(header: Header) -> dict[str, list[int]]:
    """Name → saved offsets, from the file's metadata."""
    try:
        told = json.loads(header.metadata[KEY], object_pairs_hook=distinct)
        return {name: _checked(info["saved_offsets"]) for name, info in told.items()}
    except KeyError as error:
        raise FormatError(header.path, f"its metadata lacks {error}: not one of the shards beside it") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(header.path, f"malformed {KEY}: {error}") from error


def _checked(offsets: object) -> list[int]:
    if not isinstance(offsets, list) or not all(type(n) is int and 0 <= n < _INT64 for n in offsets):
        raise ValueError(f"{offsets!r:.80} are no offsets")
    return offsets


def _box(header: Header, entry: HeaderEntry, offsets: list[int] | None) -> Box:
    """The box of an entry; one that the metadata does not mention is a whole tensor."""
    try:
        shape = DTYPES[entry.dtype].item_shape(entry.shape)
    except ValueError as error:
        raise UnsupportedError(header.path, f"tensor {entry.name!r}: {error}") from error
    if offsets is None:
        return Box.whole(shape)
    if len(offsets) != len(shape) or any(o + n >= _INT64 for o, n in zip(offsets, shape, strict=True)):
        raise FormatError(
            header.path, f"tensor {entry.name!r}: offsets {offsets} for shape {list(shape)}", entry.start, entry.stop
        )
    return Box(tuple(offsets), shape)


def _add(builder: CatalogBuilder, name: str, held: list[tuple[int, HeaderEntry, Box]]) -> None:
    """Declare a tensor by the extent of its boxes; of equal boxes (replicas) the first counts."""
    _, first, box = held[0]
    for number, entry, other in held:
        if entry.dtype != first.dtype or len(other.length) != len(box.length):
            path = builder.files[number].path
            raise FormatError(
                path, f"tensor {name!r} has another dtype or rank than in the other shards", entry.start, entry.stop
            )
    extent = [max((b.offset[d] + b.length[d] for _, _, b in held), default=0) for d in range(len(box.length))]
    canonical = values.join_name("model", name)
    builder.tensor(canonical, first.dtype, extent)
    seen: set[Box] = set()
    for number, entry, own in held:
        if own not in seen:
            seen.add(own)
            builder.fragment(canonical, number, entry.start, own)


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    owned_files=owned.by_pattern(r"[^/]*\.safetensors"),  # all of them, as the reader takes all
)

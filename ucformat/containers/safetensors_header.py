"""The header of a safetensors file, by byte range: a strict parser and the matching builder.

Readers of every format that is built on safetensors (native shards, Hugging Face, DCP's HF form) call `read_header`;
nothing beyond the header is ever read here. A file that passes has entries that tile its data section exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError
from ucformat.storage.store import Bytes, Store

MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors library itself sets
MAX_DIMENSIONS = 64  # as torch and numpy; also bounds the work that a hostile shape can cause
MAX_NUMBERS = 1 << 63  # element and byte counts are int64 everywhere
LENGTH_BYTES = 8  # little-endian length of the JSON that follows

_KEYS = frozenset(("dtype", "shape", "data_offsets"))

_WIDTH: dict[str, tuple[int, int]] = {
    kind.stored: (kind.group[0], kind.group[1] * kind.itemsize) for kind in DTYPES.values() if kind.name == kind.stored
}
"""dtype in a header → (numbers, bytes that so many numbers take)."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: dtype and shape as the header states them, bytes [start, stop) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. `entries` are in the order of their bytes and tile [data_start, size)."""

    path: str
    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]
    data_start: int
    size: int


def read_header(store: Store, path: str) -> Header:
    """Read and check the header of the safetensors file `path`.

    Raises FormatError naming tensor and byte range for every breach of the format, MissingFileError, StorageError.
    """
    size, where = store.size(path), f"{store.url}/{path}"
    data_start = _data_start(where, store.read(path, 0, min(size, LENGTH_BYTES)), size)
    return parse_header(path, where, store.read(path, LENGTH_BYTES, data_start), size)


def header_of(where: str, data: Bytes) -> Header:
    """The header of a whole file that was read. Raises FormatError as `read_header`."""
    data_start = _data_start(where, data[:LENGTH_BYTES].tobytes(), len(data))
    return parse_header(where, where, data[LENGTH_BYTES:data_start].tobytes(), len(data))


def _data_start(where: str, lead: bytes, size: int) -> int:
    """Where the header says that the data begins."""
    if size < LENGTH_BYTES:
        why = f"a safetensors file has at least {LENGTH_BYTES} bytes, this one {size}"
        raise FormatError(where, why, 0, size, "header.length")
    length = int.from_bytes(lead, "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            where, f"header length {length} is above the limit of {MAX_HEADER_BYTES}", 0, LENGTH_BYTES, "header.length"
        )
    if LENGTH_BYTES + length > size:
        raise FormatError(where, f"header of {length} bytes is cut off: the file has {size}", LENGTH_BYTES, size, "header.length")
    return LENGTH_BYTES + length


def parse_header(path: str, where: str, raw: bytes, size: int) -> Header:
    """The header whose JSON is `raw`, in a file of `size` bytes that messages call `where`. Raises FormatError."""
    data_start = LENGTH_BYTES + len(raw)
    tree = _parse(where, raw, data_start)
    metadata = _metadata(where, tree.pop("__metadata__", {}), data_start)
    entries = sorted((_entry(where, name, item, data_start, size) for name, item in tree.items()), key=_order)
    _prove_tiling(where, entries, data_start, size)
    return Header(path, tuple(entries), metadata, data_start, size)


def is_safetensors(store: Store, path: str) -> bool:
    """Whether the first bytes of an existing file look like a safetensors header; reads 9 bytes."""
    size = store.size(path)
    if size <= LENGTH_BYTES:
        return False
    lead = store.read(path, 0, LENGTH_BYTES + 1)
    return int.from_bytes(lead[:LENGTH_BYTES], "little") <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES) and lead[8:] == b"{"


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor whose header says so. Raises KeyError for an unknown dtype, ValueError for a part of a byte."""
    numbers, width = _WIDTH[dtype]
    groups, rest = divmod(math.prod(shape), numbers)
    if rest:
        raise ValueError(f"{dtype} needs a multiple of {numbers} numbers")
    return groups * width


def build_header(entries: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """Length and JSON for (name, header dtype, header shape) whose bytes follow one another in that order.

    Padded with spaces so that the data starts at a multiple of `align` bytes.
    """
    tree: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + nbytes(dtype, shape)
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % align)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _order(entry: HeaderEntry) -> tuple[int, int]:
    return entry.start, entry.stop


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """`object_pairs_hook` of json.loads that raises ValueError on a key that appears twice."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {again!r} appears twice")
    return tree


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _parse(where: str, raw: bytes, data_start: int) -> dict[str, object]:
    """The JSON object in `raw`, keys distinct on every level."""
    if raw[:1] != b"{":
        raise FormatError(where, "the safetensors header is not a JSON object", LENGTH_BYTES, data_start, "header.json")
    try:
        tree = json.loads(raw.decode(), object_pairs_hook=distinct, parse_constant=_refuse_constant)
        "".join(tree).encode()  # lone surrogates are no text
    except (ValueError, RecursionError) as error:
        clause = "header.twice" if "appears twice" in str(error) else "header.json"
        raise FormatError(where, f"malformed safetensors header: {error}", LENGTH_BYTES, data_start, clause) from error
    checked: dict[str, object] = tree
    return checked


def _metadata(where: str, found: object, data_start: int) -> dict[str, str]:
    if not isinstance(found, dict):
        raise FormatError(where, "__metadata__ is not an object of strings", LENGTH_BYTES, data_start, "header.ucf")
    for key, value in found.items():
        if not isinstance(value, str):
            raise FormatError(where, f"__metadata__ {key!r} is not a string", LENGTH_BYTES, data_start, "header.ucf")
    return found


def _entry(where: str, name: str, item: object, data_start: int, size: int) -> HeaderEntry:
    """One checked entry; offsets become bytes of the file."""
    if not isinstance(item, dict) or not item.keys() >= _KEYS:
        raise FormatError(
            where, f"tensor {name!r}: needs dtype, shape and data_offsets", LENGTH_BYTES, data_start, "header.entry"
        )
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTH:
        raise FormatError(where, f"tensor {name!r}: unknown dtype {dtype!r}", LENGTH_BYTES, data_start, "header.entry")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise FormatError(where, f"tensor {name!r}: {_short(shape)} is no shape", LENGTH_BYTES, data_start, "header.entry")
    if not _counts(offsets) or len(offsets) != 2:
        raise FormatError(
            where, f"tensor {name!r}: {_short(offsets)} are no byte offsets", LENGTH_BYTES, data_start, "header.entry"
        )
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if start > stop or stop > size:
        raise FormatError(where, f"tensor {name!r}: lies outside the file of {size} bytes", start, stop, "header.tiling")
    try:
        wanted = nbytes(dtype, shape)
    except ValueError as error:
        raise FormatError(where, f"tensor {name!r}: {error}", start, stop, "header.entry") from error
    if wanted != stop - start:
        raise FormatError(
            where, f"tensor {name!r}: {dtype} {shape} takes {wanted} bytes, not {stop - start}", start, stop, "header.entry"
        )
    return HeaderEntry(name, dtype, tuple(shape), start, stop)


def _counts(found: object) -> TypeGuard[list[int]]:
    """Whether `found` is a list of whole numbers in [0, 2^63); JSON's true and false are none."""
    return isinstance(found, list) and all(type(n) is int and 0 <= n < MAX_NUMBERS for n in found)


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 80 else text[:77] + "..."


def _prove_tiling(where: str, entries: Sequence[HeaderEntry], data_start: int, size: int) -> None:
    """No holes, no overlaps, nothing behind the last tensor."""
    end, before = data_start, ""
    for entry in entries:
        if entry.start < end:
            raise FormatError(
                where, f"tensor {entry.name!r} overlaps tensor {before!r}", entry.start, min(end, entry.stop), "header.tiling"
            )
        if entry.start > end:
            raise FormatError(where, f"no tensor owns the bytes before tensor {entry.name!r}", end, entry.start, "header.tiling")
        end, before = entry.stop, entry.name
    if end != size:
        raise FormatError(where, f"{size - end} bytes behind the last tensor", end, size, "header.tiling")

"""Writing the zip that torch.save writes, record by record: offsets and sizes are known before any byte is.

Used for torch.save files and for the items of DCP files. Records are stored and 64-aligned from the start of the zip;
sizes and CRCs follow the data, so bytes stream through once and in order.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucformat.containers.checksums import crc32, crc32_combine
from ucformat.containers.file_image import Filled
from ucformat.dtypes import DTYPES
from ucformat.lazy_torch import torch
from ucformat.storage.store import Bytes

ALIGN_BYTES = 64  # what torch itself aligns records to
_BUFFER_BYTES = 1 << 20  # small records gather here: one write instead of thousands
_LIMIT32 = 0xFFFFFFFF
_FLAGS = 0x808  # sizes after the data; names are UTF-8
_DATE = 0x21  # 1980-01-01: equal state gives equal files
_TYPED: dict[str, str] = {
    "F32": "FloatStorage", "F64": "DoubleStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage",
    "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage",
    "U8": "ByteStorage", "BOOL": "BoolStorage", "C64": "ComplexFloatStorage", "C128": "ComplexDoubleStorage",
}  # fmt: skip
"""dtype → the class of its storage, in torch."""


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A tensor to be written, as a leaf of the tree: its items, row-major, are the record `data/<key>`."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class OutgoingObject:
    """An object of a class that is not installed here: the program that reads the file makes it, and sets its attributes."""

    module: str
    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """Stands for a class by its name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    owner: Outgoing


def pickle_tree(tree: Any) -> bytes:
    """The `data.pkl` of a tree of plain values, `Outgoing` leaves and `OutgoingObject`s."""
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(tree)
    return out.getvalue()


class _Pickler(pickle._Pickler):
    """Pickles `Outgoing` leaves as torch pickles tensors. In Python's own form, which can name a class without having it."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:  # the signature is pickle's
        if isinstance(obj, _Class):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())  # type: ignore[attr-defined]
        elif isinstance(obj, OutgoingObject):
            made = (_Class(obj.module, obj.name),)
            self.save_reduce(copyreg.__newobj__, made, dict(obj.attributes))  # type: ignore[attr-defined]
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Outgoing):
            return NotImplemented
        steps: list[int] = [1]
        for n in reversed(obj.shape[1:]):
            steps.append(steps[-1] * max(n, 1))
        stride = tuple(reversed(steps)) if obj.shape else ()
        hooks: OrderedDict[str, object] = OrderedDict()
        common = (_Storage(obj), 0, obj.shape, stride, False, hooks)
        if obj.dtype in _TYPED:
            return torch._utils._rebuild_tensor_v2, common
        return torch._utils._rebuild_tensor_v3, (*common, DTYPES[obj.dtype].torch)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = _TYPED.get(obj.owner.dtype)
        if kind is None:
            return ("storage", torch.UntypedStorage, obj.owner.key, "cpu", obj.owner.nbytes)
        return ("storage", getattr(torch, kind), obj.owner.key, "cpu", obj.owner.nbytes // DTYPES[obj.owner.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class _Written:
    name: bytes
    header: int
    size: int
    crc: int


class RecordWriter:
    """Writes one zip of records below the folder `top`, from byte `origin` of a file, through `put(start, bytes)`.

    Without `put` nothing is written and CRCs are wrong: that is how sizes are found (see `zip_size`).
    """

    def __init__(self, put: Callable[[int, Bytes], None] | None, top: str, origin: int = 0) -> None:
        self._put, self._top, self._origin = put, top, origin
        self._at = origin
        self._buffer = bytearray()
        self._written: list[_Written] = []
        self._open: _Written | None = None

    @property
    def at(self) -> int:
        """The file offset of the next byte."""
        return self._at

    def add(self, name: str, data: bytes) -> None:
        """A whole record."""
        self.begin(name, len(data))
        self.append(np.frombuffer(data, dtype=np.uint8))
        self.end()

    def begin(self, name: str, size: int) -> None:
        """Start a record of `size` bytes; its bytes follow through `append`, then `end`."""
        path = f"{self._top}/{name}".encode()
        header, zip_at = self._at, self._at - self._origin
        pad = -(zip_at + 30 + len(path) + 4) % ALIGN_BYTES
        extra = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        self._emit(struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, _DATE, 0, 0, 0, len(path), len(extra)) + path + extra)
        self._open = _Written(path, header, size, 0)

    def append(self, data: Bytes, crc: int | None = None) -> None:
        """The next bytes of the open record, and their crc32 if it is known."""
        assert self._open is not None
        before = self._open.crc
        crc = crc32(data.data, before) if crc is None else crc32_combine(before, crc, len(data))
        self._open = _Written(self._open.name, self._open.header, self._open.size, crc)
        if len(data) < _BUFFER_BYTES:
            self._emit(data.tobytes())
            return
        self._flush()
        if self._put is not None:
            self._put(self._at, data)
        self._at += len(data)

    def add_stream(self, name: str, size: int, chunks: Iterator[Filled], on_bytes: Callable[[int], None] | None) -> None:
        """A whole record of `size` bytes, from the next of `chunks` (see `file_image.stream`)."""
        self.begin(name, size)
        left = size
        while left:
            part = next(chunks)
            self.append(part.data, part.crc)
            left -= len(part.data)
            if on_bytes is not None:
                on_bytes(len(part.data))
        self.end()

    def skip(self) -> None:
        """Pass over the open record's bytes, when only sizes matter."""
        assert self._open is not None
        self._flush()
        self._at += self._open.size

    def end(self) -> None:
        """Close the open record."""
        assert self._open is not None
        done, wide = self._open, self._open.size >= _LIMIT32
        self._emit(struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\x07\x08", done.crc, done.size, done.size))
        self._written.append(done)
        self._open = None

    def close(self) -> int:
        """Write the directory; the file offset behind the zip."""
        start = self._at - self._origin
        for record in self._written:
            self._emit(_central(record, record.header - self._origin))
        count, size = len(self._written), self._at - self._origin - start
        if count >= 0xFFFF or start >= _LIMIT32 or size >= _LIMIT32:
            end = self._at - self._origin
            self._emit(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._emit(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        few, short = min(count, 0xFFFF), min(size, _LIMIT32)
        self._emit(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, short, min(start, _LIMIT32), 0))
        self._flush()
        return self._at

    def _emit(self, data: bytes) -> None:
        self._at += len(data)
        if self._put is None:
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hand the gathered bytes on; `_at` counts them already."""
        if self._put is not None and self._buffer:
            self._put(self._at - len(self._buffer), np.frombuffer(bytes(self._buffer), dtype=np.uint8))
            self._buffer.clear()


def _central(record: _Written, header: int) -> bytes:
    """The record's line of the directory; sizes that overflow 32 bits go into a zip64 extra field."""
    wide = [value for value in (record.size, record.size, header) if value >= _LIMIT32]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset, version = min(record.size, _LIMIT32), min(header, _LIMIT32), 45 if wide else 20
    lengths = (len(record.name), len(extra))
    head = (b"PK\x01\x02", version, version, _FLAGS, 0, 0, _DATE, record.crc, size, size, *lengths, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", *head) + record.name + extra


def write_head(out: RecordWriter, data_pkl: bytes) -> None:
    """The records that precede tensor data in every file."""
    out.add("data.pkl", data_pkl)
    out.add(".format_version", b"1")
    out.add(".storage_alignment", str(ALIGN_BYTES).encode())
    out.add("byteorder", b"little")


def write_tail(out: RecordWriter) -> int:
    """What follows tensor data; the file offset behind the zip."""
    out.add("version", b"3\n")
    return out.close()


def zip_size(top: str, data_pkl: bytes, leaves: Iterable[Outgoing], origin: int = 0) -> int:
    """Bytes of the whole zip."""
    out = RecordWriter(None, top, origin)
    write_head(out, data_pkl)
    for leaf in leaves:
        out.begin(f"data/{leaf.key}", leaf.nbytes)
        out.skip()
        out.end()
    return write_tail(out) - origin

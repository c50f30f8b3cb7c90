"""The zip directory of a torch.save file: which bytes of the file are which record. Records are stored, not deflated.

Works on a zip that lies anywhere in a file (DCP puts thousands of them back to back). Sizes and CRCs come from the
central directory, since torch leaves them zero in the local headers; where a record's data starts comes from its
local header, which torch pads to align the data.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ucformat.catalog import Checks, StaticChecks
from ucformat.errors import FormatError, UnsupportedError
from ucformat.storage.store import Store

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_TAIL_BYTES = 4096  # end records and the directory of a few entries: all of it for a DCP item
_COMMENT_BYTES = 65535  # the longest comment that a zip can end in
_MAX_DIRECTORY = 1 << 30  # bytes; ten million records
_GAP_BYTES = 4096  # cheaper to read than to ask for separately
_SPAN_BYTES = 2 << 20  # of one read: many small records at once, and no large one
_BATCH = 4096  # records whose local headers are fetched at once: 16 MiB with the gaps between them
_THREADS = 8  # reads of a few hundred bytes wait for latency, not for bandwidth
_FEW = 16  # records: more than a DCP item has, whose headers are at hand already
_MAX32 = 0xFFFFFFFF  # a 32-bit size that stands for "see the zip64 field"


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One record: `size` bytes at `start` of the file, from its first byte. `crc` is None where torch wrote none."""

    name: str
    start: int
    size: int
    crc: int | None

    @property
    def stop(self) -> int:
        return self.start + self.size


class Peek:
    """Small reads of one file, fetched together: `prefetch` many ranges, then `get` them."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._starts: list[int] = []
        self._spans: list[bytes] = []

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read the ranges, near ones in one go; what was prefetched before is dropped."""
        spans: list[list[int]] = []
        for start, stop in sorted(ranges):
            if spans and start - spans[-1][1] <= _GAP_BYTES and max(stop, spans[-1][1]) - spans[-1][0] <= _SPAN_BYTES:
                spans[-1][1] = max(stop, spans[-1][1])
            else:
                spans.append([start, stop])
        self._starts = [span[0] for span in spans]
        if len(spans) < 4:
            self._spans = [self._store.read(self._path, *span) for span in spans]
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            self._spans = list(pool.map(lambda span: self._store.read(self._path, *span), spans))

    def get(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), read now when they were not prefetched."""
        i = bisect_right(self._starts, start) - 1
        if i >= 0 and stop <= self._starts[i] + len(self._spans[i]):
            base = self._starts[i]
            return self._spans[i][start - base : stop - base]
        return self._store.read(self._path, start, stop)


@dataclass(frozen=True, slots=True)
class _Record:
    """A line of the central directory. `header` is the file offset of the local header."""

    name: str
    header: int
    size: int
    crc: int


def tail_range(start: int, stop: int) -> tuple[int, int]:
    """The bytes of a zip in [start, stop) that hold its directory, when that is small."""
    return max(start, stop - _TAIL_BYTES), stop


def zip_entries(
    store: Store, path: str, start: int = 0, stop: int | None = None, peek: Peek | None = None
) -> dict[str, ZipEntry]:
    """The records of the torch.save zip in bytes [start, stop) of a file, by name in the archive.

    Raises FormatError when the zip is damaged or hostile (records outside, overlapping, twice, with paths that leave
    the archive), UnsupportedError when records are compressed or encrypted, or when it is no zip at all.
    """
    stop = store.size(path) if stop is None else stop
    peek = peek or Peek(store, path)
    count, directory, directory_stop = _find_directory(peek, path, start, stop)
    records = _records(peek.get(directory, directory_stop), count, path, start, directory)
    starts = _data_starts(store, path, peek, records, directory)
    checked = any(record.crc for record in records)  # torch writes zeros when CRCs are switched off
    entries = [ZipEntry(r.name, data, r.size, r.crc if checked else None) for r, data in zip(records, starts, strict=True)]
    limit = directory
    for record, entry in sorted(zip(records, entries, strict=True), key=lambda pair: -pair[0].header):
        if entry.stop > limit:
            raise FormatError(path, f"zip record {entry.name!r} overlaps what follows it", entry.start, entry.stop)
        limit = record.header
    return {entry.name: entry for entry in entries}


def checks_of(entries: Iterable[ZipEntry]) -> StaticChecks | None:
    """The CRCs of records of one file as its checksums; None when none has any."""
    known = sorted((e for e in entries if e.crc is not None and e.size), key=lambda e: e.start)
    if not known:
        return None
    return StaticChecks(
        Checks(
            "crc32",
            np.array([e.start for e in known], dtype=np.int64),
            np.array([e.stop for e in known], dtype=np.int64),
            np.array([e.crc for e in known], dtype=np.uint64),
        )
    )


def _find_directory(peek: Peek, path: str, start: int, stop: int) -> tuple[int, int, int]:
    """(records, first byte, last byte + 1) of the central directory, from the end records."""
    low, _ = tail_range(start, stop)
    at, end = _find_end(peek.get(low, stop), low, stop)
    if end is None and low > start:
        low = max(start, stop - _COMMENT_BYTES - _END.size)
        at, end = _find_end(peek.get(low, stop), low, stop)
    if end is None:
        _refuse_other(peek.get(start, min(stop, start + 512)), path, start, stop)
        raise FormatError(path, "a zip without its end record: the file is truncated", start, stop)
    _, _, _, _, count, size, offset, _ = end
    limit = at
    if at - _LOCATOR.size >= start:
        signature, _, offset64, _ = _LOCATOR.unpack(peek.get(at - _LOCATOR.size, at))
        if signature == b"PK\x06\x07":
            limit = start + offset64
            if limit + _END64.size > at:
                raise FormatError(path, "the zip64 end record lies outside the file", at - _LOCATOR.size, at)
            fields = _END64.unpack(peek.get(limit, limit + _END64.size))
            if fields[0] != b"PK\x06\x06":
                raise FormatError(path, "the zip64 end record is damaged", limit, limit + _END64.size)
            count, size, offset = fields[7], fields[8], fields[9]
    first = start + offset
    if first + size > limit or size > _MAX_DIRECTORY or count * _CENTRAL.size > size:
        raise FormatError(path, "the zip directory lies outside the file, or is larger than its records need", at, stop)
    return count, first, first + size


def _find_end(tail: bytes, low: int, stop: int) -> tuple[int, tuple[bytes, int, int, int, int, int, int, int] | None]:
    """File offset and fields of the end record: the last one whose comment ends where the zip does."""
    found = tail.rfind(b"PK\x05\x06")
    while found >= 0:
        if found + _END.size <= len(tail):
            fields = _END.unpack_from(tail, found)
            if low + found + _END.size + fields[7] == stop:
                return low + found, fields
        found = tail.rfind(b"PK\x05\x06", 0, found)
    return 0, None


def _refuse_other(head: bytes, path: str, start: int, stop: int) -> None:
    """Raise for what torch.save wrote before 1.6: a bare pickle, or a tar."""
    resave = "re-save it with a current torch: torch.save(torch.load(file, weights_only=True), file)"
    if head[:1] == b"\x80" or head[:2] in (b"(l", b"(d", b"cc"):
        raise UnsupportedError(path, f"a legacy torch.save file (a pickle, not a zip): {resave}")
    if head[257:262] == b"ustar":
        raise UnsupportedError(path, f"a legacy torch.save file (a tar, not a zip): {resave}")
    if not head.startswith(b"PK"):
        raise FormatError(path, "not a torch.save file: no zip", start, stop)


def _records(directory: bytes, count: int, path: str, start: int, base: int) -> list[_Record]:
    records: dict[str, _Record] = {}
    at = 0
    for _ in range(count):
        record, at = _record(directory, at, path, start, base)
        if record.name in records:
            raise FormatError(path, f"zip record {record.name!r} is there twice", record.header)
        records[record.name] = record
    return list(records.values())


def _record(directory: bytes, at: int, path: str, start: int, base: int) -> tuple[_Record, int]:
    """The record at `at` of the directory, and where the next one is."""
    body = at + _CENTRAL.size
    if body > len(directory):
        raise FormatError(path, "the zip directory is truncated", base + at)
    (signature, _, _, flags, method, _, _, crc, packed, size, name_len, extra_len, comment_len, _, _, _, header) = (
        _CENTRAL.unpack_from(directory, at)
    )
    end = body + name_len + extra_len + comment_len
    if signature != b"PK\x01\x02" or end > len(directory):
        raise FormatError(path, "the zip directory is damaged", base + at)
    try:
        name = directory[body : body + name_len].decode()
    except UnicodeDecodeError:
        raise FormatError(path, "a zip record's name is no UTF-8", base + body, base + body + name_len) from None
    if method != 0 or flags & 0x1 or flags & 0x40:
        raise UnsupportedError(path, f"zip record {name!r} is compressed or encrypted: torch.save never does that")
    if _MAX32 in (size, packed, header):
        extra = directory[body + name_len : body + name_len + extra_len]
        size, packed, header = _zip64(extra, size, packed, header, path, base + at)
    if size != packed:
        raise FormatError(path, f"zip record {name!r} has two sizes, {size} and {packed}", base + at)
    if not name or "\0" in name or "\\" in name or name.startswith("/") or ".." in name.split("/"):
        raise FormatError(path, f"zip record {name!r}: a name that leaves the archive", base + at)
    if start + header + _LOCAL.size + name_len + size > base:
        raise FormatError(path, f"zip record {name!r} lies outside the archive", start + header, start + header + size)
    return _Record(name, start + header, size, crc), end


def _zip64(extra: bytes, size: int, packed: int, header: int, path: str, at: int) -> tuple[int, int, int]:
    """Sizes and offset with those that overflow 32 bits taken from the zip64 extra field."""
    where = 0
    while where + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, where)
        if kind == 1:
            values = list(struct.unpack_from(f"<{min(length, len(extra) - where - 4) // 8}Q", extra, where + 4))
            wanted = [size, packed, header]
            if len(values) < wanted.count(_MAX32):
                break
            full = [values.pop(0) if value == _MAX32 else value for value in wanted]
            return full[0], full[1], full[2]
        where += 4 + length
    raise FormatError(path, "the zip64 sizes of a record are missing", at)


def _data_starts(store: Store, path: str, peek: Peek, records: Sequence[_Record], directory: int) -> list[int]:
    """Where each record's data starts, by its local header."""
    if len(records) <= _FEW:
        return [_data_start(path, peek, record, directory) for record in records]
    starts = [0] * len(records)
    order = sorted(range(len(records)), key=lambda i: records[i].header)
    headers = Peek(store, path)
    for first in range(0, len(order), _BATCH):
        batch = order[first : first + _BATCH]
        headers.prefetch(_header(records[i], directory) for i in batch)
        for i in batch:
            starts[i] = _data_start(path, headers, records[i], directory)
    return starts


def _header(record: _Record, directory: int) -> tuple[int, int]:
    return record.header, min(directory, record.header + _LOCAL.size)


def _data_start(path: str, peek: Peek, record: _Record, directory: int) -> int:
    signature, *_, name_len, extra_len = _LOCAL.unpack(peek.get(*_header(record, directory)))
    data: int = record.header + _LOCAL.size + name_len + extra_len
    if signature != b"PK\x03\x04" or data + record.size > directory:
        raise FormatError(path, f"the local header of zip record {record.name!r} is damaged", record.header, data)
    return data


def without_prefix(entries: Mapping[str, ZipEntry], path: str) -> dict[str, ZipEntry]:
    """Records by their name below the archive's top folder ("data.pkl", "data/0"). Raises FormatError."""
    tops = {name.split("/", 1)[0] for name in entries}
    if len(tops) != 1 or any("/" not in name for name in entries):
        raise FormatError(path, "a zip, but none that torch.save writes: its records are not in one folder")
    return {name.split("/", 1)[1]: entry for name, entry in entries.items()}

"""The record in the `ucf.json` of an adopted checkpoint, and the checksums of its files as columns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ucformat.catalog import Algorithm, Checks
from ucformat.containers.envelope import seal, unseal
from ucformat.containers.safetensors_header import build_header, header_of
from ucformat.errors import FormatError
from ucformat.formats.native.manifest import FileRecord
from ucformat.formats.native.shard import Count
from ucformat.storage.store import safe_path

NAME = "adopted"
FOLDER = "adopted"
"""What the folder of index and checksums is called, before a dot and a token."""
HEAD_BYTES = 256  # of `ucf.json`, in which the word is that tells an adopted checkpoint
_ALGORITHMS: tuple[Algorithm, ...] = ("xxh3-64", "crc32")
_DTYPES = {"algorithm": "U8", "count": "U64", "start": "U64", "stop": "U64", "digest": "U64"}


class SourceRecord(msgspec.Struct, frozen=True):
    """A file of the other program."""

    file: str
    """Path relative to `ucf.json`."""
    size: Count
    stamp: str
    """What `Store.stamp` said: on a local disk the time of the last change, in ns."""


class AdoptedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an adopted checkpoint is. It has no `shards`, so that readers of native checkpoints refuse it."""

    adopts: str
    """The format of the files, which comes first: what is adopted is told by it."""
    index: FileRecord
    sources: tuple[SourceRecord, ...]
    """Files that hold fragments; `fragment.shard` counts them, and `inline` behind them."""
    others: tuple[SourceRecord, ...]
    """Files that were read for what is in record and index (metadata, pointers to the newest step)."""
    checks: FileRecord
    """Checksums of ranges of the sources: see `encode_checks`."""
    values: msgspec.Raw
    inline: FileRecord | None = None
    """Small tensors that the reader had to compute, such as steps."""
    aliases: dict[str, str] = {}
    step: int | None = None
    mesh: dict[str, int] = {}
    remarks: tuple[str, ...] = ()
    origin_layout: dict[str, str] = {}
    created: str = ""
    writer: str = ""


def encode_record(record: AdoptedRecord) -> bytes:
    """The bytes of `ucf.json`."""
    return seal(msgspec.json.encode(record))


def is_adopted(start: bytes) -> bool:
    """Whether a `ucf.json` that begins so is that of an adopted checkpoint."""
    return b'"record":{"adopts":"' in start


def decode_record(data: bytes, file: str) -> AdoptedRecord:
    """The record in the bytes of `ucf.json`. Raises what `unseal` raises, FormatError."""
    raw = unseal(data, file)
    try:
        record = msgspec.json.decode(raw, type=AdoptedRecord)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FormatError(file, f"malformed record of an adopted checkpoint: {error}", 0, len(data)) from error
    own = [record.index, record.checks, *([] if record.inline is None else [record.inline])]
    for path in (*(item.file for item in own), *(item.file for item in (*record.sources, *record.others))):
        safe_path(path, file)
    if record.step is not None and not 0 <= record.step < 1 << 63:
        raise FormatError(file, f"step {record.step}", 0, len(data))
    return record


def encode_checks(checks: Sequence[Checks]) -> bytes:
    """A safetensors file of columns: of each source its algorithm and count of ranges; of each range start, stop, digest."""
    columns: dict[str, NDArray[np.generic]] = {
        "algorithm": np.array([_ALGORITHMS.index(one.algorithm) for one in checks], dtype=np.uint8),
        "count": np.array([len(one.start) for one in checks], dtype=np.uint64),
        **{
            key: np.concatenate([np.asarray(getattr(one, key)).astype(np.uint64) for one in checks] or [np.empty(0, np.uint64)])
            for key in ("start", "stop", "digest")
        },
    }
    order = sorted(columns, key=lambda key: (-columns[key].itemsize, key))
    header = build_header([(key, _DTYPES[key], columns[key].shape) for key in order], {"format": "pt"}, align=4096)
    return header + b"".join(columns[key].tobytes() for key in order)


def decode_checks(data: NDArray[np.uint8], where: str, count: int) -> tuple[Checks, ...]:
    """What `encode_checks` made, for so many sources. Raises FormatError."""
    header = header_of(where, data)
    held = {entry.name: entry for entry in header.entries}
    try:
        columns = {
            key: data[held[key].start : held[key].stop].view(np.uint8 if dtype == "U8" else np.dtype("<u8"))
            for key, dtype in _DTYPES.items()
        }
        ends = np.cumsum(columns["count"].astype(np.int64)).tolist()
        if len(ends) != count or len(columns["algorithm"]) != count or (ends and ends[-1] != len(columns["digest"])):
            raise ValueError("the columns do not count up")
        found = []
        for number, stop in enumerate(ends):
            rows = slice(0 if number == 0 else ends[number - 1], stop)
            found.append(
                Checks(
                    _ALGORITHMS[int(columns["algorithm"][number])],
                    columns["start"][rows].astype(np.int64),
                    columns["stop"][rows].astype(np.int64),
                    columns["digest"][rows].astype(np.uint64),
                )
            )
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise FormatError(where, f"malformed checksums: {error}", 0, len(data)) from error
    return tuple(found)

"""The envelope of small JSON records: the version first, so that any later reader can refuse politely, and a digest.

Commit records, records of slots, markers and the like are stored in it. specs/format.md, section 3, is the normative text.
"""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import numpy as np

from ucformat.containers import checksums
from ucformat.errors import ChecksumError, FormatError, VersionError

VERSION = "1.0"
"""Of the format."""
_RECORD = b'"record":'
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", description="xxh3-64, 16 hexadecimal digits")]


class Envelope(msgspec.Struct, frozen=True):
    """The file `ucf.json`: version first, so that any later reader can refuse politely."""

    ucf: str
    """Format version, `major.minor`."""
    digest: Digest
    """xxh3-64 of the bytes of `record` as they stand in the file, 16 hexadecimal digits."""
    record: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True):
    """All that is known of a file of any version."""

    ucf: str


def seal(raw: bytes) -> bytes:
    """The bytes of a file that holds the record `raw` (JSON) in its envelope."""
    return msgspec.json.encode(Envelope(VERSION, _digest(raw), msgspec.Raw(raw))) + b"\n"


def unseal(data: bytes, file: str) -> bytes:
    """The record, still JSON, in the bytes of a sealed file.

    Raises VersionError for an unknown major version, ChecksumError when it is damaged, FormatError when it breaks the format.
    """
    try:
        version = msgspec.json.decode(data, type=_Versioned).ucf
        if version.split(".", 1)[0] != VERSION.split(".", 1)[0]:
            raise VersionError(file, version, VERSION)
        envelope = msgspec.json.decode(data, type=Envelope)
        start, stop = data.index(_RECORD) + len(_RECORD), data.rindex(b"}")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FormatError(file, f"malformed commit record: {error}", 0, len(data), "envelope.json") from error
    raw = data[start:stop]
    if _digest(raw) != envelope.digest:
        raise ChecksumError(file, start, stop, what="digest of the commit record", clause="envelope.digest")
    try:
        _refuse_duplicates(data)
    except (ValueError, RecursionError) as error:
        clause = "record.twice" if "twice" in str(error) else "envelope.json"
        raise FormatError(file, f"malformed commit record: {error}", 0, len(data), clause) from error
    return raw


def _refuse_duplicates(data: bytes) -> None:
    def pairs(items: list[tuple[str, object]]) -> None:
        if len({key for key, _ in items}) != len(items):
            raise ValueError("an object has the same key twice")

    json.loads(data, object_pairs_hook=pairs)


def _digest(data: bytes) -> str:
    return f"{checksums.digest('xxh3-64', np.frombuffer(data, dtype=np.uint8)):016x}"

"""Requests and replies between hosts: a length, one JSON object, and behind a reply the bytes that were asked for."""

from __future__ import annotations

import re
import struct
from typing import Literal

import msgspec

LENGTH = struct.Struct("!H")
REQUEST_BYTES = 1024  # of one request, more than any path and number need
READ_BYTES = 64 << 20  # of one reply: a reader asks for longer ranges in parts
_FOLDER = r"rank-\d{5,12}"
_FILE = r"slot-\d{1,9}\.(?:safetensors|json)|parity-\d{1,9}\.(?:xor|json)"
FOLDER, FILE = re.compile(_FOLDER), re.compile(f"{_FOLDER}/(?:{_FILE})")
"""What may be listed, and what may be read. Nothing else in a snapshot directory is anybody else's business."""

Status = Literal["ok", "missing", "short", "refused", "failed"]


class List(msgspec.Struct, frozen=True, tag=True):
    """Names in the directory, or in the folder of a rank."""

    path: str


class Size(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a file."""

    path: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Bytes [start, stop) of a file; to its end without `stop`."""

    path: str
    start: int
    stop: int | None = None


Request = List | Size | Read
REQUESTS = msgspec.json.Decoder(Request)


class Reply(msgspec.Struct, frozen=True):
    """What comes before the bytes of an answer."""

    status: Status
    nbytes: int = 0
    """Bytes that follow."""
    message: str = ""
    """What went wrong, unless the status is ok."""
    value: int = 0
    """The answer to `Size`."""


REPLIES = msgspec.json.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    data = msgspec.json.encode(message)
    return LENGTH.pack(len(data)) + data


def may_list(path: str) -> bool:
    return not path or FOLDER.fullmatch(path) is not None


def may_read(path: str) -> bool:
    return FILE.fullmatch(path) is not None

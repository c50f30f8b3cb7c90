"""Small edits of torch.save files for tests: the same records with other names, contents or flags."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path


def without_crc(raw: bytes) -> bytes:
    """The zip with zeros for every CRC in its directory, as torch writes it with CRCs switched off."""
    data = bytearray(raw)
    size, start = struct.unpack_from("<2I", data, data.rfind(b"PK\x05\x06") + 12)
    at = start
    while at < start + size:
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        data[at + 16 : at + 20] = bytes(4)
        at += 46 + name + extra + comment
    return bytes(data)


def rewrite(path: Path, edit: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> None:
    """Take the records out, let `edit` change them, and write the zip anew."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    edit(records)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)

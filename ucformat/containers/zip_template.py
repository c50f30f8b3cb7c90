"""Many small torch.save files that differ in their tensors' bytes alone: one is made, the others are copies with other bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucformat.containers.checksums import crc32
from ucformat.containers.zip_write import Outgoing, RecordWriter, write_head, write_tail
from ucformat.storage.store import Bytes

_CENTRAL_BYTES = 46  # of a line of the directory, before its name
_DESCRIPTOR_CRC = 4  # bytes behind a record's data at which its crc32 is stated
_CENTRAL_CRC = 16


@dataclass(frozen=True, slots=True)
class ZipTemplate:
    """A zip whose records of tensor data are empty yet."""

    image: bytes
    data: Sequence[tuple[int, int]]
    """Where the bytes of each leaf lie: start, length."""
    crc: Sequence[tuple[int, int]]
    """Where the crc32 of each is stated: behind it, and in the directory."""

    @classmethod
    def of(cls, top: str, data_pkl: bytes, leaves: Sequence[Outgoing]) -> ZipTemplate:
        """The file that has this `data.pkl` and leaves of these sizes, all zero."""
        image = bytearray()
        out = RecordWriter(lambda _, data: image.extend(data), top)
        write_head(out, data_pkl)
        data: list[tuple[int, int]] = []
        for leaf in leaves:
            out.begin(f"data/{leaf.key}", leaf.nbytes)
            data.append((out.at, leaf.nbytes))
            out.append(np.zeros(leaf.nbytes, dtype=np.uint8))
            out.end()
        write_tail(out)
        directory = _directory(image)
        lines = [directory[f"{top}/data/{leaf.key}".encode()] for leaf in leaves]
        stated = [(start + size + _DESCRIPTOR_CRC, at + _CENTRAL_CRC) for (start, size), at in zip(data, lines, strict=True)]
        return cls(bytes(image), data, stated)

    def filled(self, contents: Sequence[Sequence[Bytes]]) -> bytes:
        """The file with these bytes, which come in any number of parts for each leaf."""
        image = bytearray(self.image)
        for (start, size), places, parts in zip(self.data, self.crc, contents, strict=True):
            at, crc = start, 0
            for part in parts:
                image[at : at + len(part)] = part.data
                crc = crc32(part.data, crc)
                at += len(part)
            assert at == start + size
            for place in places:
                struct.pack_into("<I", image, place, crc)
        return bytes(image)


def _directory(image: bytearray) -> dict[bytes, int]:
    """Name of each record → where its line of the directory begins. For zips below 4 GiB with fewer than 65,535 records."""
    end = image.rindex(b"PK\x05\x06")
    count, _, at = struct.unpack_from("<HII", image, end + 10)
    found: dict[bytes, int] = {}
    for _ in range(count):
        name, extra, comment = struct.unpack_from("<3H", image, at + 28)
        found[bytes(image[at + _CENTRAL_BYTES : at + _CENTRAL_BYTES + name])] = at
        at += _CENTRAL_BYTES + name + extra + comment
    return found

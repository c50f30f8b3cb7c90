"""A lost slot, seen as a read-only store: its bytes are computed from parity and the other members' slots as they are read.

Nothing here is believed: readers compare the block checksums of the lost slot's own table, which is computed, too, and has
its digest in the record that every stripe carries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats.snapshot import SlotRecord, rank_name
from ucformat.snapshot.parity.stripes import LostRange, cut
from ucformat.storage.store import Bytes, Store, Writer

STREAMS = 2  # reads at a time: each reads of all other members
STEP_BYTES = 4 << 20  # computed at once


@dataclass(frozen=True, slots=True)
class FileAt:
    """A file of a survivor: its store and its path there."""

    store: Store
    path: str


@dataclass(frozen=True, slots=True)
class LostSlot:
    """What is known of a lost slot."""

    record: SlotRecord
    member: int
    """Its number in the group."""
    chunk: int
    slots: Mapping[int, tuple[FileAt, int]]
    """By member, the slots that are left, and their sizes."""
    stripes: Mapping[int, FileAt]
    """By number, the stripes that are left: all but that which the lost rank kept."""
    guards: Sequence[Callable[[], None]] = field(default_factory=tuple)
    """Raise SnapshotChangedError once one of these holds something else."""

    def guard(self) -> None:
        for prove in self.guards:
            prove()


def xor_into(out: Bytes, data: Bytes) -> None:
    """XOR `data` into the first bytes of `out`: eight bytes at a time, as memory is fastest."""
    whole = data.nbytes // 8 * 8
    if out.ctypes.data % 8 or data.ctypes.data % 8:
        np.bitwise_xor(out[: data.nbytes], data, out=out[: data.nbytes])
        return
    words = out[:whole].view(np.uint64)
    np.bitwise_xor(words, data[:whole].view(np.uint64), out=words)
    rest = out[whole : data.nbytes]
    np.bitwise_xor(rest, data[whole:], out=rest)


class LostSlotStore(Store):
    """The directory of one lost slot, which is the only file in it. `nbytes` counts what was computed."""

    streams = STREAMS

    def __init__(self, lost: LostSlot) -> None:
        self.lost, self.nbytes = lost, 0
        self.url = f"parity of rank {lost.record.rank}"
        self._path = f"{rank_name(lost.record.rank)}/{lost.record.file}"
        self._lock = threading.Lock()

    def size(self, path: str) -> int:
        self._prove_is(path)
        return self.lost.record.size

    def exists(self, path: str) -> bool:
        return path == self._path

    def list(self, path: str = "") -> Sequence[str]:
        folder, _, name = self._path.partition("/")
        return [f"{folder}/"] if not path else [name] if path == folder else []

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        """Raises what reading the survivors raises; SnapshotChangedError is for the guard to find."""
        self._prove_is(path)
        stop = start + out.nbytes
        if start < 0 or stop > self.lost.record.size:
            raise FormatError(f"{self.url}/{path}", f"has {self.lost.record.size} bytes", start, stop)
        scratch = np.empty(min(out.nbytes, STEP_BYTES), dtype=np.uint8)
        for at in range(start, stop, STEP_BYTES):
            upto = min(at + STEP_BYTES, stop)
            for part in cut(self.lost.member, at, upto, self.lost.chunk):
                self._compute(part, out[part.start - start : part.stop - start], scratch)
        with self._lock:
            self.nbytes += out.nbytes

    def _compute(self, part: LostRange, out: Bytes, scratch: Bytes) -> None:
        stripe = self.lost.stripes[part.stripe]
        stripe.store.read_into(stripe.path, part.at, out)
        for member, (file, size) in self.lost.slots.items():
            if member == part.stripe:
                continue
            a, b = part.of(member, self.lost.chunk, size)
            if a < b:
                file.store.read_into(file.path, a, scratch[: b - a])
                xor_into(out, scratch[: b - a])

    def _prove_is(self, path: str) -> None:
        if path != self._path:
            raise MissingFileError(f"{self.url}/{path}")

    def put(self, path: str, data: bytes) -> None:
        raise self._read_only(path)

    def writer(self, path: str, size: int) -> Writer:
        raise self._read_only(path)

    def remove(self, path: str = "") -> None:
        raise self._read_only(path)

    def sub(self, path: str) -> Store:
        raise self._read_only(path)

    def _read_only(self, path: str) -> UnsupportedError:
        return UnsupportedError(f"{self.url}/{path}", "what is computed from parity can only be read")

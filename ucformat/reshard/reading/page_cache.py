"""What a load leaves behind it in the page cache: whoever is the last to read a part of a file lets go of its pages.

A checkpoint is read once, and its pages would push others out. Where a virtual machine gives unused memory back to its
host, every page that a read adds has moreover to be fetched from there, which costs more than the reading itself.

Files are seen as *cells* of `CELL_BYTES`. Ranks of one host show each other in shared memory which cells they have still
to read. Nobody waits for anybody: a rank that has read a cell looks whether it was the last one.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucformat.catalog import Catalog
from ucformat.group import Group, word
from ucformat.reshard.reading.tasks import Task
from ucformat.storage.store import Reader

CELL_BYTES = 8 << 20
STRETCH = 4  # cells at a time: pages come in large groups, which go only as a whole

Row = NDArray[np.uint8]
"""(cells,) 1 where a rank has still to read."""
Address = Sequence[int]
"""(what tells hosts apart, process, file descriptor) of a row; the process is -1 where the system has no such memory."""


class Wake:
    """The pages behind one rank. Thread-safe. Use as a context manager, left when no rank of the group reads any more."""

    def __init__(self, catalog: Catalog, tasks: Sequence[Task], here: Sequence[bool]) -> None:
        """`here`: which tasks' bytes were in memory before anybody read: they stay there."""
        self._base = _bases(catalog)
        self._left = np.zeros(self._base[-1], dtype=np.int32)
        self._brought = np.zeros(self._base[-1], dtype=bool)
        for task, known in zip(tasks, here, strict=True):
            self._left[self._cells(task)] += 1
            self._brought[self._cells(task)] |= not known
        self._row: Row = (self._left > 0).astype(np.uint8)
        self._others: list[Row] = []
        self._lock = threading.Lock()
        self._open = ExitStack()

    def join(self, group: Group) -> None:
        """Show the ranks of this host what is to be read here, and see theirs. Every rank of `group` calls it."""
        if group.size == 1:
            return
        addresses = group.numbers(self._show())
        own = addresses[group.rank]
        near = addresses[(addresses[:, 0] == own[0]) | (addresses[:, 1] < 0)]  # others' memory is another one
        for address in near.tolist():
            if address == own.tolist() and own[1] >= 0:
                continue
            row = self._see(address) if own[1] >= 0 else None
            if row is None:
                self._brought[:] = False  # nobody knows what is still needed: all stays
                return
            self._others.append(row)

    def passed(self, task: Task, reader: Reader) -> None:
        """A task of the file that `reader` reads is done."""
        for cell in range(*self._cells(task).indices(len(self._left))):
            with self._lock:
                self._left[cell] -= 1
                done = not self._left[cell]
                if done:
                    self._row[cell] = 0
            if done and self._is_over(cell):
                first = cell
                while first > max(self._base[task.file], cell - STRETCH) and self._is_over(first - 1):
                    first -= 1
                reader.drop_cached((first - self._base[task.file]) * CELL_BYTES, (cell + 1 - first) * CELL_BYTES)

    def __enter__(self) -> Wake:
        return self

    def __exit__(self, *_: object) -> None:
        self._row, self._others = np.zeros(0, dtype=np.uint8), []
        self._open.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _cells(self, task: Task) -> slice:
        base = self._base[task.file]
        return slice(base + task.low // CELL_BYTES, base + max(task.high - 1, task.low) // CELL_BYTES + 1)

    def _is_over(self, cell: int) -> bool:
        """Whether a cell's pages were brought by this load, and nobody has still to read it."""
        return bool(self._brought[cell]) and not self._row[cell] and not any(row[cell] for row in self._others)

    def _show(self) -> Address:
        """Put the row where other processes find it."""
        try:
            fd = os.memfd_create("ucformat-wake", os.MFD_CLOEXEC)
            self._open.callback(os.close, fd)
            os.ftruncate(fd, len(self._row))
            shared = np.frombuffer(mmap.mmap(fd, len(self._row)), dtype=np.uint8)
            shared[:] = self._row
            self._row = shared
            # processes see each other where they share a namespace, which a host has under one number
            host = f"{socket.gethostname()} {_boot()} {os.stat('/proc/self/ns/pid').st_ino}"
            return word(xxhash.xxh3_64_intdigest(host.encode())), os.getpid(), fd
        except (AttributeError, OSError):
            return 0, -1, -1

    def _see(self, address: Address) -> Row | None:
        """Another rank's row; None where the system does not show it."""
        _, process, number = address
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, fd)
            return np.frombuffer(mmap.mmap(fd, len(self._row), access=mmap.ACCESS_READ), dtype=np.uint8)
        except (OSError, ValueError):
            return None


def _bases(catalog: Catalog) -> list[int]:
    """(files + 1,) the number of each file's first cell: equal on all ranks."""
    size = np.zeros(len(catalog.files), dtype=np.int64)
    np.maximum.at(size, catalog.fragments.file, catalog.stops())
    count = size // CELL_BYTES + 2  # what is read of a file can end a block later
    bases: list[int] = [0, *np.cumsum(count).tolist()]
    return bases


def _boot() -> str:
    """Tells this run of this machine apart from all others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()

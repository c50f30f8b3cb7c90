"""Which checked ranges of files have been read so far, and the error for one whose bytes are not those that were written."""

from __future__ import annotations

import threading

import numpy as np

from ucformat.catalog import Catalog, Checks
from ucformat.containers import checksums as sums
from ucformat.errors import ChecksumError

PADDING_BYTES = 64 << 10  # unread rest of a checked range that is worth reading, so that the range can be checked


class Seen:
    """Checksums of files, loaded once, and what is known so far of ranges that are read in parts.

    Whoever passes one to several executions calls `complete` after the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checks: dict[int, tuple[Checks | None, sums.Ledger | None]] = {}

    def of(self, catalog: Catalog, file: int) -> tuple[Checks | None, sums.Ledger | None]:
        """The checks of a file, and a ledger where ranges may arrive in parts. Raises what loading them raises."""
        with self._lock:
            if file not in self._checks:
                entry = catalog.files[file]
                found = None if entry.checks is None else entry.checks.load(catalog.store_of(file), entry.path)
                ledger = sums.Ledger(found) if found is not None and found.algorithm == "crc32" else None
                self._checks[file] = found, ledger
            return self._checks[file]

    def complete(self, catalog: Catalog) -> None:
        """Check the ranges that were read but for a little padding, which is read now. Raises ChecksumError."""
        for file, (found, ledger) in self._checks.items():
            for start, stop in [] if ledger is None else ledger.gaps(PADDING_BYTES):
                data = np.empty(stop - start, dtype=np.uint8)
                catalog.store_of(file).read_into(catalog.files[file].path, start, data)
                assert ledger is not None
                wrong = ledger.add(start, data)
                if wrong is not None:
                    assert found is not None
                    raise damaged(catalog, file, found, wrong)


def damaged(catalog: Catalog, file: int, found: Checks, wrong: int) -> ChecksumError:
    """The error for checked range `wrong` of a file."""
    start, stop = int(found.start[wrong]), int(found.stop[wrong])
    where = f"{catalog.store_of(file).url}/{catalog.files[file].path}"
    return ChecksumError(where, start, stop, tensors_at(catalog, file, start, stop), found.algorithm)


def tensors_at(catalog: Catalog, file: int, start: int, stop: int) -> list[str]:
    """Names of the tensors that have bytes in [start, stop) of a file."""
    table = catalog.fragments
    rows = np.flatnonzero(table.file == file)
    hit = rows[(table.start[rows] < stop) & (catalog.stops(rows) > start)]
    return [catalog.tensors[i].name for i in np.unique(table.tensor[hit])]

"""Cut a read plan into tasks: a few MiB of one file each, and what they bring to which destination.

A *segment* is what one task contributes to one destination: bytes that go to bytes (flat), or a strided box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ucformat.catalog import Checks
from ucformat.containers import checksums as sums
from ucformat.reshard.reading.plan import TASK_BYTES, ReadPlan

GAP_BYTES = 64 << 10  # cheaper to read over than to start another read

Segment = tuple[int, int, int]
"""(piece, first byte, one past the last byte)."""


@dataclass(slots=True)
class Task:
    """Bytes [start, stop) of a file and the segments in them."""

    file: int
    start: int
    stop: int
    fresh: int
    """First byte that no earlier task has read."""
    low: int = 0
    """Bytes [low, high) are read: whole blocks where blocks have checksums."""
    high: int = 0
    segments: list[Segment] = field(default_factory=list)


def tasks(plan: ReadPlan, flat: NDArray[np.bool_], checks: Mapping[int, Checks | None]) -> list[Task]:
    """The tasks of a plan, ascending by file and position. `flat`: (K,) pieces that may be cut at any byte."""
    found: list[Task] = []
    last: Task | None = None
    for file, start, stop, piece in sorted(_segments(plan, flat, checks)):  # the same bytes may be wanted twice
        if last is None or last.file != file or _apart(last, start, stop, _origin(checks[file])):
            fresh = max(last.stop, last.fresh) if last is not None and last.file == file else 0
            found.append(last := Task(file, start, stop, max(fresh, start)))
        last.stop = max(last.stop, stop)
        last.segments.append((piece, start, stop))
    for task in found:
        known = checks[task.file]
        task.low, task.high = (task.start, task.stop) if known is None else sums.widen(known, task.start, task.stop)
    return found


def _apart(last: Task, start: int, stop: int, origin: int) -> bool:
    """Whether a segment begins a new task."""
    too_long = max(stop, last.stop) - last.start > TASK_BYTES
    return too_long or start - last.stop > GAP_BYTES or start >= _line(last.start, origin)


def _segments(
    plan: ReadPlan, flat: NDArray[np.bool_], checks: Mapping[int, Checks | None]
) -> Iterator[tuple[int, int, int, int]]:
    """(file, start, stop, piece). Flat pieces are cut where tasks end, so that no block is read for two of them."""
    files = plan.catalog.fragments.file[plan.fragment].tolist()
    columns = zip(files, flat.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True)
    for piece, (file, cuttable, start, stop) in enumerate(columns):
        while cuttable and (line := _line(start, _origin(checks[file]))) < stop:
            yield file, start, line, piece
            start = line
        yield file, start, stop, piece


def _line(start: int, origin: int) -> int:
    """The end of the stretch of `TASK_BYTES` in which a byte lies, counted from `origin`."""
    return origin + ((start - origin) // TASK_BYTES + 1) * TASK_BYTES


def _origin(checks: Checks | None) -> int:
    """Where checksummed blocks begin."""
    return 0 if checks is None or checks.algorithm != "xxh3-64" or not len(checks.start) else int(checks.start[0])

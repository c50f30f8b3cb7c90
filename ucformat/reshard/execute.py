"""Carry out a read plan: large ordered reads on threads, checked, straight into the destination tensors.

A *segment* is what one read contributes to one destination: bytes that go to bytes (flat), or a strided box. Segments are
grouped into *tasks* of a few MiB of one file; each task is read, verified and scattered by one thread, so at most
`threads` tasks are in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ucformat import checks as sums
from ucformat import cores
from ucformat.box import Ints
from ucformat.catalog import Catalog, Checks, row_major
from ucformat.dtypes import DType
from ucformat.errors import ChecksumError, DTypeMismatchError, ShapeMismatchError
from ucformat.localdisk import aligned
from ucformat.reshard.plan import TASK_BYTES, ReadPlan, arrange, cut
from ucformat.storage import Bytes, Sheet

AHEAD = 4  # tasks that are brought into memory before their turn
GAP_BYTES = 64 << 10  # cheaper to read over than to start another read
PADDING_BYTES = 64 << 10  # unread rest of a checked range that is worth reading, so that the range can be checked
VERIFY_BYTES = 4 << 20  # read and hashed while still in the cache that cores share
DIRECT_BYTES = 16 << 10  # shorter segments cost less to copy than as one more buffer of a read
WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Segment = tuple[int, int, int]
"""(piece, first byte, one past the last byte)."""


@dataclass(slots=True)
class _Task:
    """Bytes [start, stop) of a file and the segments in them."""

    file: int
    start: int
    stop: int
    fresh: int
    """First byte that no earlier task has read."""
    cached: bool = False
    """Being brought into memory by the system: read it where it is verified."""
    segments: list[Segment] = field(default_factory=list)


def execute(
    plan: ReadPlan,
    dest: Sequence[torch.Tensor],
    *,
    cast: bool = False,
    threads: int | None = None,
    verify: bool = True,
    on_bytes: Callable[[int], None] | None = None,
    seen: Seen | None = None,
) -> None:
    """Fill `dest[i]` with want i of the plan.

    Destinations have the shape of their want, any strides and device. Their dtype is the stored one, or any other that
    torch can convert to when `cast`. `on_bytes` is told how many bytes each finished read brought, from any thread.
    `threads`: this process's share of the cores by default, more for storage that answers many requests at once.
    `seen` carries checksums over from one execution to the next, where a file is read by several.

    Raises ShapeMismatchError and DTypeMismatchError before any read; ChecksumError, FormatError, MissingFileError and
    StorageError, naming file and bytes, while reading: the destinations are then partly filled.
    """
    kept = Seen() if seen is None else seen
    store = plan.catalog.store
    _Execution(plan, dest, cast, kept, on_bytes, verify).run(threads or max(cores.share(), store.streams))
    if seen is None and verify:
        kept.complete(plan.catalog)


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
                found = None if entry.checks is None else entry.checks.load(catalog.store, entry.path)
                ledger = sums.Ledger(found) if found is not None and found.algorithm == "crc32" else None
                self._checks[file] = found, ledger
            return self._checks[file]

    def complete(self, catalog: Catalog) -> None:
        """Check the ranges that were read but for a little padding, which is read now. Raises ChecksumError."""
        for file, (found, ledger) in self._checks.items():
            for start, stop in [] if ledger is None else ledger.gaps(PADDING_BYTES):
                data = np.empty(stop - start, dtype=np.uint8)
                catalog.store.read_into(catalog.files[file].path, start, data)
                assert ledger is not None
                wrong = ledger.add(start, data)
                if wrong is not None:
                    assert found is not None
                    raise damaged(catalog, file, found, wrong)


def damaged(catalog: Catalog, file: int, found: Checks, wrong: int) -> ChecksumError:
    """The error for checked range `wrong` of a file."""
    start, stop = int(found.start[wrong]), int(found.stop[wrong])
    where = f"{catalog.store.url}/{catalog.files[file].path}"
    return ChecksumError(where, start, stop, tensors_at(catalog, file, start, stop), found.algorithm)


class _Execution:
    """One run of a plan: what every thread needs to know."""

    def __init__(
        self,
        plan: ReadPlan,
        dest: Sequence[torch.Tensor],
        cast: bool,
        seen: Seen,
        on_bytes: Callable[[int], None] | None,
        verify: bool,
    ) -> None:
        self.catalog = plan.catalog
        self.dest = [tensor.detach() for tensor in dest]
        self.verify, self.on_bytes, self.seen = verify, on_bytes, seen
        self.kinds: list[DType] = [plan.catalog.tensors[i].kind for i in plan.wants.tensor]
        flat_dest = np.array([self._check(plan, i, cast) for i in range(len(dest))], dtype=bool)
        self.flat = _flat(plan, flat_dest)
        uneven = cut(plan, ~self.flat)
        if uneven is not plan:
            plan = arrange(uneven)
            self.flat = _flat(plan, flat_dest)
        self.plan = plan
        self.file_start: list[int] = plan.start.tolist()
        self.dest_start = _dest_starts(plan, self.kinds)
        self.bytes_of: dict[int, Bytes] = {}
        self.checks: dict[int, Checks | None] = {}
        self.ledgers: dict[int, sums.Ledger] = {}
        self.scratch = threading.local()
        self.failed = False

    def _check(self, plan: ReadPlan, want: int, cast: bool) -> bool:
        """Whether bytes can go straight into destination `want`; raises when it does not fit."""
        spec = plan.catalog.tensors[plan.wants.tensor[want]]
        tensor, ndim = self.dest[want], len(spec.shape)
        shape = tuple(map(int, plan.wants.length[want, :ndim]))
        if tuple(tensor.shape) != shape:
            raise ShapeMismatchError(spec.name, shape, tuple(tensor.shape))
        if tensor.dtype != spec.kind.torch:
            if not cast:
                raise DTypeMismatchError(spec.name, spec.dtype, str(tensor.dtype).removeprefix("torch."))
            if spec.kind.group != (1, 1):
                raise DTypeMismatchError(spec.name, spec.dtype, str(tensor.dtype), "packed numbers can't be converted")
            return False
        return tensor.device.type == "cpu" and tensor.is_contiguous()

    def run(self, threads: int) -> None:
        tasks = self._tasks()
        count = min(threads, len(tasks))
        waiting = iter(range(len(tasks)))
        turn = threading.BoundedSemaphore(self.catalog.store.streams)
        for task in tasks[:AHEAD]:
            self._prefetch(task)
        if count <= 1:
            self._work(tasks, waiting, turn)
            return
        with ThreadPoolExecutor(count, thread_name_prefix="ucf-read") as pool:
            try:
                for future in [pool.submit(self._work, tasks, waiting, turn) for _ in range(count)]:
                    future.result()
            except BaseException:
                self.failed = True  # an interrupt reaches this thread alone
                raise

    def _work(self, tasks: list[_Task], waiting: Iterator[int], turn: AbstractContextManager[object]) -> None:
        """Take tasks in file order and read each when it is its turn; verify and scatter beside the next one's reading."""
        try:
            while True:
                with turn:
                    number = None if self.failed else next(waiting, None)
                    if number is None:
                        return
                    if number + AHEAD < len(tasks):
                        self._prefetch(tasks[number + AHEAD])
                    data = self._fetch(tasks[number])
                task = tasks[number]
                with torch.no_grad():
                    self._put(task, data)
                if self.on_bytes is not None:
                    self.on_bytes(sum(self._useful(*segment) for segment in task.segments))
        except BaseException:
            self.failed = True  # the other threads stop with the task in hand
            raise

    def _prefetch(self, task: _Task) -> None:
        entry = self.catalog.files[task.file]
        if entry.inline is None:
            low, high = self._extent(task)
            with self.catalog.store.reader(entry.path) as reader:
                task.cached = reader.prefetch(low, high - low)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def _tasks(self) -> list[_Task]:
        tasks: list[_Task] = []
        files = self.catalog.fragments.file[self.plan.fragment]
        for file, piece, start, stop in self._segments(files):
            task = tasks[-1] if tasks else None
            if (
                task is None
                or task.file != file
                or start - task.stop > GAP_BYTES
                or max(stop, task.stop) - task.start > TASK_BYTES
            ):
                fresh = max(task.stop, task.fresh) if task is not None and task.file == file else 0
                tasks.append(task := _Task(file, start, stop, max(fresh, start)))
            task.stop = max(task.stop, stop)
            task.segments.append((piece, start, stop))
        for file in {task.file for task in tasks}:
            self._load_checks(file)
        return tasks

    def _segments(self, files: NDArray[np.int32]) -> Iterator[tuple[int, int, int, int]]:
        """(file, piece, start, stop), ascending; flat pieces longer than a task are cut at round file offsets."""
        starts, stops = self.plan.start.tolist(), self.plan.stop.tolist()
        for piece, (file, flat) in enumerate(zip(files.tolist(), self.flat.tolist(), strict=True)):
            start, stop = starts[piece], stops[piece]
            if not flat or stop - start <= TASK_BYTES:
                yield file, piece, start, stop
                continue
            while start < stop:
                upto = min(stop, (start // TASK_BYTES + 1) * TASK_BYTES)
                yield file, piece, start, upto
                start = upto

    def _load_checks(self, file: int) -> None:
        found, ledger = self.seen.of(self.catalog, file) if self.verify else (None, None)
        self.checks[file] = found
        if ledger is not None:
            self.ledgers[file] = ledger

    # -- one task ------------------------------------------------------------------------------------------------

    def _fetch(self, task: _Task) -> Bytes | None:
        """The bytes of a task's extent in this thread's scratch memory; None when they are cached."""
        entry = self.catalog.files[task.file]
        if entry.inline is not None:
            return np.frombuffer(entry.inline, dtype=np.uint8)[task.start : task.stop]
        if task.cached:
            return None
        low, high = self._extent(task)
        with self.catalog.store.reader(entry.path) as reader:
            data = self._scratch(low, high - low)
            reader.read_into(low, data)
        return data

    def _extent(self, task: _Task) -> tuple[int, int]:
        """The bytes to read for a task: whole blocks where blocks have checksums."""
        found = self.checks[task.file]
        return (task.start, task.stop) if found is None else sums.widen(found, task.start, task.stop)

    def _put(self, task: _Task, data: Bytes | None) -> None:
        """Verify what was read for a task, or read it now, and put it where it belongs."""
        if data is None:
            self._read_cached(task)
            return
        low, high = self._extent(task) if self.catalog.files[task.file].inline is None else (task.start, task.stop)
        sheet = Sheet(low, data)
        for start, stop in sums.steps(self.checks[task.file], low, high, VERIFY_BYTES):
            self._verify(task, sheet, start, stop)
        self._scatter(task.segments, data, low)

    def _read_cached(self, task: _Task) -> None:
        """Read straight into the destinations where that is possible, the rest through scratch memory."""
        low, high = self._extent(task)
        data = self._scratch(low, high - low)
        sheet, rest = self._sheet(task, data, low)
        with self.catalog.store.reader(self.catalog.files[task.file].path) as reader:
            for start, stop in sums.steps(self.checks[task.file], low, high, VERIFY_BYTES):
                reader.read_parts(start, sheet.cut(start, stop))
                self._verify(task, sheet, start, stop)
        self._scatter(rest, data, low)

    def _sheet(self, task: _Task, data: Bytes, low: int) -> tuple[Sheet, list[Segment]]:
        """Where the bytes of a task's extent from `low` go, of which `data` takes any; the segments to copy out of that."""
        sheet, rest, reached = Sheet(low), [], low
        segments = task.segments
        for i, segment in enumerate(segments):
            piece, start, stop = segment
            alone = start >= reached and (i + 1 == len(segments) or segments[i + 1][1] >= stop)
            if alone and self.flat[piece] and stop - start >= DIRECT_BYTES:
                if sheet.stop < start:
                    sheet.add(data[sheet.stop - low : start - low])
                sheet.add(self._flat_dest(piece, start, stop))
            else:
                rest.append(segment)
            reached = max(reached, stop)
        if sheet.stop < low + len(data):
            sheet.add(data[sheet.stop - low :])
        return sheet, rest

    def _useful(self, piece: int, start: int, stop: int) -> int:
        if self.plan.contiguous[piece]:
            return stop - start
        want = int(self.plan.want[piece])
        return int(np.prod(self.plan.length[piece])) * self.kinds[want].itemsize

    def _scratch(self, start: int, nbytes: int) -> Bytes:
        """The thread's buffer, placed so that memory and file have equal alignment."""
        skew = start % self.catalog.store.alignment
        buffer: Bytes | None = getattr(self.scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes + skew:
            buffer = self.scratch.buffer = aligned(max(nbytes + skew, TASK_BYTES + (1 << 20)))
        return buffer[skew : skew + nbytes]

    def _verify(self, task: _Task, sheet: Sheet, start: int, stop: int) -> None:
        """Compare the checksums of bytes [start, stop), or note them where ranges arrive in parts."""
        found = self.checks[task.file]
        if found is None:
            return
        wrong: int | None = None
        if found.algorithm == "xxh3-64":
            wrong = next(sums.mismatches(found, sheet, start, stop), None)
        else:
            at = max(start, task.fresh)
            for part in sheet.cut(at, stop):
                wrong = self.ledgers[task.file].add(at, part) if wrong is None else wrong
                at += part.nbytes
        if wrong is not None:
            raise damaged(self.catalog, task.file, found, wrong)

    # -- scatter -------------------------------------------------------------------------------------------------

    def _scatter(self, segments: Sequence[Segment], data: Bytes, origin: int) -> None:
        """Copy segments out of `data`, the bytes of the file from `origin` on."""
        for piece, start, stop in segments:
            part = data[start - origin : stop - origin]
            if self.flat[piece]:
                self._flat_dest(piece, start, stop)[:] = part
            else:
                self._copy_box(piece, part)

    def _flat_dest(self, piece: int, start: int, stop: int) -> Bytes:
        """The bytes of the destination that bytes [start, stop) of the file go to."""
        want = int(self.plan.want[piece])
        image = self.bytes_of.get(want)
        if image is None:
            image = self.bytes_of[want] = self.dest[want].reshape(-1).view(torch.uint8).numpy()
        at = self.dest_start[piece] + start - self.file_start[piece]
        return image[at : at + stop - start]

    def _copy_box(self, piece: int, data: Bytes) -> None:
        want = int(self.plan.want[piece])
        kind, table = self.kinds[want], self.catalog.fragments
        ndim = self.dest[want].dim()
        fragment = self.plan.fragment[piece : piece + 1]
        stride = row_major(table.length[fragment]) if table.stride is None else table.stride[fragment]
        size = self.plan.length[piece, :ndim].tolist()
        source = _typed(data, kind).as_strided(size, stride[0, :ndim].tolist())
        low = (self.plan.offset[piece] - self.plan.wants.offset[want])[:ndim].tolist()
        target = self.dest[want]
        for d, (at, n) in enumerate(zip(low, size, strict=True)):
            target = target.narrow(d, at, n)
        if target.dtype == kind.torch and kind.itemsize in WIDTH:
            width = WIDTH[kind.itemsize]  # move bits: copies between some exotic dtypes are not implemented
            source, target = source.view(width), target.view(width)
        target.copy_(source)


def _flat(plan: ReadPlan, flat_dest: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(K,) whether a piece is contiguous both in the file and in its destination."""
    if not len(plan.want):
        return np.zeros(0, dtype=bool)
    stride: Ints = row_major(plan.wants.length[plan.want])
    dense = ((plan.length == 1) | (stride == row_major(plan.length))).all(axis=1)
    flat: NDArray[np.bool_] = plan.contiguous & dense & flat_dest[plan.want]
    return flat


def _dest_starts(plan: ReadPlan, kinds: Sequence[DType]) -> list[int]:
    """(K,) where each piece begins in the row-major bytes of its destination."""
    if not len(plan.want):
        return []
    stride: Ints = row_major(plan.wants.length)[plan.want]
    size = np.array([kind.itemsize for kind in kinds], dtype=np.int64)[plan.want]
    items = ((plan.offset - plan.wants.offset[plan.want]) * stride).sum(axis=1)
    starts: list[int] = (items * size).tolist()
    return starts


def _typed(data: Bytes, kind: DType) -> torch.Tensor:
    """Bytes as a flat tensor of a dtype; copied when they are not aligned for it."""
    usable = data[: data.nbytes // kind.itemsize * kind.itemsize]
    if usable.ctypes.data % kind.itemsize or not usable.flags.writeable:
        usable = usable.copy()
    return torch.from_numpy(usable).view(kind.torch)


def tensors_at(catalog: Catalog, file: int, start: int, stop: int) -> list[str]:
    """Names of the tensors that have bytes in [start, stop) of a file."""
    table = catalog.fragments
    rows = np.flatnonzero(table.file == file)
    size = np.array([spec.kind.itemsize for spec in catalog.tensors], dtype=np.int64)[table.tensor[rows]]
    stride = row_major(table.length[rows]) if table.stride is None else table.stride[rows]
    end = table.start[rows] + (((table.length[rows] - 1) * stride).sum(axis=1) + 1) * size
    hit = rows[(table.start[rows] < stop) & (end > start)]
    return [catalog.tensors[i].name for i in np.unique(table.tensor[hit])]

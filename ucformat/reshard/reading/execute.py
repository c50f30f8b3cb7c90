"""Carry out a read plan: large ordered reads on threads, checked, straight into the destination tensors.

Each task is read, verified and scattered by one thread, so at most `threads` tasks are in flight. A thread takes a *run*
of tasks: one where a store answers requests, many that follow one another where a disk is read in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ucformat import process
from ucformat.box import Ints
from ucformat.catalog import Checks, row_major
from ucformat.containers import checksums as sums
from ucformat.dtypes import DType
from ucformat.errors import ShapeMismatchError, UcformatError
from ucformat.group import Group
from ucformat.reshard.reading.destination import ArrayDestination, Destination
from ucformat.reshard.reading.page_cache import Wake
from ucformat.reshard.reading.plan import TASK_BYTES, ReadPlan, arrange, cut
from ucformat.reshard.reading.seen import Seen, damaged
from ucformat.reshard.reading.tasks import Segment, Task, tasks
from ucformat.storage.local import aligned
from ucformat.storage.store import Bytes, Reader, Sheet

if TYPE_CHECKING:
    import torch

AHEAD = 4  # tasks that are brought into memory before their turn
RUN_TASKS = 128  # at most that one thread reads in order: long enough for a disk to read ahead, short enough to end together
DISK_THREADS = 2  # at least, where a disk is read: it has work while one of them hashes
VERIFY_BYTES = 4 << 20  # read and hashed while still in the cache that cores share
DIRECT_BYTES = 16 << 10  # shorter segments cost less to copy than as one more buffer of a read


Run = list[Task]
"""Tasks of one file, ascending."""


def execute(
    plan: ReadPlan,
    dest: Sequence[torch.Tensor] | Sequence[NDArray[Any]],
    *,
    cast: bool = False,
    threads: int | None = None,
    verify: bool = True,
    on_bytes: Callable[[int], None] | None = None,
    seen: Seen | None = None,
) -> None:
    """Fill `dest[i]` with want i of the plan.

    Destinations are all tensors, or all numpy arrays. Tensors have the shape of their want, any strides and device; their dtype
    is the stored one, or any other that torch can convert to when `cast`. Arrays take bits: their dtype is `DType.numpy`.
    `on_bytes` is told how many bytes each finished read brought, from any thread.
    `threads`: this process's share of the cores by default, more for storage that answers many requests at once.
    `seen` carries checksums over from one execution to the next, where a file is read by several.

    Raises ShapeMismatchError and DTypeMismatchError before any read; ChecksumError, FormatError, MissingFileError and
    StorageError, naming file and bytes, while reading; CheckpointChangedError for what was replaced meanwhile:
    the destinations are then partly filled.
    """
    Reading(plan, dest, cast=cast, seen=seen, on_bytes=on_bytes, verify=verify).run(threads)


class Reading:
    """A plan that is about to be carried out: what every thread needs to know. See `execute`."""

    def __init__(
        self,
        plan: ReadPlan,
        dest: Sequence[torch.Tensor] | Sequence[NDArray[Any]],
        *,
        cast: bool = False,
        seen: Seen | None = None,
        on_bytes: Callable[[int], None] | None = None,
        verify: bool = True,
    ) -> None:
        """Raises ShapeMismatchError and DTypeMismatchError, and what loading checksums raises."""
        self.catalog = plan.catalog
        self.given: list[Any] = list(dest)
        self.dest = [destination(one) for one in dest]
        self.verify, self.on_bytes = verify, on_bytes
        self.seen, self.last = seen or Seen(), seen is None
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
        self.files: list[int] = np.unique(self.catalog.fragments.file[self.plan.fragment]).tolist()
        with self._unchanged():
            for file in self.files:
                self._load_checks(file)
        self.tasks = tasks(self.plan, self.flat, self.checks)

    def _check(self, plan: ReadPlan, want: int, cast: bool) -> bool:
        """Whether bytes can go straight into destination `want`; raises when it does not fit."""
        spec = plan.catalog.tensors[plan.wants.tensor[want]]
        target, ndim = self.dest[want], len(spec.shape)
        shape = tuple(map(int, plan.wants.length[want, :ndim]))
        if target.shape != shape:
            raise ShapeMismatchError(spec.name, shape, target.shape)
        return target.accepts_bytes(spec, cast=cast)

    def run(self, threads: int | None = None) -> None:
        """`threads`: as many as suit by default, which is more where a disk has to be asked."""
        self._read_all(threads or self._suiting(self.look()), None)

    def run_once(self, here: Sequence[bool], group: Group) -> None:
        """Run, and take out of the page cache what that brought there. Every rank of `group` calls, with what `look` told."""
        with Wake(self.catalog, self.tasks, here) as wake:
            wake.join(group)
            with group.together(f"reading {self.catalog.url}"):
                self._read_all(self._suiting(here), wake)

    def look(self) -> list[bool]:
        """Which tasks' bytes are in memory already. Raises what opening files raises."""
        here = []
        for file, of_file in groupby(self.tasks, key=attrgetter("file")):
            with self._reader(file) as reader:
                here += [reader.is_here(task.low, task.high - task.low) for task in of_file]
        return here

    def _suiting(self, here: Sequence[bool]) -> int:
        """How many threads suit."""
        least = DISK_THREADS if 2 * sum(here) < len(here) else 1
        return max((self._streams(file) for file in self.files), default=0) or max(process.share(), least)

    def _read_all(self, threads: int, wake: Wake | None) -> None:
        runs = self._runs(threads)
        with self._unchanged():
            if min(threads, len(runs)) <= 1:
                for run in runs:
                    self._read_run(run, wake)
            else:
                self._read_beside(runs, threads, wake)
            if self.verify and self.last:
                self.seen.complete(self.catalog)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Behind the block, what it read is of one version. Raises CheckpointChangedError, whatever else came of a change."""
        try:
            yield
        except UcformatError:
            self._prove_unchanged()
            raise
        self._prove_unchanged()

    def _prove_unchanged(self) -> None:
        for file in self.files:
            guard = self.catalog.files[file].guard
            if guard is not None:
                guard()

    def _read_beside(self, runs: Sequence[Run], threads: int, wake: Wake | None) -> None:
        with ThreadPoolExecutor(threads, thread_name_prefix="ucf-read") as pool:
            try:
                for future in [pool.submit(self._read_run, run, wake) for run in runs]:
                    future.result()
            except BaseException:
                self.failed = True  # an interrupt reaches this thread alone
                raise

    def _streams(self, file: int) -> int:
        return self.catalog.store_of(file).streams

    def _reader(self, file: int) -> Reader:
        entry, store = self.catalog.files[file], self.catalog.store_of(file)
        return store.reader(entry.path) if entry.inline is None else Reader(store, entry.path)

    def _runs(self, threads: int) -> list[Run]:
        """Tasks that follow one another, of one file each."""
        in_order = max(1, min(RUN_TASKS, -(-len(self.tasks) // threads)))
        runs: list[Run] = []
        for file, group in groupby(self.tasks, key=attrgetter("file")):
            most, of_file = 1 if self._streams(file) else in_order, list(group)
            runs += [of_file[i : i + most] for i in range(0, len(of_file), most)]
        return runs

    def _read_run(self, run: Run, wake: Wake | None) -> None:
        """Read, verify and scatter tasks in file order."""
        try:
            with self._reader(run[0].file) as reader:
                for i, task in enumerate(run):
                    if self.failed:
                        return
                    for later in run[: AHEAD + 1] if i == 0 else run[i + AHEAD : i + AHEAD + 1]:
                        reader.prefetch(later.low, later.high - later.low)
                    useful = self._read(task, reader)
                    if self.on_bytes is not None:
                        self.on_bytes(useful)
                    if wake is not None:
                        wake.passed(task, reader)
        except BaseException:
            self.failed = True  # the other threads stop with the task in hand
            raise

    def _load_checks(self, file: int) -> None:
        found, ledger = self.seen.of(self.catalog, file) if self.verify else (None, None)
        self.checks[file] = found
        if ledger is not None:
            self.ledgers[file] = ledger

    # -- one task ------------------------------------------------------------------------------------------------

    def _read(self, task: Task, reader: Reader) -> int:
        """Read a task, verify it and put it where it belongs; the bytes that were wanted."""
        inline = self.catalog.files[task.file].inline
        if inline is not None:
            self._put(task, np.frombuffer(inline, dtype=np.uint8)[task.start : task.stop], task.start)
        elif self._streams(task.file):
            data = self._scratch(task.file, task.low, task.high - task.low)
            reader.read_into(task.low, data)
            self._put(task, data, task.low)
        else:
            self._read_in_steps(task, reader)
        return sum(self._useful(*segment) for segment in task.segments)

    def _put(self, task: Task, data: Bytes, low: int) -> None:
        """Verify what was read for a task, the bytes of the file from `low` on, and put it where it belongs."""
        sheet = Sheet(low, data)
        for start, stop in sums.steps(self.checks[task.file], low, sheet.stop, VERIFY_BYTES):
            self._verify(task, sheet, start, stop)
        self._scatter(task.segments, data, low)

    def _read_in_steps(self, task: Task, reader: Reader) -> None:
        """Read straight into the destinations where that is possible, the rest through scratch memory."""
        low, high = task.low, task.high
        data = self._scratch(task.file, low, high - low)
        sheet, rest = self._sheet(task, data, low)
        for start, stop in sums.steps(self.checks[task.file], low, high, VERIFY_BYTES):
            reader.read_parts(start, sheet.cut(start, stop))
            self._verify(task, sheet, start, stop)
        self._scatter(rest, data, low)

    def _sheet(self, task: Task, data: Bytes, low: int) -> tuple[Sheet, list[Segment]]:
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

    def _scratch(self, file: int, start: int, nbytes: int) -> Bytes:
        """The thread's buffer, placed so that memory and file have equal alignment."""
        skew = start % self.catalog.store_of(file).alignment
        buffer: Bytes | None = getattr(self.scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes + skew:
            buffer = self.scratch.buffer = aligned(max(nbytes + skew, TASK_BYTES + (1 << 20)))
        return buffer[skew : skew + nbytes]

    def _verify(self, task: Task, sheet: Sheet, start: int, stop: int) -> None:
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
            image = self.bytes_of[want] = self.dest[want].image()
        at = self.dest_start[piece] + start - self.file_start[piece]
        return image[at : at + stop - start]

    def _copy_box(self, piece: int, data: Bytes) -> None:
        want = int(self.plan.want[piece])
        kind, ndim = self.kinds[want], len(self.dest[want].shape)
        stride = self.catalog.fragments.strides(self.plan.fragment[piece : piece + 1])
        size = self.plan.length[piece, :ndim].tolist()
        low = (self.plan.offset[piece] - self.plan.wants.offset[want])[:ndim].tolist()
        self.dest[want].put(low, size, data, stride[0, :ndim].tolist(), kind)


def destination(target: torch.Tensor | NDArray[Any]) -> Destination:
    """What fills a tensor, or an array of an item's bits."""
    if isinstance(target, np.ndarray):
        return ArrayDestination(target)
    from ucformat.reshard.reading.tensor_destination import TensorDestination

    return TensorDestination(target)


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

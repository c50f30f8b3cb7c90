"""Copying by plan on the host: one thread that copies in the windows it is given, and a rest for which training waits.

The host's gate opens when an action has ended and closes when the next one begins; a chunk is only begun when it should end
within its window. Chunks planned beside compute are paced. An action waits for the pieces that it changes, and `finish` copies
what is left, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ucformat.containers.file_image import ByteRequest, ByteSource
from ucformat.snapshot.copyplan.plan import EXPOSED, NEVER, OVERLAP, CopyPlan
from ucformat.snapshot.schedule.clock import Span, now
from ucformat.storage.store import Bytes

POLL_S = 0.0005  # between two looks whether the place of a version is free: far shorter than any window worth filling


@dataclass(frozen=True, slots=True)
class Work:
    """One version to copy: what, by which plan, to where."""

    plan: CopyPlan
    fill: ByteSource
    """Puts bytes of the live tensors into place; counts pieces as the plan does."""
    open: Callable[[], Sequence[Bytes] | None]
    """Where the bytes of each piece go; None as long as the place is not free. Asked until it is."""
    done: Callable[[], None] = lambda: None
    """Called once, when every byte is in place: before the deadline if possible, on the copying thread then."""
    told: Callable[[int], None] | None = None
    """Called after every chunk with the bytes copied so far, by the thread that copies."""


@dataclass(slots=True)
class Outcome:
    """What became of one version's copies."""

    nbytes: int = 0
    windowed: int = 0
    """Bytes copied while the rank was idle."""
    beside: int = 0
    """Bytes copied beside compute."""
    exposed: int = 0
    """Bytes copied while training waited."""
    exposed_s: float = 0.0
    """Seconds from the deadline until all was copied, those of deadlines within the step included."""
    busy_s: float = 0.0
    """Seconds spent copying before the deadline."""
    refused: bool = False
    """The place was not free until the deadline: nothing was copied."""
    finished: bool = False
    """All is copied, and `Work.done` was called."""
    failure: Exception | None = None
    spans: list[Span] = field(default_factory=list)
    """Every copy, for the trace."""


@dataclass(frozen=True, slots=True)
class _Gates:
    """What a plan says of when its chunks may be copied, by position in the list of actions."""

    plan: CopyPlan
    order: NDArray[np.int64]
    """Chunks in the order in which they are copied: exposed ones last."""
    windows: dict[int, int]
    """Which window opens at a position."""
    ready: NDArray[np.int64]
    """By piece: how many actions must have ended."""
    waits: bool
    """Whether any must."""
    deadline: NDArray[np.int64]
    """By piece: before which action it must be copied, or NEVER."""
    dues: tuple[int, ...]
    """All deadlines, ascending."""

    @classmethod
    def of(cls, plan: CopyPlan) -> _Gates:
        pieces = plan.pieces
        return cls(
            plan,
            np.argsort(plan.window == EXPOSED, kind="stable"),
            {0 if window.after is None else window.after + 1: i for i, window in enumerate(plan.windows)},
            pieces.ready,
            bool(pieces.ready.any()),
            pieces.deadline,
            (*np.unique(pieces.deadline[pieces.deadline != NEVER]).tolist(), NEVER),
        )

    def next_due(self, position: int) -> int:
        """The first deadline after `position`."""
        return next(due for due in self.dues if due > position)


class HostCopier:
    """Copies one version at a time. Methods are called by the training thread."""

    def __init__(self, *, record: bool = True) -> None:
        self._lock = threading.Condition()
        self._work: Work | None = None
        self._next = 0
        self._outcome = Outcome()
        self._out: Sequence[Bytes] | None = None
        self._window: int | None = None
        self._until = 0.0
        self._step_began = 0.0
        self._copying = False
        self._stopping = False
        self._record = record
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._ended = 0
        self._due = NEVER
        self._gates: _Gates | None = None
        self._thread = threading.Thread(target=self._run, name="ucf-copy", daemon=True)
        self._thread.start()

    def begin(self, work: Work) -> None:
        """Take on a version; the optimizer step that made it has ended."""
        with self._lock:
            self._work, self._next, self._outcome, self._out = work, 0, Outcome(), None
            gates = self._gates
            if gates is None or gates.plan is not work.plan:
                self._gates = gates = _Gates.of(work.plan)
            self._order, self._due = gates.order, gates.next_due(-1)
            self._step_began = now()
            self._window, self._ended = None, 0
            self._lock.notify()

    def opened(self, position: int) -> None:
        """`position` actions have ended, and the rank is idle now."""
        self._ended = position
        work, gates = self._work, self._gates
        if work is None or gates is None:
            return
        window = gates.windows.get(position)
        with self._lock:
            self._window = window
            if window is not None:
                self._until = now() + work.plan.windows[window].seconds
            if window is not None or gates.waits:
                self._lock.notify()

    def closed(self) -> None:
        """The next action begins: nothing new is started. Waits only for pieces that the action changes by plan."""
        self._window = None
        if self._ended >= self._due:
            self._enforce(self._ended)

    def _enforce(self, position: int) -> None:
        """Copy what has its deadline at `position`, on this thread."""
        began = now()
        work, gates, outcome = self._withdraw(), self._gates, self._outcome
        if work is None or gates is None:
            return
        left = self._order[self._next :]
        due = gates.deadline[work.plan.piece[left]] <= position
        self._order, self._due = np.concatenate([self._order[: self._next], left[due], left[~due]]), gates.next_due(position)
        if due.any():
            self._copy_here(work, outcome, self._next + int(due.sum()), began)
        else:
            outcome.exposed_s += now() - began
        with self._lock:
            if outcome.failure is None and not outcome.refused:
                self._work = work
                self._lock.notify()

    def finish(self) -> Outcome:
        """The deadline: copy what is left on this thread, and wait for the chunk in hand. What became of the version."""
        began = now()
        work = self._withdraw()
        if work is not None:
            self._copy_here(work, self._outcome, len(work.plan), began)
        return self._outcome

    def _withdraw(self) -> Work | None:
        """Take the version away from the copying thread, once its chunk in hand is copied."""
        with self._lock:
            work, self._work, self._window = self._work, None, None
            while self._copying:
                self._lock.wait()
        return work

    def _copy_here(self, work: Work, outcome: Outcome, stop: int, began: float) -> None:
        """Copy the chunks up to number `stop` of the order while training waits, as it has since `began`."""
        before, busy = outcome.nbytes, outcome.busy_s
        try:
            outcome.refused = outcome.failure is None and not self._opened(work)
            while outcome.failure is None and not outcome.refused and self._next < stop:
                self._copy(work, self._take(), outcome)
            if outcome.failure is None and not outcome.refused and self._next >= len(work.plan):
                self._settle(work, outcome)
        except Exception as error:
            outcome.failure = error
        outcome.exposed += outcome.nbytes - before
        outcome.busy_s = busy
        outcome.exposed_s += now() - began

    def stop(self) -> None:
        """End the thread; a version in hand is given up."""
        with self._lock:
            self._stopping, self._work = True, None
            self._lock.notify()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._stopping and (wait := self._waiting()) != 0.0:
                    self._lock.wait(wait)
                if self._stopping:
                    return
                work, outcome = self._work, self._outcome
                assert work is not None
                chunk, self._copying = self._take(), True
                idle = self._window is not None
            try:
                size = self._copy(work, chunk, outcome)
                if idle:
                    outcome.windowed += size
                else:
                    outcome.beside += size
                if self._next >= len(work.plan):
                    self._settle(work, outcome)
            except Exception as error:  # reported at the deadline: training must not die of it
                outcome.failure = error
            with self._lock:
                self._copying = False
                self._lock.notify_all()

    def _settle(self, work: Work, outcome: Outcome) -> None:
        if not outcome.finished:
            outcome.finished = True
            work.done()

    def _opened(self, work: Work) -> bool:
        """Whether there is a place to copy to."""
        if self._out is None:
            self._out = work.open()
        return self._out is not None

    def _take(self) -> int:
        chunk = int(self._order[self._next])
        self._next += 1
        return chunk

    def _waiting(self) -> float | None:
        """Seconds to wait before the next chunk may start: 0 for now, None until told otherwise."""
        work, gates = self._work, self._gates
        if work is None or gates is None or self._outcome.failure is not None or self._next >= len(work.plan):
            return None
        chunk = int(self._order[self._next])
        kind = int(work.plan.window[chunk])
        seconds = float(work.plan.end[chunk] - work.plan.begin[chunk])
        time = now()
        if kind == EXPOSED or gates.ready[work.plan.piece[chunk]] > self._ended:
            return None
        if kind == OVERLAP:
            due = self._step_began + float(work.plan.begin[chunk])
            if due > time:
                return due - time
        else:
            window = self._window
            if window is None or kind > window or time + seconds > self._until:
                return None
        try:
            return 0.0 if self._opened(work) else POLL_S
        except Exception as error:
            self._outcome.failure = error
            return None

    def _copy(self, work: Work, chunk: int, outcome: Outcome) -> int:
        """Copy one chunk; its bytes."""
        piece, start, stop = (int(column[chunk]) for column in (work.plan.piece, work.plan.start, work.plan.stop))
        assert self._out is not None
        began = now()
        work.fill([ByteRequest(piece, start, stop, self._out[piece][start:stop])])
        ended = now()
        outcome.nbytes += stop - start
        outcome.busy_s += ended - began
        if work.told is not None:
            work.told(outcome.nbytes)
        if self._record:
            outcome.spans.append(Span(f"piece {piece} [{start}:{stop}]", began, ended))
        return stop - start

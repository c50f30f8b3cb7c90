"""One version's copies from devices: asked for gate by gate, ordered by events, and settled when they are over.

The training thread asks; `settle` runs on the thread that waits. Neither is needed for the order in which things happen on
the device: that is laid down by events alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ucformat.box import Ints
from ucformat.reshard.reading.tensor_destination import WIDTH
from ucformat.snapshot.copying.accelerator import Device, Event, Stream
from ucformat.snapshot.copying.host import Outcome
from ucformat.snapshot.copyplan.plan import EXPOSED, NEVER, OVERLAP, CopyPlan
from ucformat.snapshot.schedule.clock import Span, now
from ucformat.snapshot.schedule.replay import Track
from ucformat.storage.store import Bytes

DEADLINE = -1  # in `Batch.gate`: behind the deadline, while training waits
AHEAD = -2  # in `Batch.gate`: what changes within the step, copied from clones as soon as possible


@dataclass(slots=True)
class LateOutcome(Outcome):
    """What became of one version's copies: incomplete until it is `known`."""

    known: threading.Event = field(default_factory=threading.Event)
    quiet: bool = False
    """No copy of it can run any more: its place may be used again."""
    began: float = 0.0
    """When the device began the step, on the host's clock as exactly as a waking thread can tell."""
    track: Track | None = None
    """The step as the device ran it; None when that could not be measured."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One version to copy: what, by which plan, to where."""

    plan: CopyPlan
    views: Sequence[torch.Tensor]
    """Live memory of the plan's pieces: does not change between a piece's readiness and its deadline."""
    changing: Sequence[torch.Tensor]
    """Live memory that changes earlier: cloned on the device in `begin`, then copied."""
    open: Callable[[], Sequence[Bytes] | None]
    """Where the bytes of each of `views` and of `changing` go; None as long as the place is not free. Asked until it is."""
    done: Callable[[], None] = lambda: None
    """Called when every byte is in place, by another thread."""
    ended: Callable[[LateOutcome], None] = lambda outcome: None
    """Called then, and when nothing came of it, by that thread: once for every version, in their order."""
    told: Callable[[int], None] | None = None
    """Called with the bytes copied so far, by that thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What has one gate and one deadline, and is of one kind: a window's index, OVERLAP or EXPOSED."""

    gate: int
    """So many actions have ended; or DEADLINE, or AHEAD."""
    kind: int
    due: int
    """Must be copied before the action at this position begins; NEVER before the next optimizer step."""
    ranges: Ints
    """(R, 3) piece, first byte, one past the last byte."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One batch on one device."""

    batch: Batch
    nbytes: int
    start: Event
    stop: Event


@dataclass(slots=True)
class Lane:
    """One device's part in a version."""

    device: Device
    stream: Stream
    edges: list[Event] = field(default_factory=list)
    """On the computing stream: the step begins, then actions begin and end in turn."""
    copied: list[Copied] = field(default_factory=list)
    deadline: Event = None
    """On the computing stream: the last deadline that was reached."""
    last: Event = None
    """On the copying stream, behind everything."""
    waits: list[tuple[Event, Event]] = field(default_factory=list)
    """On the computing stream, before and behind every wait for copies."""

    def mark(self) -> None:
        """An edge, where the computing stream stands now."""
        self.edges.append(self.device.record(self.device.computing()))

    def gate(self, batch: Batch) -> Event:
        if batch.gate == DEADLINE:
            return self.deadline
        position = 0 if batch.gate == AHEAD else min(batch.gate, (len(self.edges) - 1) // 2)
        return self.edges[2 * position]

    def reach(self) -> None:
        """A deadline, where the computing stream stands now."""
        self.deadline = self.device.record(self.device.computing())

    def wait(self) -> None:
        """Let the computing stream go on when everything asked for is copied."""
        computing = self.device.computing()
        self.last = self.device.record(self.stream)
        self.device.wait(computing, self.last)
        self.waits.append((self.deadline, self.device.record(computing)))


class Flight:
    """The copies of one version."""

    def __init__(self, work: DeviceWork, batches: Sequence[Batch], lanes: list[Lane]) -> None:
        self.work, self.lanes, self.outcome = work, lanes, LateOutcome()
        self._left = list(batches)
        self._dues = {batch.due for batch in batches}
        """Deadlines that were not reached."""
        self._ended = 0
        self._over = False
        """Whether everything was asked for."""
        self._out: Sequence[Bytes] | None = None
        self._sources: dict[int, torch.Tensor] = {}
        """The memory that copies read: kept until they are done, whatever the optimizer replaces."""
        self._on: Ints = np.empty(0, dtype=np.int64)
        """(P,) the number of the lane on which each piece lies."""

    def begin(self) -> None:
        views, changing = self.work.views, self.work.changing
        self._on = np.array([self._lane(view) for view in (*views, *changing)], dtype=np.int64)
        for i, view in enumerate(changing, len(views)):
            device = self.lanes[self._on[i]].device  # on the computing stream: before anything that may change it
            self._sources[i] = _bytes(device.clone(device.computing(), _bits(view.detach())))
        for lane in self.lanes:
            lane.mark()
        ahead = [(i, 0, source.numel()) for i, source in self._sources.items()]
        self._left[:0] = [Batch(AHEAD, EXPOSED, NEVER, np.array(ahead, dtype=np.int64))] if ahead else []

    def _lane(self, tensor: torch.Tensor) -> int:
        for at, lane in enumerate(self.lanes):
            if lane.device.holds(tensor):
                return at
        raise RuntimeError(f"a tensor has moved to {tensor.device}, where none was when the engine was made")

    def opened(self, position: int) -> None:
        """So many actions have been asked for."""
        self._ended = position
        if position:  # the first gap begins with the step
            for lane in self.lanes:
                lane.mark()
        if self._opened():
            self._issue(lambda batch: batch.gate != DEADLINE and batch.gate <= position)

    def closed(self) -> None:
        """The next action follows: what it changes must be copied first."""
        if min(self._dues, default=NEVER) <= self._ended:
            self._dues = {due for due in self._dues if due > self._ended}
            self._reach(lambda batch: batch.due <= self._ended)
        for lane in self.lanes:
            lane.mark()

    def close(self) -> None:
        """The optimizer step follows."""
        self._reach(lambda batch: True)
        self._over = True

    def _reach(self, due: Callable[[Batch], bool]) -> None:
        """A deadline: ask for what is left of what is due, and make computing wait for it."""
        for lane in self.lanes:
            lane.reach()
        if not self._opened():
            self.outcome.refused = True
        self._issue(due)
        for lane in self.lanes:
            lane.wait()

    def _opened(self) -> bool:
        """Whether there is a place to copy to."""
        if self._out is None and not self.outcome.refused:
            self._out = self.work.open()
        return self._out is not None

    def _issue(self, which: Callable[[Batch], bool]) -> None:
        """Ask for some of the batches that are left."""
        if self.outcome.refused:
            return
        chosen = [batch for batch in self._left if which(batch)]
        self._left = [batch for batch in self._left if not which(batch)]
        for batch in chosen:
            on = self._on[batch.ranges[:, 0]]
            for at, lane in enumerate(self.lanes):
                self._ask(lane, batch, batch.ranges[on == at])

    def _ask(self, lane: Lane, batch: Batch, ranges: Ints) -> None:
        if not len(ranges):
            return
        assert self._out is not None
        device, stream = lane.device, lane.stream
        device.wait(stream, lane.gate(batch))
        start = device.record(stream)
        for piece, first, last in ranges.tolist():
            device.copy(stream, self._source(lane, piece)[first:last], self._out[piece][first:last])
        nbytes = int((ranges[:, 2] - ranges[:, 1]).sum())
        lane.copied.append(Copied(batch, nbytes, start, device.record(stream)))

    def _source(self, lane: Lane, piece: int) -> torch.Tensor:
        """A piece's bytes: its own memory, or a gathered copy that the copying stream makes."""
        if piece not in self._sources:
            view = _bits(self.work.views[piece].detach())
            self._sources[piece] = _bytes(view if view.is_contiguous() else lane.device.clone(lane.stream, view))
        return self._sources[piece]

    # -- what the waiting thread does ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the copies; declare the version valid if all went well; measure."""
        outcome = self.outcome
        for act in (self._tell, self._wait, self._declare, self._end):
            try:
                act()
            except Exception as error:  # reported later: training must not die of it
                outcome.failure = outcome.failure or error
        try:
            self._measure()
        except Exception:
            outcome.track = None  # the version is what it is, measured or not
        outcome.known.set()

    def _tell(self) -> None:
        nbytes = 0
        for lane in self.lanes:
            for copied in lane.copied:
                if self.work.told is not None and copied.batch.gate != AHEAD:
                    lane.device.synchronise(copied.stop)
                    nbytes += copied.nbytes
                    self.work.told(nbytes)

    def _wait(self) -> None:
        for lane in self.lanes:
            lane.device.synchronise(lane.last if self._over else lane.device.record(lane.stream))
        self._sources = {}
        self.outcome.quiet = True

    def _declare(self) -> None:
        if self.outcome.failure is None and not self.outcome.refused:
            self.work.done()
            self.outcome.finished = True

    def _end(self) -> None:
        self.work.ended(self.outcome)

    def _measure(self) -> None:
        outcome = self.outcome
        if not self._over:
            return  # it failed before the step was over
        for lane in self.lanes:
            lane.device.synchronise(lane.waits[-1][1])
        main = self.lanes[0]
        ended = [main.device.elapsed(main.edges[0], event) for event in (*main.edges, *main.waits[-1])]
        outcome.began = now() - ended[-1]
        actions = (len(main.edges) - 1) // 2  # what was begun and not ended does not count
        times = np.array(ended[1 : 1 + 2 * actions]).reshape(-1, 2)
        outcome.track = Track(times[:, 0], times[:, 1], ended[-2])
        for lane in self.lanes:
            outcome.exposed_s = max(outcome.exposed_s, sum(lane.device.elapsed(*wait) for wait in lane.waits))
            for copied in lane.copied:
                self._account(lane, copied)

    def _account(self, lane: Lane, copied: Copied) -> None:
        """Add a batch's bytes to what they were: in a window, beside compute, or late."""
        outcome, batch = self.outcome, copied.batch
        origin = lane.edges[0]
        start, stop, due = (lane.device.elapsed(origin, event) for event in (copied.start, copied.stop, lane.deadline))
        outcome.spans.append(Span(f"{copied.nbytes} bytes", outcome.began + start, outcome.began + stop))
        if batch.gate == AHEAD:
            return
        late = 1.0 if batch.gate == DEADLINE or start >= due else max(0.0, stop - due) / max(stop - start, 1e-9)
        exposed = round(copied.nbytes * late)
        outcome.nbytes += copied.nbytes
        outcome.exposed += exposed
        outcome.busy_s += max(0.0, min(stop, due) - start)
        if batch.kind == OVERLAP:
            outcome.beside += copied.nbytes - exposed
        else:
            outcome.windowed += copied.nbytes - exposed


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers where there are such: clones of some exotic dtypes are not implemented."""
    width = WIDTH.get(tensor.element_size())
    return tensor if width is None else tensor.view(width)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, one-dimensional."""
    return tensor.reshape(-1).view(torch.uint8)

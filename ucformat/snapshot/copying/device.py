"""Copying by plan from a device: everything is asked for in advance, and ordered by events on the device itself.

The host runs ahead of the device, so neither its clock nor its position tells when a window opens. Copies go to a stream of
their own, behind an event of the computing stream: the start of the step, or the end of the action that opens their window.
At the deadline the computing stream waits for the last copy; the host does not wait. A thread that sleeps until the
copies are done declares the version valid, and tells later how it went.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ucformat.box import Ints
from ucformat.errors import UnsupportedError
from ucformat.snapshot.copying.accelerator import Device, devices
from ucformat.snapshot.copying.device_version import DEADLINE, Batch, DeviceWork, Flight, Lane, LateOutcome
from ucformat.snapshot.copying.host import HostCopier, Outcome
from ucformat.snapshot.copyplan.plan import EXPOSED, OVERLAP, CopyPlan
from ucformat.snapshot.schedule.replay import Floats, Track

COPY_BYTES = 64 << 20  # a millisecond of a fast link, for which a loop's own small copies (of a loss, say) may have to wait


class DeviceCopier:
    """Copies versions that lie on devices: one is asked for at a time, while the one before may still be in flight.

    Methods are called by the training thread, with the stream current on which it computes. None of them raises, nor waits
    for copies; `finish` alone waits while the host is more than a whole step ahead of the device.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = [(device, device.stream()) for device in devices]
        self._flight: Flight | None = None
        self._before: LateOutcome | None = None
        self._track: Track | None = None
        self._batched: tuple[CopyPlan, list[Batch]] | None = None
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ucf-device", daemon=True)
        self._thread.start()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on one of the devices."""
        return any(device.holds(tensor) for device, _ in self._devices)

    def begin(self, work: DeviceWork) -> None:
        """Take on a version; the optimizer step that made it was asked of the computing stream."""
        self._flight = Flight(work, self._batches(work.plan), [Lane(*device) for device in self._devices])
        self._try(Flight.begin)

    def opened(self, position: int) -> None:
        """`position` actions have been asked for, and a gap follows."""
        self._try(lambda version: version.opened(position))

    def closed(self) -> None:
        """The next action follows."""
        self._try(Flight.closed)

    def finish(self) -> Outcome:
        """The deadline: the state is about to change. What became of the version will be `known` later."""
        version = self._flight
        if version is None:
            return Outcome()
        if self._before is not None:
            self._before.known.wait()  # its slot may be the one that this version needs; the device has a whole step to do
            self._track = self._before.track or self._track
        self._try(Flight.close)
        self._flight, self._before = None, version.outcome
        self._queue.put(version)
        return version.outcome

    def stop(self) -> None:
        """Wait for everything in flight, and end the thread; a version in hand is given up."""
        if self._flight is not None:
            self._flight.outcome.failure = RuntimeError("given up")
            self._queue.put(self._flight)
            self._flight = None
        self._queue.put(None)
        self._thread.join()

    def _try(self, act: Callable[[Flight], None]) -> None:
        version = self._flight
        if version is None or version.outcome.failure is not None:
            return
        try:
            act(version)
        except Exception as error:  # reported when the outcome is known: training must not die of it
            version.outcome.failure = error

    def _batches(self, plan: CopyPlan) -> list[Batch]:
        """A plan as batches; kept as long as the plan is the same."""
        if self._batched is None or self._batched[0] is not plan:
            self._batched = plan, batched(plan, np.zeros(1) if self._track is None else self._track.ready())
        return self._batched[1]

    def _run(self) -> None:
        while self._settled():
            pass

    def _settled(self) -> bool:
        """Settle the next version, and keep nothing of it."""
        version = self._queue.get()
        if version is not None:
            version.settle()
        return version is not None


def copier_for(views: Sequence[torch.Tensor]) -> HostCopier | DeviceCopier:
    """What copies these: devices order the copies of what lies on them themselves.

    Raises UnsupportedError for devices whose order is not known here: their copies might be torn.
    """
    for view in views:
        if view.device.type not in {"cpu", "cuda"}:
            raise UnsupportedError(str(view.device), "snapshots are taken of state in host memory and on CUDA devices")
    found = devices(views)
    return DeviceCopier(found) if found else HostCopier()


def known(outcome: Outcome, *, wait: bool = False) -> bool:
    """Whether it is known what became of a version; waits for it if asked."""
    if not isinstance(outcome, LateOutcome):
        return True
    return outcome.known.wait(None if wait else 0)


def batched(plan: CopyPlan, gates: Floats) -> list[Batch]:
    """A plan's chunks in the order in which gates open, adjoining ones joined. `gates` are seconds by position.

    What runs beside compute goes behind the last gate before its time: that spreads it over the step as far as the step
    has actions. Behind one gate, what is due earlier goes first, then what has a window.
    """
    if not len(plan):
        return []
    last = np.iinfo(np.int64).max
    opens = np.array([0 if window.after is None else window.after + 1 for window in plan.windows] or [0], dtype=np.int64)
    beside = np.maximum(np.searchsorted(gates, plan.begin, side="right") - 1, 0)
    gate = np.maximum(np.where(plan.window >= 0, opens[np.maximum(plan.window, 0)], beside), plan.pieces.ready[plan.piece])
    gate = np.where(plan.window == EXPOSED, last, gate)
    due = plan.pieces.deadline[plan.piece]
    order = np.lexsort((np.where(plan.window == OVERLAP, last, plan.window), due, gate))
    keys = np.stack([np.where(gate == last, DEADLINE, gate), plan.window, due], axis=1)
    keys, ranges = _joined(keys[order], np.stack([plan.piece, plan.start, plan.stop], axis=1)[order])
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    parts = zip(keys[np.r_[0, cuts]].tolist(), np.split(ranges, cuts), strict=True)
    return [Batch(position, kind, before, part) for (position, kind, before), part in parts]


def _joined(keys: Ints, ranges: Ints) -> tuple[Ints, Ints]:
    """`Batch.ranges` of chunks and what batches them: those that adjoin are one, within multiples of `COPY_BYTES`."""
    same = np.column_stack([keys, ranges[:, 0], ranges[:, 1] // COPY_BYTES])
    apart = (same[1:] != same[:-1]).any(axis=1) | (ranges[1:, 1] != ranges[:-1, 2])
    first, last = np.r_[True, apart], np.r_[apart, True]
    return keys[first], np.column_stack([ranges[first, :2], ranges[last, 2]])

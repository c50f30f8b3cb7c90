"""One version on its way from live memory into a slot: what is copied when, and where it goes once a slot is free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from ucformat.box import Ints
from ucformat.containers.file_image import ByteRequest
from ucformat.dtypes import DType
from ucformat.reshard.reading.fill import TensorFill
from ucformat.snapshot.cadence import Due
from ucformat.snapshot.copying.device import DeviceCopier
from ucformat.snapshot.copying.device_version import DeviceWork, LateOutcome
from ucformat.snapshot.copying.host import HostCopier, Work
from ucformat.snapshot.copyplan.plan import CopyPlan
from ucformat.snapshot.report import StepReport
from ucformat.snapshot.schedule.clock import now
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.snapshot.source.share import Boundary, Share
from ucformat.storage.store import Bytes

Told = Callable[[int], None]
"""Hears of bytes copied so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the pieces of every version go."""

    kinds: Sequence[DType]
    nbytes: Ints
    """(P,)."""
    slots: Mapping[int, Sequence[Bytes]]
    """By slot, the bytes of each piece."""

    @classmethod
    def of(cls, share: Share, slots: SlotSet) -> Places:
        pieces = share.keys[: share.pieces]
        return cls(
            [spec.kind for spec, _ in pieces],
            np.array([box.volume * spec.kind.itemsize for spec, box in pieces], dtype=np.int64),
            {
                slot.index: [slot.tensor(i).reshape(-1).view(torch.uint8).numpy() for i in range(len(pieces))]
                for slot in slots.slots
            },
        )


class Taking:
    """A version that is being copied. `begin` it at the boundary, then give its work to a copier."""

    def __init__(
        self,
        report: StepReport,
        boundary: Boundary,
        due: Due,
        places: Places,
        free_slot: Callable[[], Slot | None],
        copier: HostCopier | DeviceCopier,
    ) -> None:
        self.report, self.boundary, self.due, self.began = report, boundary, due, now()
        self.names: tuple[str, ...] = ()
        """The step's actions, once they are known."""
        self.slot: Slot | None = None
        """Where it goes; None until a slot is free."""
        self.gate = 0.0
        """Seconds into the step until there was a slot."""
        stable = np.array(boundary.stable, dtype=bool)
        changes, self._chosen = np.flatnonzero(~stable).tolist(), np.flatnonzero(stable).tolist()
        self._changing = [i for i in changes if isinstance(copier, DeviceCopier) and copier.holds(boundary.views[i])]
        self._aside = sorted(set(changes) - set(self._changing))
        self._staged: dict[int, Bytes] = {}
        self._watched = [boundary.views[i] for i in self._chosen]
        self._versions, self._wrapped = _versions(self._watched), _versions(boundary.wrappers)
        self._sealed: list[int] | None = None
        self._places, self._free_slot, self._copier = places, free_slot, copier
        self._fill: TensorFill | None = None

    @property
    def sizes(self) -> Ints:
        """Bytes of each piece that is copied by plan, in the plan's order."""
        return self._places.nbytes[self._chosen]

    def teller(self, tell: Callable[[int, int, int], None] | None) -> Told | None:
        """What tells `tell` of the version's progress: its step, bytes copied so far, bytes in all."""
        if tell is None:
            return None
        step, total = self.report.step, int(self.sizes.sum())
        return lambda copied: tell(step, copied, total)

    def begin(self) -> None:
        """Copy what may change before the next optimizer step, aside as long as there is no slot."""
        self._find()
        fill = self._filling(self._aside)
        for at, i in enumerate(self._aside):
            length = int(self._places.nbytes[i])
            place = np.empty(length, dtype=np.uint8) if self.slot is None else self._places.slots[self.slot.index][i]
            fill([ByteRequest(at, 0, length, place)])
            if self.slot is None:
                self._staged[i] = place

    def open(self) -> list[Bytes] | None:
        """The places of the pieces that are copied by plan, then of those that a device clones, once there is a slot."""
        self._find()
        if self.slot is None:
            return None
        out = self._places.slots[self.slot.index]
        for i, data in self._staged.items():
            out[i][:] = data
        self._staged = {}
        return [out[i] for i in (*self._chosen, *self._changing)]

    def _find(self) -> None:
        if self.slot is None:
            self.slot = self._free_slot()
            self.gate = now() - self.began

    def changed(self) -> list[int]:
        """Pieces that were written to since the boundary, or until the deadline. Any thread.

        A safety net for loops that change the state without the engine's knowing: it sees what autograd's version counters
        see, which leaves out `.data` and foreign kernels.
        """
        if self._sealed is not None:
            return self._sealed
        after, wrapped = _versions(self._watched), _versions(self.boundary.wrappers)
        changed = [i for i, a, b in zip(self._chosen, self._versions, after, strict=True) if a != b]
        if wrapped == self._wrapped:
            return changed
        through = (x for x, a, b in zip(self.boundary.wrappers, self._wrapped, wrapped, strict=True) if a != b)
        return sorted({*changed, *(self.boundary.written(through) & set(self._chosen))})

    def seal(self) -> None:
        """The deadline: what changes from now on does no harm."""
        self._sealed = self.changed()

    def copy(self, plan: CopyPlan, done: Callable[[], None], ended: Callable[[LateOutcome], None], told: Told | None) -> None:
        """Give the work to the copier; `ended` is for one of devices."""
        if isinstance(self._copier, DeviceCopier):
            changing = [self.boundary.views[i] for i in self._changing]
            self._copier.begin(DeviceWork(plan, self._watched, changing, self.open, done, ended, told))
        else:
            self._copier.begin(Work(plan, self._planned, self.open, done, told))

    def _planned(self, parts: Sequence[ByteRequest]) -> None:
        """The fill of a plan's pieces."""
        if self._fill is None:  # it looks at every tensor: the thread that copies has more time for it than the boundary
            self._fill = self._filling(self._chosen)
        self._fill(parts)

    def _filling(self, pieces: Sequence[int]) -> TensorFill:
        return TensorFill([self.boundary.views[i] for i in pieces], [self._places.kinds[i] for i in pieces])


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Autograd's counters of in-place writes, which have no public name; -1 for inference tensors, which have none."""
    try:
        return list(map(attrgetter("_version"), tensors))  # in one go: a call per tensor of thousands takes longer
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]

"""One version on its way from live memory into a slot: what is copied when, and where it goes once a slot is free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ucformat.dtypes import DType
from ucformat.image import Part
from ucformat.reshard.fill import TensorFill
from ucformat.snapshot.bubbles import CopyPlan
from ucformat.snapshot.clock import now
from ucformat.snapshot.copier import HostCopier, Work
from ucformat.snapshot.device import DeviceCopier
from ucformat.snapshot.flight import DeviceWork, LateOutcome
from ucformat.snapshot.report import StepReport
from ucformat.snapshot.slots import Slot
from ucformat.snapshot.sources import Boundary
from ucformat.storage import Bytes

Told = Callable[[int], None]
"""Hears of bytes copied so far."""


class Taking:
    """A version that is being copied. `begin` it at the boundary, then give its work to a copier."""

    def __init__(
        self,
        report: StepReport,
        boundary: Boundary,
        kinds: Sequence[DType],
        places: Mapping[int, Sequence[Bytes]],
        free_slot: Callable[[], Slot | None],
        copier: HostCopier | DeviceCopier,
    ) -> None:
        """`places` are the bytes of each piece, by slot."""
        self.report, self.boundary, self.began = report, boundary, now()
        self.names: tuple[str, ...] = ()
        """The step's actions, once they are known."""
        self.slot: Slot | None = None
        """Where it goes; None until a slot is free."""
        self.gate = 0.0
        """Seconds into the step until there was a slot."""
        changes = [i for i, stable in enumerate(boundary.stable) if not stable]
        self._chosen = [i for i, stable in enumerate(boundary.stable) if stable]
        self._changing = [i for i in changes if isinstance(copier, DeviceCopier) and copier.holds(boundary.views[i])]
        self._aside = sorted(set(changes) - set(self._changing))
        self._staged: dict[int, Bytes] = {}
        self._versions = [_version(boundary.views[i]) for i in self._chosen]
        self._sealed: list[int] | None = None
        self._places, self._free_slot, self._copier = places, free_slot, copier
        self._fill = TensorFill(boundary.views, kinds)
        self._lengths = [len(place) for place in next(iter(places.values()))]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece that is copied by plan, in the plan's order."""
        return [self._lengths[i] for i in self._chosen]

    def begin(self) -> None:
        """Copy what may change before the next optimizer step, aside as long as there is no slot."""
        self.open()
        for i in self._aside:
            place = np.empty(self._lengths[i], dtype=np.uint8) if self.slot is None else self._places[self.slot.index][i]
            self._fill([Part(i, 0, self._lengths[i], place)])
            if self.slot is None:
                self._staged[i] = place

    def open(self) -> list[Bytes] | None:
        """The places of the pieces that are copied by plan, then of those that a device clones, once there is a slot."""
        if self.slot is None:
            self.slot = self._free_slot()
            self.gate = now() - self.began
        if self.slot is None:
            return None
        out = self._places[self.slot.index]
        for i, data in self._staged.items():
            out[i][:] = data
        self._staged = {}
        return [out[i] for i in (*self._chosen, *self._changing)]

    def changed(self) -> list[int]:
        """Pieces that were written to since the boundary, or until the deadline. Any thread.

        A safety net for loops that change the state without the engine's knowing: it sees what autograd's version counters
        see, which leaves out `.data`, DTensors and foreign kernels.
        """
        if self._sealed is not None:
            return self._sealed
        views, before = self.boundary.views, self._versions
        return [i for i, version in zip(self._chosen, before, strict=True) if _version(views[i]) != version]

    def seal(self) -> None:
        """The deadline: what changes from now on does no harm."""
        self._sealed = self.changed()

    def copy(self, plan: CopyPlan, done: Callable[[], None], ended: Callable[[LateOutcome], None], told: Told | None) -> None:
        """Give the work to the copier; `ended` is for one of devices."""
        if isinstance(self._copier, DeviceCopier):
            views = self.boundary.views
            chosen, changing = [views[i] for i in self._chosen], [views[i] for i in self._changing]
            self._copier.begin(DeviceWork(plan, chosen, changing, self.open, done, ended, told))
        else:
            self._copier.begin(Work(plan, self._renumbered, self.open, done, told))

    def _renumbered(self, parts: Sequence[Part]) -> None:
        """The fill of a plan's pieces."""
        self._fill([Part(self._chosen[part.piece], part.start, part.stop, part.out) for part in parts])


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # autograd's counter of in-place writes has no public name

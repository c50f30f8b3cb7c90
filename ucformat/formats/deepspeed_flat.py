"""Where elements of parameters lie in DeepSpeed's flat buffers: pure geometry, no files.

ZeRO-1, ZeRO-2 and BF16_Optimizer lay a group's parameters end to end (with padding after each, when alignment is asked for),
pad the whole, and cut it into equal slices: a rank's slice starts and ends anywhere. ZeRO-3 cuts every parameter
into equal slices, the last one padded: a rank's buffer is its slice of each parameter in turn. Either way a rank holds
runs of consecutive elements of parameters, and a run is at most 2n-1 boxes of an n-dimensional parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ucformat.box import Box, flat_range


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in a group's whole flat buffer: elements [start, start + numel)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a parameter, row-major, that lie at element `at` of a rank's own flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """The run as (element of the rank's buffer, box of the parameter)."""
        at = self.at
        for box in flat_range(self.shape, self.start, self.stop):
            yield at, box
            at += box.volume


def slots(shapes: Mapping[str, Sequence[int]], paddings: Sequence[int] | None = None) -> tuple[list[Slot], int]:
    """The parameters of a group in order, `paddings[i]` unused elements after the i-th, and the elements in all."""
    placed: list[Slot] = []
    at = 0
    for (name, shape), pad in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        placed.append(Slot(name, tuple(shape), at))
        at = placed[-1].stop + pad
    return placed, at


def runs_of_slice(placed: Sequence[Slot], start: int, stop: int) -> list[Run]:
    """What a rank holds whose buffer is elements [start, stop) of the group's flat buffer."""
    first = max(0, bisect_right(placed, start, key=lambda slot: slot.start) - 1)
    runs: list[Run] = []
    for slot in placed[first:]:
        if slot.start >= stop:
            break
        low, high = max(start, slot.start), min(stop, slot.stop)
        if low < high:
            runs.append(Run(slot.name, slot.shape, low - slot.start, high - slot.start, low - start))
    return runs


def share(numel: int, world: int) -> int:
    """Elements of each rank's slice of a parameter under ZeRO-3, padding included."""
    return -(-numel // world)


def run_of_share(name: str, shape: Sequence[int], rank: int, world: int, at: int) -> Run | None:
    """A rank's slice of a parameter under ZeRO-3, at element `at` of its buffer; None when it is all padding."""
    numel = math.prod(shape)
    size = share(numel, world)
    start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
    return Run(name, tuple(shape), start, stop, at) if start < stop else None


def starts_of_slices(lengths: Sequence[int], total: int) -> list[int] | None:
    """Where each rank's slice starts in the flat buffer of `total` elements, given the lengths that are stored.

    All slices are equally long, but padding at the end of the buffer may have been cut off those that hold it. None when
    the lengths can't be such slices.
    """
    starts: list[int] = []
    at = 0
    for length in lengths:
        if length > lengths[0] or (length < lengths[0] and at + length < total):
            return None
        starts.append(at)
        at += length
    return starts if at >= total else None


class Geometry(Protocol):
    """How one group's parameters lie in the ranks' flat buffers."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters by name, in order."""
        ...

    def runs(self, lengths: Sequence[int]) -> list[list[Run]] | None:
        """What each rank holds, when its buffer has `lengths[rank]` elements; None when buffers of this group can't."""
        ...


@dataclass(frozen=True, slots=True)
class EvenSlices:
    """ZeRO-1, ZeRO-2, BF16_Optimizer: equal slices of all parameters end to end, `paddings[i]` elements after the i-th."""

    shapes: Mapping[str, tuple[int, ...]]
    paddings: Sequence[int]
    tail: int
    """The most padding that may stand at the end of the whole buffer."""

    def runs(self, lengths: Sequence[int]) -> list[list[Run]] | None:
        placed, total = slots(self.shapes, self.paddings)
        starts = starts_of_slices(lengths, total)
        if starts is None or sum(lengths) - total > self.tail:
            return None
        return [runs_of_slice(placed, start, start + length) for start, length in zip(starts, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class ParameterSlices:
    """ZeRO-3: every parameter cut into equal slices; a rank's buffer is its slice of each in turn."""

    shapes: Mapping[str, tuple[int, ...]]

    def runs(self, lengths: Sequence[int]) -> list[list[Run]] | None:
        world = len(lengths)
        if set(lengths) != {slice_elements(self.shapes, world)}:
            return None
        return [self._of_rank(rank, world) for rank in range(world)]

    def _of_rank(self, rank: int, world: int) -> list[Run]:
        found: list[Run] = []
        at = 0
        for name, shape in self.shapes.items():
            run = run_of_share(name, shape, rank, world, at)
            if run is not None:
                found.append(run)
            at += share(math.prod(shape), world)
        return found


def slice_elements(shapes: Mapping[str, Sequence[int]], world: int) -> int:
    """Elements of a rank's buffer for these parameters under ZeRO-3."""
    return sum(share(math.prod(shape), world) for shape in shapes.values())


def fill_buffers(
    shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[int], world: int
) -> list[dict[str, tuple[int, ...]]] | None:
    """Spread parameters, in order, over ZeRO-3 buffers of `sizes` elements; None when they do not fill them exactly."""
    filled: list[dict[str, tuple[int, ...]]] = []
    rest = list(shapes.items())[::-1]
    for size in sizes:
        members: dict[str, tuple[int, ...]] = {}
        room = size
        while rest and share(math.prod(rest[-1][1]), world) <= room:
            name, shape = rest.pop()
            members[name] = shape
            room -= share(math.prod(shape), world)
        if room:
            return None
        filled.append(members)
    return None if rest else filled

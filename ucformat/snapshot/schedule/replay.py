"""A schedule replayed with measured durations: when each action starts and stops, and where a rank idles.

Pure. Closed forms of the idle time hold for GPipe and 1F1B alone, and for equal stages: so the lists are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ucformat.group import Group
from ucformat.snapshot.schedule.actions import KINDS, Action, Kind, Result, Schedule, ScheduleError, gives

Floats = NDArray[np.float64]

HAIR = 1e-9  # of a step: shorter gaps are rounding, not idle time


@dataclass(frozen=True, slots=True)
class IdleWindow:
    """Idle seconds [start, stop) of a rank's step, between two positions of its action list."""

    after: int | None
    """Position of the action before, None at the start of the step."""
    before: int | None
    """Position of the action that ends it, None where the optimizer does."""
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Track:
    """One rank's step of `seconds`, from the end of one optimizer step to the beginning of the next: planned or measured."""

    start: Floats
    """(N,) seconds at which each action begins, ascending."""
    stop: Floats
    """(N,) seconds at which each action ends."""
    seconds: float

    @classmethod
    def whole(cls, seconds: float) -> Track:
        """A step without a pipeline: one long action, no idle time."""
        return cls(np.zeros(1), np.full(1, float(seconds)), float(seconds))

    def windows(self) -> tuple[IdleWindow, ...]:
        """The idle windows in time order, those at the start and the end included. None where no action is known."""
        opens, closes = self.ready(), self.deadline()
        n = len(self.start)
        if n == 0:
            return ()
        return tuple(
            IdleWindow(at - 1 if at else None, at if at < n else None, float(opens[at]), float(closes[at]))
            for at in np.flatnonzero(closes - opens > HAIR * self.seconds).tolist()
        )

    @property
    def idle(self) -> float:
        """Seconds in all windows together."""
        return sum((window.seconds for window in self.windows()), 0.0)

    def ready(self) -> Floats:
        """(N + 1,) by position: when everything before it has ended."""
        return np.concatenate([np.zeros(1), np.maximum.accumulate(self.stop)])

    def deadline(self) -> Floats:
        """(N + 1,) by position: when its action begins, the optimizer for N."""
        return np.concatenate([self.start, np.full(1, self.seconds)])


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks' tracks of one step, on one clock."""

    schedule: Schedule
    tracks: tuple[Track, ...]
    seconds: float
    """From the first action's start to the last one's end."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long each stage takes for each kind of action, for one microbatch."""

    seconds: Floats
    """(S, 5) by stage and `KINDS`; NaN where not measured."""

    @classmethod
    def uniform(
        cls, stages: int, forward: float, inputs: float, weights: float, *, backward: float | None = None, reduce: float = 0.0
    ) -> Times:
        """Equal stages. A full backward takes `inputs + weights` unless given."""
        full = inputs + weights if backward is None else backward
        return cls(np.tile(np.array([forward, full, inputs, weights, reduce]), (stages, 1)))

    @classmethod
    def measured(cls, schedule: Schedule, rank: int, durations: Floats) -> Times:
        """Medians of one rank's measured durations, (N,) or (steps, N) seconds by position; NaN for other ranks' stages."""
        rows = np.atleast_2d(durations)
        actions = schedule.ranks[rank]
        if rows.shape[1] != len(actions):
            raise ScheduleError(f"{rows.shape[1]} durations for {len(actions)} actions", rank)
        found = np.full((len(schedule.stage_rank), len(KINDS)), np.nan)
        for stage, kind in {(action.stage, action.kind) for action in actions}:
            columns = [at for at, action in enumerate(actions) if (action.stage, action.kind) == (stage, kind)]
            values = rows[:, columns]
            if not np.isnan(values).all():
                found[stage, KINDS.index(kind)] = np.nanmedian(values)
        return cls(found)

    def of_all(self, group: Group) -> Times:
        """What all ranks measured, each for its own stages: of several that have the same stage, the slowest counts."""
        known = np.where(np.isnan(self.seconds), -1, self.seconds * 1e9).astype(np.int64)  # nanoseconds
        found = group.maximum(known.ravel()).reshape(known.shape)
        return Times(np.where(found < 0, np.nan, found / 1e9))

    def of(self, action: Action) -> float:
        """Seconds that `action` takes. A full backward is the sum of its halves where it was not measured, and vice versa.

        Raises ScheduleError where nothing tells.
        """
        row = self.seconds[action.stage]
        forward, full, inputs, weights, reduce = row.tolist()
        known: dict[Kind, float] = {
            "F": forward,
            "B": inputs + weights if np.isnan(full) else full,
            "I": full / 2 if np.isnan(inputs) else inputs,
            "W": full / 2 if np.isnan(weights) else weights,
            "REDUCE_GRAD": 0.0 if np.isnan(reduce) else reduce,
        }
        found = known[action.kind]
        if not (np.isfinite(found) and found >= 0):
            raise ScheduleError(f"no duration is known for {action.kind} of stage {action.stage}", action=action)
        return found


def replay(schedule: Schedule, times: Times, p2p: float = 0.0, *, hidden: float = 0.0) -> Timeline:
    """When everything happens if each action begins as soon as its rank is free and its inputs have arrived.

    `p2p` is the seconds that a result takes to another rank; sending costs the sender nothing. `hidden` is the part of
    the shorter half of an OVERLAP_F_B pair that runs beside the longer: 0 as torch runs pairs, up to 1.
    Raises ScheduleError for a duration that is not known.
    """
    if times.seconds.shape != (len(schedule.stage_rank), len(KINDS)):
        raise ScheduleError(f"durations of {len(times.seconds)} stages for a schedule of {len(schedule.stage_rank)}")
    takes = {action: times.of(action) for action in {action for actions in schedule.ranks for action in actions}}
    start = [np.zeros(len(actions)) for actions in schedule.ranks]
    stop = [np.zeros(len(actions)) for actions in schedule.ranks]
    done: dict[Result, tuple[float, int]] = {}
    for rank, at in schedule.order:
        action = schedule.ranks[rank][at]
        begin = float(stop[rank][at - 1]) if at else 0.0
        for key in schedule.needs(action):
            when, where = done[key]
            begin = max(begin, when if where == rank else when + p2p)
        seconds = takes[action]
        if action.joined and at:
            seconds -= hidden * min(seconds, takes[schedule.ranks[rank][at - 1]])
        start[rank][at], stop[rank][at] = begin, begin + seconds
        done.update((key, (begin + seconds, rank)) for key in gives(action))
    total = max((float(row[-1]) for row in stop if len(row)), default=0.0)
    return Timeline(schedule, tuple(Track(a, b, total) for a, b in zip(start, stop, strict=True)), total)

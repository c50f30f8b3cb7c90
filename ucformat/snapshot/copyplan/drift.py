"""When a plan no longer fits: measured against planned times, with memory enough not to run after noise."""

from __future__ import annotations

from collections import deque

import numpy as np

from ucformat.snapshot.schedule.replay import Floats, Track

STEPS = 8  # medians over so many steps: a slow step or two (data, garbage collection) is no drift
ENTER = 0.15  # of the step's seconds are elsewhere than planned: about what the planner's margin forgives
LITTLE = 0.1  # of the step: less idle time than this is hardly planned with
NOISE_S = 0.001  # what the system's scheduler moves in any step: no plan gains by following it
SURE = 4.0  # standard errors of a median, or of a smoothed rate, that are taken for noise: the plan was made of such, too
DIFFER = 0.1  # by which fraction measurements are taken to scatter, until they tell
LEAVE = 0.07  # half of it: what hovers around the threshold is reported once


def segments(track: Track) -> Floats:
    """(2N + 1,) seconds of a step: the gap before each action and the action, in turn, then the gap at the end."""
    stop = np.maximum.accumulate(np.r_[0.0, track.stop])
    found = np.empty(2 * len(track.start) + 1)
    found[0::2] = np.maximum(0.0, np.r_[track.start, track.seconds] - stop)
    found[1::2] = track.stop - track.start
    return found


def deviation(planned: Track, measured: Floats) -> float:
    """Fraction of the planned step that lies elsewhere: medians of `measured`, (steps, 2N + 1) segments, against the plan.

    Only what lies beyond the noise of these medians counts, as far as the steps themselves show how they differ. Or the fraction
    of the plan's idle time, if that is more: copies are planned into it. Where there is little of it, noise would be much of it:
    a tenth of the step counts at least.
    """
    expected = segments(planned)
    total = float(expected.sum())
    median = np.median(measured, axis=0)
    moved = np.maximum(0.0, np.abs(median - expected) - SURE * _error(measured, median))
    if total <= 0:
        return float(moved.sum() > 0)
    if float(moved.sum()) <= NOISE_S:
        return 0.0
    idle = max(float(expected[0::2].sum()), LITTLE * total)
    return max(float(moved.sum()) / total, float(moved[0::2].sum()) / idle)


def _error(measured: Floats, median: Floats) -> Floats:
    """Standard error of the medians of normal noise, from the median deviation, which single slow steps don't move."""
    error: Floats = np.median(np.abs(measured - median), axis=0) * (1.25 * 1.48 / len(measured) ** 0.5)
    return error


class Smoothed:
    """A quantity, smoothed over measurements, and how much these scatter."""

    def __init__(self, weight: float) -> None:
        """`weight` is that of the newest measurement."""
        self.value: float | None = None
        self._weight, self._variance = weight, 0.0

    def add(self, measured: float) -> None:
        if self.value is None:
            self.value, self._variance = measured, (DIFFER * measured) ** 2
            return
        self._variance += self._weight * ((measured - self.value) ** 2 - self._variance)
        self.value += self._weight * (measured - self.value)

    def differs(self, known: float, by: float) -> bool:
        """Whether it differs from `known` by more than this, and by more than noise explains."""
        error = float((self._weight / (2 - self._weight) * self._variance) ** 0.5)
        return self.value is not None and abs(self.value - known) > max(by, SURE * error)


class Drift:
    """Decides when to plan again. `rebase` after every new plan."""

    def __init__(self, planned: Track, *, steps: int = STEPS, enter: float = ENTER, leave: float = LEAVE) -> None:
        if steps < 1 or not 0 <= leave <= enter:
            raise ValueError(f"drift over {steps} steps, from {enter} until {leave}, can't be decided")
        self.enter, self.leave = enter, leave
        self.planned = planned
        self.recent: deque[Floats] = deque(maxlen=steps)
        self.drifting = False

    def observe(self, measured: Track) -> bool:
        """One more measured step. True once when the plan has become wrong; again only after it was right or renewed.

        A step with NaN in it was not measured and does not count. Raises ValueError when the step has another number of
        actions than the plan.
        """
        if len(measured.start) != len(self.planned.start):
            raise ValueError(f"{len(measured.start)} actions measured, {len(self.planned.start)} planned")
        found = segments(measured)
        if not np.isfinite(found).all():
            return False
        self.recent.append(found)
        if len(self.recent) < (self.recent.maxlen or 1):
            return False
        moved = deviation(self.planned, np.stack(self.recent))
        was, self.drifting = self.drifting, moved > (self.leave if self.drifting else self.enter)
        return self.drifting and not was

    def typical(self) -> Track:
        """The step that the recent ones tell, by medians of their segments: what to plan with next."""
        if not self.recent:
            return self.planned
        edges = np.cumsum(np.median(np.stack(self.recent), axis=0))
        return Track(edges[0:-1:2], edges[1::2], float(edges[-1]))

    def rebase(self, planned: Track) -> None:
        """Compare with a new plan from now on."""
        self.planned, self.drifting = planned, False
        self.recent.clear()

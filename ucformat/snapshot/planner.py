"""When a copy plan is made, and with which times and rates: measured first, made, watched, and made anew.

The engine tells how each step and each version's copies went. A plan needs a few measured steps; from then on it is in
force until times, copy rates or the waiting for a slot are no longer those that it was made with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ucformat.box import Ints
from ucformat.errors import RankFailedError
from ucformat.group import Group
from ucformat.snapshot.copying.host import Outcome
from ucformat.snapshot.copyplan.drift import Drift, Smoothed
from ucformat.snapshot.copyplan.plan import CopyPlan, Mode, Pieces, Rates, plan_copies
from ucformat.snapshot.report import SnapshotReport
from ucformat.snapshot.schedule.replay import IdleWindow, Times, Track, replay
from ucformat.snapshot.schedule.strategy import Strategy

_LOG = logging.getLogger(__name__)
WARM_UP = 3  # steps that are measured before the first plan: the first one sets up connections and shapes
RATE_DRIFT = 0.25  # of the planned copy rate: more asks for a new plan
WAITING_DRIFT = 0.08  # the same while training waits, of which the prediction is made
RATE_BYTES = 16 << 20  # in less time than these take, the clock and the scheduler measure themselves
GATE_DRIFT = 0.2  # of all idle time: so much more or less of waiting for a slot asks for a new plan
GATE_S = 0.001  # but no less: where there is hardly any idle time, each jitter of a thread would be a change
OPENING_S = 0.0002  # from the opening of a window to the first byte: a thread has to wake up
UNKNOWN_STEP_S = 0.1  # a step, before any was measured

Names = tuple[str, ...]
"""Actions of a step, in the order in which they ran."""


class Planner:
    """One rank's plans. The training thread calls it."""

    def __init__(self, mode: Mode, group: Group, report: SnapshotReport) -> None:
        self.mode = mode
        self.strategy: Strategy | None = None
        self._group, self._report = group, report
        self._ended = 0
        self._tracks: list[tuple[Names, Track]] = []
        self._drift: Drift | None = None
        self._rates = Rates(alone=4e9, beside=2e9)  # a guess, until the first copies tell
        self._current: tuple[int, CopyPlan] | None = None
        """How much was known of steps then, and the plan in force."""
        self._alone, self._waiting = Smoothed(0.15), Smoothed(0.15)
        self._gate, self._gates = 0.0, Smoothed(0.2)

    def plan(self, nbytes: Ints) -> CopyPlan:
        """The plan in force for pieces of these bytes. Made anew only when something changed."""
        known = min(len(self._tracks), 1) if self._drift is None else 2  # nothing, one step, or enough
        if self._current is not None:
            then, plan = self._current
            if then == known and np.array_equal(plan.pieces.nbytes, nbytes):
                return plan
        pieces = Pieces.lasting(nbytes)
        if self._drift is None:
            seconds = self._tracks[-1][1].seconds if self._tracks else UNKNOWN_STEP_S
            plan = plan_copies(Track.whole(seconds), pieces, self._rates, "overlap")
            self._current = known, plan
            return plan
        whole = self._drift.planned
        plan = plan_copies(_after(whole, self._gate), pieces, self._rates, self.mode)
        plan = replace(plan, windows=_as_they_open(plan.windows, whole.windows()))
        self._current = known, plan
        self._report.plan = f"{plan.taken}: {plan.reason}"
        return plan

    @property
    def due(self) -> bool:
        """The next `ended` makes the first plan: what is known of earlier steps must have been told by then."""
        return self._ended == WARM_UP

    def ended(self) -> None:
        """A step has ended, on all ranks alike. One of the first ones exchanges what they all measured."""
        self._ended += 1
        if self._ended == WARM_UP + 1:
            self._first_plan()

    def measured(self, names: Names, track: Track) -> None:
        """What a step was like: before its `ended`, or later where a device has to tell."""
        if self._drift is None:
            self._tracks.append((names, track))
            if self._ended > WARM_UP:  # nothing was known when it was time
                self._drift = Drift(track)
        elif len(track.start) == len(self._drift.planned.start) and self._drift.observe(track):
            self._drift.rebase(self._drift.typical())
            self._replan()

    def learn(self, outcome: Outcome, gate: float) -> None:
        """What was just measured of rates, and of waiting for a slot, smoothed; a plan that is off is made anew."""
        self._gates.add(gate)
        idle = 0.0 if self._drift is None else self._drift.planned.idle
        if self._drift is not None and self._gates.differs(self._gate, max(GATE_S, GATE_DRIFT * idle)):
            self._gate = self._gates.value or 0.0
            self._replan()
        _measure(self._alone, outcome.nbytes - outcome.exposed, outcome.busy_s)
        _measure(self._waiting, outcome.exposed, outcome.exposed_s)
        beside = self._alone if self._alone.value is not None else self._waiting
        waiting = self._waiting if self._waiting.value is not None else self._alone
        known = self._rates
        then = known.waiting or known.alone
        if beside.differs(known.alone, RATE_DRIFT * known.alone) or waiting.differs(then, WAITING_DRIFT * then):
            alone = beside.value or known.alone
            self._rates = Rates(alone=alone, beside=alone / 2, opening=OPENING_S, waiting=waiting.value or alone)
            self._replan()

    # -- inside --------------------------------------------------------------------------------------------------

    def _first_plan(self) -> None:
        """Windows from the schedule replayed with all ranks' measured times, or as this rank measured them itself."""
        names, last = self._tracks[-1] if self._tracks else ((), None)
        like = [track for found, track in self._tracks[1:] if found == names]
        replayed: Track | None = None
        try:
            replayed = self._replayed(names, like)
        except RankFailedError as error:  # in an optimizer's hook, which must not raise: the loop meets that rank itself
            self._report.failures.append(f"planned without the other ranks: {error}")
            _LOG.warning("snapshots of rank %d: planned without the other ranks: %s", self._group.rank, error)
        if last is None:
            return
        drift = Drift(last, steps=max(1, len(like)))
        for track in like:
            drift.observe(track)
        self._drift = Drift(replayed or drift.typical())

    def _replayed(self, names: Names, tracks: list[Track]) -> Track | None:
        """The rank's step as the schedule says; None when the loop does not run the schedule as it is written."""
        strategy = self.strategy
        own: Times | None = None
        if tracks and strategy is not None and strategy.schedule is not None:
            actions = strategy.schedule.ranks[strategy.rank]
            if tuple(map(str, actions)) == names:
                own = Times.measured(strategy.schedule, strategy.rank, np.stack([t.stop - t.start for t in tracks]))
        if self._group.any_rank(own is None) or own is None or strategy is None or strategy.schedule is None:
            return None
        united = own.of_all(self._group)
        return _as_run(replay(strategy.schedule, united).tracks[strategy.rank], tracks)

    def _replan(self) -> None:
        if self._current is not None:
            self._report.replans += int(self._drift is not None)
            self._current = None


def _measure(rate: Smoothed, nbytes: int, seconds: float) -> None:
    if nbytes >= RATE_BYTES and seconds > 0:
        rate.add(nbytes / seconds)


def _after(track: Track, seconds: float) -> Track:
    """What is left of a step when its first `seconds` are over."""
    seconds = min(seconds, track.seconds / 2)  # a plan needs a step to lie in
    return Track(np.maximum(track.start - seconds, 0.0), np.maximum(track.stop - seconds, 0.0), track.seconds - seconds)


def _as_they_open(windows: Sequence[IdleWindow], whole: Sequence[IdleWindow]) -> tuple[IdleWindow, ...]:
    """Windows of what is left of a step, as long as they are when they open: what was waited for a slot is part of them."""
    seconds = {window.after: window.seconds for window in whole}
    return tuple(replace(window, start=window.stop - seconds.get(window.after, window.seconds)) for window in windows)


def _as_run(planned: Track, measured: list[Track]) -> Track:
    """`planned` as this loop runs it: a rank that does not wait for the others before its optimizer idles after it instead."""
    rest = float(np.median([track.seconds - track.stop[-1] for track in measured]))
    late = max(0.0, planned.seconds - float(planned.stop[-1]) - rest)
    return Track(planned.start + late, planned.stop + late, planned.seconds)

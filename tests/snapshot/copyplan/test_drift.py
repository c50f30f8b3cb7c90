"""Drift: a changed step is noticed once, noise never."""

from __future__ import annotations

import numpy as np
import pytest

from ucformat.snapshot.copyplan.drift import Drift, deviation, segments
from ucformat.snapshot.schedule.actions import one_f_one_b
from ucformat.snapshot.schedule.replay import Times, Track, replay


def step(slow: float = 1.0) -> Track:
    """Rank 0 of a step in which the stage after it is slower by a factor."""
    times = Times.uniform(2, 1, 1, 1)
    times.seconds[1] *= slow
    return replay(one_f_one_b(2, 4), times).tracks[0]


def noisy(track: Track, rng: np.random.Generator, part: float) -> Track:
    edges = np.cumsum(segments(track) * rng.uniform(1 - part, 1 + part, 2 * len(track.start) + 1))
    return Track(edges[0:-1:2], edges[1::2], float(edges[-1]))


def test_segments_are_the_step_taken_apart() -> None:
    track = step()
    assert segments(track).sum() == pytest.approx(track.seconds)
    assert segments(track)[0::2].sum() == pytest.approx(track.idle)
    assert deviation(track, segments(track)[None]) == 0


def test_noise_never_asks_for_a_new_plan() -> None:
    rng = np.random.default_rng(0)
    drift = Drift(step())
    assert not any(drift.observe(noisy(step(), rng, 0.1)) for _ in range(200))


def test_single_slow_steps_are_no_drift() -> None:
    drift = Drift(step(), steps=8)
    assert not any(drift.observe(step(3.0 if at % 4 == 0 else 1.0)) for at in range(100))


def test_a_lasting_change_is_told_once_and_again_only_after_a_new_plan() -> None:
    drift = Drift(step(), steps=4)
    assert sum(drift.observe(step()) for _ in range(10)) == 0
    told = [drift.observe(step(1.5)) for _ in range(20)]
    assert sum(told) == 1
    assert told.index(True) <= 3
    drift.rebase(drift.typical())
    assert sum(drift.observe(step(1.5)) for _ in range(20)) == 0
    assert sum(drift.observe(step(1.0)) for _ in range(20)) == 1


def test_what_hovers_around_the_threshold_is_told_once() -> None:
    base = Track.whole(1.0)
    drift = Drift(base, steps=1, enter=0.2, leave=0.1)
    told = [drift.observe(Track.whole(seconds)) for seconds in (1.19, 1.21, 1.19, 1.21, 1.15, 1.25, 1.09, 1.21)]
    assert told == [False, True, False, False, False, False, False, True]


def test_typical_is_the_median_step() -> None:
    drift = Drift(step(), steps=5)
    assert drift.typical() is drift.planned
    for slow in (2.0, 2.0, 9.0, 2.0, 1.0):
        drift.observe(step(slow))
    assert segments(drift.typical()) == pytest.approx(segments(step(2.0)))


def test_steps_that_were_not_measured_do_not_count() -> None:
    drift = Drift(step(), steps=1)
    track = step(3.0)
    broken = Track(track.start, np.where(np.arange(len(track.stop)) == 2, np.nan, track.stop), track.seconds)
    assert not drift.observe(broken)
    assert not drift.recent


def test_another_number_of_actions_is_refused() -> None:
    with pytest.raises(ValueError, match="1 actions measured"):
        Drift(step()).observe(Track.whole(1.0))
    with pytest.raises(ValueError, match="can't be decided"):
        Drift(step(), enter=0.1, leave=0.2)


def test_idle_time_that_shrinks_by_a_third_is_drift_though_it_is_little_of_the_step() -> None:
    """Rank 1 of a pipeline, whose first window closes earlier when rank 0 waits less before its update."""
    planned = Track(np.array([0.06, 0.18]), np.array([0.18, 0.30]), 0.30)
    drift = Drift(planned, steps=3)
    earlier = Track(planned.start - 0.02, planned.stop - 0.02, 0.28)
    assert [drift.observe(earlier) for _ in range(3)] == [False, False, True]
    drift.rebase(drift.typical())
    assert drift.planned.idle == pytest.approx(0.04)
    assert [drift.observe(earlier) for _ in range(3)] == [False, False, False]


def test_hardly_any_idle_time_may_come_and_go() -> None:
    busy = Track(np.array([0.0]), np.array([0.298]), 0.3)
    drift = Drift(busy, steps=1)
    assert not drift.observe(Track(busy.start, busy.stop, 0.301))

"""When plans are made: after the first steps, and anew when what they were made with no longer holds."""

from __future__ import annotations

import numpy as np
import pytest

from ucformat.group import Group
from ucformat.snapshot.copying.host import Outcome
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.planner import RATE_BYTES, WARM_UP, Planner
from ucformat.snapshot.report import SnapshotReport
from ucformat.snapshot.schedule.replay import Track

SIZES = np.array([20 << 20, 3 << 20])
NAMES = ("forward", "backward")


def planner(mode: Mode = "auto") -> tuple[Planner, SnapshotReport]:
    report = SnapshotReport()
    return Planner(mode, Group(0), report), report


def track(gap: float = 0.05) -> Track:
    """Two actions of 100 ms, with a gap before each and at the end."""
    start = np.array([gap, 2 * gap + 0.1])
    return Track(start, start + 0.1, float(start[1]) + 0.1 + gap)


def step(made: Planner, like: Track) -> None:
    made.measured(NAMES, like)
    made.ended()


def test_until_enough_is_measured_copies_run_beside_compute_and_then_in_windows() -> None:
    made, report = planner()
    for _ in range(WARM_UP + 1):
        assert made.plan(SIZES).taken == "overlap"
        assert not report.plan
        step(made, track())
    plan = made.plan(SIZES)
    assert plan.taken == "bubble"
    assert report.plan.startswith("bubble: ")
    assert len(plan.windows) == 3
    assert made.plan(SIZES) is plan


def test_a_plan_is_of_the_pieces_that_are_asked_for() -> None:
    made, _ = planner()
    for _ in range(WARM_UP + 1):
        step(made, track())
    for sizes in (SIZES, SIZES[:1], SIZES[:0]):
        plan = made.plan(sizes)
        assert plan.pieces.nbytes.tolist() == sizes.tolist()
        assert int((plan.stop - plan.start).sum()) == sizes.sum()


def test_steps_that_a_device_tells_of_late_count_and_none_at_all_wait_for_the_first() -> None:
    made, _ = planner()
    for at in range(WARM_UP + 1):
        assert made.due == (at == WARM_UP)
        if at > 1:
            made.measured(NAMES, track())
        made.ended()
    assert made.plan(SIZES).taken == "bubble"

    made, _ = planner()
    for _ in range(WARM_UP + 2):
        made.ended()
    assert made.plan(SIZES).taken == "overlap"
    made.measured(NAMES, track())
    assert made.plan(SIZES).taken == "bubble"


def test_times_that_drift_ask_for_a_new_plan_once() -> None:
    made, report = planner()
    for _ in range(WARM_UP + 1):
        step(made, track())
    before = made.plan(SIZES)
    for _ in range(40):
        step(made, track(gap=0.2))
        made.plan(SIZES)
    assert report.replans == 1
    assert sum(window.seconds for window in made.plan(SIZES).windows) > 3 * sum(window.seconds for window in before.windows)


def test_rates_that_are_measured_ask_for_a_new_plan_and_short_copies_tell_nothing() -> None:
    made, report = planner()
    for _ in range(WARM_UP + 1):
        step(made, track())
    fast = made.plan(SIZES)
    made.learn(Outcome(nbytes=RATE_BYTES // 2, busy_s=10.0), 0.0)
    assert made.plan(SIZES) is fast
    made.learn(Outcome(nbytes=RATE_BYTES, busy_s=RATE_BYTES / 1e8), 0.0)
    slow = made.plan(SIZES)
    assert report.replans == 1
    assert (slow.end - slow.begin).sum() > 10 * (fast.end - fast.begin).sum()


def test_waiting_for_a_slot_shortens_the_step_that_is_planned() -> None:
    made, report = planner("bubble")
    for _ in range(WARM_UP + 1):
        step(made, track())
    before = made.plan(SIZES)
    assert len(before.windows) == 3
    for _ in range(40):
        made.learn(Outcome(), 0.04)
        made.plan(SIZES)
    assert report.replans >= 1
    after = made.plan(SIZES)
    assert after.window_use > before.window_use
    # a window that was already open when there was a slot still closes when its action begins
    assert [window.seconds for window in after.windows] == pytest.approx([window.seconds for window in before.windows])


def noisy(made: Planner, report: SnapshotReport, seconds: float, rate: float, steps: int) -> list[int]:
    """Steps of about this length and copies of about this rate, each some tens of percent off; in which ones it planned anew."""
    rng, anew = np.random.default_rng(int(rate)), []
    for at in range(steps):
        edges = np.cumsum(seconds * np.array([0.15, 0.3, 0.15, 0.3, 0.1]) * np.exp(0.3 * rng.standard_normal(5)))
        before, nbytes = report.replans, 4 * RATE_BYTES
        made.plan(SIZES)
        step(made, Track(edges[0:-1:2], edges[1::2], float(edges[-1])))
        first, rest = rate * np.exp(0.3 * rng.standard_normal(2))
        spent = (nbytes / first, nbytes / rest)
        made.learn(Outcome(nbytes=2 * nbytes, exposed=nbytes, busy_s=spent[0], exposed_s=spent[1]), float(rng.uniform(0, 1e-3)))
        anew += [at] * (report.replans - before)
    return anew


@pytest.mark.parametrize("seconds", [0.001, 0.3])
def test_noise_in_measured_times_and_rates_asks_for_hardly_any_new_plan(seconds: float) -> None:
    made, report = planner()
    assert len(noisy(made, report, seconds, 4e9, 500)) <= 10


def test_what_changes_for_good_asks_for_a_new_plan_in_the_midst_of_noise() -> None:
    made, report = planner()
    noisy(made, report, 0.3, 4e9, 100)
    assert noisy(made, report, 0.6, 4e9, 40) != []
    made, report = planner()
    noisy(made, report, 0.3, 4e9, 100)
    assert noisy(made, report, 0.3, 1e9, 40) != []

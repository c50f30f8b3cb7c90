"""Copy plans: every byte once, never too early or too late, in windows while they last, and costing what was predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from tests.snapshot.rigs.rigs import MODES, Piece, columns, questions
from ucformat.snapshot.copyplan.plan import CHUNK_BYTES, EXPOSED, MARGIN, OVERLAP, CopyPlan, Mode, Rates, plan_copies
from ucformat.snapshot.schedule.actions import one_f_one_b
from ucformat.snapshot.schedule.from_torch import named
from ucformat.snapshot.schedule.replay import Times, Track, replay

MIB = 1 << 20
RATES = Rates(alone=10e9, beside=5e9, chunk=20e-6)


def track(rank: int) -> Track:
    """One of two ranks under 1F1B, 8 microbatches, forwards of 30 ms and backwards of 60."""
    return replay(one_f_one_b(2, 8), Times.uniform(2, 0.03, 0.03, 0.03)).tracks[rank]


def plan(
    track: Track,
    pieces: Sequence[Piece],
    rates: Rates,
    mode: Mode = "auto",
    *,
    margin: float = MARGIN,
    chunk_bytes: int = CHUNK_BYTES,
) -> CopyPlan:
    return plan_copies(track, columns(pieces), rates, mode, margin=margin, chunk_bytes=chunk_bytes)


def check_whole(plan: CopyPlan) -> None:
    """Every byte of every piece exactly once."""
    rows = np.lexsort((plan.start, plan.piece))
    piece, start, stop = plan.piece[rows], plan.start[rows], plan.stop[rows]
    first = np.r_[True, piece[1:] != piece[:-1]][: len(rows)]
    last = np.r_[piece[1:] != piece[:-1], True][: len(rows)]
    assert (start[first] == 0).all()
    assert (start[~first] == stop[~last]).all()
    assert dict(zip(piece[last].tolist(), stop[last].tolist(), strict=True)) == {
        at: nbytes for at, nbytes in enumerate(plan.pieces.nbytes.tolist()) if nbytes
    }
    assert (stop > start).all()


def check_times(plan: CopyPlan, track: Track) -> None:
    """Nothing before its state is final; nothing but what training waits for after its deadline."""
    n = len(track.start)
    for at in range(len(plan)):
        ready, deadline = (int(column[plan.piece[at]]) for column in (plan.pieces.ready, plan.pieces.deadline))
        assert plan.begin[at] >= track.ready()[ready]
        if plan.window[at] != EXPOSED:
            assert plan.end[at] <= track.deadline()[min(deadline, n)] + 1e-9
        if plan.window[at] >= 0:
            window = plan.windows[plan.window[at]]
            assert (n if window.before is None else window.before) <= deadline
            assert (window.before if window.before is not None else n) >= ready


def check_windows(plan: CopyPlan, rates: Rates, margin: float) -> None:
    """Chunks lie in their window one after the other, and fill at most the allowed part."""
    for at, window in enumerate(plan.windows):
        rows = plan.window == at
        begin, end = plan.begin[rows], plan.end[rows]
        if not len(begin):
            continue
        assert begin[0] >= window.start + rates.opening - 1e-12
        assert (begin[1:] >= end[:-1] - 1e-12).all()
        cost = (rates.chunk + (plan.stop - plan.start)[rows] / rates.alone).sum()
        assert cost + rates.opening <= window.seconds * (1 - margin) + 1e-9


def simulate(plan: CopyPlan, rates: Rates) -> float:
    """Seconds that training waits when the plan is carried out: windows that turn out full leave the rest for the end."""
    late = 0.0
    for at, window in enumerate(plan.windows):
        clock = window.start + rates.opening
        for row in np.flatnonzero(plan.window == at):
            seconds = rates.chunk + (plan.stop[row] - plan.start[row]) / rates.alone
            if clock + seconds > window.stop + 1e-9:
                late += seconds
            else:
                clock += seconds
    clock = 0.0
    for row in np.flatnonzero(plan.window == OVERLAP):
        nbytes = plan.stop[row] - plan.start[row]
        clock = max(clock, plan.begin[row]) + max(rates.chunk + nbytes / rates.beside, nbytes / plan.limit)
        assert clock <= plan.end[row] + 1e-9  # the pace can be kept
    rest = plan.window == EXPOSED
    return late + float((rates.chunk + (plan.stop - plan.start)[rest] / rates.alone).sum())


@given(questions())
@settings(max_examples=150, deadline=None)
def test_every_plan_copies_every_byte_once_in_time_and_costs_what_it_says(
    case: tuple[Track, list[Piece], Rates, Mode, float, int],
) -> None:
    track, pieces, rates, mode, margin, chunk_bytes = case
    found = plan(track, pieces, rates, mode, margin=margin, chunk_bytes=chunk_bytes)
    check_whole(found)
    check_times(found, track)
    check_windows(found, rates, margin)
    assert (found.stop - found.start).max(initial=0) <= chunk_bytes
    assert (np.diff(found.begin) >= 0).all()
    assert simulate(found, rates) == pytest.approx(found.exposed)
    assert (found.limit > 0) == bool((found.window == OVERLAP).any()) or found.exposed > 0
    assert 0 <= found.window_use <= 1
    if mode == "auto":
        others = [plan(track, pieces, rates, m, margin=margin, chunk_bytes=chunk_bytes) for m in MODES[1:]]
        assert all(found.cost <= other.cost * (1 + 1e-9) for other in others)


@pytest.mark.parametrize("rank", [0, 1])
def test_state_that_fits_is_copied_in_the_bubbles_alone(rank: int) -> None:
    step = track(rank)  # 90 ms idle: 810 MB at 10 GB/s within the margin
    found = plan(step, [Piece(512 * MIB)], RATES)
    assert found.taken == "bubble"
    assert found.reason.startswith("all fits into the windows")
    assert found.exposed == found.overlapped == 0
    assert (found.window >= 0).all()
    assert found.window_use == pytest.approx(512 * MIB / 10e9 / step.idle, rel=0.1)


def test_what_the_windows_cant_hold_runs_beside_compute_throttled() -> None:
    step = track(0)
    found = plan(step, [Piece(1024 * MIB)], RATES)
    assert found.taken == "bubble+overlap"
    assert found.exposed == 0
    assert found.window_use > 0.85
    beside = found.window == OVERLAP
    busy = step.seconds - step.idle
    needed = (found.stop - found.start)[beside].sum() / (busy * 0.9)
    assert needed <= found.limit <= 1.06 * needed  # as slowly as the step allows, rather than as fast as possible
    for at in np.flatnonzero(beside):
        assert not any(w.start < found.end[at] - 1e-9 and found.begin[at] + 1e-9 < w.stop for w in found.windows)


def test_a_state_larger_than_the_step_leaves_an_exposed_rest_as_predicted() -> None:
    step, nbytes, rates = track(0), 8 << 30, Rates(10e9, 5e9)
    found = plan(step, [Piece(nbytes)], rates)
    assert found.taken == "bubble+overlap"
    assert found.reason.startswith("not all fits anywhere")
    held = 0.9 * (step.idle * 10e9 + (step.seconds - step.idle) * 5e9)
    assert found.exposed == pytest.approx((nbytes - held) / 10e9, rel=0.02)
    assert found.exposed < plan(step, [Piece(nbytes)], rates, "bubble").exposed
    assert plan(step, [Piece(nbytes)], rates, "blocking").exposed == pytest.approx(nbytes / 10e9)


def test_without_a_pipeline_the_copy_is_spread_over_the_step() -> None:
    for mode in ("auto", "bubble", "overlap"):
        found = plan(Track.whole(0.5), [Piece(256 * MIB)], RATES, mode)
        assert found.taken == "overlap"
        assert (found.window == OVERLAP).all()
        assert found.exposed == 0
        assert 0.4 < found.end[-1] <= 0.45
    assert "no idle windows" in plan(Track.whole(0.5), [Piece(256 * MIB)], RATES).reason


def test_a_step_of_which_no_action_is_known_has_no_windows() -> None:
    found = plan(Track(np.empty(0), np.empty(0), 0.5), [Piece(256 * MIB)], RATES)
    assert found.taken == "overlap"
    assert not found.windows


def test_copies_that_slow_compute_more_than_they_save_are_not_run_beside_it() -> None:
    rates = Rates(10e9, 5e9, slowdown=1.0)
    assert plan(Track.whole(0.5), [Piece(256 * MIB)], rates).taken == "blocking"
    found = plan(track(0), [Piece(1024 * MIB)], rates)
    assert found.taken == "bubble"
    assert found.exposed > 0
    assert found.cost < plan(track(0), [Piece(1024 * MIB)], rates, "overlap").cost


def test_slivers_are_not_used() -> None:
    start = np.array([0.0002, 0.1002, 0.2])
    step = Track(start, np.array([0.1, 0.15, 0.25]), 0.25)  # idle: 0.2 ms, 0.2 ms, 50 ms
    found = plan(step, [Piece(64 * MIB)], RATES, "bubble")
    assert len(found.windows) == 3
    assert set(found.window.tolist()) == {2}


def test_pieces_that_change_early_go_first_and_late_ones_wait() -> None:
    step = track(0)
    n = len(step.start)
    early, late = step.windows()[0], step.windows()[-1]
    assert early.before is not None
    assert late.before is not None
    pieces = [Piece(100 * MIB), Piece(100 * MIB, 0, early.before), Piece(50 * MIB, late.before), Piece(8 * MIB, n)]
    found = plan(step, pieces, RATES)
    assert set(found.window[found.piece == 1].tolist()) == {0}
    assert set(found.window[found.piece == 2].tolist()) == {len(found.windows) - 1}
    assert set(found.window[found.piece == 3].tolist()) == {EXPOSED}  # final only when the optimizer begins
    first, second = found.begin[found.piece == 0].min(), found.begin[found.piece == 1].max()
    assert second < first


def test_what_is_final_late_goes_before_what_has_room_earlier() -> None:
    step = Track(np.array([0.0, 0.15]), np.array([0.1, 0.16]), 0.16)  # idle: 50 ms behind the first action
    found = plan(step, [Piece(300 * MIB), Piece(400 * MIB, ready=1)], RATES)
    assert found.exposed == 0
    assert set(found.window[found.piece == 1].tolist()) == {0}
    assert OVERLAP in found.window[found.piece == 0]


def test_a_piece_due_before_any_window_is_exposed_at_its_deadline() -> None:
    step = track(0)
    found = plan(step, [Piece(8 * MIB, 0, 1)], RATES, "bubble")
    assert (found.window == EXPOSED).all()
    assert found.begin[0] == step.start[1]


def test_interleaved_slivers_still_hold_small_chunks() -> None:
    step = replay(named("interleaved1f1b", 4, 8), Times.uniform(8, 0.004, 0.004, 0.004)).tracks[0]
    found = plan(step, [Piece(256 * MIB)], RATES, "bubble")
    assert len(found.windows) == 7
    assert max(w.seconds for w in found.windows) < step.idle / 2
    assert found.exposed == 0
    assert len(set(found.window.tolist())) >= 6


def test_nothing_to_copy_is_a_plan() -> None:
    for pieces in ([], [Piece(0)]):
        found = plan(track(1), pieces, RATES)
        assert len(found) == found.cost == 0
        assert found.taken == "bubble"


def test_many_small_pieces_are_planned_in_linear_time() -> None:
    step = replay(one_f_one_b(8, 64), Times.uniform(8, 0.01, 0.01, 0.01)).tracks[0]
    found = plan(step, [Piece(200_000)] * 20_000, Rates(25e9, 20e9, 5e-6))
    check_whole(found)
    assert len(found) == 20_000


@pytest.mark.parametrize(
    ("piece", "rates", "margin"),
    [
        (Piece(-1), RATES, 0.1),
        (Piece(1, 3, 2), RATES, 0.1),
        (Piece(1, 0, 99), RATES, 0.1),
        (Piece(1), Rates(0, 1), 0.1),
        (Piece(1), Rates(1, float("nan")), 0.1),
        (Piece(1), Rates(float("inf"), 1), 0.1),
        (Piece(1), RATES, 1.0),
    ],
)
def test_senseless_questions_are_refused(piece: Piece, rates: Rates, margin: float) -> None:
    with pytest.raises(ValueError, match=r"does not fit|positive|margin"):
        plan(track(0), [piece], rates, margin=margin)

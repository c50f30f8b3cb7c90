"""Replay: the closed forms where they hold, the deviations that are known, and measured times."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.world import run
from ucformat.snapshot.schedule.actions import ScheduleError, gives, gpipe, one_f_one_b, parse
from ucformat.snapshot.schedule.from_torch import named
from ucformat.snapshot.schedule.replay import IdleWindow, Times, Track, replay

# ranks, microbatches, (forward, backward of the input, of the weights): as in the notes on snapshots, section 3.4
CASES = [(p, p * k, times) for p, k, times in product((2, 4, 8), (1, 2, 4), ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.8, 1.0)))]


def lengths(track: Track) -> tuple[float, list[float], float]:
    """Idle seconds at the start, in between and at the end."""
    found = track.windows()
    start = sum(w.seconds for w in found if w.after is None)
    end = sum(w.seconds for w in found if w.before is None)
    return start, [w.seconds for w in found if w.after is not None and w.before is not None], end


@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_1f1b_idles_where_the_closed_form_says(p: int, m: int, times: tuple[float, float, float]) -> None:
    forward, backward = times[0], times[1] + times[2]
    found = replay(one_f_one_b(p, m), Times.uniform(p, *times))
    assert found.seconds == pytest.approx((m + p - 1) * (forward + backward))
    for s, track in enumerate(found.tracks):
        start, middle, end = lengths(track)
        assert start == pytest.approx(s * forward)
        assert end == pytest.approx(s * backward)
        hops = p - 1 - s
        # one window before the first backward, then gaps of a forward in cool-down, where consecutive ones
        assert middle == pytest.approx([hops * backward, *[forward] * hops] if hops else [])


@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_gpipe_idles_in_one_piece_between_forwards_and_backwards(p: int, m: int, times: tuple[float, float, float]) -> None:
    forward, backward = times[0], times[1] + times[2]
    found = replay(gpipe(p, m), Times.uniform(p, *times))
    for s, track in enumerate(found.tracks):
        start, middle, end = lengths(track)
        assert start == pytest.approx(s * forward)
        assert end == pytest.approx(s * backward)
        assert middle == pytest.approx([(p - 1 - s) * (forward + backward)] if s < p - 1 else [])


@pytest.mark.parametrize("name", ["interleaved1f1b", "loopedbfs"])
@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize(("p", "m", "times"), [case for case in CASES if case[1] <= 16])
def test_interleaving_divides_the_idle_time(name: str, v: int, p: int, m: int, times: tuple[float, float, float]) -> None:
    found = replay(named(name, p, m, v), Times.uniform(p * v, *(t / v for t in times)))
    for track in found.tracks:
        assert track.idle == pytest.approx((p - 1) * sum(times) / v)


@pytest.mark.parametrize("name", ["interleavedzerobubble", "zbvzerobubble", "dualpipev"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_schedules_idle_for_half_a_forward_per_hop_when_times_are_equal(name: str, p: int, m: int) -> None:
    found = replay(named(name, p, m), Times.uniform(2 * p, 0.5, 0.5, 0.5))
    for track in found.tracks:
        assert track.idle == pytest.approx((p - 1) / 2)


@pytest.mark.parametrize(("name", "idle"), [("interleavedzerobubble", 3.5), ("zbvzerobubble", 4.1), ("dualpipev", 3.5)])
def test_unequal_times_deviate_from_the_closed_form_as_observed(name: str, idle: float) -> None:
    """Which is why lists are replayed: 2.8 is what the formula says here."""
    found = replay(named(name, 8, 16), Times.uniform(16, 0.5, 0.4, 0.5))
    assert found.seconds - 16 * 2.8 == pytest.approx(idle)


def test_zbv_with_few_microbatches_idles_twice_as_long() -> None:
    found = replay(named("zbvzerobubble", 4, 4), Times.uniform(8, 0.5, 0.5, 0.5))
    assert found.tracks[0].idle == pytest.approx(3.0)


def test_windows_name_the_actions_around_them() -> None:
    track = replay(one_f_one_b(2, 2), Times.uniform(2, 1, 1, 1)).tracks
    # rank 0: F0 F1 . B0 . B1 R; rank 1: . F0 B0 F1 B1 R .
    assert track[0].windows() == (IdleWindow(1, 2, 2.0, 4.0), IdleWindow(2, 3, 6.0, 7.0))
    assert track[1].windows() == (IdleWindow(None, 0, 0.0, 1.0), IdleWindow(4, None, 7.0, 9.0))


def test_a_slow_stage_makes_the_others_wait() -> None:
    times = Times.uniform(2, 1, 1, 1)
    times.seconds[1] *= 3
    found = replay(one_f_one_b(2, 8), times)
    assert found.tracks[1].idle == pytest.approx(3)  # its own fill and drain
    assert found.tracks[0].idle == pytest.approx(found.seconds - 8 * 3)


def test_results_take_time_to_another_rank_alone() -> None:
    times = Times.uniform(2, 1, 1, 1)
    apart = replay(parse([["0F0", "0B0"], ["1F0", "1B0"]]), times, p2p=0.5)
    together = replay(parse([["0F0", "1F0", "1B0", "0B0"]]), times, p2p=0.5)
    assert (apart.seconds, together.seconds) == (7.0, 6.0)


def test_the_shorter_half_of_a_pair_can_be_hidden() -> None:
    schedule = parse([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    times = Times.uniform(1, 1, 1, 1)
    assert [replay(schedule, times, hidden=h).seconds for h in (0.0, 0.5, 1.0)] == [6.0, 5.5, 5.0]


def test_measured_medians_of_all_ranks_make_the_times() -> None:
    schedule = one_f_one_b(2, 2)
    truth = Times.uniform(2, 1, 1.5, 0.5, reduce=0.25)
    truth.seconds[1] *= 2
    found = []
    for rank, track in enumerate(replay(schedule, truth).tracks):
        durations = np.stack([track.stop - track.start] * 5)
        durations[2] *= 10  # one slow step
        found.append(Times.measured(schedule, rank, durations))
    united = run(2, lambda group: found[group.rank].of_all(group))[0]
    assert np.isnan(found[0].seconds[1]).all()
    for actions in schedule.ranks:
        for action in actions:
            assert united.of(action) == pytest.approx(truth.of(action))


def test_halves_and_wholes_of_a_backward_stand_in_for_each_other() -> None:
    nan = float("nan")
    full, halves = Times(np.array([[1, 3, nan, nan, nan]])), Times(np.array([[1, nan, 2, 1, nan]]))
    (row,) = parse([["0F0", "0B0", "0F1", "0I1", "0W1", "0REDUCE_GRAD"]]).ranks
    assert [full.of(action) for action in row] == [1, 3, 1, 1.5, 1.5, 0]
    assert [halves.of(action) for action in row] == [1, 3, 1, 2, 1, 0]


def test_durations_that_are_not_known_are_named() -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ScheduleError, match=r"no duration is known for \w of stage 1"):
        replay(schedule, Times.measured(schedule, 0, np.ones(len(schedule.ranks[0]))))
    with pytest.raises(ScheduleError, match="3 durations for 5 actions"):
        Times.measured(schedule, 0, np.ones(3))
    with pytest.raises(ScheduleError, match="1 stages for a schedule of 2"):
        replay(schedule, Times.uniform(1, 1, 1, 1))


@given(
    st.sampled_from(["1f1b", "gpipe", "interleaved1f1b", "zbvzerobubble", "dualpipev"]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
    st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_no_action_begins_before_its_inputs_and_idle_and_busy_time_fill_the_step(
    name: str, ranks: int, more: int, data: st.DataObject, p2p: float
) -> None:
    schedule = named(name, ranks, 2 * ranks * (1 + more))
    stages = len(schedule.stage_rank)
    row = st.lists(st.floats(0.125, 4), min_size=5, max_size=5)
    times = Times(np.array(data.draw(st.lists(row, min_size=stages, max_size=stages))))
    found = replay(schedule, times, p2p)
    ended = {
        key: (track.stop[at], rank)
        for rank, track in enumerate(found.tracks)
        for at, action in enumerate(schedule.ranks[rank])
        for key in gives(action)
    }
    for rank, track in enumerate(found.tracks):
        assert (track.start[1:] >= track.stop[:-1]).all()
        assert track.idle + (track.stop - track.start).sum() == pytest.approx(found.seconds)
        for at, action in enumerate(schedule.ranks[rank]):
            for key in schedule.needs(action):
                when, where = ended[key]
                assert track.start[at] >= when + (p2p if where != rank else 0)

"""Schedules: every order that can be run is read, every other one is refused with rank and action."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import UcformatError
from ucformat.snapshot.schedule.actions import Action, Schedule, ScheduleError, build, gives, gpipe, one_f_one_b, parse


def feasible(schedule: Schedule) -> bool:
    """Whether `order` is every action once, each rank's in sequence, each after what it needs."""
    done: set[object] = set()
    places = [0] * len(schedule.ranks)
    for rank, at in schedule.order:
        action = schedule.ranks[rank][at]
        if at != places[rank] or not done.issuperset(schedule.needs(action)):
            return False
        places[rank] += 1
        done.update(gives(action))
    return places == [len(actions) for actions in schedule.ranks]


@pytest.mark.parametrize(("ranks", "microbatches"), list(product((1, 2, 3, 4, 8), (1, 2, 3, 8, 16))))
def test_1f1b_and_gpipe_can_be_run_for_all_sizes(ranks: int, microbatches: int) -> None:
    for make in (one_f_one_b, gpipe):
        schedule = make(ranks, microbatches)
        assert feasible(schedule)
        assert schedule.microbatches == microbatches
        assert schedule.stage_rank == tuple(range(ranks))


def test_1f1b_keeps_no_more_activations_than_stages_that_follow() -> None:
    for stage, actions in enumerate(one_f_one_b(4, 9).ranks):
        alive = most = 0
        for action in actions:
            alive += {"F": 1, "B": -1}.get(action.kind, 0)
            most = max(most, alive)
        assert most == 4 - stage


def test_lists_in_text_form_are_read_and_written_back() -> None:
    rows = [
        ["0F0", "0F1", "0I0", "0W0", "0B1", "0REDUCE_GRAD"],
        ["1F0", "1I0", "(1F1;1W0)OVERLAP_F_B", "1B1", "1REDUCE_GRAD"],
    ]
    schedule = parse(rows, "own")
    assert schedule.lists() == rows
    assert schedule.ranks[1][2:4] == (Action(1, "F", 1), Action(1, "W", 0, joined=True))
    assert schedule.stages_of(1) == (1,)
    assert feasible(schedule)


def test_idle_steps_and_moves_of_data_are_left_out() -> None:
    plain = parse([["0F0", "0B0"], ["1F0", "1B0"]])
    full = parse(
        [
            ["0UNSHARD", "0F0", "0SEND_F0", None, None, "0RECV_B0", "0B0", "0RESHARD"],
            ["", "1UNSHARD", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RESHARD"],
        ]
    )
    assert full == plain


@pytest.mark.parametrize(
    ("rows", "rank", "action", "why"),
    [
        ([["0F0", "0B0"], ["1B0", "1F0"]], 1, "1B0", "deadlocks"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], 0, "0B0", "deadlocks"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], 0, "0W0", "deadlocks"),
        ([["0F0", "0REDUCE_GRAD", "0B0"], ["1F0", "1B0"]], 0, "0REDUCE_GRAD", "deadlocks"),
        # each rank waits for what the other does later: neither is in its own way
        ([["0F0", "2F0", "2B0", "0B0", "0F1", "2F1", "2B1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], 0, "2F0", "deadlocks"),
        ([["0F0", "0B0"], ["1F0", "1F0", "1B0"]], 1, "1F0", "twice"),
        ([["0F0", "0B0", "0W0"], ["1F0", "1B0"]], 0, "0W0", "twice"),
        ([["0F0", "0B0"], ["1F0", "0F1", "1B0"]], 1, "0F1", "also runs on rank 0"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], 0, None, "B or W is missing for stage 0, microbatch 0"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1B1"]], 1, None, "F is missing for stage 1, microbatch 0"),
        ([["0F0", "0B0"], ["2F0", "2B0"]], None, None, "numbered from 0"),
        ([["0F0", "0X0"]], 0, "0X0", "not an action"),
        ([["0F0 1"]], 0, "0F0 1", "not an action"),
        ([["0F"]], 0, "0F", "needs a microbatch"),
        ([["0REDUCE_GRAD1"]], 0, "0REDUCE_GRAD1", "has no microbatch"),
        ([["0REDUCE_GRAD"]], None, None, "no action has a microbatch"),
        ([[]], None, None, "numbered from 0"),
        ([], None, None, "numbered from 0"),
    ],
)
def test_lists_that_cant_be_run_are_refused_with_rank_and_action(
    rows: list[list[str | None]], rank: int | None, action: str | None, why: str
) -> None:
    with pytest.raises(ScheduleError, match=why) as caught:
        parse(rows)
    assert isinstance(caught.value, UcformatError)
    assert caught.value.rank == rank
    assert (None if caught.value.action is None else str(caught.value.action)) == action
    assert rank is None or f"rank {rank}" in str(caught.value)
    assert action is None or action in str(caught.value)


def test_torchs_own_list_for_1f1b_is_refused_since_it_deadlocks() -> None:
    """The last rank's list as torch 2.13 publishes it for 3 ranks and 4 microbatches."""
    rows = [list(row) for row in one_f_one_b(3, 4).lists()]
    rows[2] = ["2F1", "2B0", "2F2", "2B1", "2F3", "2B2", "2F4", "2B3", "2REDUCE_GRAD"]
    with pytest.raises(ScheduleError) as caught:
        parse(rows)
    assert caught.value.rank is not None


@given(st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_is_either_run_to_the_end_or_refused(ranks: int, microbatches: int, data: st.DataObject) -> None:
    rows = [data.draw(st.permutations(actions)) for actions in gpipe(ranks, microbatches).ranks]
    try:
        schedule = build("shuffled", rows)
    except ScheduleError as error:
        assert "deadlocks" in str(error)
        assert error.rank is not None
        assert error.action in rows[error.rank]
    else:
        assert feasible(schedule)

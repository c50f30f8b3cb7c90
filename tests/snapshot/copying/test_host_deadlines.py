"""Actions that change a piece wait until it is copied, and nothing is copied before it is final."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.snapshot.rigs.rigs import LONG, PATIENCE_S, SOON_S, Piece, Rig, meanwhile, rig, track
from ucformat.containers.file_image import ByteRequest
from ucformat.snapshot.copyplan.plan import EXPOSED, OVERLAP, Mode, Rates
from ucformat.snapshot.schedule.clock import StepClock
from ucformat.snapshot.schedule.replay import Track
from ucformat.storage.store import Bytes


def wire(at: Rig) -> StepClock:
    """A clock whose actions the copier hears of, in a step that has begun."""
    clock = StepClock(at.copier.opened, at.copier.closed)
    at.copier.begin(at.work)
    clock.begin()
    return clock


@pytest.mark.parametrize("mode", ["bubble", "overlap", "blocking", "auto"])
def test_an_action_waits_for_what_it_changes_and_for_nothing_else(mode: Mode) -> None:
    slow = Rates(alone=1e3, beside=1e3, slowdown=1.0)  # a second per chunk: nothing of it fits
    with rig(
        [Piece(2500), Piece(2500, deadline=1), Piece(500, deadline=2)], track(0.0, 1.0, 2.0, 3.0, seconds=LONG), mode, slow
    ) as at:
        truth = [x.clone() for x in at.live]
        at.hold.clear()
        clock = wire(at)
        at.hold.set()
        clock.enter("0")
        clock.leave()
        clock.enter("1")
        assert sum(piece == 1 for piece, _ in at.copies) == 3
        assert [piece for piece, beside in at.copies if piece != 1 and not beside] == []
        at.live[1].fill_(0)
        clock.leave()
        clock.end()  # the optimizer is the action at position 2
        assert sum(piece == 2 for piece, _ in at.copies) == 1
        at.live[2].fill_(0)
        outcome = at.copier.finish()
        at.assert_copied(outcome, truth)


def test_an_action_waits_for_the_chunk_in_hand_of_what_it_changes() -> None:
    with rig([Piece(1000, deadline=0)], track(0.5, 1.0, seconds=LONG), "bubble") as at:
        truth = [x.clone() for x in at.live]
        at.hold.clear()
        clock = wire(at)
        assert at.held.wait(PATIENCE_S)

        def act() -> None:
            clock.enter("0")
            at.live[0].fill_(0)
            clock.leave()

        with meanwhile(act):
            time.sleep(SOON_S)
            at.hold.set()
        clock.end()
        at.assert_copied(at.copier.finish(), truth)


def test_copies_beside_compute_go_on_after_a_deadline() -> None:
    with rig([Piece(1000, deadline=0), Piece(3000)], Track.whole(0.1), "overlap") as at:
        assert sorted(at.plan.window.tolist()) == [EXPOSED, OVERLAP, OVERLAP, OVERLAP]

        def fill(parts: Sequence[ByteRequest]) -> None:
            if not at.beside():
                time.sleep(2 * SOON_S)  # the others are due by then
            at.fill(parts)

        at.copier.begin(replace(at.work, fill=fill))
        at.copier.opened(0)
        at.copier.closed()
        assert (0, False) in at.copies
        assert at.reached(4)
        assert at.copier.finish().exposed == 1000


def test_a_version_without_a_place_at_a_deadline_is_refused_for_good() -> None:
    with rig([Piece(1000, deadline=0), Piece(1000)], track(0.5, 1.0, seconds=2.0), "blocking") as at:
        free: list[Sequence[Bytes]] = []
        at.copier.begin(replace(at.work, open=lambda: free[0] if free else None))
        at.copier.opened(0)
        at.copier.closed()
        at.live[0].fill_(0)
        free.append(at.out)
        at.copier.opened(1)
        outcome = at.copier.finish()
        assert (outcome.refused, at.copies, at.done) == (True, [], [])


def test_a_copy_that_fails_at_a_deadline_does_not_reach_the_action() -> None:
    def fail(parts: Sequence[ByteRequest]) -> None:
        raise OSError("broken")

    with rig([Piece(1000, deadline=0)], track(0.5, 1.0, seconds=2.0), "blocking") as at:
        at.copier.begin(replace(at.work, fill=fail))
        at.copier.opened(0)
        at.copier.closed()
        assert str(at.copier.finish().failure) == "broken"


@pytest.mark.parametrize("mode", ["bubble", "overlap"])
def test_nothing_is_copied_before_it_is_final(mode: Mode) -> None:
    gap = 1.0 if mode == "bubble" else 1e-3
    with rig([Piece(2500, ready=1)], track(0.0, 1e-3, gap, 1.1, seconds=1.1), mode) as at:
        clock = wire(at)
        clock.enter("0")
        time.sleep(SOON_S)  # far longer than planned
        at.live[0].fill_(7)
        clock.leave()
        assert at.reached(3)  # once it is final, by the thread
        clock.end()
        outcome = at.copier.finish()
        assert (at.copies, outcome.exposed) == ([(0, True)] * 3, 0)
        assert set(at.out[0].tolist()) == {7}


def test_a_new_version_waits_for_the_actions_of_its_own_step() -> None:
    with rig([Piece(1000, ready=1)], track(0.0, 1e-3, 1e-3, 1.0, seconds=1.0), "overlap") as at:
        at.copier.opened(2)
        at.copier.begin(at.work)
        assert not at.reached(1, SOON_S)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Piece], Track, Mode]:
    n = draw(st.integers(0, 4))
    edges = np.cumsum([draw(st.sampled_from([0.0, 1e-3, 4e-3])) for _ in range(2 * n + 1)])
    pieces = []
    for _ in range(draw(st.integers(1, 5))):
        deadline = draw(st.none() | st.integers(0, n))
        ready = draw(st.integers(0, n if deadline is None else deadline))
        pieces.append(Piece(draw(st.integers(0, 3500)), ready, deadline))
    mode: Mode = draw(st.sampled_from(["bubble", "overlap", "blocking", "auto"]))
    return pieces, Track(edges[0 : 2 * n : 2], edges[1 : 2 * n : 2], float(edges[-1]) + 1e-3), mode


@settings(deadline=None, max_examples=60)
@given(steps(), st.lists(st.sampled_from([0.0, 2e-3]), min_size=9, max_size=9))
def test_every_piece_is_kept_as_it_was_between_readiness_and_deadline(
    step: tuple[list[Piece], Track, Mode], takes: list[float]
) -> None:
    pieces, planned, mode = step
    with rig(pieces, planned, mode, Rates(alone=1e6, beside=1e6)) as at:
        truth = [x.clone() for x in at.live]
        for live, piece in zip(at.live, pieces, strict=True):
            if piece.ready:
                live.fill_(1)
        clock = wire(at)
        for action in range(len(planned.start)):
            time.sleep(takes[2 * action])
            clock.enter(str(action))
            for i, piece in enumerate(pieces):
                if piece.deadline == action:
                    at.live[i].fill_(2)
            time.sleep(takes[2 * action + 1])
            for i, piece in enumerate(pieces):
                if piece.ready == action + 1:
                    at.live[i].copy_(truth[i])
            clock.leave()
        time.sleep(takes[-1])
        clock.end()
        outcome = at.copier.finish()
        at.assert_copied(outcome, truth)

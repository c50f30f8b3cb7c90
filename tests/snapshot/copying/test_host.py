"""What the host's copier does when: windows, pace, deadlines, and what is reported of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.snapshot.rigs.rigs import LONG, PATIENCE_S, SOON_S, Piece, columns, meanwhile, rig, track
from ucformat.containers.file_image import ByteRequest
from ucformat.snapshot.copying.host import Outcome
from ucformat.snapshot.copyplan.plan import EXPOSED, OVERLAP, Mode
from ucformat.snapshot.schedule.replay import Track
from ucformat.storage.store import Bytes

WHOLE = Track.whole(LONG)
IDLE = track(LONG / 2, LONG, seconds=LONG)
"""Idle at first, for a very long time."""
TWO = track(0.025, LONG / 2, LONG / 2 + 0.025, LONG, seconds=LONG)
"""Two windows with room for two chunks each."""


def test_what_fits_into_a_window_is_copied_by_the_thread_and_costs_no_wait() -> None:
    with rig([Piece(3500), Piece(700)], IDLE, "bubble") as at:
        truth = [x.clone() for x in at.live]
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.reached(5)
        outcome = at.copier.finish()
        at.assert_copied(outcome, truth)
        assert (outcome.windowed, outcome.beside, outcome.exposed) == (4200, 0, 0)
        assert at.done == [True]
        assert len(outcome.spans) == 5


def test_nothing_is_copied_in_a_window_that_has_not_opened() -> None:
    with rig([Piece(1000)], TWO, "bubble") as at:
        at.copier.begin(at.work)
        assert not at.reached(1, SOON_S)
        at.copier.opened(1)  # a later window than planned serves as well
        assert at.reached(1)


def test_a_chunk_is_not_begun_before_its_window() -> None:
    with rig([Piece(4000)], TWO, "bubble") as at:
        assert at.plan.window.tolist() == [0, 0, 1, 1]
        at.plan = replace(at.plan, windows=(replace(at.plan.windows[0], stop=LONG / 2), at.plan.windows[1]))
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.reached(2)
        assert not at.reached(3, SOON_S)
        at.copier.closed()
        at.copier.opened(1)
        assert at.reached(4)


def test_nothing_is_begun_once_the_window_is_closed() -> None:
    with rig([Piece(2000)], IDLE, "bubble") as at:
        at.hold.clear()
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.held.wait(PATIENCE_S)
        at.copier.closed()  # comes back though a chunk is in hand
        at.hold.set()
        assert at.reached(1)
        assert not at.reached(2, SOON_S)
        outcome = at.copier.finish()
        assert (outcome.windowed, outcome.exposed) == (1000, 1000)


def test_nothing_is_begun_in_a_gap_that_the_plan_does_not_know() -> None:
    with rig([Piece(2000)], track(0.0, 1.0, LONG / 2, LONG, seconds=LONG), "bubble") as at:
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert not at.reached(1, SOON_S)
        at.copier.closed()
        at.copier.opened(1)
        assert at.reached(2)


def test_a_chunk_that_would_outlast_its_window_is_not_begun() -> None:
    with rig([Piece(2000)], TWO, "bubble") as at:
        at.hold.clear()
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.held.wait(PATIENCE_S)
        time.sleep(0.03)  # the window is over
        at.hold.set()
        assert at.reached(1)
        assert not at.reached(2, SOON_S)
        assert at.copier.finish().exposed == 1000


def test_exposed_chunks_wait_for_the_deadline() -> None:
    with rig([Piece(3000)], track(0.015, LONG, seconds=LONG), "bubble") as at:
        truth = [x.clone() for x in at.live]
        assert at.plan.window.tolist() == [0, EXPOSED, EXPOSED]
        at.plan = replace(at.plan, windows=(replace(at.plan.windows[0], stop=LONG),), begin=at.plan.begin * 0)
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.reached(1)
        assert not at.reached(2, SOON_S)
        at.copier.closed()
        assert not at.reached(2, SOON_S)
        outcome = at.copier.finish()
        at.assert_copied(outcome, truth)
        assert at.copies == [(0, True), (0, False), (0, False)]
        assert (outcome.windowed, outcome.exposed, at.done) == (1000, 2000, [False])


def test_exposed_chunks_let_those_of_windows_go_first() -> None:
    with rig([Piece(1000, deadline=0), Piece(1000)], track(0.005, 1.0, LONG / 2, LONG, seconds=LONG), "bubble") as at:
        assert at.plan.window.tolist() == [EXPOSED, 1]  # position 0 has a window that is too short
        at.plan = replace(at.plan, pieces=columns([Piece(1000), Piece(1000)]))
        at.copier.begin(at.work)
        at.copier.opened(1)
        assert at.reached(1)
        assert at.copies == [(1, True)]


def test_copies_beside_compute_keep_to_their_pace() -> None:
    with rig([Piece(3000)], WHOLE, "overlap") as at:
        truth = [x.clone() for x in at.live]
        assert at.plan.window.tolist() == [OVERLAP] * 3
        at.copier.begin(at.work)
        assert at.reached(1)  # in the middle of an action
        assert not at.reached(2, SOON_S)
        outcome = at.copier.finish()
        at.assert_copied(outcome, truth)
        assert (outcome.beside, outcome.exposed) == (1000, 2000)


def test_copies_beside_compute_go_on_by_themselves() -> None:
    with rig([Piece(3000)], Track.whole(0.1), "overlap") as at:
        at.copier.begin(at.work)
        assert at.reached(3)
        assert at.copier.finish().beside == 3000


@pytest.mark.parametrize("mode", ["bubble", "overlap", "blocking"])
def test_a_place_that_is_not_free_is_asked_for_until_it_is(mode: Mode) -> None:
    with rig([Piece(3000)], track(0.03, 0.06, seconds=0.1), mode) as at:
        truth, asked = [x.clone() for x in at.live], []

        def place() -> Sequence[Bytes] | None:
            asked.append(at.beside())
            return at.out if len(asked) > 3 or not at.beside() else None

        at.copier.begin(replace(at.work, open=place))
        at.copier.opened(0)
        if mode != "blocking":
            assert at.reached(1)
            assert len(asked) == 4  # not again once there is one
        at.assert_copied(at.copier.finish(), truth)


def test_a_version_without_a_place_is_refused_and_nothing_of_it_is_copied() -> None:
    with rig([Piece(3000)], WHOLE, "overlap") as at:
        at.copier.begin(replace(at.work, open=lambda: None))
        outcome = at.copier.finish()
        assert (outcome.refused, outcome.finished, outcome.failure, outcome.nbytes) == (True, False, None, 0)
        assert (at.copies, at.done) == ([], [])


def test_a_version_without_pieces_is_done_at_the_deadline() -> None:
    with rig([], WHOLE, "overlap") as at:
        at.copier.begin(at.work)
        at.copier.opened(0)
        at.assert_copied(at.copier.finish(), [])


def test_the_deadline_waits_for_the_chunk_in_hand() -> None:
    with rig([Piece(1000)], IDLE, "bubble") as at:
        truth, outcomes = [x.clone() for x in at.live], []
        at.hold.clear()
        at.copier.begin(at.work)
        at.copier.opened(0)
        assert at.held.wait(PATIENCE_S)
        with meanwhile(lambda: outcomes.append(at.copier.finish())) as finishing:
            finishing.join(SOON_S)
            assert outcomes == []
            at.hold.set()
        at.assert_copied(outcomes[0], truth)


@pytest.mark.parametrize("where", ["fill", "open", "done"])
@pytest.mark.parametrize("mode", ["overlap", "blocking"])
def test_what_fails_is_told_at_the_deadline_and_ends_the_version(where: str, mode: Mode) -> None:
    failed = threading.Event()

    def fail(*_: object) -> Any:
        failed.set()
        raise OSError("broken")

    with rig([Piece(1000), Piece(500)], Track.whole(0.05), mode) as at:
        broken: dict[str, Any] = {where: fail}
        at.copier.begin(replace(at.work, **broken))
        if mode == "overlap":
            assert failed.wait(PATIENCE_S)
        outcomes: list[Outcome] = []
        with meanwhile(lambda: outcomes.append(at.copier.finish())):
            pass
        outcome = outcomes[0]
        assert str(outcome.failure) == "broken"
        assert len(at.copies) == (2 if where == "done" else 0)
        assert at.done == []
        at.told.clear()
        truth = [x.clone() for x in at.live]
        at.copier.begin(at.work)  # the next version is another story
        at.assert_copied(at.copier.finish(), truth)


def test_a_failure_ends_the_copies_beside_compute_too() -> None:
    calls = []

    def fail(parts: Sequence[ByteRequest]) -> None:
        calls.append(at.beside())
        raise OSError("broken")

    with rig([Piece(3000)], Track.whole(0.1), "overlap") as at:
        at.copier.begin(replace(at.work, fill=fail))
        time.sleep(SOON_S)
        assert at.copier.finish().failure is not None
        assert len(calls) == 1


def test_a_version_that_nobody_began_has_no_outcome() -> None:
    with rig([Piece(1000)], WHOLE, "overlap") as at:
        assert at.copier.finish() == Outcome()
        at.copier.opened(0)
        at.copier.closed()


def test_every_version_is_copied_by_its_own_plan() -> None:
    action = track(0.5, 1.0, seconds=2.0)
    with rig([Piece(1000)], action, "blocking") as at, rig([Piece(1000, deadline=0)], action, "blocking") as other:
        for plan, copies in [(at.plan, 0), (other.plan, 1), (other.plan, 1), (at.plan, 0)]:
            at.plan = plan
            at.copies.clear()
            at.copier.begin(at.work)
            at.copier.opened(0)
            at.copier.closed()
            assert len(at.copies) == copies
            assert at.copier.finish().nbytes == 1000


def test_finishing_again_changes_nothing() -> None:
    with rig([Piece(1000)], WHOLE, "blocking") as at:
        truth = [x.clone() for x in at.live]
        at.copier.begin(at.work)
        at.copier.finish()
        at.assert_copied(at.copier.finish(), truth)


def test_stopping_gives_up_the_version_in_hand() -> None:
    with rig([Piece(3000)], WHOLE, "overlap") as at:
        at.copier.begin(at.work)
        assert at.reached(1)
        at.copier.stop()
        assert at.copier.finish().nbytes == 1000
        assert (len(at.copies), at.done) == (1, [])
        assert "ucf-copy" not in {thread.name for thread in threading.enumerate()}


def test_a_copier_that_keeps_no_record_has_no_spans() -> None:
    with rig([Piece(1000)], WHOLE, "blocking", record=False) as at:
        at.copier.begin(at.work)
        assert at.copier.finish().spans == []

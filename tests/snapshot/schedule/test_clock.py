"""Actions as they happen: what listeners hear, and the step as it is measured."""

from __future__ import annotations

import numpy as np

from ucformat.snapshot.schedule.clock import StepClock


class Heard:
    def __init__(self) -> None:
        self.events: list[object] = []
        self.clock = StepClock(self.events.append, lambda: self.events.append("closed"))


def test_every_gap_is_heard_of_as_it_opens_and_closes() -> None:
    heard = Heard()
    heard.clock.begin()
    for name in "ab":
        heard.clock.enter(name)
        heard.clock.leave()
    heard.clock.end()
    assert heard.events == [0, "closed", 1, "closed", 2, "closed"]


def test_actions_within_an_action_are_part_of_it() -> None:
    heard = Heard()
    heard.clock.begin()
    heard.clock.enter("outer")
    heard.clock.enter("inner")
    heard.clock.leave()
    heard.clock.leave()
    assert heard.events == [0, "closed", 1]
    assert [span.name for span in heard.clock.spans] == ["outer"]


def test_what_happens_outside_a_step_does_not_count() -> None:
    heard = Heard()
    heard.clock.enter("before")
    heard.clock.begin()
    heard.clock.leave()  # of an action that began before the step
    heard.clock.enter("a")
    heard.clock.leave()
    heard.clock.end()
    heard.clock.enter("after")
    heard.clock.leave()
    assert [span.name for span in heard.clock.spans] == ["a"]
    assert heard.events == [0, "closed", 1, "closed"]


def test_the_step_is_measured_from_its_own_beginning() -> None:
    heard = Heard()
    for _ in range(2):
        heard.clock.begin()
        for name in "abc":
            heard.clock.enter(name)
            heard.clock.leave()
        track = heard.clock.end()
        edges = np.ravel(np.column_stack([track.start, track.stop]))
        assert len(track.start) == 3
        assert edges.tolist() == sorted(edges.tolist())
        assert 0 <= edges[0] <= edges[-1] <= track.seconds


def test_the_gap_closes_before_the_action_begins() -> None:
    """Whoever makes an action wait is not counted as the action."""
    clock = StepClock(closed=lambda: spans.append(len(clock.spans)))
    spans: list[int] = []
    clock.begin()
    clock.enter("a")
    assert spans == [0]

"""Tests of which steps are taken and persisted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ucformat.snapshot.cadence import Cadence


def taken(cadence: Cadence, steps: Iterable[int]) -> list[tuple[int, bool, bool]]:
    found = [(step, cadence.next(step)) for step in steps]
    return [(step, due.persist, due.hash) for step, due in found if due is not None]


def test_multiples_are_taken_when_every_step_is_seen() -> None:
    assert taken(Cadence(2, 4, 0), range(1, 9)) == [(2, False, False), (4, True, False), (6, False, False), (8, True, False)]


def test_what_never_meets_a_multiple_is_taken_at_the_first_step_after_it() -> None:
    assert taken(Cadence(5, 10, 1), range(7, 40, 7)) == [(14, True, True), (21, True, True), (28, False, True), (35, True, True)]


def test_a_first_step_is_as_due_as_any() -> None:
    assert taken(Cadence(1, 100, 0), (100, 101)) == [(100, True, False), (101, False, False)]
    assert taken(Cadence(1, 100, 0), (105, 199, 201)) == [(105, False, False), (199, False, False), (201, True, False)]


def test_steps_ascend() -> None:
    cadence = Cadence(1, None, 1)
    assert taken(cadence, (3, 4)) == [(3, False, True), (4, False, True)]
    with pytest.raises(ValueError, match="step 4 was taken already"):
        cadence.next(4)

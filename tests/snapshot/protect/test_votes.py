"""That a version is held is said in order, and only once; that one is lost is said at once."""

from __future__ import annotations

from ucformat.snapshot.protect.votes import InOrder


def test_held_versions_are_told_in_order_and_lost_ones_at_once() -> None:
    told: list[tuple[int, bool]] = []
    tells = InOrder(lambda step, held: told.append((step, held)))
    assert tells.expect(1, None)
    assert tells.expect(2, None)
    assert not tells.expect(2, False)  # the first word counts
    tells.known(2, held=True)
    assert told == []  # of 1 nothing is known
    assert tells.expect(3, False)
    assert told == [(3, False)]
    tells.known(1, held=False)
    assert told == [(3, False), (1, False), (2, True)]
    tells.known(1, held=True)
    assert tells.expect(4, True)
    assert told[3:] == [(4, True)]

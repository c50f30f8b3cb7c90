"""What one rank does when: its actions as they happen, for the copier's windows, for drift and for the trace.

A step runs from the end of one optimizer step (`begin`) to the start of the next (`end`). Whoever computes calls `enter`
and `leave` around each action; the gaps between are idle time. Listeners hear of every gap as it opens and closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ucformat.snapshot.schedule.replay import Track

now = time.monotonic  # one clock for all processes of a host


@dataclass(slots=True)
class Span:
    """Something that took from `start` to `stop` on the monotonic clock, for the trace."""

    name: str
    start: float
    stop: float


@dataclass(slots=True)
class StepClock:
    """Records the actions of the step that runs now."""

    opened: Callable[[int], None] = lambda position: None
    """Called when an action has ended, with the number of actions that have: the idle gap before that position begins."""
    closed: Callable[[], None] = lambda: None
    """Called before an action begins, which may have to wait until what it changes is copied."""
    running: bool = False
    """Whether a step was begun: actions before the first one do not count."""
    began: float = 0.0
    spans: list[Span] = field(default_factory=list)
    _depth: int = 0

    def begin(self) -> None:
        """The optimizer step has ended."""
        self.running, self.began, self._depth = True, now(), 0
        self.spans = []
        self.opened(0)

    def enter(self, name: str) -> None:
        """An action begins; actions within actions are part of the outer one."""
        if not self.running:
            return
        if self._depth == 0:
            self.closed()
            self.spans.append(Span(name, now(), float("nan")))
        self._depth += 1

    def leave(self) -> None:
        """The action ends."""
        if not self.running or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self.spans[-1].stop = now()
            self.opened(len(self.spans))

    def end(self) -> Track:
        """The next optimizer step begins: the step as it was measured."""
        stop = now()
        self.running = False
        self.closed()
        return Track(
            np.array([span.start - self.began for span in self.spans]),
            np.array([span.stop - self.began for span in self.spans]),
            stop - self.began,
        )

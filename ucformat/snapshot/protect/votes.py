"""Tells the ranks that a version is held only once it is protected: so none gives up what it relies on before that.

A version that is not protected counts as one that this rank does not hold. Its slot may be given away, but it is still there, and
a restart that loses no host finds it, until that happens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Expected:
    step: int
    held: bool | None
    """None: not known yet."""


class InOrder:
    """Passes on that versions are held in the order of their steps, and that others are not at once. Any thread."""

    def __init__(self, tell: Callable[[int, bool], None]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._expected: deque[_Expected] = deque()
        self._last = -1

    def expect(self, step: int, held: bool | None) -> bool:
        """A version comes next, of which it is known whether it is held, or is not yet. False: it was expected before."""
        with self._lock:
            if step <= self._last:
                return False
            self._last = step
            if held is False:
                self._tell(step, False)
            else:
                self._expected.append(_Expected(step, held))
                self._flush()
            return True

    def known(self, step: int, *, held: bool) -> None:
        """What became of an expected version."""
        with self._lock:
            item = next((item for item in self._expected if item.step == step and item.held is None), None)
            if item is None:
                return
            item.held = held
            if not held:
                self._expected.remove(item)
                self._tell(step, False)
            self._flush()

    def _flush(self) -> None:
        while self._expected and self._expected[0].held is not None:
            item = self._expected.popleft()
            self._tell(item.step, bool(item.held))

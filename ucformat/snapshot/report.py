"""What the snapshots of a run did: a line per step, and sums."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

_LOG = logging.getLogger("ucformat")
KEPT_STEPS = 10_000  # step reports kept: hours of training in a few MB


class Warnings:
    """Logs the first failure of each kind; the report has all."""

    def __init__(self, rank: int) -> None:
        self._rank, self._kinds = rank, set[str]()

    def first(self, kind: str, text: str) -> None:
        """Log `text` unless something of its kind was logged before."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            _LOG.warning("snapshots of rank %d: %s", self._rank, text)


@dataclass(slots=True)
class StepReport:
    """One step's snapshot."""

    step: int
    mode: str = ""
    """How it was copied: bubble, bubble+overlap, overlap, blocking."""
    nbytes: int = 0
    windowed: int = 0
    """Bytes copied while the rank was idle."""
    beside: int = 0
    """Bytes copied beside compute."""
    exposed: int = 0
    """Bytes copied while training waited."""
    boundary_ms: float = 0.0
    """Training waited at the start, for what changes within the step and for bookkeeping."""
    exposed_ms: float = 0.0
    """Training waited before the optimizer step, for the rest of the copies."""
    predicted_ms: float = 0.0
    """What the plan expected of `exposed_ms`."""
    step_ms: float = 0.0
    """From this boundary to the next."""
    window_use: float = 0.0
    """Fraction of the planned windows' time that the plan uses."""
    skipped: str = ""
    """Why there is no snapshot of this step; empty when there is one."""

    @property
    def waited_ms(self) -> float:
        return self.boundary_ms + self.exposed_ms


@dataclass(slots=True)
class SnapshotReport:
    """Everything since the engine was made."""

    strategy: str = ""
    plan: str = ""
    """The copy plan in force, and why."""
    slot_bytes: int = 0
    slots: int = 0
    taken: int = 0
    skipped: int = 0
    failed: int = 0
    restorable: int | None = None
    """The newest step that all ranks are known to hold, protected if that was asked for: a restart loses nothing before it."""
    went_back: list[int] = field(default_factory=list)
    """Steps that were taken although the same or a higher one had been: these were abandoned then."""
    replans: int = 0
    hashed: int = 0
    persisted: list[int] = field(default_factory=list)
    """Steps that were committed to storage, as this rank knows."""
    persist_failed: int = 0
    protected: int = 0
    """Versions that this rank has done its part to protect."""
    unprotected: int = 0
    """Versions for which it could not."""
    keeper_restarts: int = 0
    remarks: list[str] = field(default_factory=list)
    """What is worth knowing of the slots: that they are not in memory, or not pinned for a device."""
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    """The last failures, in words."""
    steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def done(self) -> list[StepReport]:
        """Steps that have a snapshot."""
        return [step for step in self.steps if not step.skipped]

    def uncount(self, step: int, why: str) -> bool:
        """A version was not taken after all; whether it was counted as taken."""
        line = next((line for line in reversed(self.steps) if line.step <= step), None)
        if line is None or line.step != step or line.skipped:
            return False
        line.skipped = why
        self.taken -= 1
        self.skipped += 1
        return True

    def __str__(self) -> str:
        done = self.done()
        lines = [
            f"snapshots: {self.taken} taken, {self.skipped} skipped, {self.failed} failed",
            f"memory: {self.slots} slots of {_mib(self.slot_bytes)}"
            + ("" if self.restorable is None else f"; step {self.restorable} can be restored"),
            f"layout: {self.strategy}",
            f"plan: {self.plan or 'not made yet'}; made anew {self.replans} times",
        ]
        if done:
            waits = f"boundary {_ms(s.boundary_ms for s in done)}, deadline {_ms(s.exposed_ms for s in done)}"
            lines.append(f"per step: {_mib(median(s.nbytes for s in done))}, waited {_ms(s.waited_ms for s in done)} ({waits})")
        persisted = f"{len(self.persisted)} persisted, {self.persist_failed} failed"
        lines.append(f"keeper: {self.hashed} hashed, {persisted}, {self.keeper_restarts} restarts")
        if self.protected or self.unprotected:
            lines.append(f"protection: {self.protected} versions, {self.unprotected} not")
        lines += [f"note: {text}" for text in self.remarks]
        lines += [f"failure: {text}" for text in list(self.failures)[-3:]]
        return "\n".join(lines)


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _ms(values: Iterable[float]) -> str:
    return f"{median(values):.2f} ms"

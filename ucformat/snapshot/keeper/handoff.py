"""What becomes of committed slots: hashed and persisted by the keeper, held while it reads them, reported when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ucformat.snapshot.cadence import Due
from ucformat.snapshot.keeper.client import Keeper
from ucformat.snapshot.keeper.messages import Event, Failed, Hashed, KeeperOptions, Persisted, Restarted, Skipped
from ucformat.snapshot.report import SnapshotReport
from ucformat.snapshot.slots.slot_set import Slot, SlotSet

ROTATING = 2  # slots without which no version can be taken: one keeps the newest while the next one is copied
STOP_S = 60.0  # that `close` waits for checksums, and for a keeper that has given a version up
LOOK_S = 0.01  # between looks whether a busy keeper can take more


@dataclass(frozen=True, slots=True)
class Persist:
    """Which snapshots go to storage, and how long they stay there."""

    url: str
    """Run directory, at any fsspec URL: every persisted step is an ordinary checkpoint in it."""
    every: int = 100
    """The first step taken at or after each multiple of this is persisted; one that is skipped or fails is not made up for."""
    keep: int | None = None
    """So many of the newest stay; None for all."""
    keep_every: int | None = None
    """Steps that are multiples of this stay for ever."""
    retries: int = 5
    timeout_s: float = 1800.0
    imports: tuple[str, ...] = ()
    """Modules that the keeper imports first, such as one that registers a file system with fsspec."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"Persist.every ({self.every}) must be at least 1")
        if self.keep_every is not None and self.keep_every % self.every:
            raise ValueError(
                f"keep_every ({self.keep_every}) must be a multiple of every ({self.every}): no other steps are persisted"
            )


Warn = Callable[[str, str], None]
"""Logs the first failure of each kind: its kind, and what happened."""


class Persistence:
    """One rank's keeper and the slots that it reads."""

    def __init__(self, slots: SlotSet, report: SnapshotReport, run: str, persist: Persist | None, warn: Warn) -> None:
        self._slots, self._report, self._persist, self._warn = slots, report, persist, warn
        self._held: set[int] = set()
        self._patience = max(1, persist.every // 2) if persist else 0
        """Steps for which a version that is being written may hold up others, where there is no slot beside the rotating ones."""
        self._holding_up: tuple[int, int] | None = None
        """The step that is being written, and the first one that it held up."""
        self._ordered: set[int] = set()
        """Steps that it was given to persist."""
        self._given_up: set[int] = set()
        """Steps that were counted as failed, though the keeper may still be writing them."""
        told = persist or Persist("")
        self._keeper = Keeper(
            KeeperOptions(
                directory=slots.directory,
                rank=slots.rank,
                world=slots.world,
                run=run,
                persist_url=told.url or None,
                keep=told.keep,
                keep_every=told.keep_every,
                retries=told.retries,
                timeout_s=told.timeout_s,
                imports=told.imports,
            )
        )
        self._keeper.start()

    def committed(self, slot: Slot, step: int, due: Due, patient_until: float = 0.0) -> None:
        """A version is complete here: hand it on if it is due. Waits for a busy keeper until a time (monotonic)."""
        for queued in self._keeper.queued_in(slot.index):
            self._give_up(queued, f"its slot was needed for step {step}, as storage is slower than versions come: persist fewer")
        if not (due.persist or due.hash):
            return
        taken = self._keeper.hash_and_maybe_persist(slot.index, step, due.persist)
        while not taken and time.monotonic() < patient_until:
            time.sleep(LOOK_S)
            self.poll()
            taken = self._keeper.hash_and_maybe_persist(slot.index, step, due.persist)
        self._ordered |= {step} if taken and due.persist else set()
        if not taken and due.persist:
            self._lost(step, "not persisted: the keeper is busy with earlier versions")
            self._keeper.hash_and_maybe_persist(slot.index, step, persist=False)
        self._follow()

    def held_up(self, step: int) -> str:
        """No slot was free for a version: which one is being persisted in a slot that others need; empty when none is.

        With two slots, that one gives way in the end: training without snapshots in memory is worse than a step that is not in
        storage. If it was just slow, a later one has more time.
        """
        self.poll()
        order = self._keeper.being_written()
        if self._persist is None or order is None or len(self._slots.slots) > ROTATING:
            return ""
        writing, first = self._holding_up or (-1, step)
        if writing != order.step:
            first = step
        self._holding_up = (order.step, first)
        if step - first >= self._patience:
            self._patience = max(1, min(2 * self._patience, self._persist.every - 1))
            why = f"writing it held up the versions of steps {first} to {step}"
            self._give_up(order.step, f"{why}; with slots={ROTATING + 1} it would hold up none")
            self._follow()
        return f"step {order.step} is being persisted from one of {len(self._slots.slots)} slots"

    def _give_up(self, step: int, why: str) -> None:
        self._keeper.give_up(step)
        self._given_up.add(step)
        self._lost(step, f"not persisted: {why}")

    def _lost(self, step: int, why: str) -> None:
        self._report.persist_failed += 1
        self._report.failures.append(f"step {step}: {why}")
        self._warn("persist", f"step {step} is not in storage: {why}")

    @property
    def busy(self) -> bool:
        """Whether the keeper still has a version to persist."""
        self.poll()
        return self._keeper.persists()

    def move(self, slots: SlotSet) -> None:
        """The slots were laid out anew; what the keeper still reads of the old ones may be replaced, and fails then."""
        self._slots, self._held = slots, set()
        self._follow()

    def poll(self) -> None:
        """Hear what the keeper has done since."""
        for event in self._keeper.poll():
            self._note(event)
        self._follow()

    def close(self, within_s: float | None = None) -> None:
        """Let the keeper finish what it has, and end; within the time that persisting may take, unless another is given."""
        if within_s is None:
            persisting = self._persist is not None and self._keeper.persists()
            within_s = self._persist.timeout_s + STOP_S if self._persist is not None and persisting else STOP_S
        for event in self._keeper.stop(within_s):
            self._note(event)
        self._follow()

    def leave(self) -> None:
        """Let the keeper finish what it has begun, as when this process dies, and end by itself. Not waited for."""
        self._keeper.leave()

    def _follow(self) -> None:
        """Hold just the slot of the version that is being written: queued ones, and those that are only hashed, give way."""
        order = self._keeper.being_written()
        busy = {slot.index for slot in self._slots.slots if order is not None and slot.index == order.slot}
        for index in busy - self._held:
            self._slots.hold(self._slots.slot(index))
        for index in self._held - busy:
            self._slots.release(self._slots.slot(index))
        self._held = busy

    def _note(self, event: Event) -> None:
        if isinstance(event, Hashed):
            self._report.hashed += 1
        elif isinstance(event, Persisted):
            self._report.persisted.append(event.step)
            if event.step in self._given_up:  # all of it had been read when its slot was given away
                self._report.persist_failed -= 1
        elif isinstance(event, Failed) and event.step in self._ordered:
            self._lost(event.step, event.message)
        elif isinstance(event, Failed):
            self._report.failures.append(f"step {event.step}: no checksums: {event.message}")
            self._warn("hash", f"step {event.step} has no checksums: {event.message}")
        elif isinstance(event, Skipped) and event.missed:
            self._lost(event.step, f"not persisted: {event.why}")
        elif isinstance(event, Restarted):
            self._report.keeper_restarts = event.count
            self._report.failures.append(f"keeper: {event.message}")
            self._warn("keeper", event.message)

"""Slots that are to be persisted, and what keepers say of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ucformat
from tests.snapshot.rigs import slotfill
from tests.snapshot.rigs.gated import GatedFileSystem
from ucformat.snapshot.keeper import slot_copy
from ucformat.snapshot.keeper.client import Keeper
from ucformat.snapshot.keeper.messages import Event, Failed, KeeperOptions, Order, Persisted, Skipped
from ucformat.snapshot.keeper.slot_copy import HeldSlot
from ucformat.snapshot.keeper.worker import Persister
from ucformat.snapshot.slots.slot_set import Slot, SlotSet

RUN = "run-1"
PATIENCE_S = 120.0  # nothing here waits so long unless it is broken

E = TypeVar("E")


def options(directory: Path, url: Path | str | None = None, rank: int = 0, world: int = 1, **others: Any) -> KeeperOptions:
    chosen = {"run": RUN, "timeout_s": PATIENCE_S, "imports": (GatedFileSystem.__module__,), **others}
    return KeeperOptions(str(directory), rank, world, persist_url=None if url is None else str(url), **chosen)


def make_slots(directory: Path, rank: int = 0, world: int = 1, count: int = 2, run: str = RUN) -> SlotSet:
    return SlotSet.create(directory, rank, world, slotfill.pieces(rank, world), count, run=run)


def take(slots: SlotSet, step: int) -> Slot:
    slot = slotfill.take(slots, slotfill.pieces(slots.rank, slots.world), step)
    assert slot is not None
    return slot


def hashed(slots: SlotSet, step: int) -> HeldSlot:
    """A fresh version of `step`, hashed."""
    slot = take(slots, step)
    return slot_copy.hash_slot(slot_copy.find_slot(slots.directory, slots.rank, slot.index, step))


def assert_persisted(url: Path | str, step: int) -> None:
    """The checkpoint of a step is whole, and every item of it is of that step."""
    with_step = f"{url}/step-{step:08d}"
    catalog = ucformat.open(with_step).catalog
    assert slotfill.assert_is_step(catalog) == step


def persist_all(chosen: KeeperOptions, *slots: HeldSlot) -> list[Event]:
    """What a persister says of these versions, one after another, until it has done all it can."""
    events: list[Event] = []
    persister = Persister(chosen, events.append)
    for slot in slots:
        persister.submit(Order(slot.record.step, slot.index, persist=True), slot)
    persister.finish(drop=False)
    persister.run()
    return events


def ends(events: Sequence[Event]) -> list[tuple[type[Event], int]]:
    """How versions ended."""
    return [(type(event), event.step) for event in events if isinstance(event, Persisted | Failed | Skipped)]


def only(kind: type[E], events: Sequence[Event]) -> E:
    """The one event of a kind."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


def until(condition: Callable[[], bool], *keepers: Keeper) -> list[list[Event]]:
    """Poll keepers until the condition holds; what each said."""
    said: list[list[Event]] = [[] for _ in keepers]
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, said
        for keeper, events in zip(keepers, said, strict=True):
            events += keeper.poll()
        time.sleep(0.01)
    return said


def listen(kind: type[Event], *keepers: Keeper, count: int = 1) -> list[list[Event]]:
    """Poll keepers until each has said something of a kind; what each said up to then."""
    said: list[list[Event]] = [[] for _ in keepers]
    limit = time.monotonic() + PATIENCE_S
    while any(sum(isinstance(event, kind) for event in events) < count for events in said):
        assert time.monotonic() < limit, said
        for keeper, events in zip(keepers, said, strict=True):
            events += keeper.poll()
        time.sleep(0.01)
    return said

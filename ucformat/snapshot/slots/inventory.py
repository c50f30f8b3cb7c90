"""What an earlier process left in a rank's directory, and what of it stays when slots are made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ucformat.errors import StorageError, UcformatError
from ucformat.formats.native.shard import ShardLayout, hex_digest
from ucformat.formats.snapshot import SlotRecord, read_slot, slot_name, survey
from ucformat.snapshot.slots.free_memory import PART
from ucformat.snapshot.slots.slotfile import drop, has_layout
from ucformat.storage.local import LocalStore

_ANY = re.compile(r"slot-(\d+)\.(?:safetensors|json)")


@dataclass(frozen=True, slots=True)
class Found:
    """A slot's file."""

    index: int
    size: int
    record: SlotRecord | None
    """None: it holds no version."""
    fits: bool
    """It has the layout that is wanted now."""

    @property
    def step(self) -> int:
        return -1 if self.record is None else self.record.step

    @property
    def age(self) -> tuple[int, str]:
        """Ascending from slots without a version to the newest."""
        return (self.step, "" if self.record is None else self.record.created)

    def is_any(self, records: Iterable[SlotRecord]) -> bool:
        """Whether it holds one of these versions."""
        return self.record is not None and any(self.record.same_version(record) for record in records)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What stays in a rank's directory."""

    folder: str
    adopted: tuple[Found, ...]
    """To be used again; the version that would be opened now comes last, before it the others, the oldest first."""
    earlier: tuple[Found, ...]
    """Versions of another layout."""
    whole: bool
    """One of the versions is complete in this directory: there is no need to ask ranks of other hosts."""
    remarks: list[str] = field(default_factory=list)

    @property
    def kept(self) -> set[int]:
        return {item.index for item in (*self.adopted, *self.earlier)}


def scan_slots(folder: str, layout: ShardLayout, count: int) -> Inventory:
    """Sort out a directory whose lock is held, and remove what is of no use. Raises StorageError.

    Kept are up to `count` slots of this layout: of the version that would be opened now, then of the newest ones. Of another
    layout: the version that would be opened now; when none is complete here (ranks of other hosts can't be seen), all of them.
    """
    found, remarks = _find(folder, layout)
    versions, _ = survey(LocalStore(os.path.dirname(folder)))
    whole = next((version for version in versions if version.complete), None)
    loadable = [] if whole is None else [held.record for held in whole.held]
    others = [item for item in found if not item.fits and item.record is not None]
    if whole is not None:
        others = [item for item in others if item.is_any(loadable)]
    fitting = sorted((item for item in found if item.fits), key=lambda item: (item.is_any(loadable), item.age))
    stock = Inventory(folder, tuple(fitting[-count:]), tuple(others), whole is not None, remarks)
    for item in found:
        if item.index not in stock.kept:
            drop(folder, item.index)
    return stock


def _find(folder: str, layout: ShardLayout) -> tuple[list[Found], list[str]]:
    """All slots, and remarks on records that count for nothing; remains of unfinished work are removed."""
    store, name = LocalStore(os.path.dirname(folder)), os.path.basename(folder)
    found: list[Found] = []
    remarks: list[str] = []
    for index in _indices(folder, os.listdir(folder)):
        path = f"{folder}/{slot_name(index)}"
        fits = has_layout(folder, index, layout)
        record: SlotRecord | None = None
        try:
            record = read_slot(store, name, index).record
            if hex_digest(store.read(f"{name}/{record.file}", 0, record.data_start)) != record.header_digest:
                raise StorageError(path, "its header is not the one that was committed")
        except UcformatError as error:
            if os.path.exists(f"{folder}/slot-{index}.json"):
                remarks.append(f"ignored: {error}")
                record = None
        size = os.path.getsize(path) if os.path.exists(path) else 0
        found.append(Found(index, size, record, fits))
    return found, remarks


def _indices(folder: str, names: Iterable[str]) -> list[int]:
    """Numbers of the slots there, after removing files under temporary names."""
    indices: set[int] = set()
    for name in names:
        if name.endswith(PART) and name.startswith("slot-"):
            os.unlink(f"{folder}/{name}")
        elif match := _ANY.fullmatch(name):
            indices.add(int(match[1]))
    return sorted(indices)

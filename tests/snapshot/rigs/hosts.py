"""Hosts as directories, slots of a small state on them, and parity made by the product's own code, all in this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from tests.snapshot.rigs.parts import SHAPE, Part, whole
from tests.snapshot.rigs.slotfill import hash_slot
from tests.snapshot.rigs.threads import on_threads
from ucformat import values
from ucformat.catalog import TensorSpec
from ucformat.formats.snapshot import HeldShard, rank_name
from ucformat.group import Group
from ucformat.snapshot.parity.groups import form_groups
from ucformat.snapshot.protect.make import MemberSlot, make_stripe
from ucformat.snapshot.restore import Restored, restore
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.storage.local import LocalStore

SPEC = TensorSpec("model/w", "F64", SHAPE)


class MemoryHosts:
    """A job of some ranks: `hosts` says of each on which host it runs. Versions are taken without a trainer."""

    def __init__(self, place: Path, hosts: Sequence[int], members: int = 8, run: str = "run") -> None:
        self.place, self.hosts, self.world = place, list(hosts), len(hosts)
        self.grouping = form_groups([str(host) for host in hosts], members)
        self.slots: list[SlotSet] = []
        for rank, host in enumerate(hosts):
            box = Part(Group(rank, self.world), 0).box
            here = [other for other in range(self.world) if hosts[other] == host]
            self.slots.append(SlotSet.create(self.directory(host), rank, self.world, [(SPEC, box)], 3, run=run, here=here))
        self.last: dict[int, Slot] = {}

    def directory(self, host: int) -> str:
        return str(self.place / f"host{host}")

    def take(self, step: int, ranks: Collection[int] | None = None, *, hashed: bool = True) -> None:
        """A version, on all ranks or on some."""
        for rank, slots in enumerate(self.slots):
            if ranks is None or rank in ranks:
                slot = slots.begin()
                assert slot is not None
                slot.tensor(0).copy_(whole(step)[Part(Group(rank, self.world), 0).box.slices])
                slots.commit(slot, step, values.encode({"step": step}))
                slots.settle(step, whole=True)
                if hashed:
                    hash_slot(slots, slot)
                self.last[rank] = slot

    def member(self, rank: int) -> MemberSlot:
        """The slot of a rank's last version."""
        slots, slot = self.slots[rank], self.last[rank]
        record = slots.record(slot)
        assert record is not None
        return MemberSlot(LocalStore(slots.directory), HeldShard(rank_name(rank), slot.index, record))

    def protect(self, ranks: Collection[int] | None = None) -> None:
        """Parity of the last version, on all ranks or on some."""
        for rank in range(self.world):
            group = self.grouping.of(rank)
            if group and (ranks is None or rank in ranks):
                others = {other: self.member(other) for other in group if other != rank}
                make_stripe(self.member(rank), others, self.slots[rank].directory, lambda: None)

    def close(self) -> None:
        for slots in self.slots:
            slots.close()


def restore_on(place: Path, hosts: Sequence[int], dim: int = 0, run: str = "next") -> list[tuple[Restored | None, Part]]:
    """What a job restores whose ranks run on these hosts, and the state that it then has."""

    def rank(group: Group) -> tuple[Restored | None, Part]:
        part = Part(group, dim)
        directory = str(place / f"host{hosts[group.rank]}")
        return restore(part.state, directory, None, run, group, "lo"), part

    return on_threads(len(hosts), rank)

"""Which versions the hosts hold between them: slots that are there, and those that parity proves can be computed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ucformat.snapshot.recovery.inventory import HostInventory, SlotKey, SlotSummary, StripeSummary
from ucformat.snapshot.slots.restart_fence import Fence

_TOLD = 8  # ranks that a message names


@dataclass(frozen=True, slots=True)
class PlacedSlot:
    """A slot of a version, and the host that holds it."""

    host: int
    slot: SlotSummary


@dataclass(frozen=True, slots=True)
class PlacedStripe:
    """A parity stripe, and the host that holds it."""

    host: int
    stripe: StripeSummary


@dataclass(frozen=True, slots=True)
class ComputedSlot:
    """A slot that no host holds, or that is damaged: it is computed from what the others of its group hold."""

    slot: SlotSummary
    member: int
    """Its number in the group."""
    slots: tuple[PlacedSlot, ...]
    """Of the other members, in the order of the group."""
    stripes: tuple[PlacedStripe, ...]
    """That the other members keep, in the same order."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What turned out to be unusable while restoring. Equal on all ranks."""

    hosts: frozenset[int] = frozenset()
    """That do not answer."""
    slots: frozenset[SlotKey] = frozenset()
    """That are damaged."""
    computed: frozenset[SlotKey] = frozenset()
    """That could not be computed from parity: something of that is damaged."""

    def __or__(self, other: Losses) -> Losses:
        return Losses(self.hosts | other.hosts, self.slots | other.slots, self.computed | other.computed)


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """What the hosts hold of one version, by rank."""

    step: int
    world: int
    run: str
    slots: tuple[PlacedSlot | ComputedSlot, ...]

    @property
    def complete(self) -> bool:
        return len(self.slots) == self.world

    @property
    def hashed(self) -> bool:
        """Whether all of its slots have checksums."""
        return all(item.slot.hashed for item in self.slots)

    @property
    def computed(self) -> tuple[int, ...]:
        """Ranks whose slots are computed."""
        return tuple(item.slot.rank for item in self.slots if isinstance(item, ComputedSlot))

    @property
    def created(self) -> str:
        return max(item.slot.key.created for item in self.slots)

    def missing(self) -> list[int]:
        """The first ranks whose slots are not to be had; `world` may be any number that a record claims."""
        there = {item.slot.rank for item in self.slots}
        return list(islice((rank for rank in range(self.world) if rank not in there), _TOLD))


@dataclass(slots=True)
class _Found:
    """What is found of one version."""

    slots: dict[int, PlacedSlot] = field(default_factory=dict)
    stripes: list[PlacedStripe] = field(default_factory=list)


def versions(hosts: Sequence[HostInventory], losses: Losses = Losses()) -> list[HeldVersion]:
    """All versions that any host holds a part of, the newest first; without those that a restart has abandoned.

    Of a slot that two hosts hold, as after a rank has moved, the newer version counts, and of the same one the first host's.
    """
    fences = {fence for host in hosts for fence in host.fences}
    found: dict[tuple[int, int, str], _Found] = {}
    for number, host in enumerate(hosts):
        if number in losses.hosts:
            continue
        for slot in host.slots:
            if slot.key in losses.slots or any(_abandoned(slot.key, fence) for fence in fences):
                continue
            here = found.setdefault((slot.key.step, slot.key.world, slot.key.run), _Found())
            before = here.slots.get(slot.rank)
            if before is None or before.slot.key.created < slot.key.created:
                here.slots[slot.rank] = PlacedSlot(number, slot)
        for stripe in host.stripes:
            of = stripe.members[0]
            if not any(_abandoned(key, fence) for key in stripe.members for fence in fences):
                found.setdefault((of.step, of.world, of.run), _Found()).stripes.append(PlacedStripe(number, stripe))
    made = [_version(key, here, losses.computed) for key, here in found.items() if here.slots]
    return sorted(made, key=lambda version: (version.step, version.created), reverse=True)


def _abandoned(slot: SlotKey, fence: Fence) -> bool:
    """Whether another start of the job went on from an older step: the host of this slot was away when that was made known."""
    return slot.run != fence.run and slot.step > fence.step and slot.created < fence.created


def _version(key: tuple[int, int, str], found: _Found, hopeless: Collection[SlotKey]) -> HeldVersion:
    slots: dict[int, PlacedSlot | ComputedSlot] = dict(found.slots)
    if len(slots) < key[1]:
        for item in _computable(found, hopeless):
            slots.setdefault(item.slot.rank, item)
    return HeldVersion(*key, tuple(slots[rank] for rank in sorted(slots)))


def _computable(found: _Found, hopeless: Collection[SlotKey]) -> Iterator[ComputedSlot]:
    """Slots that are not there, and all that is needed to compute them is, of one version."""
    groups: dict[tuple[SlotKey, ...], dict[int, PlacedStripe]] = {}
    for placed in found.stripes:
        groups.setdefault(placed.stripe.members, {}).setdefault(placed.stripe.rank, placed)
    for members, stripes in groups.items():
        lost = [key for key in members if key.rank not in found.slots]
        if len(lost) != 1 or lost[0] in hopeless:
            continue
        others = [key for key in members if key is not lost[0]]
        slots = [found.slots[key.rank] for key in others]
        if any(slot.slot.key != key for slot, key in zip(slots, others, strict=True)):
            continue  # the stripe is of another version of a slot than the one that is there
        if all(key.rank in stripes for key in others):
            summary = SlotSummary(lost[0], 0, hashed=True)
            kept = tuple(stripes[key.rank] for key in others)
            yield ComputedSlot(summary, members.index(lost[0]), tuple(slots), kept)


def lost(version: HeldVersion, hosts: Sequence[HostInventory]) -> str:
    """Why an incomplete version can't be used, in words; empty when all ranks are seen here, and some had not finished it."""
    seen = frozenset[int]().union(*(host.ranks for host in hosts))
    missing = version.missing()
    absent = [rank for rank in missing if rank not in seen]
    if not absent and len(hosts) == 1:
        return ""
    ranks = ", ".join(map(str, absent or missing))
    here = "here" if len(hosts) == 1 else f"on any of {len(hosts)} hosts"
    why = f"have no directory {here}" if absent else f"do not hold it {here}"
    return f"step {version.step} of {version.world} ranks lies in part elsewhere (ranks {ranks} {why})"


def troubles(hosts: Sequence[HostInventory], found: Sequence[HeldVersion]) -> Iterator[str]:
    """What else is there and can't be used."""
    for host in hosts:
        yield from host.ignored
    yield from filter(None, (lost(version, hosts) for version in found if not version.complete))


def by_step(found: Iterable[HeldVersion]) -> Mapping[int, HeldVersion]:
    """The newest complete version of each step."""
    whole: dict[int, HeldVersion] = {}
    for version in found:
        if version.complete:
            whole.setdefault(version.step, version)
    return whole

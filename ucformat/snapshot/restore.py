"""Going on after a restart: the newest version that the hosts hold between them, whoever the ranks are now, else storage.

Every rank decides from what all hosts hold, so all try the same versions in the same order, and meet the same error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, Literal

from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    SnapshotChangedError,
    StorageError,
    UcformatError,
)
from ucformat.formats import native
from ucformat.formats.snapshot import rank_name
from ucformat.group import Group
from ucformat.reshard.load import LoadOptions, load_catalog
from ucformat.snapshot.parity.lost_slot import LostSlotStore
from ucformat.snapshot.recovery.catalog import open_version
from ucformat.snapshot.recovery.hosts import Hosts, meet
from ucformat.snapshot.recovery.inventory import HostInventory, scan
from ucformat.snapshot.recovery.versions import ComputedSlot, HeldVersion, Losses, by_step, lost, troubles, versions
from ucformat.snapshot.slots.restart_fence import Fence, abandon, read_fence
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)
_RANK = re.compile(r"rank-(\d{5,})/")
_DAMAGE = (ChecksumError, FormatError, MissingFileError, NotACheckpointError, SnapshotChangedError, StorageError)
"""What another version may not have. Everything else says that the state is another one: it is raised, and nothing is tried."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a state was restored from."""

    step: int
    source: Literal["memory", "storage"]
    where: str
    why: str
    """Why this source and this step, in words; with every version that was passed over, and what was wrong with it."""
    verified: bool = True
    """False: some slots had no checksums yet, so what was read from memory could not be compared with any."""
    passed_over: tuple[str, ...] = ()
    """Newer versions, or ones that were to be preferred, that could not be used, and why; also logged as a warning."""
    served: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all ranks read, by source: `this host` (a rank's own), `peer://<address>` of another host, `storage`. Blocks are
    read whole, to be verified, so this is a little more than the state. `parity` are bytes that were computed, each from
    bytes that count at their own sources."""
    computed: tuple[int, ...] = ()
    """Ranks of the version whose slots were lost or damaged, and computed from parity."""


@dataclass(frozen=True, slots=True)
class _InStorage:
    """What rank 0 finds in storage."""

    newest: int | None
    abandoned: tuple[int, ...]
    """Newer steps that the job has gone back from: they count only where there is no other."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A version that may be restored."""

    step: int
    source: Literal["memory", "storage"]
    where: str
    verified: bool

    def what(self, memory: Mapping[int, HeldVersion]) -> object:
        """What it is made of: the same step may be tried again without a slot or a host."""
        return self.source, self.step, memory[self.step].slots if self.source == "memory" else ()


def restore(
    state: MutableMapping[str, Any],
    directory: str,
    persist_url: str | None,
    run: str,
    group: Group,
    interface: str | None = None,
) -> Restored | None:
    """Restore `state` in place from the newest version; None when nothing is there. Every rank of `group` calls it.

    Ranks may run on several hosts: what lies on another one is read over the network, through `interface` (see `peers`).
    Memory goes first where it holds a step as new as storage does. Once a version turned out to be damaged, those with checksums
    go before those without. What is newer in memory than the restored step is abandoned from then on: `run` names the start of
    the job that does so.

    Raises what loading raises when a version is good and does not fit the state, or when all are damaged; NotACheckpointError
    when only versions are there that can't be used from here. The class is the same on every rank.
    """
    with meet(directory, group, interface) as hosts:
        restored = _restore(state, hosts, persist_url, group)
        if restored is not None:
            fence = group.broadcast(Fence.now(run, restored.step))
            with group.together(f"forgetting what came after step {restored.step}"):
                abandon(directory, group.rank, hosts.here, fence)
    return restored


def _restore(state: MutableMapping[str, Any], hosts: Hosts, persist_url: str | None, group: Group) -> Restored | None:
    inventories, stored = _look(hosts, persist_url, group)
    abandoned = [f"step {step} in storage was saved before the job went back" for step in stored.abandoned]
    losses, first = Losses(), None
    passed: list[str] = []
    tried = set[object]()
    while True:
        found = versions(inventories, losses)
        memory = by_step(found)
        if not tried and not memory:
            passed += islice((*hosts.unreachable.values(), *troubles(inventories, found)), 1)
        if not tried and (memory or stored.newest is not None):
            passed += abandoned
        waiting = _choices(memory, stored, hosts.own.url, persist_url or "", damaged=bool(tried))
        choice = next((item for item in waiting if item.what(memory) not in tried), None)
        if choice is None:
            break
        tried.add(choice.what(memory))
        try:
            served = _load(choice, memory, hosts, state, group)
        except _DAMAGE as error:
            first = first or error
            more = _blame(error, memory.get(choice.step) if choice.source == "memory" else None, hosts)
            losses = reduce(or_, group.all_gather(more), losses)
            passed.append(f"step {choice.step} in {choice.source} can't be used ({error})")
            continue
        out_of_reach = [lost(version, inventories) for version in found if version.step > choice.step and not version.complete]
        passed += [*hosts.unreachable.values(), *filter(None, out_of_reach)] if memory else []
        return _restored(choice, memory, stored.newest, passed, served, group)
    if first is not None:
        raise first
    if passed:
        raise NotACheckpointError(hosts.own.url, f"{passed[0]}; to start anew, remove this directory")
    return None


def _blame(error: UcformatError, version: HeldVersion | None, hosts: Hosts) -> Losses:
    """What an error of reading a version in memory makes unusable, as this rank knows: a host, or the slot of a rank."""
    file = str(getattr(error, "file", ""))
    match = _RANK.search(file)
    if version is None:
        return Losses()
    if isinstance(error, StorageError):
        down = [host for host, store in hosts.stores.items() if store is not hosts.own and file.startswith(f"{store.url}/")]
        if down:
            return Losses(hosts=frozenset(down))
    placed = next((item for item in version.slots if match and item.slot.rank == int(match[1])), None)
    if placed is None:
        return Losses()
    key = frozenset({placed.slot.key})
    return Losses(computed=key) if isinstance(placed, ComputedSlot) else Losses(slots=key)


def _look(hosts: Hosts, persist_url: str | None, group: Group) -> tuple[list[HostInventory], _InStorage]:
    """What each host holds, and what storage does, on every rank. Raises StorageError when either can't be looked at."""
    mine: HostInventory | None = None
    stored = _InStorage(None, ())
    with group.together("looking for versions to restore"):
        mine = scan(hosts.own) if hosts.leads else None
        if group.rank == 0 and persist_url is not None:
            stored = _in_storage(open_store(persist_url), _went_back(hosts.own.url, mine))
    gathered, stored = group.all_gather(mine), group.broadcast(stored)
    leaders = [there[0] for there in hosts.ranks]
    return [(host not in hosts.unreachable and gathered[rank]) or HostInventory() for host, rank in enumerate(leaders)], stored


def _choices(
    memory: Mapping[int, HeldVersion], stored: _InStorage, directory: str, url: str, *, damaged: bool
) -> list[_Candidate]:
    """What to try, in order. Once anything was `damaged`, memory without checksums goes last."""

    def in_storage(step: int) -> _Candidate:
        return _Candidate(step, "storage", f"{url.rstrip('/')}/{native.step_name(step)}", True)

    newest = -1 if stored.newest is None else stored.newest
    steps = sorted(memory, reverse=True)
    order = [
        *(_Candidate(step, "memory", directory, memory[step].hashed) for step in steps if step >= newest),
        *([] if stored.newest is None else [in_storage(stored.newest)]),
        *(_Candidate(step, "memory", directory, memory[step].hashed) for step in steps if step < newest),
        *map(in_storage, stored.abandoned),
    ]
    return sorted(order, key=lambda item: not item.verified) if damaged else order


def _load(
    choice: _Candidate, memory: Mapping[int, HeldVersion], hosts: Hosts, state: MutableMapping[str, Any], group: Group
) -> dict[str, int]:
    """Restore the state from a version; bytes that all ranks have read, by source."""
    before, counts = hosts.read(), list[int]()
    catalog: Catalog | None = None
    if choice.source == "memory":
        catalog = open_version(memory[choice.step], hosts, group)
        load_catalog(catalog, state, LoadOptions(), group)
    else:
        with group.together(f"opening step {choice.step} in {choice.source}"):
            catalog = formats.open_catalog(choice.where)
        assert catalog is not None
        load_catalog(catalog, state, LoadOptions(on_bytes=counts.append), group)
    sources = {name: nbytes - before.get(name, 0) for name, nbytes in hosts.read().items()}
    computed = sum(file.store.nbytes for file in catalog.files if isinstance(file.store, LostSlotStore))
    return _sum(group.all_gather({**sources, "storage": sum(counts), "parity": computed}))


def _restored(
    choice: _Candidate,
    memory: Mapping[int, HeldVersion],
    stored: int | None,
    passed: list[str],
    served: Mapping[str, int],
    group: Group,
) -> Restored:
    in_memory = f"step {max(memory)}" if memory else "none"
    why = f"memory has {in_memory}, storage has {'none' if stored is None else f'step {stored}'}"
    if not choice.verified:
        why += "; unverified: not all of its slots had checksums yet"
    computed = memory[choice.step].computed if choice.source == "memory" else ()
    if computed:
        why += f"; computed from parity: what rank{'s' * (len(computed) > 1)} {', '.join(map(str, computed))} held"
    why = "; ".join([*reversed(passed), why])
    if (passed or computed) and group.rank == 0:
        _LOG.warning("restored step %d from %s: %s", choice.step, choice.source, why)
    return Restored(choice.step, choice.source, choice.where, why, choice.verified, tuple(passed), served, computed)


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """All ranks' bytes by source, without sources that served none."""
    names = sorted({name for each in counts for name in each})
    total = {name: sum(each.get(name, 0) for each in counts) for name in names}
    return {name: nbytes for name, nbytes in total.items() if nbytes}


def _went_back(directory: str, found: HostInventory | None) -> Fence | None:
    """From where what is in memory of rank 0 went on; None where it is not known to have gone back."""
    fence = read_fence(f"{directory}/{rank_name(0)}")
    here = found is not None and fence is not None and any(slot.key.run == fence.run for slot in found.slots)
    return fence if here else None


def _in_storage(run: Store, fence: Fence | None) -> _InStorage:
    """The newest step in storage that the job has not gone back from. Raises StorageError when it can't be looked at.

    What was saved there before the job went back is only noted as passed over once a lower step is saved.
    """
    abandoned: list[int] = []
    for step in native.newest_first(run):
        if fence is None or step <= fence.step or not _is_older(run.sub(native.step_name(step)), fence):
            return _InStorage(step, tuple(abandoned))
        abandoned.append(step)
    return _InStorage(None, tuple(abandoned))


def _is_older(store: Store, fence: Fence) -> bool:
    """Whether a step was saved before the fence was set up, by another start of the job."""
    try:
        record = native.read_record(store)
    except (ChecksumError, FormatError, MissingFileError):
        return False  # which it is, is said when it is opened
    return not native.Generation(fence.run).wrote(record) and bool(fence.created) and record.created <= fence.created

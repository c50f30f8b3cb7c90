"""Going on after a restart: the newest version that every rank can load, from memory where it is there, else from storage.

Rank 0 decides from what all ranks found, so every rank tries the same versions in the same order, and meets the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
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
)
from ucformat.formats import native, snapshot
from ucformat.formats.snapshot import Version, rank_name
from ucformat.formats.source import Source
from ucformat.group import Group
from ucformat.reshard.load import LoadOptions, load_catalog
from ucformat.snapshot.slots.restart_fence import Fence, abandon
from ucformat.storage.open import open_store

_LOG = logging.getLogger(__name__)
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


@dataclass(frozen=True, slots=True)
class _InMemory:
    """What one rank finds in its directory."""

    hashed: dict[int, bool]
    """Step of each version that all ranks hold there → whether all of its slots have checksums."""
    trouble: str
    """What else is there and can't be used; empty when there is nothing, or nothing that was ever whole."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A version that may be restored."""

    step: int
    source: Literal["memory", "storage"]
    where: str
    verified: bool


def restore(state: MutableMapping[str, Any], directory: str, persist_url: str | None, run: str, group: Group) -> Restored | None:
    """Restore `state` in place from the newest version; None when nothing is there. Every rank of `group` calls it.

    Memory goes first where it holds a step as new as storage does. Once a version turned out to be damaged, those with checksums
    go before those without. What is newer in memory than the restored step is abandoned from then on: `run` names the start of
    the job that does so.

    Raises what loading raises when a version is good and does not fit the state, or when all are damaged; NotACheckpointError
    when only versions are there that can't be used from here. The class is the same on every rank.
    """
    restored = _restore(state, directory, persist_url, group)
    if restored is not None:
        with group.together(f"forgetting what came after step {restored.step}"):
            abandon(directory, group.rank, group.size, Fence(run, restored.step))
    return restored


def _restore(state: MutableMapping[str, Any], directory: str, persist_url: str | None, group: Group) -> Restored | None:
    mine, stored = _InMemory({}, ""), None
    with group.together("looking for versions to restore"):
        mine = _in_memory(directory)
        stored = _newest_in_storage(persist_url) if group.rank == 0 else None
    found, stored = group.all_gather(mine), group.broadcast(stored)
    common = set.intersection(*(set(each.hashed) for each in found))
    hashed = {step: all(each.hashed[step] for each in found) for step in common}
    troubles = [f"memory of rank {rank}: {each.trouble}" for rank, each in enumerate(found) if each.trouble]
    passed, first = [] if hashed else troubles[:1], None
    for choice in _choices(hashed, stored, directory, persist_url or "", passed):
        try:
            _load(choice, state, group)
        except _DAMAGE as error:
            first = first or error
            passed.append(f"step {choice.step} in {choice.source} can't be used ({error})")
            continue
        return _restored(choice, hashed, stored, passed, group)
    if first is not None:
        raise first
    if passed:
        raise NotACheckpointError(directory, f"{passed[0]}; to start anew, remove this directory")
    return None


def _choices(hashed: dict[int, bool], stored: int | None, directory: str, url: str, passed: list[str]) -> Iterator[_Candidate]:
    """What to try, in order. `passed` grows while it is tried: from the first damage on, memory without checksums goes last."""
    newest = -1 if stored is None else stored
    waiting = [
        *(_Candidate(step, "memory", directory, hashed[step]) for step in sorted(hashed, reverse=True) if step >= newest),
        *([] if stored is None else [_Candidate(stored, "storage", f"{url.rstrip('/')}/{native.step_name(stored)}", True)]),
        *(_Candidate(step, "memory", directory, hashed[step]) for step in sorted(hashed, reverse=True) if step < newest),
    ]
    before = len(passed)
    while waiting:
        damaged = len(passed) > before
        choice = next((item for item in waiting if item.verified), waiting[0]) if damaged else waiting[0]
        waiting.remove(choice)
        yield choice


def _load(choice: _Candidate, state: MutableMapping[str, Any], group: Group) -> None:
    catalog: Catalog | None = None
    with group.together(f"opening step {choice.step} in {choice.source}"):
        if choice.source == "memory":
            catalog = snapshot.open_catalog(Source(open_store(choice.where)), choice.step)
        else:
            catalog = formats.open_catalog(choice.where)
    assert catalog is not None
    load_catalog(catalog, state, LoadOptions(), group)


def _restored(choice: _Candidate, hashed: dict[int, bool], stored: int | None, passed: list[str], group: Group) -> Restored:
    memory = f"step {max(hashed)}" if hashed else "none"
    why = f"memory has {memory}, storage has {'none' if stored is None else f'step {stored}'}"
    if not choice.verified:
        why += "; unverified: not all of its slots had checksums yet"
    why = "; ".join([*reversed(passed), why])
    if passed and group.rank == 0:
        _LOG.warning("restored step %d from %s: %s", choice.step, choice.source, why)
    return Restored(choice.step, choice.source, choice.where, why, choice.verified, tuple(passed))


def _in_memory(directory: str) -> _InMemory:
    """Raises StorageError when the directory can't be looked at."""
    store = open_store(directory)
    versions, ignored = snapshot.survey(store)
    whole = [version for version in versions if version.complete]
    hashed: dict[int, bool] = {}
    for version in whole:  # the newest first, as opening goes through them
        hashed.setdefault(version.step, all(item.record.table_digest is not None for item in version.held))
    trouble = "; ".join(ignored) or next(iter(_elsewhere(versions, store.list())), "")
    return _InMemory(hashed, "" if whole else trouble)


def _elsewhere(versions: list[Version], names: Collection[str]) -> Iterator[str]:
    """Versions whose other ranks are not seen here at all. One that a rank beside is without was never whole."""
    for version in versions:
        absent = [rank for rank in version.missing() if f"{rank_name(rank)}/" not in names]
        if absent:
            ranks = ", ".join(map(str, absent))
            yield f"step {version.step} of {version.world} ranks lies in part elsewhere (ranks {ranks} have no directory here)"


def _newest_in_storage(url: str | None) -> int | None:
    """Raises StorageError when the storage can't be looked at."""
    return None if url is None else native.newest_step(open_store(url))

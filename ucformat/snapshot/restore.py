"""Going on after a restart: the newest version that every rank can load, from memory where it is there, else from storage."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from ucformat import formats
from ucformat.errors import UcformatError
from ucformat.formats import native, snapshot
from ucformat.formats.source import Source
from ucformat.group import Group
from ucformat.reshard.load import LoadOptions, load_catalog
from ucformat.snapshot.slots.restart_fence import Fence, abandon
from ucformat.storage.open import open_store


@dataclass(frozen=True, slots=True)
class Restored:
    """What a state was restored from."""

    step: int
    source: Literal["memory", "storage"]
    where: str
    why: str
    """Why this source and this step, in words."""


def restore(state: MutableMapping[str, Any], directory: str, persist_url: str | None, run: str, group: Group) -> Restored | None:
    """Restore `state` in place from the newest version; None when there is none anywhere. Every rank of `group` calls it.

    Memory goes first where it holds a step as new as storage does. When reading it fails on any rank, storage serves.
    What is newer in memory than the restored step is abandoned from then on: `run` names the start of the job that does so.
    """
    restored = _restore(state, directory, persist_url, group)
    if restored is not None:
        with group.together(f"forgetting what came after step {restored.step}"):
            abandon(directory, group.rank, group.size, Fence(run, restored.step))
    return restored


def _restore(state: MutableMapping[str, Any], directory: str, persist_url: str | None, group: Group) -> Restored | None:
    in_memory = group.all_gather(_steps_in_memory(directory))
    common = set.intersection(*map(set, in_memory))
    stored = group.broadcast(_steps_in_storage(persist_url) if group.rank == 0 else [])
    newest = max(stored, default=-1)
    reason = f"memory has {_told(common)}, storage has {_told(stored)}"
    for step in sorted((step for step in common if step >= newest), reverse=True):
        try:
            catalog = None
            with group.together(f"opening the snapshot of step {step}"):
                catalog = snapshot.open_catalog(Source(open_store(directory)), step)
            assert catalog is not None
            load_catalog(catalog, state, LoadOptions(), group)
        except UcformatError as error:
            reason = f"the snapshot of step {step} in memory can't be used ({error}); {reason}"
            continue
        return Restored(step, "memory", directory, reason)
    if newest < 0 or persist_url is None:
        return None
    where = f"{persist_url.rstrip('/')}/{native.step_name(newest)}"
    with group.together(f"opening {where}"):
        catalog = formats.open_catalog(where)
    load_catalog(catalog, state, LoadOptions(), group)
    return Restored(newest, "storage", where, reason)


def _steps_in_memory(directory: str) -> list[int]:
    try:
        return list(snapshot.complete_steps(open_store(directory)))
    except UcformatError:
        return []


def _steps_in_storage(url: str | None) -> list[int]:
    step = None if url is None else native.newest_step(open_store(url))
    return [] if step is None else [step]


def _told(steps: set[int] | list[int]) -> str:
    return f"step {max(steps)}" if steps else "none"

"""Which persisted versions go, and how: never a committed one by halves, never the newest."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ucformat.formats import native
from ucformat.formats.native.manifest import MANIFEST
from ucformat.snapshot.keeper.contributions import PARTS, SHARDS
from ucformat.storage.store import Store

_STEP = re.compile(r"step-(\d{8,})/")
_SHARD = re.compile(r"\d{5,}-.*")  # named by `parts.shard_path`: nobody else puts a token there
_MARK = f"{PARTS}/.removed"  # says that what is left of a directory may go


def doomed(steps: Collection[int], newest: int, keep: int | None, keep_every: int | None) -> list[int]:
    """Committed steps to remove now that `newest` is committed, ascending.

    `keep` counts back from `newest`. Steps beyond it belong to a run that was rolled back: that is for the user to judge.
    """
    if keep is None:
        return []
    past = sorted(step for step in steps if step < newest)
    gone = past[: max(0, len(past) - (keep - 1))]
    return [step for step in gone if keep_every is None or step % keep_every]


def prune(run: Store, newest: int, keep: int | None, keep_every: int | None) -> list[int]:
    """Remove the versions that are no longer kept; their steps. Raises StorageError."""
    steps = doomed(native.committed_steps(run), newest, keep, keep_every) if keep is not None else []
    for step in steps:
        store = run.sub(native.step_name(step))
        store.put(_MARK, b"")  # if the rest is interrupted, `clear_abandoned` goes on with it
        store.remove(MANIFEST)
        store.remove()
    return steps


def clear_abandoned(run: Store, before: int, but: Collection[int] = ()) -> set[int]:
    """Remove what keepers left of versions with steps below `before` that were never committed. Raises StorageError.

    Returns the steps that were looked at, which need no second look. Directories that are not a keeper's stay: they may be a
    save that is being written.
    """
    found = {int(match[1]) for name in run.list() if (match := _STEP.fullmatch(name))}
    past = {step for step in found if step < before and step not in but}
    for step in sorted(past):
        store = run.sub(native.step_name(step))
        if not native.is_committed(store) and _is_keepers(store):
            store.remove()
    return past


def _is_keepers(store: Store) -> bool:
    return bool(store.list(PARTS)) or any(_SHARD.fullmatch(name) for name in store.list(SHARDS))


def tidy(store: Store, shards: Sequence[str]) -> None:
    """Leave nothing in a committed version but what its record lists: no parts, no shards of interrupted attempts."""
    for name in store.list(SHARDS):
        path = f"{SHARDS}/{name.rstrip('/')}"
        if path not in shards:
            store.remove(path)
    store.remove(PARTS)

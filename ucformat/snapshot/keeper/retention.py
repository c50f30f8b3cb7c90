"""What keepers clear away in a run directory. Which committed versions go is the rule of `native.retention`."""

from __future__ import annotations

from collections.abc import Collection

from ucformat.formats import native, ownership
from ucformat.storage.store import Store


def clear_abandoned(run: Store, before: int, own: str, but: Collection[int] = ()) -> set[int]:
    """Remove what keepers and killed saves left of versions with steps below `before` that were never committed.

    `own` is the token of this start of the job, whose ranks wait for none of these any more. Returns the steps of which
    nothing is left to be removed, so that they need no second look. Raises StorageError.
    """
    done: set[int] = set()
    for step in native.step_numbers(run.list()):
        name = native.step_name(step)
        if step >= before or step in but or run.is_link(name):
            continue
        store = run.sub(name)
        if not native.is_committed(store):
            native.clear(store, own=own)
            if ownership.markers(store):
                continue  # another start's, which may be alive
        done.add(step)
    return done

"""The rule by which old steps of a run go, for `save(keep=)`, `Persist(keep=)` and `prune` alike.

What was just saved stays, and `keep` counts back from it: it and the highest `keep - 1` steps below it stay, lower ones go.
Higher steps were passed over, as the job went back (see `native.run`): they stay, don't count, and go once the job has passed
them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ucformat.errors import ChecksumError, FormatError, MissingFileError
from ucformat.formats import ownership
from ucformat.formats.native.attempt import clear, files_of, read_record
from ucformat.formats.native.manifest import MANIFEST
from ucformat.formats.native.run import committed_steps, is_committed, note_saved, passed_over, step_name, step_numbers
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)


def expired(
    steps: Collection[int], saved: int, keep: int, keep_every: int | None = None, passed: Collection[int] = ()
) -> list[int]:
    """Steps to remove now that `saved` is committed, ascending. `passed` are those that the job went back from."""
    past = sorted(step for step in steps if step < saved)
    counted = [step for step in past if step not in passed]
    if keep > 1 and len(counted) < keep - 1:
        return []
    floor = saved if keep == 1 else counted[1 - keep]
    return [step for step in past if step < floor and (keep_every is None or step % keep_every)]


def prune_steps(run: Store, saved: int, keep: int, keep_every: int | None = None) -> list[int]:
    """Remove the steps that are no longer kept; those. Raises StorageError."""
    gone = expired(committed_steps(run), saved, keep, keep_every, passed_over(run, run.list()))
    removed = [step for step in gone if remove_step(run, step)]
    if removed:
        note_saved(run, saved)
    return removed


def remove_step(run: Store, step: int) -> bool:
    """Remove a committed step: its commit record first, then what that names; whether it is gone. Raises StorageError.

    Of a step that is a symbolic link, the link is removed. Files that the record does not name stay.
    """
    name = step_name(step)
    if run.is_link(name):
        run.remove(name)
        return True
    store = run.sub(name)
    try:
        files = files_of(read_record(store))
    except MissingFileError:
        return False
    except (ChecksumError, FormatError) as error:
        _LOG.warning("%s: not removed, as its record is damaged and names no files: remove it yourself: %s", store.url, error)
        return False
    claim = ownership.begin(store, "remove", replaces=files)  # if the rest is interrupted, others can go on with it
    try:
        store.remove_files([MANIFEST])
        store.remove_files(files)
        claim.done()
    finally:
        claim.hold.release()
    clear(store)
    store.remove_folder()
    return True


def clear_steps(run: Store, but: Collection[int] = ()) -> set[int]:
    """Remove what killed saves left in steps that were never committed; which steps were looked at. Raises StorageError."""
    looked = {step for step in step_numbers(run.list()) if step not in but}
    for step in sorted(looked):
        store = run.sub(step_name(step))
        if not run.is_link(step_name(step)) and not is_committed(store):
            clear(store)
    return looked

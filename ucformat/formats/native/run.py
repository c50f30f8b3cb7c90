"""Run directories: which of their steps are committed, and which one is meant where none is named.

That is the highest step, unless the job went back: when a step is saved and higher ones are there, these are noted in
`rollback.json` and passed over from then on. They stay where they are, and can be opened by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from ucformat.containers.envelope import seal, unseal
from ucformat.errors import FormatError, MissingFileError
from ucformat.formats.native.manifest import MANIFEST
from ucformat.storage.store import Store

_LOG = logging.getLogger(__name__)
ROLLBACK = "rollback.json"
_STEP = re.compile(r"step-(\d{8,})/")


class Rollback(msgspec.Struct, frozen=True):
    """The content of `rollback.json`, in the envelope of `ucf.json`."""

    passed_over: tuple[int, ...]
    """Steps that were committed already when a lower one was saved, ascending."""


def step_name(step: int) -> str:
    """Directory of a step inside a run directory."""
    return f"step-{step:08d}"


def step_numbers(names: Iterable[str]) -> list[int]:
    """The steps that entries of a run directory are named for, committed or not, ascending."""
    found = (int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
    return sorted(step for step in found if f"{step_name(step)}/" in names)


def committed_steps(run: Store) -> list[int]:
    """Steps of a run directory that are committed, ascending. Raises StorageError."""
    return [step for step in step_numbers(run.list()) if is_committed_step(run, step)]


def is_committed_step(run: Store, step: int) -> bool:
    return is_committed(run, step_name(step))


def is_committed(store: Store, folder: str = "") -> bool:
    """Whether a checkpoint is committed: its commit record is there, and whole. Raises StorageError.

    A back end that writes files in place shows a record that is empty or cut short before all of it is written, and leaves it so
    when it is interrupted. One that is damaged otherwise counts: what is wrong with it is said when it is opened.
    """
    path = f"{folder}/{MANIFEST}" if folder else MANIFEST
    try:
        size = store.size(path)
        if size > 0 and store.appears_whole and store.streams:  # an object: it is never seen in part, whoever writes it
            return True
        if size > 0 and (store.read(path, size - 1, size) == b"\n" or not is_cut_short(store.read(path))):
            return True
    except MissingFileError:
        return False
    except FormatError:
        return True
    _warn(f"{store.url}/{path}")
    return False


@lru_cache(maxsize=1024)  # once for each
def _warn(path: str) -> None:
    _LOG.warning("%s is empty or cut short, as an interrupted write leaves it: this step counts as not committed", path)


def is_cut_short(record: bytes) -> bool:
    """Whether the bytes of a commit record end before it does."""
    try:
        msgspec.json.decode(record, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        why = str(error)  # a number may have been cut at its point
        return "truncated" in why or why.endswith(f"invalid number (byte {len(record)})")
    return False


def newest_step(run: Store) -> int | None:
    """The committed step that a run directory means; None when there is none.

    Steps that were passed over count only where there is no other. A step that can't be looked at is an error, never absent:
    raises StorageError, and FormatError for a damaged `rollback.json`.
    """
    return next(newest_first(run), None)


def newest_first(run: Store) -> Iterator[int]:
    """Committed steps, in the order in which they are meant: see `newest_step`, which raises the same."""
    names = run.list()
    steps, last = step_numbers(names), set(passed_over(run, names))
    for group in ([step for step in steps if step not in last], [step for step in steps if step in last]):
        yield from (step for step in reversed(group) if is_committed_step(run, step))


def passed_over(run: Store, names: Iterable[str]) -> tuple[int, ...]:
    """Steps that the job has gone back from; `names` are the entries of the run directory."""
    if ROLLBACK not in names:
        return ()
    where = f"{run.url}/{ROLLBACK}"
    try:
        return msgspec.json.decode(unseal(run.read(ROLLBACK), where), type=Rollback).passed_over
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(where, f"malformed: {error}") from error


def note_saved(run: Store, step: int) -> tuple[int, ...]:
    """After `step` was committed: note the higher steps as passed over; those that were not yet.

    Raises StorageError, FormatError.
    """
    names = run.list()
    before = passed_over(run, names)
    steps = step_numbers(names)
    beyond = [other for other in steps if other > step and (other in before or is_committed_step(run, other))]
    now = tuple(sorted({*beyond, *before}.intersection(steps).difference({step})))
    if now != before and now:
        run.put(ROLLBACK, seal(msgspec.json.encode(Rollback(now))))
    elif now != before:
        run.remove(ROLLBACK)
    return tuple(other for other in beyond if other not in before)

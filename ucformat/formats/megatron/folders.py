"""Where a Megatron checkpoint lies: the iteration's folder in a run, and its kind. Only listings and two small files are read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from ucformat.errors import MissingFileError, NotACheckpointError
from ucformat.storage.store import Store

Kind = Literal["legacy", "distributed"]

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"  # of a distributed checkpoint: what all ranks have alike
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/")
ITERATION = re.compile(r"(?:iter_\d{7,}|release)/")
_METADATA_BYTES = 64 << 10  # its metadata.json has about 100; a larger one belongs to something else
_TRACKER_BYTES = 64
_RANK_FILES = frozenset({MODEL_FILE, "model_rng.pt", OPTIMIZER_FILE})


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one iteration."""

    store: Store
    kind: Kind
    backend: str = ""
    """Of a distributed checkpoint: how its sharded tensors are stored."""


def rank_of(name: str) -> tuple[int, ...] | None:
    """The one to three numbers in the name of a rank's folder, or None for other names."""
    match = _RANK.fullmatch(name)
    return tuple(int(number) for number in match.groups() if number is not None) if match else None


def find(store: Store) -> Place | None:
    """The iteration at or in `store`; None when it is no Megatron checkpoint.

    Raises MissingFileError when the tracker file names an iteration that is not there, NotACheckpointError when nothing says
    which of several is meant.
    """
    place = _at(store)
    if place is not None:
        return place
    names = store.list()
    iterations = [name.rstrip("/") for name in names if ITERATION.fullmatch(name)]
    named = _tracked(store) if TRACKER in names else None
    if named is not None:
        if named in iterations:
            place = _at(store.sub(named))
        if place is not None:
            return place
        known = [name for name in iterations if _at(store.sub(name)) is not None]
        if not known:
            return None
        there = f"there is {', '.join(known[:8])}: give that folder"
        raise MissingFileError(f"{store.url}/{named}", f"{TRACKER} names {named!r}, which holds no checkpoint; {there}")
    found = [(name, place) for name in iterations if (place := _at(store.sub(name))) is not None]
    if len(found) > 1:
        several = ", ".join(name for name, _ in found[:8])
        why = f"a Megatron run without {TRACKER}, which says which of {several} to take: give one of these folders"
        raise NotACheckpointError(store.url, why)
    return found[0][1] if found else None


def _at(store: Store) -> Place | None:
    names = store.list()
    if "metadata.json" in names and (backend := _backend(store)) is not None:
        return Place(store, "distributed", backend)
    ranks = [name for name in names if rank_of(name) is not None]
    if any(_RANK_FILES.intersection(store.list(name.rstrip("/"))) for name in ranks[:1]):
        return Place(store, "legacy")
    return None


def _backend(store: Store) -> str | None:
    """The `sharded_backend` that metadata.json names, or None when it is some other metadata.json."""
    if store.size("metadata.json") > _METADATA_BYTES:
        return None
    try:
        found = json.loads(store.read("metadata.json"))
    except (ValueError, RecursionError):
        return None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _tracked(store: Store) -> str | None:
    """The folder that the tracker file names, or None when the file is something else."""
    if store.size(TRACKER) > _TRACKER_BYTES:
        return None
    text = store.read(TRACKER).decode(errors="replace").strip()
    if text == "release":
        return text
    return f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,18}", text) else None

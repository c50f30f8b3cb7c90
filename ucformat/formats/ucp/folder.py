"""Which files make up a universal (UCP) folder of DeepSpeed: model files, and a directory of state for each parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ucformat.errors import FormatError, MissingFileError, NotACheckpointError, UcformatError
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NAME = "ucp"
POINTER = "latest_universal"
STATE = "zero"
"""The directory of a directory for each parameter."""
GLOBAL = f"{STATE}/optimizer_state.pt"
_TAG_BYTES = 4096  # a longer pointer is no name of a folder
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")


@dataclass(frozen=True, slots=True)
class UniversalFiles:
    """The files of one universal folder. Paths are relative to `store`."""

    store: Store
    model: Mapping[int, Mapping[int, str]]
    """Model-parallel rank → data-parallel rank → model file: one per rank from ZeRO-3, else the single file under 0."""
    states: Mapping[str, Mapping[str, str]]
    """Parameter → state (`fp32`, `exp_avg`, `step`…) → file."""
    sliced: bool
    """Whether the model files are those of ZeRO-3."""


def detect(source: Source) -> bool:
    """Whether a directory is a universal folder, or one whose `latest_universal` names one and which has no `latest`."""
    try:
        return source.file is None and _find(source.store) is not None
    except UcformatError:
        return False


def _is_universal(store: Store) -> bool:
    names = store.list()
    return f"{STATE}/" in names and any(_MODEL.fullmatch(name) for name in names)


def _find(store: Store) -> Store | None:
    names = store.list()
    if f"{STATE}/" in names:
        return store if any(_MODEL.fullmatch(name) for name in names) else None
    if POINTER not in names or "latest" in names or store.size(POINTER) > _TAG_BYTES:
        return None
    tag = store.read(POINTER).decode("utf-8", "replace").strip()
    if not tag or tag in (".", "..") or any(c in tag for c in "/\\\0\n") or f"{tag}/" not in names:
        return None
    found = store.sub(tag)
    return found if _is_universal(found) else None


def discover(source: Source) -> UniversalFiles:
    """The files of the universal folder at `source`. Raises NotACheckpointError, MissingFileError, FormatError."""
    store = _find(source.store)
    if store is None:
        raise NotACheckpointError(source.url, "no universal folder of DeepSpeed")
    whole: dict[int, dict[int, str]] = {}
    sliced: dict[int, dict[int, str]] = {}
    for name in store.list():
        if match := _MODEL.fullmatch(name):
            rows = whole if match["dp"] is None else sliced
            row = rows.setdefault(int(match["mp"]), {})
            if int(match["dp"] or 0) in row:
                raise FormatError(f"{store.url}/{name}", f"a second model file of the rank of {row[int(match['dp'] or 0)]}")
            row[int(match["dp"] or 0)] = name
    model = whole or sliced  # a folder for all stages has both, and those of ZeRO-3 say less
    states: dict[str, dict[str, str]] = {}
    for entry in store.list(STATE):
        if not entry.endswith("/"):
            continue
        files = [name for name in store.list(f"{STATE}/{entry[:-1]}") if name.endswith(".pt")]
        states[entry[:-1]] = {name[:-3]: f"{STATE}/{entry}{name}" for name in sorted(files)}
    if not store.exists(GLOBAL):
        raise MissingFileError(f"{store.url}/{GLOBAL}", "the optimizer's settings are missing")
    ordered = {mp: dict(sorted(row.items())) for mp, row in sorted(model.items())}
    return UniversalFiles(store, ordered, states, sliced=not whole)

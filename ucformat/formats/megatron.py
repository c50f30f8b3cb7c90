"""Megatron-LM / Megatron-core checkpoints: recognised, and refused until their reader comes.

Two layouts: `mp_rank_*/model_optim_rng.pt` (one file per model-parallel rank), and distributed checkpoints
(`common.pt` and a `metadata.json` that names the backend of the sharded tensors).
"""

from __future__ import annotations

import json
import re

from ucformat.catalog import Catalog
from ucformat.errors import UcformatError, UnsupportedError
from ucformat.formats.contract import Reader
from ucformat.formats.source import Source
from ucformat.storage.store import Store

NAME = "megatron"

_MODEL_PARALLEL = re.compile(r"mp_rank_\d{2,}(?:_\d{3,})*/")
_ITERATION = re.compile(r"(?:iter_\d{7,}|release)/")
_METADATA_BYTES = 64 << 10  # its metadata.json has about 100; a larger one belongs to something else


def detect(source: Source) -> bool:
    """Whether a directory is one of Megatron's iterations, or a run folder with iterations. Never raises."""
    if source.file is not None:
        return False
    try:
        return _kind(source.store) is not None
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """Raises UnsupportedError that says which kind of Megatron checkpoint it is."""
    kind = _kind(source.store) or "checkpoint"
    raise UnsupportedError(source.url, f"a Megatron {kind}: support comes in a later release")


def _kind(store: Store, *, inside_run: bool = False) -> str | None:
    names = store.list()
    if "metadata.json" in names and "common.pt" in names:
        backend = _backend(store)
        if backend is not None:
            return f"distributed checkpoint ({backend})"
    ranks = [name for name in names if _MODEL_PARALLEL.fullmatch(name)]
    if ranks and {"model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt"} & set(store.list(ranks[0].rstrip("/"))):
        return f"checkpoint of {len(ranks)} model-parallel ranks (legacy mp_rank folders)"
    if inside_run:
        return None
    iterations = [name for name in names if _ITERATION.fullmatch(name)]
    return _kind(store.sub(iterations[-1].rstrip("/")), inside_run=True) if iterations else None


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


READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog)

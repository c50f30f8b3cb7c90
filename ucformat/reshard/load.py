"""Loading a checkpoint of any format and layout into a live state of any layout.

Each rank plans alone from the metadata and reads just what it holds; collectives carry names and errors only. All that can
be known before reading is checked before reading: names, shapes, dtypes, coverage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import DTypeMismatchError, NamesMismatchError, ShapeMismatchError
from ucformat.group import Group
from ucformat.process import collected_later
from ucformat.reshard.reading.execute import Reading
from ucformat.reshard.reading.plan import plan, wants
from ucformat.reshard.restoring import master_weights
from ucformat.reshard.restoring.prepare import Loading, prepare, restore
from ucformat.reshard.state.walk import Piece

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load; equal on every rank."""

    strict: bool = True
    """Names that are wanted and not stored, or stored and wanted by no rank, are an error.

    A framework's own records and master weights that a live state has no place for don't count: see `formats.bookkeeping`.
    """
    cast: bool = False
    """Stored dtypes may differ from the live ones."""
    verify: bool = True
    """Compare checksums while reading."""
    on_bytes: Callable[[int], None] | None = None


def load_state(where: str, into: MutableMapping[str, object], options: LoadOptions, group: Group) -> int | None:
    """Restore `into` from the checkpoint at `where`; its step. Every rank of `group` calls it."""
    catalog: Catalog | None = None
    with group.together(f"opening {where}"):
        catalog = formats.open_catalog(where)
    assert catalog is not None
    return load_catalog(catalog, into, options, group)


def load_catalog(catalog: Catalog, into: MutableMapping[str, object], options: LoadOptions, group: Group) -> int | None:
    """Restore `into` from an open checkpoint; its step. Every rank of `group` calls it, with catalogs of one checkpoint."""
    where = catalog.store.url
    with collected_later():
        loading, reading, here = _plan(catalog, into, options, group)
    reading.run_once(here, group)
    if group.rank == 0:
        for remark in loading.remarks:
            _LOG.warning("%s: %s", where, remark)
    with group.together(f"restoring from {where}"):
        fresh = reading.dest[len(reading.dest) - len(loading.fresh) :]
        restore(loading, dict(zip(loading.fresh, fresh, strict=True)))
    return catalog.notes.step


def _plan(
    catalog: Catalog, into: MutableMapping[str, object], options: LoadOptions, group: Group
) -> tuple[Loading, Reading, list[bool]]:
    """What to read into live memory, and then into new tensors for `Loading.fresh`; and what of it is in memory."""
    loading = prepare(into, catalog, group)
    catalog = loading.catalog  # optimizer states that were stored by number have names there
    pieces = master_weights.from_masters(_known(loading.pieces, catalog), catalog)
    _check_names(loading, catalog, options, group)
    reading: Reading | None = None
    here: list[bool] = []
    with group.together(f"planning {catalog.store.url}"):
        _check_kinds(pieces, catalog, cast=options.cast)
        wanted: list[tuple[str, Box | None]] = [(piece.spec.name, piece.box) for piece in pieces]
        dest = [piece.view for piece in pieces]
        for name in loading.fresh:
            spec = catalog.spec(name)
            wanted.append((name, None))
            dest.append(spec.kind.empty(spec.shape))
        planned = plan(catalog, wants(catalog, wanted))
        reading = Reading(planned, dest, cast=options.cast, verify=options.verify, on_bytes=options.on_bytes)
        here = reading.look()
        if group.rank == 0:
            master_weights.tell(pieces, loading.names, catalog)
    assert reading is not None
    return loading, reading, here


def _known(pieces: Sequence[Piece], catalog: Catalog) -> list[Piece]:
    stored = set(catalog.names)
    return [piece for piece in pieces if piece.spec.name in stored]


def _check_names(loading: Loading, catalog: Catalog, options: LoadOptions, group: Group) -> None:
    """All ranks together: what any of them misses, and what none of them wants."""
    names = catalog.names
    tied = set(catalog.aliases) | set(catalog.aliases.values())
    stored = set(names)
    wanted = loading.names
    owners = {catalog.aliases.get(name, name) for name in wanted if name in stored}
    same = [name in wanted or (name in tied and catalog.aliases.get(name, name) in owners) for name in names]
    used = np.array(same, dtype=bool)
    lost = sorted({piece.spec.name for piece in loading.pieces} - stored) + list(loading.missing)
    told = group.all_gather((np.packbits(used).tobytes(), frozenset(loading.unused), lost))
    everyone = np.zeros(len(used), dtype=bool)
    for bits, _, _ in told:
        everyone |= np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(used)).astype(bool)
    unused = frozenset.intersection(*(values for _, values, _ in told))
    missing = sorted({name for _, _, names_lost in told for name in names_lost})
    own = formats.bookkeeping(catalog.notes.origin)
    spare = set(master_weights.placeless([name for name, hit in zip(names, everyone, strict=True) if hit], catalog))
    unexpected = [name for name, hit in zip(names, everyone, strict=True) if not hit and name not in spare] + sorted(unused)
    unexpected = [name for name in unexpected if name.split("/")[0] not in own]
    if options.strict and (missing or unexpected):
        raise NamesMismatchError(catalog.store.url, missing, unexpected, _hint(catalog, missing, unexpected))


def _hint(catalog: Catalog, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do where a model's files have other names than its memory."""
    of_model = all(any(name.startswith("model/") for name in names) for names in (missing, unexpected))
    if not of_model or not catalog.notes.origin.startswith("hf"):
        return ""
    return (
        "files of transformers models may have other names than the model in memory: "
        'load into {"model": ucformat.hf_state(model, path)}'
    )


def _check_kinds(pieces: Sequence[Piece], catalog: Catalog, *, cast: bool) -> None:
    for piece in pieces:
        stored = catalog.spec(piece.spec.name)
        if stored.shape != piece.spec.shape:
            raise ShapeMismatchError(piece.spec.name, stored.shape, piece.spec.shape)
        if stored.dtype != piece.spec.dtype and not cast:
            raise DTypeMismatchError(piece.spec.name, stored.dtype, piece.spec.dtype)

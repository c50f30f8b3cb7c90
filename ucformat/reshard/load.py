"""Loading a checkpoint of any format and layout into a live state of any layout.

Rank 0 decides which checkpoint a path means. Then each rank plans alone from the metadata and reads just what it holds;
collectives carry names and errors only. All that can be known before reading is checked before reading: names, shapes,
dtypes, coverage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import DTypeMismatchError, ShapeMismatchError, StorageError
from ucformat.families import translate
from ucformat.formats import sidecar_files
from ucformat.formats.source import Source, locate
from ucformat.group import Group, word
from ucformat.naming import Rename, rename_catalog
from ucformat.process import collected_later
from ucformat.reshard.reading.execute import Reading
from ucformat.reshard.reading.plan import plan, refuse_expanded, wants
from ucformat.reshard.restoring import master_weights
from ucformat.reshard.restoring.accounting import NameAccount, NameRules, account, identity
from ucformat.reshard.restoring.prepare import Loading, prepare, restore
from ucformat.reshard.restoring.wrappers import as_live
from ucformat.reshard.state.walk import Piece

_LOG = logging.getLogger("ucformat")
_SHOWN = 8  # names in a log line


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load; equal on every rank."""

    names: NameRules = field(default_factory=NameRules)
    """What may be missing or unexpected.

    A framework's own records and master weights that a live state has no place for don't count: see `formats.bookkeeping`.
    """
    rename: Rename | None = None
    """From stored names to those of the state."""
    cast: bool = False
    """Stored dtypes may differ from the live ones."""
    verify: bool = True
    """Compare checksums while reading."""
    on_bytes: Callable[[int], None] | None = None
    family: str | None = None
    """The model family by whose rules the model is translated first: see `families.translate`."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, on all ranks together. Names are those of the checkpoint (`model/<parameter>`, …), sorted."""

    source: str
    """The checkpoint: a path or URL."""
    format: str
    """Its format: `native`, `hf`, `dcp`, `torchsave`, `deepspeed`, `snapshot`…"""
    step: int | None
    """The step that it was saved at, where it is known."""
    loaded: tuple[str, ...]
    """Tensors that were restored."""
    missing: tuple[str, ...] = ()
    """What the state asked for and is not stored: it was left as it was."""
    unexpected: tuple[str, ...] = ()
    """What is stored and the state has no place for: it was not loaded."""
    ignored: tuple[str, ...] = ()
    """Records of the framework that wrote the checkpoint, for which nobody needs a place."""
    converted: tuple[str, ...] = ()
    """Tensors whose dtype was converted, or that were read from their master weight: `name: BF16 → F32`."""
    remarks: tuple[str, ...] = ()
    """What was assumed, and what else a user should know."""

    def log(self) -> None:
        """Tell the logger `ucformat`: a summary at INFO, what was not loaded or assumed at WARNING."""
        at = "" if self.step is None else f" of step {self.step}"
        _LOG.info("loaded %d tensors%s from %s (%s)", len(self.loaded), at, self.source, self.format)
        for what, names in (
            ("not stored, left as they were", self.missing),
            ("stored, but not loaded", self.unexpected),
            ("dtype converted", self.converted),
        ):
            if names:
                _LOG.warning("%s: %s: %s", self.source, what, _shorten(names))
        if self.ignored:
            _LOG.info("%s: not needed, not loaded: %s", self.source, _shorten(self.ignored))
        for remark in self.remarks:
            _LOG.warning("%s: %s", self.source, remark)


def load_state(where: str, step: int | None, into: MutableMapping[str, object], options: LoadOptions, group: Group) -> LoadReport:
    """Restore `into` from the checkpoint that `where` and `step` mean to rank 0. Every rank of `group` calls it."""
    name, catalog = open_alike(where, step, group)
    return load_catalog(catalog, into, options, group, name)


def open_alike(where: str, step: int | None, group: Group) -> tuple[str, Catalog]:
    """The checkpoint that `where` and `step` mean to rank 0, opened on every rank, and its format. Reads metadata only.

    Raises what opening raises; StorageError when the ranks see different ones, since one was replaced meanwhile or `where` is
    not the same storage on every host.
    """
    opened: tuple[str, Catalog] | None = None
    chosen = where
    with group.together(f"opening {where}"):
        if group.rank == 0:
            opened = formats.open_named(where, step)
            if formats.holds_steps(opened[0]):
                step = opened[1].notes.step  # there are others, and newer ones any time
            elif step is not None or locate(where).file is None:
                chosen, step = opened[1].url, None
    chosen, step = group.broadcast((chosen, step))
    with group.together(f"opening {where}"):
        opened = opened or formats.open_named(chosen, step)
    assert opened is not None
    if len(np.unique(group.numbers([word(identity(opened[1]))]))) > 1:
        why = "the ranks see different checkpoints here: it was replaced meanwhile, or is not the same storage on every host"
        raise StorageError(chosen, why)
    return opened


def load_catalog(
    catalog: Catalog, into: MutableMapping[str, object], options: LoadOptions, group: Group, format_name: str = ""
) -> LoadReport:
    """Restore `into` from an open checkpoint. Every rank of `group` calls it, with catalogs of one checkpoint."""
    where = catalog.url
    with group.together(f"renaming what {where} holds"):
        if options.rename is not None:
            catalog = rename_catalog(catalog, options.rename)
        if options.family is not None:
            beside = sidecar_files.gather(Source(catalog.store))
            catalog = translate(catalog, options.family, sidecar_files.configs(beside).values())
    catalog, remark = as_live(catalog, into, group)
    with collected_later():
        loading, reading, here, report = _plan(catalog, into, options, group)
    reading.run_once(here, group)
    with group.together(f"restoring from {where}"):
        fresh = reading.given[len(reading.given) - len(loading.fresh) :]
        restore(loading, dict(zip(loading.fresh, fresh, strict=True)))
    remarks = tuple(filter(None, (*catalog.notes.remarks, remark, *report.remarks)))
    report = replace(report, format=format_name or catalog.notes.origin, remarks=remarks)
    if group.rank == 0:
        report.log()
    return report


def _plan(
    catalog: Catalog, into: MutableMapping[str, object], options: LoadOptions, group: Group
) -> tuple[Loading, Reading, list[bool], LoadReport]:
    """What to read into live memory, and then into new tensors for `Loading.fresh`; what of it is in memory; the report."""
    loading = prepare(into, catalog, group)
    catalog = loading.catalog  # optimizer states that were stored by number have names there
    pieces = master_weights.from_masters(_known(loading.pieces, catalog), catalog)
    names = account(loading, catalog, options.names, group)
    reading: Reading | None = None
    here: list[bool] = []
    remarks: tuple[str, ...] = ()
    with group.together(f"planning {catalog.url}"):
        _check_kinds(pieces, catalog, cast=options.cast)
        wanted: list[tuple[str, Box | None]] = [(piece.spec.name, piece.box) for piece in pieces]
        dest = [piece.view for piece in pieces]
        refuse_expanded(catalog, wants(catalog, [(name, None) for name in loading.fresh]))
        for name in loading.fresh:
            spec = catalog.spec(name)
            wanted.append((name, None))
            dest.append(spec.kind.empty(spec.shape))
        planned = plan(catalog, wants(catalog, wanted))
        reading = Reading(planned, dest, cast=options.cast, verify=options.verify, on_bytes=options.on_bytes)
        here = reading.look()
        remarks = (*loading.remarks, *master_weights.rounded(pieces, loading.names, catalog))
    assert reading is not None
    brought = group.distinct((_converted(_known(loading.pieces, catalog), pieces, catalog), remarks))
    return loading, reading, here, _report(catalog, names, brought)


def _report(catalog: Catalog, names: NameAccount, brought: Sequence[tuple[list[str], tuple[str, ...]]]) -> LoadReport:
    return LoadReport(
        source=catalog.url,
        format="",
        step=catalog.notes.step,
        loaded=names.loaded,
        missing=names.missing,
        unexpected=names.unexpected,
        ignored=names.ignored,
        converted=tuple(sorted({line for converted, _ in brought for line in converted})),
        remarks=tuple(dict.fromkeys(remark for _, remarks in brought for remark in remarks)),
    )


def _known(pieces: Sequence[Piece], catalog: Catalog) -> list[Piece]:
    stored = set(catalog.names)
    return [piece for piece in pieces if piece.spec.name in stored]


def _converted(asked: Sequence[Piece], read: Sequence[Piece], catalog: Catalog) -> list[str]:
    """Tensors whose stored dtype is not that of the state, and those that are read from their master weight."""
    lines = set()
    for piece, taken in zip(asked, read, strict=True):
        stored, name = catalog.spec(taken.spec.name).dtype, piece.spec.name
        if taken.spec.name != name:
            lines.add(f"{name}: from its master weight, {taken.spec.name}")
        elif stored != piece.spec.dtype:
            lines.add(f"{name}: {stored} → {piece.spec.dtype}")
    return sorted(lines)


def _check_kinds(pieces: Sequence[Piece], catalog: Catalog, *, cast: bool) -> None:
    for piece in pieces:
        stored = catalog.spec(piece.spec.name)
        if stored.shape != piece.spec.shape:
            raise ShapeMismatchError(piece.spec.name, stored.shape, piece.spec.shape)
        if stored.dtype != piece.spec.dtype and not cast:
            raise DTypeMismatchError(piece.spec.name, stored.dtype, piece.spec.dtype)


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"

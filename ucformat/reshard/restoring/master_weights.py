"""Master weights of mixed-precision training: what they mean to a live state that keeps none.

DeepSpeed trains a bf16 or fp16 model on fp32 copies, `optimizer/<parameter>/fp32`, of which `model/<parameter>` is the
rounded image. A module in fp32 continues from the master, exactly; a module in less continues from the rounded weight,
and has no place for the master.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ucformat.catalog import Catalog
from ucformat.formats import deepspeed
from ucformat.reshard.state.optimizer import MASTER
from ucformat.reshard.state.walk import Piece

_MODEL, _OPTIMIZER = "model/", "optimizer/"
_LOG = logging.getLogger(__name__)


def from_masters(pieces: Sequence[Piece], catalog: Catalog) -> list[Piece]:
    """The pieces, of which those take the master that want the master's dtype and not that of the stored weight."""
    return [_from_master(piece, catalog) for piece in pieces]


def _from_master(piece: Piece, catalog: Catalog) -> Piece:
    master = master_of(piece.spec.name, catalog)
    if master is None or catalog.spec(piece.spec.name).dtype == piece.spec.dtype:
        return piece
    spec = catalog.spec(master)
    fits = (spec.dtype, spec.shape) == (piece.spec.dtype, piece.spec.shape)
    return replace(piece, spec=replace(piece.spec, name=master)) if fits else piece


def master_of(name: str, catalog: Catalog) -> str | None:
    """The stored master of the weight `name`, in what DeepSpeed trained."""
    if catalog.notes.origin != deepspeed.NAME or not name.startswith(_MODEL):
        return None
    master = f"{_OPTIMIZER}{name.removeprefix(_MODEL)}/{MASTER}"
    try:
        catalog.find(master)
    except KeyError:
        return None
    return master


def placeless(used: Collection[str], catalog: Catalog) -> Iterator[str]:
    """Names of masters whose weight is among the names `used`: they are no leftovers when nobody wants them."""
    for name in used:
        master = master_of(name, catalog)
        if master is not None:
            yield master


def tell(pieces: Sequence[Piece], wanted: Collection[str], catalog: Catalog) -> None:
    """Log once that weights continue from their rounded images, if they do."""
    lost = {
        piece.spec.name
        for piece in pieces
        if (master := master_of(piece.spec.name, catalog)) is not None
        and master not in wanted
        and catalog.spec(master).dtype != piece.spec.dtype
    }
    if lost:
        example = min(lost)
        _LOG.warning(
            "%s: %d weights (%s…) go on from their rounded values: this state has no place for the master weights (%s)",
            catalog.store.url, len(lost), example, master_of(example, catalog),
        )  # fmt: skip

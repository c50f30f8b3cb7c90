"""Loading into tensors whose elements share memory: an expanded buffer is written once, where what is stored allows it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.reshard.reading.lazy import read
from ucformat.reshard.state.leaf import with_plain_strides
from ucformat.reshard.state.walk import Piece


def to_base(piece: Piece, catalog: Catalog) -> Piece:
    """The piece with one element in place of those that are one in memory, along each expanded dimension.

    Reads what is stored, before anything is changed. Raises UnsupportedError when it differs along such a dimension, or when
    elements share memory otherwise.
    """
    view, name = piece.view, piece.spec.name
    dims = [d for d, (step, size) in enumerate(zip(view.stride(), view.shape, strict=True)) if step == 0 and size > 1]
    base = view
    for dim in dims:
        base = base.narrow(dim, 0, 1)
    if _overlaps(base):
        raise UnsupportedError(name, "elements share memory, so that what is stored can't be loaded into them: clone it first")
    if not dims:
        return piece
    length = tuple(base.shape)
    if name in catalog.names and catalog.spec(name).shape == piece.spec.shape:  # else refused for that
        stored = read(catalog, name, piece.box)
        first = stored[tuple(slice(n) for n in length)]
        if not same_bytes(first.expand_as(stored), stored):
            raise UnsupportedError(
                name, f"expanded along dimension {', '.join(map(str, dims))}, where the stored values differ: clone it first"
            )
    return replace(piece, box=Box(piece.box.offset, length), view=with_plain_strides(base))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    flat = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def _overlaps(view: torch.Tensor) -> bool:
    """Whether two elements lie at one place, as in windows that `unfold` gives."""
    reach, suspect = 0, False
    for step, size in sorted((step, size) for step, size in zip(view.stride(), view.shape, strict=True) if size > 1):
        suspect = suspect or step <= reach
        reach += step * (size - 1)
    if not suspect or not view.numel():
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for step, size in zip(view.stride(), view.shape, strict=True):
        places = (places[:, None] + step * torch.arange(size)).reshape(-1)
    return len(places.unique()) < view.numel()

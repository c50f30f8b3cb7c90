"""Reading boxes of tensors out of a catalog."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.reshard.execute import execute
from ucformat.reshard.fill import CatalogFill
from ucformat.reshard.plan import plan, wants

__all__ = ["CatalogFill", "read", "read_many"]


def read(catalog: Catalog, name: str, box: Box | None = None, *, verify: bool = True) -> torch.Tensor:
    """One box of a tensor (all of it by default) as a new CPU tensor of the stored dtype.

    Raises CoverageError before the first read when it is not wholly stored; ChecksumError when bytes are damaged.
    """
    return read_many(catalog, [(name, box)], verify=verify)[0]


def read_many(
    catalog: Catalog, wanted: Sequence[tuple[str, Box | None]], *, verify: bool = True, threads: int | None = None
) -> list[torch.Tensor]:
    """Several boxes at once, in one plan."""
    columns = wants(catalog, wanted)
    planned = plan(catalog, columns)
    out = []
    for index, length in zip(columns.tensor, columns.length, strict=True):
        spec = catalog.tensors[index]
        out.append(spec.kind.empty(length[: len(spec.shape)].tolist()))
    execute(planned, out, verify=verify, threads=threads)
    return out

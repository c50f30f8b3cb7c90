"""The reader of one snapshot directory: `formats.snapshot`, unless there is parity, by which slots that are lost are computed."""

from __future__ import annotations

import re

from ucformat.catalog import Catalog
from ucformat.formats import snapshot
from ucformat.formats.contract import Reader
from ucformat.formats.source import Source

_PARITY = re.compile(r"parity-\d+\.json")


def open_folder(source: Source, step: int | None = None) -> Catalog:
    """The newest version, or that of `step`. Raises what `formats.snapshot.open_catalog` raises."""
    store = source.store
    ranks = [name.rstrip("/") for name in store.list() if snapshot.rank_of(name) is not None]
    if any(_PARITY.fullmatch(name) for rank in ranks for name in store.list(rank)):
        from ucformat.snapshot.recovery.gathered import open_computed  # this module is loaded whatever is opened

        computed = open_computed(store, step)
        if computed is not None:
            return computed
    return snapshot.open_catalog(source, step)


READER = Reader(name=snapshot.NAME, detect=snapshot.detect, open_catalog=open_folder, open_step=open_folder)

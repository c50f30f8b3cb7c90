"""Reader of Megatron-LM and Megatron-core checkpoints, without Megatron: legacy `mp_rank_*` folders, and `torch_dist`.

Parameters have the names and shapes that they have in the whole model on one rank (see `names`). What reads them is imported once
a checkpoint is one of these: every conversion asks whether it is.
"""

from __future__ import annotations

from ucformat.catalog import Catalog
from ucformat.errors import MissingFileError, NotACheckpointError, UcformatError, UnsupportedError
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.megatron.beside import BOOKKEEPING
from ucformat.formats.megatron.folders import find
from ucformat.formats.megatron.writer import owned_files, prepare, takes, write
from ucformat.formats.source import Source

NAME = "megatron"
__all__ = ["NAME", "READER", "WRITER", "detect", "open_catalog"]


def detect(source: Source) -> bool:
    """Whether a directory is one of Megatron's iterations, or a run folder with iterations. Never raises."""
    if source.file is not None:
        return False
    try:
        return find(source.store) is not None
    except (MissingFileError, NotACheckpointError):
        return True  # `open_catalog` says what is missing
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of an iteration, or of the one that a run's tracker file names.

    Raises MissingFileError, FormatError and UnsupportedError naming files and parameters.
    """
    place = find(source.store)
    if place is None:
        raise NotACheckpointError(source.url, "no Megatron checkpoint in it")
    if place.kind == "legacy":
        from ucformat.formats.megatron.legacy import open_legacy

        return open_legacy(place.store)
    if place.backend != "torch_dist":
        raise UnsupportedError(source.url, f"a Megatron distributed checkpoint of kind {place.backend!r}; torch_dist is read")
    from ucformat.formats.megatron.distributed import open_distributed

    return open_distributed(place.store)


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    bookkeeping=BOOKKEEPING,
    has_masters=True,
    owned_files=owned_files,
)
WRITER = Writer(name=NAME, write=write, values="plain", takes=takes, whole_state=True, prepare=prepare, staged=True)

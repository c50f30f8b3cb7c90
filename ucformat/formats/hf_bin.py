"""Hugging Face directories of torch.save files: `pytorch_model.bin`, or numbered `.bin` shards with an index. Reading.

Names are as in `hf`: `model/<name>`.
"""

from __future__ import annotations

from ucformat.catalog import Catalog
from ucformat.errors import UcformatError
from ucformat.formats import owned, training_files
from ucformat.formats.contract import Reader
from ucformat.formats.hf import folders, model
from ucformat.formats.hf.bins import INDEX_SUFFIX, has_weights
from ucformat.formats.hf.companions import NAMES_ADVICE, companions_beside
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state

NAME = "hf-bin"


def detect(source: Source) -> bool:
    """Whether this is a directory of `.bin` weights, or the index of one; never raises on foreign input."""
    if source.file is not None:
        return source.file.endswith(INDEX_SUFFIX)
    try:
        return has_weights(source.store.list())
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of a directory. Reads the index, and of each shard its directory, pickle and local zip headers.

    Raises MissingFileError for a missing shard, FormatError (malformed, index and shards disagree), UnsupportedError (legacy
    form, sparse and quantised tensors), ChecksumError, UnsafePickleError.
    """
    catalog = model.open_catalog(source, NAME)
    return catalog if source.file is not None else with_training_state(catalog, source.store)


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    bookkeeping=training_files.BOOKKEEPING,
    names_advice=NAMES_ADVICE,
    companions=companions_beside,
    owned_files=owned.by_pattern(
        r"((diffusion_)?pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?", model.weight_files, folders.parts
    ),
)

"""Hugging Face directories of torch.save files: `pytorch_model.bin`, or numbered `.bin` shards with an index. Reading.

Names are as in `hf`: `model/<name>`.
"""

from __future__ import annotations

import re

from ucformat.catalog import Catalog
from ucformat.errors import UcformatError
from ucformat.formats import training_files
from ucformat.formats.hf import folders, model
from ucformat.formats.hf.bins import INDEX_SUFFIX, has_weights
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state

NAME = "hf-bin"
BOOKKEEPING = training_files.BOOKKEEPING
OWNS = re.compile(r"((diffusion_)?pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
weight_files = model.weight_files
folders_of = folders.parts


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

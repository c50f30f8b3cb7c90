"""Hugging Face safetensors: one file, several, or several with an index; and in the folders that are parts of a model.

Reading: tensors are `model/<name>`; tied names come from `__metadata__`, where safetensors' own `save_model` puts
them. Writing (see `hf.writer`): model tensors whole, in files that `from_pretrained` loads.
"""

from __future__ import annotations

from ucformat.catalog import Catalog
from ucformat.containers.safetensors_header import LENGTH_BYTES
from ucformat.errors import UcformatError
from ucformat.formats import owned, training_files
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.hf import bins, files, folders, model
from ucformat.formats.hf.companions import NAMES_ADVICE, companions_beside
from ucformat.formats.hf.layout import file_sizes, takes
from ucformat.formats.hf.model import weight_files
from ucformat.formats.hf.writer import prepare, write
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state
from ucformat.naming import FILE_METADATA
from ucformat.storage.store import Store

NAME = "hf"
__all__ = ["NAME", "READER", "WRITER", "detect", "open_catalog", "weight_files", "write"]
_WEIGHTS = (
    r"((diffusion_pytorch_|pytorch_)?model(-\d+-of-\d+)?\.safetensors"
    r"|(diffusion_)?pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?"
)
"""The weights that libraries look for, pickled ones beside them included: they are of the same model."""

_OTHERS = (b"DCP_SHARDING_INFO", b'"ucf":"{')
"""Metadata keys of formats that also keep fragments in safetensors files: DCP's distributed HF form, our shards."""
_SNIFF_BYTES = 4096  # __metadata__ comes first in a header


def detect(source: Source) -> bool:
    """Whether this is a Hugging Face file or directory; never raises on foreign input."""
    try:
        if source.file is not None:
            named = source.file.endswith((files.SUFFIX, files.INDEX_SUFFIX))
            return named and not _foreign(source.store, source.file)
        names = source.store.list()
        if "ucf.json" in names or ".metadata" in names:
            return False
        weights = [name for name in names if name.endswith(files.SUFFIX)]
        if weights:
            return not _foreign(source.store, weights[0])
        if any(name.endswith(files.INDEX_SUFFIX) for name in names):
            return True
        return not bins.has_weights(names) and model.has_parts(source.store)
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of a file or directory, and of what a trainer keeps beside the weights. Reads headers and pickles only.

    Raises FormatError (malformed, index and files disagree), MissingFileError, UnsupportedError; and what `hf_bin` raises
    when a folder that is a part of the model has pickled weights.
    """
    catalog = model.open_catalog(source, NAME)
    return catalog if source.file is not None else with_training_state(catalog, source.store)


def _foreign(store: Store, path: str) -> bool:
    """Whether the file's leading metadata belongs to another format built on safetensors."""
    lead = store.read(path, 0, min(store.size(path), LENGTH_BYTES + _SNIFF_BYTES))
    return any(marker in lead for marker in _OTHERS)


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    bookkeeping=frozenset({FILE_METADATA}) | training_files.BOOKKEEPING,
    names_advice=NAMES_ADVICE,
    companions=companions_beside,
    owned_files=owned.by_pattern(_WEIGHTS, weight_files, folders.parts),
)
WRITER = Writer(
    name=NAME,
    write=write,
    values="none",
    takes=takes,
    not_a_directory=(files.SUFFIX,),
    staged=True,
    bare_names=True,
    prepare=prepare,
    file_sizes=file_sizes,
)

"""The files that go along with a model: those beside its weights, or in the directory that a user names instead."""

from __future__ import annotations

from ucformat.errors import MissingFileError, UnsupportedError
from ucformat.formats import sidecar_files
from ucformat.formats.hf import folders, model
from ucformat.formats.hf.files import SUFFIX
from ucformat.formats.hf.stems import is_known
from ucformat.formats.source import Source, locate
from ucformat.formats.target import Companions
from ucformat.formats.training_files import is_training_file

NAMES_ADVICE = (
    "files of transformers models may have other names than the model in memory: "
    'load into {"model": ucformat.hf_state(model, path)}'
)


def companions_beside(source: Source) -> Companions:
    """The files beside the weights at `source`, and in the folders that are parts of the model."""
    if source.file is None:
        read = {name for name in source.store.list() if is_training_file(name)}
        return sidecar_files.gather(source, folders.parts(source.store), model.weight_files(source) | read)
    return sidecar_files.gather(source, () if is_known(source.file.partition(SUFFIX)[0]) else None)


def companions_of(url: str) -> Companions:
    """The files of a model's directory, or those that a checkpoint carries.

    Raises MissingFileError when there are none, UnsupportedError for a file, FormatError.
    """
    source = locate(url)
    if source.file is not None:
        raise UnsupportedError(url, "companions are the files of a directory: name that")
    found = sidecar_files.gather(source, folders.parts(source.store), named=True)
    if not found.files:
        raise MissingFileError(url, "no configuration, tokenizer or other file that goes along with a model")
    return found

"""The files of a model's directory that a user names, to go along with a state that has none."""

from __future__ import annotations

from ucformat.errors import MissingFileError, UnsupportedError
from ucformat.formats import sidecar_files
from ucformat.formats.hf import folders
from ucformat.formats.source import locate
from ucformat.formats.target import Companions


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

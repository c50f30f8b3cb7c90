"""What accelerate and Hugging Face's Trainer save under FSDP: model and optimizer as DCP folders, or each as one file.

    pytorch_model_fsdp_0/   optimizer_0/        SHARDED_STATE_DICT
    pytorch_model_fsdp.bin  optimizer.bin       FULL_STATE_DICT

The trainer's other files lie beside them: see `training_files`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ucformat.catalog import Catalog
from ucformat.errors import UcformatError
from ucformat.formats import dcp, torchsave, training_files
from ucformat.formats.contract import Reader
from ucformat.formats.source import Source
from ucformat.formats.training_files import with_training_state
from ucformat.formats.unite import seen_from, unite

NAME = "fsdp-folders"

_MODEL, _OPTIMIZER, _FILE = "pytorch_model_fsdp_0", "optimizer_0", "pytorch_model_fsdp.bin"
_FURTHER = re.compile(r"(pytorch_model_fsdp|optimizer)_([1-9]\d*(\.bin|/)|(\d+_)?rank\d+\.bin)")
"""Further models and optimizers, and what each rank saved for itself (LOCAL_STATE_DICT)."""
_PREFIX = "model/"


def detect(source: Source) -> bool:
    """Whether a directory holds a model in one of these forms. Never raises."""
    if source.file is not None:
        return False
    try:
        names = source.store.list()
        return _FILE in names or (f"{_MODEL}/" in names and dcp.detect(Source(source.store.sub(_MODEL))))
    except UcformatError:
        return False


def open_catalog(source: Source) -> Catalog:
    """The catalog of all parts. Raises what the readers of DCP and torch.save raise."""
    root, names = source.store, source.store.list()
    if _FILE in names:
        catalog = torchsave.open_catalog(Source(root, _FILE))
        catalog = catalog.rename(lambda name: name if name.startswith(_PREFIX) else _PREFIX + name)
    else:
        catalog = seen_from(dcp.open_catalog(Source(root.sub(_MODEL))), root)
    if f"{_OPTIMIZER}/" in names and dcp.detect(Source(root.sub(_OPTIMIZER))):
        catalog = unite(catalog, seen_from(dcp.open_catalog(Source(root.sub(_OPTIMIZER))), root))
    further = [name for name in names if _FURTHER.fullmatch(name)]
    said = (f"not read: {', '.join(further)}",) if further else ()
    notes = replace(catalog.notes, origin=NAME, remarks=(*catalog.notes.remarks, *said), origin_layout={})
    return with_training_state(replace(catalog, notes=notes), root)


READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog, bookkeeping=training_files.BOOKKEEPING)

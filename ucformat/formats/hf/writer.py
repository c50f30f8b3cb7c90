"""Writing a Hugging Face directory: weights in safetensors files, their indices, and the model's companion files.

What goes where is decided in `layout`. Optimizer state and values have no place in this format. Tied weights are stored
once; `__metadata__` of the file says `{alias: name}`, as safetensors' own `save_model` does, and loaders tie them again by
the configuration.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from ucformat.containers.file_image import write_image
from ucformat.formats import sidecar_files
from ucformat.formats.hf import folders, stems
from ucformat.formats.hf.layout import LAYOUT_KEY, PlannedFile, indices, lay_out, may_be_sharded
from ucformat.formats.staging import publish
from ucformat.formats.target import Companions, WriteJob, shorten
from ucformat.storage.store import Store


def write(job: WriteJob) -> None:
    """Write `job.store` as a Hugging Face directory. Every rank calls it and writes its share of the files.

    Raises UnsupportedError when two names would become one, for a piece of a tensor, and for dtypes that safetensors
    lacks; FormatError for a companion with the name of a file that is written; ExistsError, StorageError, RankFailedError.
    """
    files = lay_out(job)
    index = indices(files)
    taken = [*(file.path for file in files), *index]
    sidecar_files.check_names(job.companions, taken)

    def write_mine(store: Store) -> None:
        for file in files[job.group.rank :: job.group.size]:
            with store.writer(file.path, file.image.size) as writer:
                write_image(writer, file.image, job.fill, on_bytes=job.on_bytes)

    def commit(store: Store) -> None:
        sidecar_files.carry(job.companions, store, dtype=job.dtype)
        for path, data in index.items():
            store.put(path, data)

    publish(job, write_mine, commit, last=_last(job.companions, files, index))


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """The job with the companions that fit what is written, and what a user should know of the directory to be."""
    planned = lay_out(job)
    job = replace(job, companions=_without_adapter(job.companions, planned))
    return job, _remarks(job, planned)


def _without_adapter(companions: Companions, files: Sequence[PlannedFile]) -> Companions:
    """The companions without `adapter_config.json` where no adapter is beside it: libraries would look for its weights."""
    adapters = {file.folder for file in files if file.stem.partition(".")[0] == stems.ADAPTER}

    def alone(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name == stems.ADAPTER_CONFIG and folder not in adapters

    lost = [item.path for item in companions.files if alone(item.path)]
    return companions.without(lost, "no weights of an adapter are written") if lost else companions


def _remarks(job: WriteJob, files: Sequence[PlannedFile]) -> tuple[str, ...]:
    """What a user should know of the directory that `job` would write."""
    said: list[str] = []
    for folder in sorted({file.folder for file in files}):
        noted = job.notes.origin_layout.get(LAYOUT_KEY + folder, stems.DEFAULT)
        if not stems.is_known(noted):
            said.append(f"no library looks for weights called {noted}: written as {stems.DEFAULT}.safetensors")
    large = [
        file.path for file in files if not may_be_sharded(job, file.folder, file.stem) and file.image.size > job.max_file_bytes
    ]
    if large:
        said.append(f"larger than {job.max_file_bytes:,} bytes, as their libraries read a single file: {shorten(large)}")
    described = any(fnmatch.fnmatchcase(item.path, sign) for item in job.companions.files for sign in sidecar_files.MODEL_SIGNS)
    if not described and any(file.stem not in stems.UNDESCRIBED for file in files):
        said.append("no config.json goes along, and libraries need one: pass companions=DIR (--companions DIR)")
    return tuple(said)


def _last(companions: Companions, files: Sequence[PlannedFile], index: Sequence[str] | dict[str, bytes]) -> str:
    """The file without which nobody takes the directory for a model: that of the top, where weights are."""
    top = [path for path in (*index, *(file.path for file in files)) if "/" not in path]
    named = [item.path for item in companions.files if item.path in (folders.PIPELINE, folders.MODULES)]
    return (top or named or [files[-1].path])[0]

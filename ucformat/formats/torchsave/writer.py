"""Writing one torch.save file that stock `torch.load(weights_only=True, mmap=True)` loads, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ucformat import values
from ucformat.catalog import Notes
from ucformat.containers.file_image import stream
from ucformat.containers.zip_write import Outgoing, RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.errors import UnsupportedError
from ucformat.formats.staging import replacing
from ucformat.formats.target import Companions, OutputBox, WriteJob, shorten
from ucformat.formats.torchstate import Nest, plain, to_torch
from ucformat.values import bytes_io

DEFAULT_FILE = "checkpoint.pt"
_TOP = "checkpoint"  # the folder inside the zip; torch takes any


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """The job without what surrounds a model, as a single file has no place for it; and remarks on that."""
    from ucformat.formats.hf.layout import noted_folders  # its room imports this one, to read .bin files

    said = []
    if job.companions.files:
        said.append(f"not copied, a single file has no place for them: {shorten([item.path for item in job.companions.files])}")
    lost = noted_folders(job.notes)
    if lost:
        said.append(f"a single file does not say which tensors belong into folders of their own: {shorten(lost)}")
    streams = _streams(job.values)
    if streams:
        said.append(f"torch.load refuses io.BytesIO with weights_only=True: {shorten(streams)}")
    return replace(job, companions=Companions(remarks=job.companions.remarks)), tuple(said)


def _streams(tree: object) -> list[str]:
    """Paths of all io.BytesIO among the values."""
    found: list[str] = []

    def note(path: str, value: object) -> bool:
        found.extend([path] * bytes_io.is_one(value))
        return False

    values.prune(tree, note)
    return found


def one_file(job: WriteJob) -> list[int]:
    """Tensor bytes of the file that would be written."""
    return [sum(target.nbytes for target in job.targets)]


def write(job: WriteJob) -> None:
    """Write the file `job.file` (default `checkpoint.pt`) in `job.store`. Rank 0 writes, the others wait for it.

    Pieces must follow one another in each tensor's row-major order: whole tensors, or slabs along dimension 0. Raises
    UnsupportedError for other pieces and for dtypes that torch lacks, ExistsError, StorageError, RankFailedError.
    """
    with job.group.together("writing"):
        if job.group.rank == 0:
            _write(job)


def _write(job: WriteJob) -> None:
    path = job.file or DEFAULT_FILE
    pieces = in_order(job)
    leaves = {
        name: Outgoing(str(i), held[0][1].spec.dtype, held[0][1].spec.shape) for i, (name, held) in enumerate(pieces.items())
    }
    data_pkl = pickle_tree(torch_tree(job, leaves))
    size = zip_size(_TOP, data_pkl, leaves.values())
    with replacing(job.store, path, size, overwrite=job.overwrite) as writer:
        out = RecordWriter(writer.write, _TOP)
        write_head(out, data_pkl)
        _write_tensors(job, out, pieces, leaves)
        write_tail(out)
        if job.finish is not None:
            job.finish()


def _write_tensors(
    job: WriteJob, out: RecordWriter, pieces: Mapping[str, Sequence[tuple[int, OutputBox]]], leaves: Mapping[str, Outgoing]
) -> None:
    order = [index for held in pieces.values() for index, _ in held]
    chunks = stream([job.targets[index].nbytes for index in order], job.fill_of(order))
    for leaf in leaves.values():
        out.add_stream(f"data/{leaf.key}", leaf.nbytes, chunks, job.on_bytes)


def in_order(job: WriteJob) -> dict[str, list[tuple[int, OutputBox]]]:
    """Each tensor's pieces (with their index) in row-major order. Raises UnsupportedError when they are no slabs."""
    pieces: dict[str, list[tuple[int, OutputBox]]] = {}
    for index, target in enumerate(job.targets):
        if target.spec.dtype.startswith("F6_"):
            raise UnsupportedError(job.store.url, f"tensor {target.name!r}: torch has no dtype {target.spec.dtype}")
        pieces.setdefault(target.name, []).append((index, target))
    for name, held in pieces.items():
        held.sort(key=lambda pair: pair[1].box.offset)
        spec = held[0][1].spec
        done = 0
        for _, target in held:
            row = math.prod(spec.shape[1:])
            first = target.box.offset[0] * row if spec.shape else 0
            if target.box.length[1:] != spec.shape[1:] or (first != done and target.box.volume):
                raise UnsupportedError(job.store.url, f"tensor {name!r}: piece {target.box} is no slab along dimension 0")
            done += target.box.volume
    return pieces


OUTER_KEY = "torchsave:"
"""Before the keys of `torchstate.Outer` in a checkpoint's notes."""


def outer_of(notes: Notes, prefix: str) -> dict[str, str]:
    """How the origin arranged its state, as the notes say under `prefix`."""
    return {key.removeprefix(prefix): value for key, value in notes.origin_layout.items() if key.startswith(prefix)}


def torch_tree(job: WriteJob, leaves: Mapping[str, Any], *, prefix: str = OUTER_KEY, exact: bool = False) -> Nest:
    """The state as torch programs nest it, tensors being `leaves` by name.

    Everything goes where the notes say, under `prefix`, that its program keeps it. `exact` is for DCP: see `torchstate.plain`,
    and its optimizers keep `param_names`. Raises UnrepresentableError for an opaque value.
    """
    held = {**leaves, **{alias: leaves[name] for alias, name in job.aliases.items() if name in leaves}}
    tree = values.join(job.values if isinstance(job.values, dict) else {}, held)
    arranged = to_torch(cast(Nest, tree), outer_of(job.notes, prefix), param_names=exact)
    return cast(Nest, plain(arranged, exact=exact))

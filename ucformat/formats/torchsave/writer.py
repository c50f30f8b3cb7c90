"""Writing one torch.save file that stock `torch.load(weights_only=True, mmap=True)` loads, streaming."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ucformat import values
from ucformat.errors import ExistsError, UnsupportedError
from ucformat.formats.target import Target, WriteJob
from ucformat.formats.torchrecords import Outgoing, RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.formats.torchstate import Nest, plain, to_torch
from ucformat.image import stream
from ucformat.values_json import TensorRef

DEFAULT_FILE = "checkpoint.pt"
_TOP = "checkpoint"  # the folder inside the zip; torch takes any
_LOG = logging.getLogger(__name__)


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
    if job.store.exists(path) and not job.overwrite:
        raise ExistsError(f"{job.store.url.rstrip('/')}/{path}")
    pieces = in_order(job)
    leaves = {
        name: Outgoing(str(i), held[0][1].spec.dtype, held[0][1].spec.shape) for i, (name, held) in enumerate(pieces.items())
    }
    tree, dropped = torch_tree(job, leaves)
    if dropped:
        _LOG.warning("%s: left out, torch.save has no place for opaque values: %s", path, ", ".join(dropped))
    data_pkl = pickle_tree(tree)
    size = zip_size(_TOP, data_pkl, leaves.values())
    with job.store.writer(path, size) as writer:
        out = RecordWriter(writer.write, _TOP)
        write_head(out, data_pkl)
        _write_tensors(job, out, pieces, leaves)
        write_tail(out)
        if job.finish is not None:
            job.finish()


def _write_tensors(
    job: WriteJob, out: RecordWriter, pieces: Mapping[str, Sequence[tuple[int, Target]]], leaves: Mapping[str, Outgoing]
) -> None:
    order = [index for held in pieces.values() for index, _ in held]
    chunks = stream([job.targets[index].nbytes for index in order], job.fill_of(order))
    for leaf in leaves.values():
        out.add_stream(f"data/{leaf.key}", leaf.nbytes, chunks, job.on_bytes)


def in_order(job: WriteJob) -> dict[str, list[tuple[int, Target]]]:
    """Each tensor's pieces (with their index) in row-major order. Raises UnsupportedError when they are no slabs."""
    pieces: dict[str, list[tuple[int, Target]]] = {}
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


def torch_tree(job: WriteJob, leaves: Mapping[str, Any], *, exact: bool = False) -> tuple[Nest, list[str]]:
    """The state as torch programs nest it, tensors being `leaves` by name; and the paths of what was left out.

    `exact` is for DCP: see `torchstate.plain`, and its optimizers keep `param_names`.
    """
    held = {**leaves, **{alias: leaves[name] for alias, name in job.aliases.items() if name in leaves}}
    kept = _without_missing(job.values, held)
    tree = values.join(kept if isinstance(kept, dict) else {}, held)
    dropped: list[str] = []
    return plain(to_torch(cast(Nest, tree), param_names=exact), dropped, exact=exact), dropped


def _without_missing(tree: Any, held: Mapping[str, Any]) -> Any:
    """The values without placeholders of tensors that are not written (a selection)."""
    if isinstance(tree, dict):
        return type(tree)((key, _without_missing(value, held)) for key, value in tree.items() if not _missing(value, held))
    if type(tree) in (list, tuple):
        return type(tree)(None if _missing(value, held) else _without_missing(value, held) for value in tree)
    return tree


def _missing(value: object, held: Mapping[str, Any]) -> bool:
    return isinstance(value, (TensorRef, values.ArrayRef)) and value.name not in held

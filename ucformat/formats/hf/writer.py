"""Writing a Hugging Face directory: weights in safetensors files, their index, and the model's companion files.

What goes in: tensors under `model/`, prefix dropped (or all tensors where none has that prefix), each whole and in
one file. Optimizer state and values have no place in this format. Tied weights are stored once; `__metadata__` of
the file says `{alias: name}`, as safetensors' own `save_model` does, and loaders tie them again by the configuration.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucformat import values as value_tree
from ucformat.containers.file_image import FilePlan, write_image
from ucformat.containers.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, build_header
from ucformat.errors import UnsupportedError
from ucformat.formats import sidecar_files
from ucformat.formats.staging import publish
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.storage.store import Store

MODEL = "model"
METADATA_KEY = "hf_metadata"
"""Values key under which the reader keeps `__metadata__` entries that are neither `format` nor aliases."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DATA_ALIGN = 8  # bytes; readers view the data in place, and no dtype is wider
_RESERVED = ("__metadata__", "format")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to be: its image (pieces are targets' indices) and the names in it."""

    path: str
    image: FilePlan
    names: tuple[str, ...]


def takes(names: Sequence[str]) -> list[str]:
    """The names that this format has a place for: those under `model/`, or all where there are none."""
    model = [name for name in names if name.startswith(MODEL + "/")]
    return model or list(names)


def write(job: WriteJob) -> None:
    """Write `job.store` as a Hugging Face directory. Every rank calls it and writes its share of the files.

    Raises UnsupportedError when two names would become one, for a piece of a tensor, and for dtypes that safetensors
    lacks; ExistsError, StorageError, RankFailedError.
    """
    files = lay_out(job)

    def write_mine(store: Store) -> None:
        for file in files[job.group.rank :: job.group.size]:
            with store.writer(file.path, file.image.size) as writer:
                write_image(writer, file.image, job.fill, on_bytes=job.on_bytes)

    def commit(store: Store) -> None:
        for text in sidecar_files.carry(job.source, store, dtype=job.dtype):
            _LOG.warning("%s", text)
        if len(files) > 1:
            store.put(INDEX, _index(files))

    publish(job, write_mine, commit, last=INDEX if len(files) > 1 else SINGLE)


def lay_out(job: WriteJob) -> tuple[PlannedFile, ...]:
    """Which tensors go into which file, and where; pure."""
    names = _hf_names(job)
    chosen = [number for number, target in enumerate(job.targets) if target.name in names]
    if not chosen:
        raise UnsupportedError(job.store.url, "no tensors to write: nothing to put into a safetensors file")
    for number in chosen:
        _check(job, job.targets[number], names[job.targets[number].name])
    chosen.sort(key=lambda number: _natural(names[job.targets[number].name]))
    groups = list(_pack(chosen, [target.nbytes for target in job.targets], job.max_file_bytes))
    paths = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    aliases = {names[alias]: names[kept] for alias, kept in job.aliases.items() if alias in names and kept in names}
    extra = job.values.get(METADATA_KEY, {}) if isinstance(job.values, dict) else {}
    told = {key: text for key, text in extra.items() if isinstance(text, str)} if isinstance(extra, dict) else {}
    return tuple(
        _plan_file(path if len(groups) > 1 else SINGLE, group, job.targets, names, aliases, told)
        for path, group in zip(paths, groups, strict=True)
    )


def _hf_names(job: WriteJob) -> dict[str, str]:
    """Canonical name → name in the file, for tensors and aliases that go in."""
    own = [target.name for target in job.targets]
    kept = takes([*own, *job.aliases])
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in kept:
        parts = value_tree.split_name(name)
        short = ".".join(parts[1:] if parts[0] == MODEL and len(parts) > 1 else parts)
        other = taken.setdefault(short, name)
        if other != name:
            raise UnsupportedError(job.store.url, f"tensors {other!r} and {name!r} would both be called {short!r}")
        names[name] = short
    return names


def _check(job: WriteJob, target: OutputBox, name: str) -> None:
    if not target.whole:
        raise UnsupportedError(
            job.store.url, f"tensor {target.name!r}: a safetensors model holds whole tensors, not {target.box}"
        )
    if target.spec.kind.stored != target.spec.dtype:
        raise UnsupportedError(job.store.url, f"tensor {target.name!r}: safetensors has no dtype {target.spec.dtype}")
    if name in _RESERVED[:1] or not name:
        raise UnsupportedError(job.store.url, f"tensor {target.name!r}: {name!r} can't be the name of a tensor in safetensors")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which layers.2 comes before layers.10."""
    return [(len(part.lstrip("0")), part) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _pack(chosen: Sequence[int], nbytes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Consecutive runs of at most `limit` bytes; a tensor above it is alone in its file."""
    run: list[int] = []
    total = 0
    for number in chosen:
        if run and total + nbytes[number] > limit:
            yield run
            run, total = [], 0
        run.append(number)
        total += nbytes[number]
    if run:
        yield run


def _plan_file(
    path: str,
    group: Sequence[int],
    targets: Sequence[OutputBox],
    names: Mapping[str, str],
    aliases: Mapping[str, str],
    extra: Mapping[str, str],
) -> PlannedFile:
    """Widest items first, then by name: every tensor starts at a multiple of its item size."""
    order = sorted(group, key=lambda number: (-targets[number].spec.kind.itemsize, names[targets[number].name]))
    own = [names[targets[number].name] for number in order]
    held = set(own)
    tied = {alias: kept for alias, kept in sorted(aliases.items()) if kept in held and alias not in _RESERVED}
    entries = [
        (name, targets[number].spec.kind.stored, targets[number].spec.kind.header_shape(targets[number].spec.shape))
        for name, number in zip(own, order, strict=True)
    ]
    header = build_header(entries, {**extra, "format": "pt", **tied}, DATA_ALIGN)
    if len(header) - LENGTH_BYTES > MAX_HEADER_BYTES:
        why = f"the names of {len(own)} tensors are more than the header of one file can hold: choose a smaller size of files"
        raise UnsupportedError(path, why)
    nbytes = np.array([targets[number].nbytes for number in order], dtype=np.int64)
    stops = len(header) + np.cumsum(nbytes)
    image = FilePlan(int(stops[-1]), [(0, header)], np.array(order, dtype=np.int64), stops - nbytes, nbytes)
    return PlannedFile(path, image, tuple(own))


def _index(files: Sequence[PlannedFile]) -> bytes:
    total = sum(int(file.image.nbytes.sum()) for file in files)
    weight_map = {name: file.path for file in files for name in file.names}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"

"""Which tensor of a job goes into which safetensors file, under which name, and where in it. Pure.

Tensors under `model/` lose that prefix (where there are none, all tensors go in). Those of a folder that the notes name as
a part of the model go into files there. The notes also name the files; see `stems`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucformat import values as value_tree
from ucformat.catalog import Notes, TensorSpec
from ucformat.containers.file_image import FilePlan
from ucformat.containers.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, build_header
from ucformat.errors import UnsupportedError
from ucformat.formats.hf import stems
from ucformat.formats.hf.folders import MODULES
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.naming import FILE_METADATA
from ucformat.storage.store import safe_path

MODEL = "model"
LAYOUT_KEY = "hf:"
"""Notes key, before a folder, of the stem of the weight files there."""
DATA_ALIGN = 8  # bytes; readers view the data in place, and no dtype is wider
_RESERVED = ("__metadata__", "format")
_PEFT = "base_model.model."  # how the names of a PEFT adapter begin


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes: a folder (empty for the top), and its name in the files there."""

    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to be: its image (pieces are targets' indices) and the names in it."""

    folder: str
    stem: str
    path: str
    image: FilePlan
    names: tuple[str, ...]


def takes(names: Sequence[str]) -> list[str]:
    """The names that this format has a place for: those under `model/`, or all where there are none."""
    model = [name for name in names if name.startswith(MODEL + "/")]
    return model or list(names)


def lay_out(job: WriteJob) -> tuple[PlannedFile, ...]:
    """The files to be written, those at the top first. Raises UnsupportedError for what has no place in them."""
    places = _places(job)
    chosen = [number for number, target in enumerate(job.targets) if target.name in places]
    if not chosen:
        raise UnsupportedError(job.store.url, "no tensors to write: nothing to put into a safetensors file")
    for number in chosen:
        _check(job, job.targets[number], places[job.targets[number].name].name)
    found: list[PlannedFile] = []
    for folder in sorted({places[job.targets[number].name].folder for number in chosen}):
        inside = [number for number in chosen if places[job.targets[number].name].folder == folder]
        found += _plan_folder(job, folder, inside, places)
    return tuple(found)


def file_sizes(job: WriteJob) -> list[int]:
    """Tensor bytes of each file that would be written."""
    return [int(file.image.nbytes.sum()) for file in lay_out(job)]


def indices(files: Sequence[PlannedFile]) -> dict[str, bytes]:
    """Path → content of the index of each folder whose tensors are in several files."""
    found: dict[str, bytes] = {}
    for folder in sorted({file.folder for file in files}):
        inside = [file for file in files if file.folder == folder]
        if len(inside) > 1:
            found[_join(folder, stems.index_name(inside[0].stem))] = _index(inside)
    return found


def stem_of(job: WriteJob, folder: str, names: Sequence[str]) -> str:
    """What the weight files in a folder are to be called, given the tensors' names there."""
    noted = job.notes.origin_layout.get(LAYOUT_KEY + folder)
    if noted is not None:
        return noted if stems.is_known(noted) else stems.DEFAULT
    beside = {item.path for item in job.companions.files}
    of_peft = all(name.startswith(_PEFT) for name in names)
    if _join(folder, stems.ADAPTER_CONFIG) in beside:
        return stems.ADAPTER if of_peft or _join(folder, "config.json") not in beside else stems.DEFAULT
    return stems.ADAPTER if of_peft and all("lora_" in name for name in names) else stems.DEFAULT


def may_be_sharded(job: WriteJob, folder: str, stem: str) -> bool:
    """Whether a library reads such weights from several files: sentence-transformers doesn't for its modules."""
    module = folder and any(item.path == MODULES for item in job.companions.files)
    return not module and stem.partition(".")[0] not in stems.NEVER_SHARDED


def noted_folders(notes: Notes) -> list[str]:
    """The folders that are parts of a model, as its notes name them."""
    return sorted(key[len(LAYOUT_KEY) :] for key in notes.origin_layout if key.startswith(LAYOUT_KEY) and key != LAYOUT_KEY)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _places(job: WriteJob) -> dict[str, Place]:
    """Canonical name → place, for tensors and aliases that go in."""
    folders = {tuple(safe_path(folder, job.store.url).split("/")) for folder in noted_folders(job.notes)}
    places: dict[str, Place] = {}
    taken: dict[Place, str] = {}
    for name in takes([*(target.name for target in job.targets), *job.aliases]):
        place = _place(name, folders)
        other = taken.setdefault(place, name)
        if other != name:
            shown = _join(place.folder, place.name)
            raise UnsupportedError(job.store.url, f"tensors {other!r} and {name!r} would both be called {shown!r}")
        places[name] = place
    return places


def _place(name: str, folders: set[tuple[str, ...]]) -> Place:
    parts = tuple(value_tree.split_name(name))
    if parts[0] != MODEL or len(parts) == 1:
        return Place("", ".".join(parts))
    rest = parts[1:]
    cut = next((n for n in range(len(rest) - 1, 0, -1) if rest[:n] in folders), 0)
    return Place("/".join(rest[:cut]), ".".join(rest[cut:]))


def _check(job: WriteJob, target: OutputBox, name: str) -> None:
    if not target.whole:
        raise UnsupportedError(
            job.store.url, f"tensor {target.name!r}: a safetensors model holds whole tensors, not {target.box}"
        )
    if target.spec.kind.stored != target.spec.dtype:
        raise UnsupportedError(job.store.url, f"tensor {target.name!r}: safetensors has no dtype {target.spec.dtype}")
    if name in _RESERVED[:1] or not name:
        raise UnsupportedError(job.store.url, f"tensor {target.name!r}: {name!r} can't be the name of a tensor in safetensors")


def _plan_folder(job: WriteJob, folder: str, chosen: Sequence[int], places: Mapping[str, Place]) -> Iterator[PlannedFile]:
    names = {name: place.name for name, place in places.items() if place.folder == folder}
    own = [job.targets[number].name for number in chosen]
    stem = stem_of(job, folder, [names[name] for name in own])
    chosen = sorted(chosen, key=lambda number: _natural(names[job.targets[number].name]))
    nbytes = [target.nbytes for target in job.targets]
    groups = list(_pack(chosen, nbytes, job.max_file_bytes)) if may_be_sharded(job, folder, stem) else [list(chosen)]
    aliases = {names[alias]: names[kept] for alias, kept in job.aliases.items() if alias in names and kept in names}
    extra = _metadata(job, folder)
    for i, group in enumerate(groups):
        number = "" if len(groups) == 1 else f"-{i + 1:05d}-of-{len(groups):05d}"
        path = _join(folder, f"{stem}{number}.safetensors")
        image, held = _plan_file(path, group, job.targets, names, aliases, extra)
        yield PlannedFile(folder, stem, path, image, held)


def _metadata(job: WriteJob, folder: str) -> dict[str, str]:
    """What the source's files said beside their tensors, for those in `folder`."""
    extra = job.values.get(FILE_METADATA) if isinstance(job.values, dict) else None
    if folder and isinstance(extra, dict):
        extra = extra.get(folder + "/")
    return {key: text for key, text in extra.items() if isinstance(text, str)} if isinstance(extra, dict) else {}


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
) -> tuple[FilePlan, tuple[str, ...]]:
    """Widest items first, then by name: every tensor starts at a multiple of its item size."""
    order = sorted(group, key=lambda number: (-targets[number].spec.kind.itemsize, names[targets[number].name]))
    own = [names[targets[number].name] for number in order]
    held = set(own)
    tied = {alias: kept for alias, kept in sorted(aliases.items()) if kept in held and alias not in _RESERVED}
    entries = [(name, *_header_entry(path, targets[number].spec)) for name, number in zip(own, order, strict=True)]
    header = build_header(entries, {**extra, "format": "pt", **tied}, DATA_ALIGN)
    if len(header) - LENGTH_BYTES > MAX_HEADER_BYTES:
        why = f"the names of {len(own)} tensors are more than the header of one file can hold: choose a smaller size of files"
        raise UnsupportedError(path, why)
    nbytes = np.array([targets[number].nbytes for number in order], dtype=np.int64)
    stops = len(header) + np.cumsum(nbytes)
    image = FilePlan(int(stops[-1]), [(0, header)], np.array(order, dtype=np.int64), stops - nbytes, nbytes)
    return image, tuple(own)


def _header_entry(path: str, spec: TensorSpec) -> tuple[str, list[int]]:
    """What a header says of a tensor: dtype and shape."""
    try:
        return spec.kind.stored, spec.kind.header_shape(spec.shape)
    except ValueError as error:
        raise UnsupportedError(path, f"tensor {spec.name!r}: {error}") from error


def _index(files: Sequence[PlannedFile]) -> bytes:
    total = sum(int(file.image.nbytes.sum()) for file in files)
    weight_map = {name: file.path.rpartition("/")[2] for file in files for name in file.names}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"

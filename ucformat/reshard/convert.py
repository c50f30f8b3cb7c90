"""From any format to any that can be written, in bounded memory: a read plan feeds a writer, chunk by chunk.

`prepare` reads metadata only: it detects the source, chooses and renames what goes over, decides on dtypes and files,
and proves that every byte that will be needed is there. The `Conversion` it returns is what `--dry-run` shows and
what `run` carries out. `convert` is both.
"""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.errors import ExistsError, NotACheckpointError, UnsupportedError
from ucformat.formats import companions
from ucformat.formats.hf.writer import METADATA_KEY, lay_out
from ucformat.formats.source import Source, locate
from ucformat.formats.target import MAX_FILE_BYTES, Target, WriteJob
from ucformat.group import Group
from ucformat.reshard.fill import CatalogFill
from ucformat.reshard.layout import Layout, cut
from ucformat.reshard.plan import ReadPlan, plan, wants
from ucformat.storage import Store, open_store

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that `dtype=` converts, and converts to. Integers, flags and scaled low-precision numbers stay as they are."""
_SPELLINGS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "double": "F64",
}
_SPELLINGS |= {"fp16": "F16", "fp32": "F32", "fp64": "F64"}
_LAYOUTS = ("native", "dcp")  # formats whose files may hold pieces of tensors
_LEFTOVER = re.compile(r"shards(\.\d+)?/|index(\.\d+)?\.safetensors|companions/|.*\.part")
_SHOWN = 5  # names in a remark before "and N more"


@dataclass(frozen=True, slots=True)
class FileShare:
    """A file of the source and how many of its bytes are read."""

    path: str
    size: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be done, decided and proven, with nothing written yet."""

    source: Source
    read_as: str
    """Format of the source."""
    dst: str
    to: str
    job: WriteJob
    reads: tuple[FileShare, ...]
    left_out: tuple[str, ...]
    """Names of the source that do not go over: excluded, or without a place in the target format."""
    remarks: tuple[str, ...]

    @property
    def tensors(self) -> int:
        return len({target.name for target in self.job.targets})

    @property
    def read_bytes(self) -> int:
        return sum(share.nbytes for share in self.reads)

    def writes(self) -> list[int]:
        """Tensor bytes of each file that would be written."""
        if self.to == "hf":
            return [int(file.image.nbytes.sum()) for file in lay_out(self.job)]
        if self.to not in _LAYOUTS:
            return [self.written_bytes]
        return [sum(self.job.targets[i].nbytes for i in part) for part in self.job.shards()]

    @property
    def written_bytes(self) -> int:
        return sum(target.nbytes for target in self.job.targets)


@dataclass(frozen=True, slots=True)
class Report:
    """What was done; counts are those of all ranks."""

    tensors: int
    read_bytes: int
    written_bytes: int
    seconds: float
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


Progress = Callable[[int, int], None]
"""Told (bytes written so far, bytes in all) of this rank's group share, from any thread."""


def convert(
    src: str,
    dst: str,
    to: str,
    *,
    dtype: str | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    layout: Layout | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    group: Group | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Convert the checkpoint at `src` into format `to` at `dst`. Every rank of `group` calls it and does its share.

    `select` and `exclude` are globs over names (`model/*`; one without wildcards means itself and all below it).
    `dtype` converts the floating-point tensors of the model (F64, F32, F16, BF16 among each other); optimizer state,
    integers and scaled formats (fp8, fp4) are never converted. Raises what `prepare` and the target's writer raise; then
    `dst` is as it was.
    """
    group = Group() if group is None else group
    with group.together(f"planning the conversion of {src}"):
        conversion = prepare(
            src,
            dst,
            to,
            dtype=dtype,
            select=select,
            exclude=exclude,
            layout=layout,
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
        )
    return run(conversion, group, on_progress)


def prepare(
    src: str,
    dst: str,
    to: str,
    *,
    dtype: str | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    layout: Layout | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> Conversion:
    """Decide and prove everything about a conversion; reads metadata, writes nothing.

    Raises NotACheckpointError, MissingFileError, FormatError for the source, CoverageError and OverlapError when a
    tensor is not wholly stored, ExistsError when `dst` is in use, UnsupportedError for what can't be done.
    """
    formats.writer(to)
    wanted_dtype = None if dtype is None else _dtype(dtype)
    if layout is not None and to not in _LAYOUTS:
        raise UnsupportedError(dst, f"a layout has no meaning in the format {to}: it is for {' and '.join(_LAYOUTS)}")
    source = locate(src)
    reader = formats.detect(source)
    catalog = reader.open_catalog(source)
    store, file = _destination(dst, to)
    _check_destination(src, dst, store, file, overwrite)
    kept, left_out = _choose(catalog, to, select, exclude, src)
    values, lost = _choose_values(kept, to, select, exclude)
    specs = _converted(kept.tensors, wanted_dtype)
    pieces, files = ([Target(s, Box.whole(s.shape)) for s in specs], None) if layout is None else cut(layout, specs)
    read_plan = plan(kept, wants(kept, [(target.name, target.box) for target in pieces]))
    fill = CatalogFill(kept, pieces, [target.name for target in pieces])
    job = WriteJob(
        store=store,
        file=file,
        targets=pieces,
        fill=fill,
        finish=fill.complete,
        values=values,
        aliases=kept.aliases,
        notes=replace(kept.notes, mesh=dict(layout.mesh) if layout is not None else {}),
        source=_with_companions(source, kept),
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        layout=None if files is None else [part for part in files if part],
    )
    return Conversion(source, reader.NAME, dst, to, job, _shares(read_plan), tuple(left_out), (*catalog.notes.remarks, *lost))


def run(conversion: Conversion, group: Group | None = None, on_progress: Progress | None = None) -> Report:
    """Carry out a conversion. On every rank of `group`, with equal conversions."""
    group = Group() if group is None else group
    began = time.monotonic()
    count = _Count(conversion.written_bytes, on_progress)
    formats.writer(conversion.to)(replace(conversion.job, group=group, on_bytes=count))
    return Report(
        conversion.tensors,
        conversion.read_bytes,
        sum(group.all_gather(count.done)),
        time.monotonic() - began,
        conversion.left_out,
        conversion.remarks,
    )


class _Count:
    """Adds up written bytes from several threads and passes them on."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.done, self.total = 0, total
        self._tell, self._lock = on_progress, threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._tell is not None:
                self._tell(self.done, self.total)


def _dtype(name: str) -> str:
    short = _SPELLINGS.get(name.lower().removeprefix("torch."), name.upper())
    if short not in FLOATS:
        raise UnsupportedError(f"dtype {name}", f"converts to {', '.join(FLOATS)} only: scaled formats need calibration")
    return short


def _with_companions(source: Source, catalog: Catalog) -> Source:
    """Where the files that travel along lie: at the source, or in the checkpoint of a run that it led to."""
    inner = Source(catalog.store)
    return inner if not companions.found(source) and companions.found(inner) else source


def _destination(dst: str, to: str) -> tuple[Store, str | None]:
    """The directory to be, or for `torchsave` the directory around the file to be, and its name.

    An existing directory gets a file of the default name.
    """
    if to != "torchsave" or open_store(dst).list():
        if to == "hf" and dst.endswith(".safetensors"):
            raise UnsupportedError(dst, "hf is written as a directory: name that")
        return open_store(dst), None
    parent, _, name = dst.rstrip("/").rpartition("/")
    return open_store(parent or ("/" if dst.startswith("/") else ".")), name


def _check_destination(src: str, dst: str, store: Store, file: str | None, overwrite: bool) -> None:
    """Refuse to write where something is, unless it is a checkpoint that may be replaced."""
    if open_store(src).url == open_store(dst).url:
        raise UnsupportedError(dst, "source and destination are the same")
    if file is not None or not store.list():
        if file is not None and store.exists(file) and not overwrite:
            raise ExistsError(dst)
        return
    if _is_leftover(store):
        return
    if not overwrite:
        raise ExistsError(dst)
    try:
        formats.detect(locate(dst))
    except NotACheckpointError:
        raise UnsupportedError(dst, "holds something that is no checkpoint: it is not replaced; remove it yourself") from None


def _is_leftover(store: Store) -> bool:
    """Whether a directory holds only what an interrupted native save leaves: the next one clears it away."""
    return all(_LEFTOVER.fullmatch(name) for name in store.list())


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of some globs; a pattern without wildcards means the name and all below it."""
    wild = frozenset("*?[")

    def matches(name: str) -> bool:
        return any(
            fnmatch.fnmatchcase(name, pattern) or (wild.isdisjoint(pattern) and name.startswith(pattern.rstrip("/") + "/"))
            for pattern in patterns
        )

    return matches


def chooser(select: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is selected (all are, without `select`) and not excluded."""
    selected, excluded = matcher(select), matcher(exclude)
    return lambda name: (not select or selected(name)) and not excluded(name)


def _choose(catalog: Catalog, to: str, select: Sequence[str], exclude: Sequence[str], src: str) -> tuple[Catalog, list[str]]:
    """The part of a catalog that goes over, and the names that don't."""
    names = catalog.names
    chosen = list(filter(chooser(select, exclude), names))
    if names and not chosen:
        raise UnsupportedError(src, "the selection leaves no tensor")
    for pattern in select:
        if not any(map(matcher([pattern]), names)):
            raise UnsupportedError(src, f"no name matches {pattern!r}")
    kept = set(formats.taken(to, chosen))
    return catalog.filter(kept.__contains__), [name for name in names if name not in kept]


def _choose_values(catalog: Catalog, to: str, select: Sequence[str], exclude: Sequence[str]) -> tuple[object, list[str]]:
    """The values that go over, by their top-level keys, and a remark on the others.

    `select` takes those that the first component of a pattern names; `exclude` drops those that a pattern means whole.
    """
    values = catalog.values
    if not isinstance(values, dict):
        return values, []
    roots = [pattern.split("/")[0] for pattern in select]
    whole = [pattern.removesuffix("*").rstrip("/") or "*" for pattern in exclude]
    kept = {
        key: value
        for key, value in values.items()
        if key == METADATA_KEY or ((not select or _any(key, roots)) and not _any(key, whole) and to not in formats.VALUELESS)
    }
    lost = sorted(str(key) for key in values if key not in kept)
    return kept, [f"values left out: {shorten(lost)}"] if lost else []


def _any(key: object, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(str(key), pattern) for pattern in patterns)


def shorten(names: Sequence[str], limit: int = _SHOWN) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _converted(specs: Sequence[TensorSpec], dtype: str | None) -> list[TensorSpec]:
    """The specs that are written: only floating-point tensors of the model (of all, where none is named so) change dtype."""
    if dtype is None:
        return list(specs)
    named = any(spec.name.startswith("model/") for spec in specs)
    return [
        replace(spec, dtype=dtype) if spec.dtype in FLOATS and (not named or spec.name.startswith("model/")) else spec
        for spec in specs
    ]


def _shares(read_plan: ReadPlan) -> tuple[FileShare, ...]:
    """Bytes of each file that the plan reads."""
    catalog = read_plan.catalog
    file = catalog.fragments.file[read_plan.fragment]
    nbytes = np.bincount(file, weights=read_plan.stop - read_plan.start, minlength=len(catalog.files)).astype(np.int64)
    return tuple(FileShare(f.path, f.size, int(n)) for f, n in zip(catalog.files, nbytes, strict=True) if n)

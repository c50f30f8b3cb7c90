"""From any format to any that can be written, in bounded memory: a read plan feeds a writer, chunk by chunk.

`prepare` reads metadata only: it detects the source, chooses and renames what goes over, decides on dtypes and files,
and proves that every byte that will be needed is there. The `Conversion` it returns is what `--dry-run` shows and
what `run` carries out. `convert` is both.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.families import translate
from ucformat.formats import sidecar_files
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.hf.companions import companions_of
from ucformat.formats.source import Source, locate
from ucformat.formats.target import MAX_FILE_BYTES, Companions, OutputBox, WriteJob
from ucformat.group import Group, current
from ucformat.naming import Rename, rename_catalog, unwrap_model
from ucformat.reshard import destination
from ucformat.reshard.reading.fill import CatalogFill
from ucformat.reshard.reading.plan import ReadPlan, plan, refuse_expanded, wants
from ucformat.reshard.restoring import master_weights
from ucformat.reshard.selection.mesh_layout import MeshLayout, cut, parse
from ucformat.reshard.selection.precision import Precision, converted, dtype_of, is_kept
from ucformat.reshard.selection.select import Chosen, choose, shorten

if TYPE_CHECKING:
    import torch.distributed as dist

_LOG = logging.getLogger(__name__)


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
    chosen: Chosen
    """What goes over and what is left out: excluded, or without a place in the target format."""
    remarks: tuple[str, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of tensors that do not go over."""
        return self.chosen.left_out

    @property
    def values_left_out(self) -> tuple[str, ...]:
        """Paths of values that do not go over, with the class where it is unknown."""
        return (*self.chosen.values_left_out, *self.chosen.opaque_left_out)

    @property
    def tensors(self) -> int:
        return len({target.name for target in self.job.targets})

    @property
    def read_bytes(self) -> int:
        return sum(share.nbytes for share in self.reads)

    def writes(self) -> list[int]:
        """Tensor bytes of each file that would be written."""
        return formats.writer(self.to).file_sizes(self.job)

    @property
    def written_bytes(self) -> int:
        return sum(target.nbytes for target in self.job.targets)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was done; counts are those of all ranks."""

    tensors: int
    read_bytes: int
    written_bytes: int
    seconds: float
    left_out: tuple[str, ...] = ()
    """Names of tensors that did not go over."""
    values_left_out: tuple[str, ...] = ()
    """Paths of values that did not go over; of objects of unknown classes, with the class in brackets."""
    remarks: tuple[str, ...] = ()


Progress = Callable[[int, int], None]
"""Told (bytes written so far, bytes in all) of this rank's group share, from any thread."""


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str,
    *,
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    companions: str | os.PathLike[str] | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename = (),
    family: str | None = None,
    layout: MeshLayout | str | None = None,
    options: Mapping[str, str | int] = MappingProxyType({}),
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    drop: bool = False,
    process_group: dist.ProcessGroup | None = None,
    on_progress: Progress | None = None,
) -> ConvertReport:
    """Convert the checkpoint at `src` into format `to` at `dst`. Every rank of the process group calls it and does its share.

    `select` and `exclude` are globs over names (`model/*`; one without wildcards means itself and all below it).
    `rename` changes names first: a function, or pairs of a regular expression and what takes the place of each match, over
    canonical names (`model/<parameter>`, `optimizer/<parameter>/<state>`). Into hf, what wrappers add to names
    (`_orig_mod.`, `module.`…) is left out anyway.

    `family` translates names and shapes of the model, and of its optimizer state, between Megatron and Hugging Face
    transformers, whichever the source has: `llama` (also Mistral, Qwen2, Qwen3), `mixtral`, `qwen_moe`, `gpt2`, `gpt_neox`,
    any of their `model_type`s, or `auto`. Numbers that neither a `config.json` nor Megatron's arguments say are given behind it:
    `llama:heads=32,groups=8,head_dim=128,vocab=32000`.

    `dtype` converts the floating-point tensors of the model (F64, F32, F16, BF16 among each other), but for those whose names
    match a glob in `keep_dtype` and those that the model's library keeps wide in half precision (the report lists these);
    optimizer state and integers are never converted, and quantised models are refused without `keep_dtype`. Of mixed-precision
    runs that keep master weights (DeepSpeed), converted weights are made of those, so that F32 is exact. `companions`: a model
    directory whose configuration, tokenizer and the like go along, instead of the source's. `layout` cuts the tensors for a mesh,
    one file per rank: `dp=2,tp=4`, or the JSON of a rule file. `options`: settings of the target format's own, as
    `{"stage": 3, "dp": 4}` for deepspeed.

    `drop`: go on although the target format has no place for some of the weights or of the optimizer's state; the report lists
    them in `left_out`. Without it that is an error that names them, except in hf, which is for models alone.

    Raises what `prepare` and the target's writer raise; then `dst` is as it was.
    """
    group, src, dst = current(process_group), os.fspath(src), os.fspath(dst)
    with group.together(f"planning the conversion of {src}"):
        conversion = prepare(
            src,
            dst,
            to,
            dtype=dtype,
            keep_dtype=keep_dtype,
            companions=None if companions is None else os.fspath(companions),
            select=select,
            exclude=exclude,
            rename=rename,
            family=family,
            layout=parse(layout) if isinstance(layout, str) else layout,
            options=options,
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
            drop=drop,
        )
    report = run(conversion, group, on_progress)
    for text in report.remarks if group.rank == 0 else ():
        _LOG.warning("%s: %s", dst, text)
    return report


def prepare(
    src: str,
    dst: str,
    to: str,
    *,
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    companions: str | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename = (),
    family: str | None = None,
    layout: MeshLayout | None = None,
    options: Mapping[str, str | int] = MappingProxyType({}),
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    drop: bool = False,
) -> Conversion:
    """Decide and prove everything about a conversion; reads metadata, writes nothing.

    Raises NotACheckpointError, MissingFileError, FormatError for the source, CoverageError and OverlapError when a
    tensor is not wholly stored, ExistsError when `dst` is in use, UnsupportedError for what can't be done.
    """
    writer = formats.writer(to)
    if keep_dtype and dtype is None:
        raise UnsupportedError(dst, "keep_dtype means something only together with dtype")
    wanted = None if dtype is None else dtype_of(dtype)
    _check_layout(layout, writer, dst)
    if odd := sorted(set(options) - writer.options):
        known = ", ".join(sorted(writer.options)) or "none"
        raise UnsupportedError(dst, f"{writer.name} has no option {odd[0]!r} (its options: {known})")
    source = locate(src)
    reader, catalog = formats.open_source(source)
    store, file = destination.place(dst, writer)
    destination.check(src, dst, writer, store, file, overwrite=overwrite)
    beside = _companions(source, reader, catalog) if companions is None else companions_of(companions)
    catalog, remarks = _renamed(catalog, writer, rename, family, beside)
    chosen = _choose(catalog, writer, wanted, keep_dtype, select, exclude, src, remarks)
    kept = chosen.catalog
    remarks += chosen.remarks(to)
    specs = list(kept.tensors)
    if wanted is not None:
        specs, kept_wide = converted(specs, Precision(wanted, tuple(keep_dtype), sidecar_files.configs(beside)), src)
        remarks += kept_wide
    boxes, files = ([OutputBox(s, Box.whole(s.shape)) for s in specs], None) if layout is None else cut(layout, specs)
    needed = wants(kept, [(target.name, target.box) for target in boxes])
    refuse_expanded(kept, needed)
    read_plan = plan(kept, needed)
    fill = CatalogFill(kept, boxes, [target.name for target in boxes])
    job = WriteJob(
        store=store,
        file=file,
        targets=boxes,
        fill=fill,
        finish=fill.complete,
        values=kept.values,
        aliases=kept.aliases,
        notes=replace(kept.notes, mesh=dict(layout.mesh) if layout is not None else {}),
        companions=beside,
        dtype=wanted,
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        options=dict(options),
        layout=None if files is None else [held for held in files if held],
    )
    job, own = writer.prepare(job)
    chosen = _with_lost(chosen, job, writer, dst, drop=drop)
    remarks += (*own, *job.companions.remarks)
    return Conversion(source, reader.name, dst, to, job, _shares(read_plan), chosen, tuple(remarks))


def _renamed(
    catalog: Catalog, writer: Writer, rename: Rename, family: str | None, beside: Companions
) -> tuple[Catalog, list[str]]:
    """The catalog under the names that it will have, and remarks."""
    catalog = rename_catalog(catalog, rename) if rename else catalog
    catalog, unwrapped = unwrap_model(catalog) if writer.bare_names else (catalog, "")
    if family is not None:
        catalog = translate(catalog, family, sidecar_files.configs(beside).values())
    return catalog, [*catalog.notes.remarks, *([unwrapped] if unwrapped else [])]


def _choose(
    catalog: Catalog,
    writer: Writer,
    dtype: str | None,
    keep_dtype: Sequence[str],
    select: Sequence[str],
    exclude: Sequence[str],
    where: str,
    remarks: list[str],
) -> Chosen:
    """What goes over; weights that change their dtype are read from their masters."""
    masters = master_weights.converted_weights(catalog, dtype)
    masters = {weight: master for weight, master in masters.items() if not is_kept(weight, keep_dtype)}
    chosen = choose(master_weights.from_their_masters(catalog, masters), writer, select, exclude, where)
    masters = {weight: master for weight, master in masters.items() if weight in chosen.catalog.names}
    no_place = master_weights.without_taken(chosen.no_place, chosen.catalog.names, masters, catalog)
    chosen = replace(chosen, no_place=no_place)
    if masters:
        remarks.append(f"{len(masters)} weights are made of their master weights (optimizer/*/fp32), which are exact")
    return replace(chosen, left_out=master_weights.without_taken(chosen.left_out, chosen.catalog.names, masters, catalog))


def _with_lost(chosen: Chosen, job: WriteJob, writer: Writer, dst: str, *, drop: bool) -> Chosen:
    """With what the writer leaves out besides. Raises UnsupportedError when weights or optimizer state get lost unasked."""
    lost = [name for name in (*chosen.no_place, *job.left_out) if name.split("/")[0] in ("model", "optimizer")]
    if lost and writer.whole_state and not drop:
        why = f"{writer.name} has no place for {shorten(lost)}: pass drop=True (--drop) to leave them out, or exclude them"
        raise UnsupportedError(dst, why)
    return replace(chosen, left_out=tuple(sorted({*chosen.left_out, *job.left_out})))


def _check_layout(layout: MeshLayout | None, writer: Writer, dst: str) -> None:
    if layout is not None and not writer.takes_layout:
        taking = " and ".join(name for name in formats.writer_names() if formats.writer(name).takes_layout)
        raise UnsupportedError(dst, f"a layout has no meaning in the format {writer.name}: it is for {taking}")


def run(conversion: Conversion, group: Group | None = None, on_progress: Progress | None = None) -> ConvertReport:
    """Carry out a conversion. On every rank of `group`, with equal conversions."""
    group = Group() if group is None else group
    began = time.monotonic()
    count = _Count(conversion.written_bytes, on_progress)
    formats.writer(conversion.to).write(replace(conversion.job, group=group, on_bytes=count))
    return ConvertReport(
        conversion.tensors,
        conversion.read_bytes,
        sum(group.all_gather(count.done)),
        time.monotonic() - began,
        conversion.left_out,
        conversion.values_left_out,
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


def _companions(source: Source, reader: Reader, catalog: Catalog) -> Companions:
    """The files that travel along: those at the source, or in the checkpoint of a run that it led to."""
    if reader.companions is not None:
        return reader.companions(source)
    found = sidecar_files.gather(source)
    return found if found.files or catalog.store.url == source.store.url else sidecar_files.gather(Source(catalog.store))


def _shares(read_plan: ReadPlan) -> tuple[FileShare, ...]:
    """Bytes of each file that the plan reads."""
    catalog = read_plan.catalog
    file = catalog.fragments.file[read_plan.fragment]
    nbytes = np.bincount(file, weights=read_plan.stop - read_plan.start, minlength=len(catalog.files)).astype(np.int64)
    return tuple(FileShare(f.path, f.size, int(n)) for f, n in zip(catalog.files, nbytes, strict=True) if n)

"""What a writer is given: the pieces of the checkpoint to be, and a way to get their bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucformat.box import Box
from ucformat.catalog import Notes, TensorSpec
from ucformat.containers.file_image import ByteRequest, ByteSource
from ucformat.dtypes import DTYPES
from ucformat.group import Group
from ucformat.storage.store import Store

_SHOWN = 20  # names in a remark
MAX_FILE_BYTES = 4 << 30  # a size that object stores and file systems both take, and that spreads over ranks


@dataclass(frozen=True, slots=True)
class OutputBox:
    """One piece of a tensor to be written: `box` of the tensor `spec`, row-major."""

    spec: TensorSpec
    box: Box

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def whole(self) -> bool:
        return self.box.length == self.spec.shape

    @property
    def nbytes(self) -> int:
        return self.box.volume * DTYPES[self.spec.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Companion:
    """One file that travels with a model: where it lies in its store, and its path relative to a model directory."""

    stored: str
    path: str
    size: int
    digest: str = ""
    """xxh3-64 of its bytes, where a commit record says it."""


@dataclass(frozen=True, slots=True)
class Companions:
    """Files that travel with a model, where they come from, and a line on each kind of file that stays behind."""

    store: Store | None = None
    files: tuple[Companion, ...] = ()
    remarks: tuple[str, ...] = ()

    def without(self, paths: Collection[str], why: str) -> Companions:
        """The others, with a remark that says why `paths` don't go along."""
        kept = tuple(item for item in self.files if item.path not in paths)
        return replace(self, files=kept, remarks=(*self.remarks, f"not copied, {why}: {shorten(sorted(paths))}"))


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Everything a format's `write(job)` needs. Every rank of `group` holds an equal job and writes its share."""

    store: Store
    """The directory to be; it appears only when complete. With `file`: the existing directory around that file."""
    targets: Sequence[OutputBox]
    """Pieces that tile every tensor; `fill` counts them by their index here."""
    fill: ByteSource
    values: object = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    group: Group = field(default_factory=Group)
    companions: Companions = field(default_factory=Companions)
    """Files that travel along (configuration, tokenizer)."""
    dtype: str | None = None
    """What the model's floating-point tensors were converted to, for the files that travel along; None: they were not."""
    max_file_bytes: int = MAX_FILE_BYTES
    overwrite: bool = False
    on_bytes: Callable[[int], None] | None = None
    """Called with the number of tensor bytes just written, from any thread."""
    file: str | None = None
    """Name of the one file to be written into `store`, for formats that are a single file."""
    layout: Sequence[Sequence[int]] | None = None
    """Which targets (by index) go into which output file, for formats whose files may be divided freely."""

    left_out: Sequence[str] = ()
    """Names of tensors among the targets that are not written: set by `Writer.prepare`, which knows their shapes."""
    options: Mapping[str, str | int] = field(default_factory=dict)
    """Settings of the target's own, of those that its `Writer.options` names."""
    finish: Callable[[], None] | None = None
    """Called on every rank when its share is written, before anything is committed: the source's last checks."""

    def shards(self) -> list[list[int]]:
        """Targets of each output file: as `layout` says, else in order, up to `max_file_bytes` each; at least one."""
        if self.layout is not None:
            return [list(part) for part in self.layout]
        shards: list[list[int]] = [[]]
        held = 0
        for index, target in enumerate(self.targets):
            if held and held + target.nbytes > self.max_file_bytes:
                shards.append([])
                held = 0
            shards[-1].append(index)
            held += target.nbytes
        return shards

    def fill_of(self, pieces: Sequence[int]) -> ByteSource:
        """The job's `fill`, for a file whose piece i is target `pieces[i]`."""

        def fill(parts: Sequence[ByteRequest]) -> None:
            self.fill([ByteRequest(pieces[part.piece], part.start, part.stop, part.out) for part in parts])

        return fill


def shorten(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names) if len(names) <= _SHOWN else f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"

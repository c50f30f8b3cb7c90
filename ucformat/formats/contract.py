"""What a format is: a `Reader` that turns checkpoints of one kind into catalogs, a `Writer` that writes them, or both.

Everything that planning, loading, converting and comparing need to know of a format is a field here; nobody asks for its name.
A format's module has them as `READER` and `WRITER`. Those of other packages are found through the entry-point group
`ucformat.formats` (see `formats.registry`), and `ucformat.testing` has the tests that each must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ucformat.catalog import Catalog
from ucformat.formats.source import Source
from ucformat.formats.target import Companions, WriteJob

Owns = Callable[[str], bool]
"""Whether a path in the checkpoint's directory belongs to the checkpoint."""

Values = Literal["any", "plain", "none"]
"""What a format keeps of the value tree: all of it; all but objects of unknown classes; nothing, as it holds tensors only."""


def _no_explanation(source: Source) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads one kind of checkpoint."""

    name: str
    """As users see it (`hf`, `dcp-hf`), and as `Notes.origin` records it."""
    detect: Callable[[Source], bool]
    """Whether a source is of this kind, from names and the first few bytes of files. Must not raise on foreign input."""
    open_catalog: Callable[[Source], Catalog]
    """The catalog of a source that `detect` recognises; reads metadata only. Raises FormatError for what is malformed,
    MissingFileError, ChecksumError, UnsupportedError for what it does not read."""
    open_step: Callable[[Source, int], Catalog] | None = None
    """The same for one step, where a checkpoint of this kind holds several at once. None: `step=` means a folder of a run."""
    precedes: frozenset[str] = frozenset()
    """Names of formats whose `detect` may accept this kind, too: this reader is the one to take then."""
    explain: Callable[[Source], str | None] = _no_explanation
    """Why a source that no reader recognises is not of this kind (`nothing was committed here`); None when it isn't close."""
    detects_changes: bool = False
    """Whether its catalogs notice by themselves that a file was replaced while it is read. Otherwise files are compared by
    their identity, before and after."""
    bookkeeping: frozenset[str] = frozenset()
    """First components of names under which its program keeps records that a state need not have a place for."""
    has_masters: bool = False
    """Whether weights are rounded from `optimizer/<parameter>/fp32`, so that a model in fp32 continues from these."""
    names_advice: str = ""
    """What to do when names of its models differ from those in memory, for the error that lists them."""
    companions: Callable[[Source], Companions] | None = None
    """The files that travel along with a model of this kind (configuration, tokenizer). None: those of well-known names."""
    owned_files: Callable[[Source], Owns] | None = None
    """Which paths belong to the checkpoint in a directory, and go when it is replaced. None: it is never replaced."""


def _unchanged(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    return job, ()


def _sizes_of_shards(job: WriteJob) -> list[int]:
    return [sum(job.targets[i].nbytes for i in held) for held in job.shards()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes one kind of checkpoint."""

    name: str
    """As users give it: `convert(…, to=name)`."""
    write: Callable[[WriteJob], None]
    """Write a checkpoint. Every rank of `job.group` calls it and writes its share; the checkpoint appears only when complete
    (`formats.staging` does that), and a failure on any rank raises on all and leaves what was there before."""
    values: Values = "any"
    takes: Callable[[Sequence[str]], Sequence[str]] = list
    """Which of a checkpoint's tensors it has a place for, by name; a conversion reports the others as left out."""
    whole_state: bool = False
    """Whether it is meant for all of a training run: weights and optimizer state that it has no place for are then an error,
    unless the user drops them. Otherwise they are reported as left out, as of a format for models alone."""
    takes_layout: bool = False
    """Whether its files may hold boxes of tensors, divided as `WriteJob.layout` says."""
    single_file: bool = False
    """Whether it is one file, `WriteJob.file`, rather than a directory."""
    not_a_directory: tuple[str, ...] = ()
    """Endings of paths that a user takes for a file, where this is a directory: they are refused."""
    staged: bool = False
    """Whether an interrupted attempt is taken up again, as `formats.staging.publish` does."""
    bare_names: bool = False
    """Whether what wrappers add to names (`module.`, `_orig_mod.`) is left out."""
    options: frozenset[str] = frozenset()
    """Names of settings of its own that a conversion may give (`convert(…, options={name: value})`)."""
    prepare: Callable[[WriteJob], tuple[WriteJob, tuple[str, ...]]] = _unchanged
    """The job as it will be written, and remarks for the report. Reads no tensor. Raises UnsupportedError for what can't be."""
    file_sizes: Callable[[WriteJob], list[int]] = _sizes_of_shards
    """Tensor bytes of each file that would be written."""

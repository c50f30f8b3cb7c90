"""The layout language as types: what a layout file may say. specs/layout.md explains it; its schema is generated from here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ucformat.errors import LayoutError
from ucformat.layout import filenames

MAX_RANKS = 100_000  # the largest jobs there are; a typo must not fill the memory
MAX_BYTES = 4 << 20  # of a layout file
_SHOWN = 60  # characters of a layout in messages
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RANK = "rank"
"""In file names: the number of a rank over the whole mesh, the last axis varying fastest."""

Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0)]
Dim = Annotated[int, Meta(ge=0, le=63)]
Length = Annotated[int, Meta(ge=-1)]


class Pad(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A dimension that is stored longer than it is, as a vocabulary that is padded to a multiple of the ranks."""

    dim: Dim
    size: Count
    """Its true length. What lies behind it is no part of the tensor."""
    to: Count | None = None
    """Its padded length, over all ranks. Without it, any length is read; the next multiple of the ranks is written."""


class Unflatten(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One dimension seen as several, row-major, before it is cut: for what is stacked along it, as experts are."""

    dim: Dim
    sizes: list[Length]
    """Lengths in the whole tensor; -1, at most once: what is left."""


class Unstack(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A dimension over which several parameters are stacked, each of which is a tensor of the checkpoint."""

    dim: Dim
    names: str
    """Their names, with `{i}` for the index."""


class Rule(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where the ranks have the tensors that match."""

    match: str | list[str]
    """Globs. With a `/`: over the whole name. Without: over parameters, for weights and for optimizer state of their shape."""
    shard: dict[str, Dim] = {}
    """Axis → the dimension that it cuts. Axes that cut one dimension nest, the first of the mesh outermost."""
    parts: Size | list[Length | list[Count]] | None = None
    """The cut dimension is made of parts, each of which is cut by itself: how many equal ones, or the length of each in the whole
    tensor (-1, at most once: what is left), or of each the length that each rank has."""
    uneven: bool = False
    """Whether the ranks' lengths may differ. They are read as they are; written as `torch.chunk` cuts."""
    average: list[str] = []
    """Axes over which copies may differ, their mean being the tensor."""
    held_by: dict[str, Count | list[Count]] = {}
    """Axis → the coordinates that hold it, for axes over which tensors are spread."""
    pad: Pad | None = None
    unflatten: Unflatten | None = None
    """Applied first: `shard`, `parts` and `pad` count the dimensions that result."""
    unstack: Unstack | None = None
    apart: bool = False
    """Whether each rank has one of its own, as states of random number generators are: kept as `ranks/<coordinates>/<name>`."""

    @property
    def globs(self) -> list[str]:
        return [self.match] if isinstance(self.match, str) else self.match

    @property
    def title(self) -> str:
        """How messages name it."""
        return ", ".join(self.globs)


class Numbering(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Numbers in names that each coordinate of an axis counts from 0: layers of a stage, experts of a rank."""

    prefix: str
    """What stands before the number and its dot: `layers`, `mlp.experts`."""
    axis: str
    counts: list[Count] | None = None
    """How many there are on each coordinate; without it, as many as the files hold, and equally many are written."""


class RankFile(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The files of one kind that ranks wrote."""

    path: str
    """Relative to the folder, with `{axis}` for a coordinate (`{tp:02d}` with zeros), or `{rank}`."""
    at: str = ""
    """Where the contents belong in the state: `model` for a bare state dict. Empty: as the file itself says."""


class Layout(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A layout file."""

    layout: Literal[1]
    """Version of the language."""
    mesh: dict[str, Size]
    """Axis → number of ranks, the last one varying fastest."""
    rules: list[Rule] = []
    unmatched: Literal["refuse", "replicated"] = "refuse"
    """What a tensor is that no rule matches: an error, or the same on all ranks that hold it (compared when it is read)."""
    spread: list[str] | None = None
    """Axes over which whole tensors are spread, so that some coordinates hold them and others don't. By default `pp`."""
    numbering: list[Numbering] = []
    aliases: dict[str, str] = {}
    """Further names of tensors: alias → tensor. Where files hold both, they must be equal."""
    files: str | list[str | RankFile] | None = None
    """The files of the ranks, for checkpoints that have no format of their own."""

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def spread_axes(self) -> frozenset[str]:
        named = (["pp"] if "pp" in self.mesh else []) if self.spread is None else self.spread
        return frozenset(named) | {entry.axis for entry in self.numbering}

    @property
    def rank_files(self) -> list[RankFile]:
        """`files` in its longest form."""
        listed = [] if self.files is None else [self.files] if isinstance(self.files, str) else self.files
        return [RankFile(path=item) if isinstance(item, str) else item for item in listed]


class Declared(Struct, frozen=True, kw_only=True):
    """A layout that was read and checked, and how messages call it."""

    title: str
    layout: Layout


def read(where: str | os.PathLike[str] | Declared) -> Declared:
    """A layout from a JSON or YAML file (`*.yaml`, `*.yml`), or from its text. Raises LayoutError."""
    if isinstance(where, Declared):
        return where
    given = os.fspath(where)
    if given.lstrip().startswith("{"):
        return parse(given)
    try:
        data = Path(given).read_bytes()
    except OSError as error:
        raise LayoutError(given, f"can't be read: {error.strerror}") from error
    return parse(data, given, yaml=given.endswith((".yaml", ".yml")))


def parse(text: str | bytes, title: str = "", *, yaml: bool = False) -> Declared:
    """A layout from its text. Raises LayoutError saying where in it what is wrong."""
    shown = title or (str(text) if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]!s}...")
    if len(text) > MAX_BYTES:
        raise LayoutError(shown, f"larger than {MAX_BYTES} bytes")
    try:
        layout = msgspec.convert(_yaml(text, shown), Layout) if yaml else msgspec.json.decode(text, type=Layout)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LayoutError(shown, str(error)) from error
    for why in _faults(layout):
        raise LayoutError(shown, why)
    return Declared(title=shown, layout=layout)


def _yaml(text: str | bytes, title: str) -> object:
    """The tree of a YAML text. Aliases are refused: a few lines of them mean gigabytes."""
    try:
        import yaml
    except ImportError:
        raise LayoutError(title, "reading YAML needs the package PyYAML: pip install 'ucformat[yaml]', or write JSON") from None
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise LayoutError(title, "has YAML aliases (*name), which are not read: write it out")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LayoutError(title, f"malformed YAML: {error}") from error


def _faults(layout: Layout) -> Iterator[str]:
    """What a layout says that can't be meant."""
    mesh = layout.mesh
    if not mesh or layout.ranks > MAX_RANKS:
        yield f"mesh: there must be an axis, and at most {MAX_RANKS} ranks"
    for axis in mesh:
        if not _AXIS.fullmatch(axis) or axis == RANK:
            yield f"mesh: {axis!r} is no name of an axis"
    for axis in (*(layout.spread or ()), *(entry.axis for entry in layout.numbering)):
        if axis not in mesh:
            yield f"the mesh has no axis {axis!r} (its axes: {', '.join(mesh)})"
    for entry in layout.numbering:
        if entry.counts is not None and len(entry.counts) != mesh[entry.axis]:
            yield f"numbering of {entry.prefix!r}: {len(entry.counts)} counts for {mesh[entry.axis]} ranks along {entry.axis!r}"
    for rule in layout.rules:
        for why in _rule_faults(layout, rule):
            yield f"rule {rule.title!r}: {why}"
    for file in layout.rank_files:
        try:
            filenames.check(file.path, mesh)
        except ValueError as error:
            yield f"files: {file.path!r}: {error}"


def _rule_faults(layout: Layout, rule: Rule) -> Iterator[str]:
    mesh, spread = layout.mesh, layout.spread_axes
    if not rule.globs or not all(rule.globs):
        yield "an empty pattern"
    for axis in (*rule.shard, *rule.average, *rule.held_by):
        if axis not in mesh:
            yield f"the mesh has no axis {axis!r} (its axes: {', '.join(mesh)})"
    if both := set(rule.shard) & {*rule.average, *rule.held_by} or set(rule.average) & set(rule.held_by):
        yield f"says two things of axis {min(both)!r}"
    for axis, at in rule.held_by.items():
        if axis not in spread:
            yield f"'held_by' is for axes over which tensors are spread, and {axis!r} is none (see 'spread')"
        held = [at] if isinstance(at, int) else at
        if axis in mesh and (not held or max(held) >= mesh[axis]):
            yield f"axis {axis!r} has coordinates 0 to {mesh[axis] - 1}, and 'held_by' says {held}"
    yield from _form_faults(rule)


def _form_faults(rule: Rule) -> Iterator[str]:
    others = (rule.shard, rule.average, rule.held_by, rule.pad, rule.unflatten, rule.unstack)
    if rule.apart and any(others):
        yield "'apart' says all: each rank has a tensor of its own"
    if rule.parts is not None and len(set(rule.shard.values())) != 1:
        yield "'parts' needs 'shard' with the one dimension that they are parts of"
    if isinstance(rule.parts, list) and sum(part == -1 for part in rule.parts) > 1:
        yield "'parts' has -1 more than once"
    if rule.unflatten is not None:
        sizes = rule.unflatten.sizes
        if len(sizes) < 2 or sizes.count(-1) > 1 or 0 in sizes:
            yield "'unflatten' needs two lengths or more, with -1 at most once"
    if rule.unstack is not None and rule.unstack.names.count("{i}") != 1:
        yield "'unstack' needs names with one {i}"

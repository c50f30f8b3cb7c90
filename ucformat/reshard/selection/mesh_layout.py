"""Layouts declared rather than derived: mesh axes with sizes, and rules that give every rank its boxes.

Used where no live DTensors say it: `ucconvert --layout` cuts the output for a mesh, one shard file per rank.

    dp=2,tp=4                       every axis cuts dimension 0, `dp` first and `tp` within its parts; `pp` takes layers
    rules.json                      {"mesh": {"pp": 2, "tp": 2},
                                     "rules": [{"match": "model/*.wo.weight", "tp": 1},
                                               {"match": "model/embed.weight", "pp": 0, "tp": 0}]}

A rule's `match` is a glob over the whole name; the first rule that matches counts. `"axis": d` cuts dimension d over
that axis, like `torch.chunk`; for `pp` the number is the stage that holds the tensor, since a pipeline cuts no tensor.
An axis that a rule doesn't name replicates. A tensor that no rule matches is cut like without rules.
Replicas are written once: by the rank that has the fewest bytes so far.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.errors import LayoutError
from ucformat.formats.target import OutputBox

PIPELINE = "pp"
MAX_RANKS = 100_000  # the largest jobs there are; a typo must not fill the memory

_LAYER = re.compile(r"(?:^|[./])(\d{1,6})(?=[./]|$)")


@dataclass(frozen=True, slots=True)
class Rule:
    """What the tensors whose name matches `match` do on each axis."""

    match: str
    axes: Mapping[str, int]
    """Axis → dimension that it cuts, `pp` → stage."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Axes in nesting order (the last varies fastest over ranks), and rules."""

    mesh: Mapping[str, int]
    rules: tuple[Rule, ...] = ()
    told: str = ""
    """How the user gave it, for messages."""

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def rule(self, name: str) -> Rule | None:
        """The first rule that matches a name."""
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(name, rule.match)), None)


def parse(text: str) -> MeshLayout:
    """`dp=2,tp=4`, or the JSON of a rule file. Raises LayoutError."""
    if text.lstrip().startswith("{"):
        return _from_json(text)
    mesh: dict[str, int] = {}
    for item in text.split(","):
        axis, equals, size = (part.strip() for part in item.partition("="))
        if not axis or not equals or not size.isdecimal() or axis in mesh:
            raise LayoutError(text, f"{item.strip()!r} is not AXIS=SIZE: write dp=2,tp=4 or name a JSON file")
        mesh[axis] = int(size)
    return _checked(MeshLayout(mesh, (), text))


def _from_json(text: str) -> MeshLayout:
    told = text if len(text) <= 60 else text[:57] + "..."
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(told, f"malformed JSON: {error}") from error
    mesh, rules = tree.get("mesh"), tree.get("rules", [])
    unknown = tree.keys() - {"mesh", "rules"}
    if unknown or not _numbers(mesh) or not isinstance(rules, list):
        raise LayoutError(told, 'expected {"mesh": {axis: size}, "rules": [{"match": glob, axis: dimension}]}')
    return _checked(MeshLayout(mesh, tuple(_rule(told, mesh, item) for item in rules), told))


def _rule(told: str, mesh: Mapping[str, int], item: object) -> Rule:
    if not isinstance(item, dict) or not isinstance(item.get("match"), str):
        raise LayoutError(told, f'rule {item!r} has no "match"')
    axes = {axis: number for axis, number in item.items() if axis != "match"}
    if not _numbers(axes) or axes.keys() - mesh.keys():
        raise LayoutError(told, f"rule {item['match']!r}: expected numbers for axes of the mesh ({', '.join(mesh)})")
    return Rule(item["match"], axes)


def _numbers(found: object) -> bool:
    return isinstance(found, dict) and all(type(n) is int for n in found.values())


def _checked(layout: MeshLayout) -> MeshLayout:
    if not layout.mesh or any(size < 1 for size in layout.mesh.values()) or layout.ranks > MAX_RANKS:
        raise LayoutError(layout.told, f"axes need sizes of at least 1, and at most {MAX_RANKS} ranks together")
    return layout


def cut(layout: MeshLayout, specs: Sequence[TensorSpec]) -> tuple[list[OutputBox], list[list[int]]]:
    """The pieces of all tensors, disjoint and together every tensor; and for each mesh rank the indices of its pieces.

    Raises LayoutError when a rule names a dimension or stage that isn't there.
    """
    stages = _stages(layout, specs)
    load = [0] * layout.ranks
    pieces: list[OutputBox] = []
    ranks: list[list[int]] = [[] for _ in load]
    for spec in specs:
        for box, holders in _boxes(layout, spec, stages[spec.name]):
            rank = min(holders, key=lambda holder: (load[holder], holder))
            piece = OutputBox(spec, box)
            load[rank] += piece.nbytes
            ranks[rank].append(len(pieces))
            pieces.append(piece)
    return pieces, ranks


def _stages(layout: MeshLayout, specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The pipeline stage of each tensor without a rule: by its layer number, evenly; no number means stage 0."""
    layers = {spec.name: int(found[1]) for spec in specs if (found := _LAYER.search(spec.name))}
    count = max(layers.values(), default=0) + 1
    return {spec.name: layers.get(spec.name, 0) * layout.mesh.get(PIPELINE, 1) // count for spec in specs}


def _boxes(layout: MeshLayout, spec: TensorSpec, stage: int) -> Iterator[tuple[Box, list[int]]]:
    """Non-empty boxes of one tensor, and the ranks that hold each. A tensor without items is one empty box."""
    axes = _axes(layout, spec, stage)
    held: dict[Box, list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*(range(size) for size in layout.mesh.values()))):
        box = _box(layout, spec, axes, dict(zip(layout.mesh, coordinates, strict=True)))
        if box is not None and (box.volume or not math.prod(spec.shape)):
            held.setdefault(box, []).append(rank)
    if not math.prod(spec.shape):
        return iter([(Box.whole(spec.shape), [rank for ranks in held.values() for rank in ranks])])
    return iter(held.items())


def _axes(layout: MeshLayout, spec: TensorSpec, stage: int) -> Mapping[str, int]:
    rule = layout.rule(spec.name)
    if rule is None:
        cuts = {axis: 0 for axis in layout.mesh if axis != PIPELINE} if spec.shape else {}
        return {**cuts, PIPELINE: stage} if PIPELINE in layout.mesh else cuts
    for axis, number in rule.axes.items():
        limit = layout.mesh[axis] if axis == PIPELINE else len(spec.shape)
        if not -limit <= number < limit:
            what = f"{limit} stages" if axis == PIPELINE else f"{limit} dimensions"
            raise LayoutError(layout.told, f"rule {rule.match!r}: {axis} is {number}, tensor {spec.name!r} has {what}")
    return rule.axes


def _box(layout: MeshLayout, spec: TensorSpec, axes: Mapping[str, int], at: Mapping[str, int]) -> Box | None:
    """What the rank at mesh coordinates `at` holds; None when the tensor is on another pipeline stage."""
    offset, length = [0] * len(spec.shape), list(spec.shape)
    for axis, size in layout.mesh.items():
        if axis not in axes:
            continue
        if axis == PIPELINE:
            if axes[axis] % size != at[axis]:
                return None
            continue
        dim = axes[axis]
        step = -(-length[dim] // size)
        start = min(at[axis] * step, length[dim])
        offset[dim], length[dim] = offset[dim] + start, min(step, length[dim] - start)
    return Box(tuple(offset), tuple(length))

"""Names of the files of ranks: `mp_rank_{tp:02d}_{pp:03d}/model.pt`, one for each combination of the axes that it names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::(0\d{1,2}|\d)d?)?\}")
_RANK = "rank"

Coords = Mapping[str, int]
"""Axis → coordinate."""


def check(pattern: str, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for a pattern that names no files of such a mesh."""
    rest = _FIELD.sub("", pattern)
    if "{" in rest or "}" in rest:
        raise ValueError("a field is {axis}, or {axis:02d}")
    if not pattern or pattern.startswith("/") or "\\" in pattern or {"..", ".", ""} & set(pattern.split("/")):
        raise ValueError("must be a path inside the folder")
    fields = [found[1] for found in _FIELD.finditer(pattern)]
    for name in fields:
        if name not in mesh and name != _RANK:
            raise ValueError(f"the mesh has no axis {name!r} (its axes: {', '.join(mesh)})")


def axes(pattern: str, mesh: Mapping[str, int]) -> list[str]:
    """The axes along which files differ, in the order of the mesh."""
    fields = {found[1] for found in _FIELD.finditer(pattern)}
    return list(mesh) if _RANK in fields else [axis for axis in mesh if axis in fields]


def files(pattern: str, mesh: Mapping[str, int]) -> Iterator[tuple[dict[str, int], str]]:
    """The coordinates of each file along `axes`, and its name."""
    named = axes(pattern, mesh)
    for at in itertools.product(*(range(mesh[axis]) for axis in named)):
        coords = dict(zip(named, at, strict=True))
        yield coords, _FIELD.sub(lambda found, c=coords: _text(found, c, mesh), pattern)  # type: ignore[misc]


def rank_of(coords: Coords, mesh: Mapping[str, int]) -> int:
    """The number of a rank, the last axis varying fastest."""
    sizes = list(mesh.values())
    return sum(coords[axis] * math.prod(sizes[i + 1 :]) for i, axis in enumerate(mesh))


def _text(found: re.Match[str], coords: Coords, mesh: Mapping[str, int]) -> str:
    number = rank_of(coords, mesh) if found[1] == _RANK else coords[found[1]]
    return f"{number:{found[2] or ''}d}"


def matcher(pattern: str) -> re.Pattern[str]:
    """Matches names of that form, whatever the numbers in them."""
    parts, end = [], 0
    for found in _FIELD.finditer(pattern):
        parts += [re.escape(pattern[end : found.start()]), r"\d+"]
        end = found.end()
    return re.compile("".join([*parts, re.escape(pattern[end:])]))

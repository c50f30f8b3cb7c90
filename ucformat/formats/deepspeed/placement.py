"""What `universal_checkpoint_info` says of how tensor-parallel ranks hold a parameter.

Patterns are regular expressions that match at the start of a name. An affine map (DeepSpeed 0.19.8) takes precedence over the
lists of patterns; a parameter that nothing names is cut along its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ucformat.containers.zip_write import OutgoingObject
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.deepspeed.optim import mapping, sequence
from ucformat.layout.cuts import Cut, Shape, View, along, chunks, view_cuts
from ucformat.pickles.inert import Inert

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_AFFINE = "affine_map"
STAGES = "pipeline_replicated_parameter_patterns"
"""Names of parameters that several pipeline stages hold, of which the first one's are taken."""
_MAX_PATTERN = 4096  # characters
_NESTED = re.compile(r"[*+}]\)?[*+{]|\([^)]*[|*+{][^)]*\)[*+{]|\\[1-9]")
"""Repetitions of repetitions or alternatives, which take exponential time on some names."""
_REPEATED = re.compile(r"(?<!\\)[*+{]")
_MAX_REPEATED = 4  # repetitions in one pattern: each multiplies the time by the length of a name
_AFFINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """How ranks hold one tensor."""

    shape: Shape
    """Of the whole tensor."""
    cuts: Sequence[Sequence[Cut]]
    """Each rank's boxes. Boxes of two ranks that are the same part of the whole are replicas."""
    kind: Literal["stated", "assumed", "averaged"]
    """Whether the file says so, or nothing names the parameter; averaged: the whole is the mean of the ranks' tensors."""
    dropped: int = 0
    """Rows of padding at the end that are no part of the whole."""


class _Patterns:
    """A set of patterns. DeepSpeed writes one for each parameter: those that match one name alone are looked up."""

    def __init__(self, patterns: Iterable[object], file: str) -> None:
        self._exact: dict[str, list[str]] = {}
        self._others: list[tuple[str, re.Pattern[str]]] = []
        for pattern in patterns:
            slow = not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN or len(_REPEATED.findall(pattern)) > _MAX_REPEATED
            if slow or not isinstance(pattern, str) or _NESTED.search(pattern):
                raise FormatError(file, f"universal_checkpoint_info has a pattern that is not looked for: {pattern!r:.100}")
            name = re.sub(r"\\(\W)", r"\1", pattern[1:-1])
            if pattern == f"^{re.escape(name)}$":
                self._exact.setdefault(name, []).append(pattern)
                continue
            try:
                self._others.append((pattern, re.compile(pattern)))
            except (re.error, RecursionError, OverflowError) as error:
                raise FormatError(file, f"universal_checkpoint_info has the pattern {pattern!r:.100}: {error}") from None

    def matching(self, name: str) -> list[str]:
        """The patterns that match at the start of `name`."""
        return [*self._exact.get(name, ()), *(pattern for pattern, compiled in self._others if compiled.match(name))]


class Rules:
    """`universal_checkpoint_info` of one checkpoint, understood. Raises FormatError for one that can't be."""

    def __init__(self, info: object, file: str) -> None:
        self.file = file
        self.info = mapping(info, file, "universal_checkpoint_info")
        version = self.info.get("universal_checkpoint_version", 0.0)
        self.version = float(version) if isinstance(version, (int, float)) else 0.0
        lists = {key: list(_strings(self.info.get(key) or [], file, key)) for key in _LISTS}
        self._lists = {key: _Patterns(patterns, file) for key, patterns in lists.items()}
        parts = [_Parts.read(item, file) for item in sequence(self.info.get(_PARTS) or [], file, _PARTS)]
        self._parts = {pattern: part for part in reversed(parts) for pattern in part.patterns}
        self._parts_patterns = _Patterns([pattern for part in parts for pattern in part.patterns], file)
        self.widths = mapping(self.info.get(_WIDTHS) or {}, file, _WIDTHS)
        self.unsupported = mapping(self.info.get(_UNSUPPORTED) or {}, file, _UNSUPPORTED)
        self._unsupported = _Patterns(self.unsupported, file)
        self.affine = self._affine_params()
        self._affine = _Patterns(self.affine, file)
        self._unused = {pattern for key in _LISTS if key != STAGES for pattern in lists[key]} | set(self._parts)
        self._placed: dict[tuple[str, tuple[Shape, ...]], Placement] = {}

    def unused(self) -> list[str]:
        """Patterns that named none of the parameters that were looked up."""
        return sorted(self._unused)

    def on_first_stage(self, name: str) -> bool:
        """Whether a parameter that several pipeline stages hold is to be taken from the first of them."""
        return self._match(STAGES, name)

    def place(self, name: str, shards: Sequence[Shape]) -> Placement:
        """How ranks hold parameter `name`, of which they have tensors of these shapes. Raises FormatError, UnsupportedError."""
        for pattern in self._unsupported.matching(name):
            reason = str(self.unsupported[pattern])
            raise UnsupportedError(self.file, f"DeepSpeed recorded that it can't say how ranks hold {name!r}: {reason:.200}")
        key = name, tuple(shards)
        if key not in self._placed:
            try:
                self._placed[key] = self._vocabulary(name, self._place(name, shards))
            except ValueError as error:
                raise FormatError(self.file, f"universal_checkpoint_info does not fit {name!r}: {error}") from None
        return self._placed[key]

    def hints(self, name: str, whole: Shape) -> dict[str, object]:
        """What a universal folder says beside a parameter, so that DeepSpeed cuts it for tensor-parallel ranks as it was."""
        hints: dict[str, object] = {"cat_dim": 1 if self._match(_ROWS, name) else 0}
        if self._match(_HALVES, name):
            hints["param_n_sub_params"] = 2
        if self._match(_VOCABULARY, name):
            hints["vocab_tensor"] = True
        found = self._parts_of(name)
        if found is not None and found[0].dim < len(whole):
            part, size = found[0], whole[found[0].dim]
            count = part.shape[part.dim]
            widths = (size // count,) * count if isinstance(count, int) and count > 0 else count
            shape = (*part.shape[: part.dim], widths, *part.shape[part.dim + 1 :])
            fields = {"patterns": list(part.patterns), "shape": shape, "partition_dim": part.dim}
            return {"sub_param_shape": OutgoingObject("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", fields)}
        return hints

    def _place(self, name: str, shards: Sequence[Shape]) -> Placement:
        affine = [self.affine[pattern] for pattern in self._affine.matching(name)]
        listed = {key: self._match(key, name) for key in (_REPLICATED, _AVERAGED, _HALVES, _ROWS)}
        parts = self._parts_of(name)
        if len(affine) > 1:
            raise ValueError("several entries of its affine map match")
        if affine:
            return _from_map(affine[0], shards, self.file)
        if listed[_REPLICATED] or listed[_AVERAGED]:
            whole = [Cut((0,) * len(shards[0]), (0,) * len(shards[0]), shards[0])]
            if any(shape != shards[0] for shape in shards):
                raise ValueError(f"said to be equal on all ranks, and they hold shapes {list(map(list, shards))}")
            return Placement(shards[0], [whole] * len(shards), "stated" if listed[_REPLICATED] else "averaged")
        if listed[_HALVES]:
            halves = [chunks(shape[0], 2) for shape in shards]
            return Placement(*along(0, shards, [[half[p] for half in halves] for p in (0, 1)]), "stated")
        if parts is not None:
            return self._in_parts(name, *parts, shards)
        dim = 1 if listed[_ROWS] else 0
        if not shards[0]:
            raise ValueError("a scalar, which nothing says how ranks hold")
        return Placement(*along(dim, shards, [[s[dim] if dim < len(s) else 0 for s in shards]]), "stated" if dim else "assumed")

    def _in_parts(self, name: str, part: _Parts, pattern: str, shards: Sequence[Shape]) -> Placement:
        """A fused parameter, of which each rank holds a share of every part."""
        dim = part.dimension(shards[0])
        total = sum(shape[dim] for shape in shards)
        entry = part.shape[part.dim]
        sizes = list(entry) if isinstance(entry, tuple) else [total // entry] * entry if entry > 0 else []
        if sum(sizes) != total:
            raise ValueError(f"its parts {sizes} are not the {total} that its ranks hold")
        if pattern in self.widths:
            widths = [_ints(row, self.file, _WIDTHS) for row in sequence(self.widths[pattern], self.file, _WIDTHS)]
        elif self.version >= 0.4:
            raise ValueError("no widths of its parts on each rank (sub_param_shard_widths)")
        else:
            if odd := [size for size in sizes if size % len(shards)]:
                raise ValueError(f"its parts {odd} do not divide over {len(shards)} ranks, and their widths are not recorded")
            widths = [[size // len(shards)] * len(shards) for size in sizes]
        if [sum(row) for row in widths] != sizes or any(len(row) != len(shards) for row in widths):
            raise ValueError(f"its parts {sizes} are not what ranks are said to hold of them, {widths}")
        return Placement(*along(dim, shards, widths), "stated")

    def _vocabulary(self, name: str, placed: Placement) -> Placement:
        """Without the rows that only pad the vocabulary to a multiple of the ranks."""
        if not self._match(_VOCABULARY, name):
            return placed
        rows = self.info.get("original_vocab_size")
        if type(rows) is not int or rows <= 0:
            raise ValueError(f"a vocabulary, and original_vocab_size is {rows!r:.40}")
        if placed.shape[0] <= rows:
            return placed
        cuts = [
            [
                replace(cut, length=(min(cut.length[0], rows - cut.whole[0]), *cut.length[1:]))
                for cut in held
                if cut.whole[0] < rows
            ]
            for held in placed.cuts
        ]
        return replace(placed, shape=(rows, *placed.shape[1:]), cuts=cuts, dropped=placed.shape[0] - rows)

    def _match(self, key: str, name: str) -> bool:
        found = self._lists[key].matching(name)
        if len(found) > 1:
            raise FormatError(self.file, f"several patterns of {key} match {name!r}: {', '.join(found[:4])}")
        self._unused -= set(found)
        return bool(found)

    def _parts_of(self, name: str) -> tuple[_Parts, str] | None:
        for pattern in self._parts_patterns.matching(name):
            self._unused.discard(pattern)
            return self._parts[pattern], pattern
        return None

    def _affine_params(self) -> Mapping[Any, Any]:
        table = mapping(self.info.get(_AFFINE) or {}, self.file, _AFFINE)
        version = table.get("version", _AFFINE_VERSION)
        if type(version) is not int or version > _AFFINE_VERSION:
            raise UnsupportedError(
                self.file, f"an affine map of version {version!r:.20}; {_AFFINE_VERSION} is the last one that is known"
            )
        return mapping(table.get("params") or {}, self.file, "the affine map")


_LISTS = (_REPLICATED, _AVERAGED, _ROWS, _HALVES, _VOCABULARY, STAGES)


@dataclass(frozen=True, slots=True)
class _Parts:
    """An entry of `parameter_with_sub_params`."""

    patterns: tuple[str, ...]
    shape: tuple[int | tuple[int, ...], ...]
    """Of a view of the parameter; -1 for what is left. At `dim`: the length of each part, or how many equal ones there are."""
    dim: int

    @classmethod
    def read(cls, item: object, file: str) -> _Parts:
        if isinstance(item, Inert):  # SubparamShape, DeepSpeed's own class
            item = item.attributes
        entry = mapping(item, file, f"an entry of {_PARTS}")
        what = f"shape of {_PARTS}"
        dims: list[int | tuple[int, ...]] = [
            n if type(n) is int else tuple(_ints(n, file, what)) for n in sequence(entry.get("shape"), file, what)
        ]
        dim = entry.get("partition_dim")
        if type(dim) is not int or not 0 <= dim < len(dims):
            raise FormatError(file, f"partition_dim of {_PARTS} is {dim!r:.40}")
        return cls(tuple(_strings(entry.get("patterns"), file, _PARTS)), tuple(dims), dim)

    def dimension(self, shard: Shape) -> int:
        """The parameter's dimension that is cut. Raises ValueError when the view is none of it."""
        if self.dim >= len(shard):
            raise ValueError(f"a shape {self.shape} of a parameter with {len(shard)} dimensions")
        for n, wanted in zip(shard[: self.dim], self.shape[: self.dim], strict=True):
            if wanted not in (n, -1):
                raise ValueError(f"a shape {self.shape} of shards of shape {list(shard)}")
        return self.dim


def _from_map(entry: object, shards: Sequence[Shape], file: str) -> Placement:
    """What an entry of the affine map says. Raises ValueError, FormatError, UnsupportedError."""
    table = mapping(entry, file, "an entry of the affine map")
    shape = tuple(_ints(table.get("logical_shape"), file, "logical_shape"))
    ranks = mapping(table.get("ranks"), file, "ranks of the affine map")
    cuts: list[list[Cut]] = []
    if set(ranks) != set(range(len(shards))):
        raise ValueError(f"its affine map is of ranks {sorted(map(str, ranks))[:16]}, and there are {len(shards)}")
    for rank, shard in enumerate(shards):
        held = mapping(ranks[rank], file, "a rank of the affine map")
        if tuple(_ints(held.get("shard_shape"), file, "shard_shape")) != shard:
            raise ValueError(f"its affine map says shape {held.get('shard_shape')} of rank {rank}, which holds {list(shard)}")
        mine: list[Cut] = []
        for piece in sequence(held.get("pieces"), file, "pieces"):
            mine += _piece(mapping(piece, file, "a piece of the affine map"), shard, shape, file)
        cuts.append(mine)
    return Placement(shape, cuts, "stated")


def _piece(piece: Mapping[Any, Any], shard: Shape, whole: Shape, file: str) -> list[Cut]:
    if piece.get("scale", 1.0) != 1.0:
        raise UnsupportedError(
            file, f"an affine map that scales values by {piece['scale']!r:.40}: the optimizer's state can't follow"
        )
    size = tuple(_ints(piece.get("shape"), file, "shape of a piece"))
    views = []
    for key in ("dest", "source"):
        offset, strides = sequence(piece.get(key), file, key)
        view = View(_ints([offset], file, key)[0], tuple(_ints(strides, file, key)))
        if len(view.strides) != len(size):
            raise ValueError(f"a piece of shape {list(size)} with strides {list(view.strides)}")
        views.append(view)
    return view_cuts(size, views[0], views[1], shard, whole)


def _strings(value: object, file: str, what: str) -> Iterator[str]:
    for item in sequence(value, file, what):
        if not isinstance(item, str):
            raise FormatError(file, f"{what} holds {item!r:.40}, which is no pattern")
        yield item


def _ints(value: object, file: str, what: str) -> list[int]:
    found = list(sequence(value, file, what))
    if not all(type(n) is int and -1 <= n < 1 << 48 for n in found):
        raise FormatError(file, f"{what} is {value!r:.100}, not whole numbers")
    return found

"""One catalog of the tensors that model-parallel ranks hold: shards of tensor ranks are placed, stages follow one another.

Nothing is copied: fragments of the shards become fragments of the whole tensors. What several ranks hold is taken once, after its
bytes were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ucformat import box as boxes
from ucformat.box import Box
from ucformat.catalog import Catalog, FragmentTable, TensorSpec, row_major
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.deepspeed.placement import Placement, Rules
from ucformat.formats.deepspeed.records import Opened, state, weight
from ucformat.formats.replicas import Part, differing, is_constant, mean
from ucformat.formats.unite import merge_tables, widen
from ucformat.layout.cuts import Cut
from ucformat.values.tree import join_name, split_name

_SHOWN = 6
_CHECKED = 8  # parameters whose masters are compared between ranks: a misplaced file shows in all of them
_MAX_MEAN_BYTES = 256 << 20  # of a parameter that is the mean of its shards: computed in memory
OWN = "deepspeed"
"""First component of names of what belongs to single ranks."""


@dataclass(slots=True)
class _Joined:
    """Tensors and fragments of the whole, as they come."""

    specs: list[TensorSpec] = field(default_factory=list)
    blocks: list[FragmentTable] = field(default_factory=list)
    """Fragments of `specs[i]`, with `tensor` not yet set."""

    def add(self, spec: TensorSpec, table: FragmentTable) -> None:
        self.specs.append(spec)
        self.blocks.append(table)

    def catalog(self, like: Catalog, aliases: dict[str, str]) -> Catalog:
        """The catalog of it all. Strides are kept where a fragment is not contiguous."""
        order = sorted(range(len(self.specs)), key=lambda i: self.specs[i].name)
        ndim = max((len(spec.shape) for spec in self.specs), default=0)
        tables = []
        for new, old in enumerate(order):
            table = self.blocks[old]
            tensor = np.full(len(table), new, dtype=np.int32)
            stride = None if table.stride is None else widen(table.stride, ndim, 1)
            offset, length = widen(table.offset, ndim, 0), widen(table.length, ndim, 1)
            tables.append(FragmentTable(tensor, table.file, table.start, offset, length, stride))
        merged = merge_tables(tables) if tables else like.fragments
        specs = tuple(self.specs[i] for i in order)
        return replace(like, tensors=specs, fragments=_without_needless_strides(merged), aliases=aliases, _index={})


def _without_needless_strides(table: FragmentTable) -> FragmentTable:
    if table.stride is None or bool(((table.stride == row_major(table.length)) | (table.length == 1)).all()):
        return replace(table, stride=None)
    return table


def _rows(catalog: Catalog, index: int) -> FragmentTable:
    """The fragments of one tensor, with as many columns as it has dimensions, and strides."""
    rows, ndim, table = catalog.fragments.rows(index), len(catalog.tensors[index].shape), catalog.fragments
    strides = table.strides(rows)[:, :ndim]
    return FragmentTable(
        table.tensor[rows], table.file[rows], table.start[rows], table.offset[rows, :ndim], table.length[rows, :ndim], strides
    )


def _moved(table: FragmentTable, cut: Cut, itemsize: int) -> FragmentTable:
    """What fragments of a shard hold of the box `cut`, at its place in the whole tensor."""
    at, size, to = (np.array(values, dtype=np.int64).reshape(1, -1) for values in (cut.shard, cut.length, cut.whole))
    low, length = boxes.clip(table.offset, table.length, at, size)
    kept = np.flatnonzero((length > 0).all(axis=1))
    strides = table.strides()[kept]
    start = table.start[kept] + ((low[kept] - table.offset[kept]) * strides).sum(axis=1) * itemsize
    return FragmentTable(table.tensor[kept], table.file[kept], start, low[kept] - at + to, length[kept], strides)


def own_name(rank: str, name: str) -> str:
    """The name under which a tensor is kept that only one model-parallel rank has."""
    path = split_name(name)
    return join_name(OWN, rank, *(path[1:] if path[0] == OWN else path))


@dataclass(slots=True)
class TensorJoin:
    """Joins the shards of the tensor ranks of one pipeline stage."""

    opened: Opened
    rules: Rules
    labels: Sequence[str]
    """What each rank is called in names of its own tensors."""
    named: bool
    """Whether the optimizer's tensors go by parameter: else each rank's are its own."""
    _joined: _Joined = field(default_factory=_Joined)
    _pairs: list[tuple[Part, Part]] = field(default_factory=list)
    """Replicas, to be compared."""
    _assumed: set[str] = field(default_factory=set)
    _dropped: dict[str, int] = field(default_factory=dict)
    _sharded: list[str] = field(default_factory=list)
    _apart: list[str] = field(default_factory=list)

    def join(self, shards: Sequence[Catalog], parameters: set[str]) -> Catalog:
        """One catalog. `parameters`: names of parameters, as opposed to buffers. Raises FormatError, UnsupportedError."""
        aliases = self._same_names(shards)
        for spec in shards[0].tensors:
            fqn = _parameter(spec.name, named=self.named)
            if fqn is None:
                continue
            held = [shard.spec(spec.name) for shard in shards]
            if len({other.dtype for other in held}) > 1:
                raise FormatError(self.rules.file, f"{spec.name!r} is of dtype {[other.dtype for other in held]} on tensor ranks")
            if fqn in parameters and spec.shape and self._is_like(fqn, shards, held):
                self._add(fqn, shards, held)
            else:
                self._add_equal(shards, held)
        self._compare()
        self._check_masters(shards)
        for shard, label in zip(shards, self.labels, strict=True):
            self._keep_own(shard, label)
        self._report()
        return self._joined.catalog(shards[0], aliases)

    def _same_names(self, shards: Sequence[Catalog]) -> dict[str, str]:
        """Aliases; tensors and aliases are those of the first rank on all."""
        shared = [[n for n in shard.names if _parameter(n, named=self.named) is not None] for shard in shards]
        for rank, names in enumerate(shared):
            if odd := set(names) ^ set(shared[0]):
                raise FormatError(
                    self.rules.file, f"tensor rank {rank} has not the tensors of rank 0: {', '.join(sorted(odd)[:_SHOWN])}"
                )
            if shards[rank].aliases != shards[0].aliases:
                raise FormatError(self.rules.file, f"tensor rank {rank} has other tied weights than rank 0")
        return {a: owner for a, owner in shards[0].aliases.items() if _parameter(a, named=self.named) is not None}

    def _is_like(self, fqn: str, shards: Sequence[Catalog], held: Sequence[TensorSpec]) -> bool:
        """Whether a tensor has the shape of its parameter on every rank: statistics of rows and columns have not."""
        return all(spec.shape == shard.spec(weight(fqn)).shape for shard, spec in zip(shards, held, strict=True))

    def _add(self, fqn: str, shards: Sequence[Catalog], held: Sequence[TensorSpec]) -> None:
        """A tensor with the shape of its parameter."""
        spec = held[0]
        placed = self.rules.place(fqn, [other.shape for other in held])
        whole = Box.whole(spec.shape)
        if placed.kind == "averaged":
            self._add_mean(spec, [Part(shard, spec.name, whole) for shard in shards])
            return
        if placed.kind == "assumed" and self._are_replicas(shards, spec):
            self._assumed.add(fqn)
            placed = Placement(spec.shape, [[Cut(whole.offset, whole.offset, spec.shape)]] * len(shards), "assumed")
        if placed.dropped:
            self._dropped[fqn] = placed.dropped
        if len({cut.whole for cuts in placed.cuts for cut in cuts}) > 1:
            self._sharded.append(spec.name)
        tables: list[FragmentTable] = []
        taken: dict[tuple[tuple[int, ...], tuple[int, ...]], Part] = {}
        for shard, cuts in zip(shards, placed.cuts, strict=True):
            rows = _rows(shard, shard.find(spec.name))
            for cut in cuts:
                part = Part(shard, spec.name, Box(cut.shard, cut.length))
                first = taken.setdefault((cut.whole, cut.length), part)
                if first is not part:
                    self._pairs.append((first, part))
                else:
                    tables.append(_moved(rows, cut, spec.kind.itemsize))
        self._joined.add(replace(spec, shape=placed.shape), _concatenated(tables, _rows(shards[0], shards[0].find(spec.name))))

    def _are_replicas(self, shards: Sequence[Catalog], spec: TensorSpec) -> bool:
        """Whether ranks hold equal bytes of a tensor that nothing names, and such as no two different shards would have."""
        if any(shard.spec(spec.name).shape != spec.shape for shard in shards):
            return False
        parts = [Part(shard, spec.name, Box.whole(spec.shape)) for shard in shards]
        return not differing([(parts[0], other) for other in parts[1:]]) and self._proves(shards, spec.name)

    def _proves(self, shards: Sequence[Catalog], name: str) -> bool:
        """Whether the values of a tensor, or of its parameter's master weight, are not all the same.

        Zero-initialised biases are equal on all ranks, replicas or not.
        """
        catalog, fqn = shards[0], _parameter(name, named=True)
        for other in (name, *(made for key in ("fp32", "exp_avg") if fqn for made in (state(fqn, key), weight(fqn)))):
            if other in catalog.names:
                spec = catalog.spec(other)
                parts = [Part(shard, other, Box.whole(spec.shape)) for shard in shards]
                if not is_constant(parts[0]):
                    return not differing([(parts[0], part) for part in parts[1:]])
        return False

    def _add_mean(self, spec: TensorSpec, parts: Sequence[Part]) -> None:
        if spec.nbytes > _MAX_MEAN_BYTES:
            raise UnsupportedError(self.rules.file, f"{spec.name!r} is the mean of its shards, and too large to be computed")
        if differing([(parts[0], part) for part in parts[1:]]):
            self.opened.remarks.append(
                f"{spec.name!r} differs between tensor ranks, and is their mean, as parameter_to_average_patterns says"
            )
            number = self.opened.add_inline(mean(parts), f"the mean of {spec.name} over tensor ranks")
            self._joined.add(spec, _one_fragment(number, spec))
        else:
            self._joined.add(spec, _rows(parts[0].catalog, parts[0].catalog.find(spec.name)))

    def _add_equal(self, shards: Sequence[Catalog], held: Sequence[TensorSpec]) -> None:
        """A buffer, a scalar, a statistic: one for all ranks where it is equal, else each rank's own."""
        spec = held[0]
        parts = [Part(shard, own.name, Box.whole(own.shape)) for shard, own in zip(shards, held, strict=True)]
        if all(part.box == parts[0].box for part in parts) and not differing([(parts[0], part) for part in parts[1:]]):
            self._joined.add(spec, _rows(shards[0], shards[0].find(spec.name)))
            return
        self._apart.append(spec.name)
        for shard, own, label in zip(shards, held, self.labels, strict=True):
            self._joined.add(replace(own, name=own_name(label, own.name)), _rows(shard, shard.find(own.name)))

    def _keep_own(self, shard: Catalog, label: str) -> None:
        for i, spec in enumerate(shard.tensors):
            if _parameter(spec.name, named=self.named) is None:
                self._joined.add(replace(spec, name=own_name(label, spec.name)), _rows(shard, i))

    def _compare(self) -> None:
        odd = list(dict.fromkeys(self._pairs[i][0].name for i in differing(self._pairs)))
        if odd:
            shown = ", ".join(odd[:_SHOWN]) + ("…" if len(odd) > _SHOWN else "")
            raise FormatError(
                self.rules.file,
                f"universal_checkpoint_info says that tensor ranks hold the same of {shown}, and their values differ: the ranks "
                "drifted apart, or their files are of different saves",
            )

    def _check_masters(self, shards: Sequence[Catalog]) -> None:
        """A rank whose masters are another one's, while its weights are not, has that one's optimizer file."""
        names = [name for name in self._sharded if name not in shards[0].aliases and weight(_fqn(name)) not in shards[0].aliases]
        for name in [name for name in names if name.endswith("/fp32")][:_CHECKED]:
            both = name, weight(_fqn(name))
            for other in range(1, len(shards)):
                for one in range(other):
                    pairs = [tuple(Part(s, n, Box.whole(s.spec(n).shape)) for s in (shards[one], shards[other])) for n in both]
                    if len({part.box for pair in pairs for part in pair}) > 1 or is_constant(pairs[0][0]):
                        continue
                    if differing([(pair[0], pair[1]) for pair in pairs]) == [1]:
                        why = f"the optimizer's state of tensor rank {other} is that of rank {one}: a file is in another's place"
                        raise FormatError(f"{self.opened.store.url}: {self.labels[other]}", why)

    def _report(self) -> None:
        if self._assumed:
            shown = ", ".join(sorted(self._assumed)[:_SHOWN]) + ("…" if len(self._assumed) > _SHOWN else "")
            self.opened.remarks.append(
                f"universal_checkpoint_info does not name {len(self._assumed)} parameters that are equal on all tensor ranks: "
                f"taken for replicas ({shown})"
            )
        for fqn, rows in self._dropped.items():
            self.opened.remarks.append(f"{rows} rows that only pad the vocabulary of {fqn!r} are left out")
        for name in self._apart:
            self.opened.remarks.append(
                f"{name!r} differs between tensor ranks, and nothing says how they share it: kept for each rank"
            )


def _parameter(name: str, *, named: bool) -> str | None:
    """The parameter or buffer that a tensor belongs to; None for what is each rank's own."""
    path = split_name(name)
    if path[0] == OWN or (path[0] == "optimizer" and not named):
        return None
    return path[1]


def _fqn(name: str) -> str:
    return split_name(name)[1]


def _concatenated(tables: Sequence[FragmentTable], like: FragmentTable) -> FragmentTable:
    if not tables:
        return replace(
            like, **{column: getattr(like, column)[:0] for column in ("tensor", "file", "start", "offset", "length", "stride")}
        )
    return FragmentTable(
        np.concatenate([table.tensor for table in tables]),
        np.concatenate([table.file for table in tables]),
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.offset for table in tables]),
        np.concatenate([table.length for table in tables]),
        np.concatenate([table.strides() for table in tables]),
    )


def _one_fragment(file: int, spec: TensorSpec) -> FragmentTable:
    length = np.array([spec.shape], dtype=np.int64).reshape(1, len(spec.shape))
    zero = np.zeros(1, dtype=np.int32)
    return FragmentTable(
        zero, np.full(1, file, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros_like(length), length, row_major(length)
    )


def join_stages(
    opened: Opened, stages: Sequence[Catalog], labels: Sequence[str], replaced: Callable[[str], bool], *, named: bool
) -> Catalog:
    """One catalog of the stages of a pipeline. What several hold (tied weights) is taken from the first, and must be equal.

    `replaced(parameter)`: the first stage's is to be taken anyway. Raises FormatError.
    """
    joined, aliases, files = _Joined(), dict[str, str](), stages[0]
    owner: dict[str, Catalog] = {}
    pairs: list[tuple[Part, Part]] = []
    for stage, label in zip(stages, labels, strict=True):
        for i, spec in enumerate(stage.tensors):
            fqn = _parameter(spec.name, named=named)
            name = own_name(label, spec.name) if fqn is None and not spec.name.startswith(f"{OWN}/mp_rank") else spec.name
            if name not in owner:
                owner[name] = stage
                joined.add(replace(spec, name=name), _rows(stage, i))
            else:
                _add_pair(pairs, owner[name], stage, spec.name)
        for alias, target in stage.aliases.items():
            if alias in owner:
                _add_pair(pairs, owner[alias], stage, alias)
            else:
                owner[alias] = stage
                aliases[alias] = target
    odd = list(dict.fromkeys(pairs[i][0].name for i in differing(pairs)))
    for name in odd:
        fqn = _parameter(name, named=named)
        if fqn is None or not replaced(fqn):
            raise FormatError(
                f"{opened.store.url}: {name}", "tied between pipeline stages, and their values differ: files of different saves?"
            )
        opened.remarks.append(f"{name!r} differs between pipeline stages: the first stage's is taken, as DeepSpeed does")
    present = {spec.name for spec in joined.specs}
    return joined.catalog(replace(files, files=opened.files), {a: t for a, t in aliases.items() if a not in present})


def _add_pair(pairs: list[tuple[Part, Part]], first: Catalog, other: Catalog, name: str) -> None:
    one, two = first.spec(name), other.spec(name)
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        raise FormatError(
            first.url,
            f"{name!r} is {one.dtype} {list(one.shape)} on one pipeline stage and {two.dtype} {list(two.shape)} on another",
        )
    pairs.append((Part(first, name, Box.whole(one.shape)), Part(other, name, Box.whole(two.shape))))


def merged(first: Catalog, second: Catalog) -> Catalog:
    """Both catalogs' tensors, over the same files, and the first one's values and notes.

    Raises FormatError for a name in both.
    """
    joined = _Joined()
    if both := set(first.names) & set(second.names):
        raise FormatError(first.url, f"two of its files hold {min(both)!r}")
    for catalog in (first, second):
        for i, spec in enumerate(catalog.tensors):
            joined.add(spec, _rows(catalog, i))
    return joined.catalog(first, {**first.aliases, **second.aliases})

"""The parameters of the whole model, and where their shards are: in which part of which rank's file, under which local name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.megatron import names, split
from ucformat.formats.megatron.grid import Grid
from ucformat.formats.megatron.ranks import Opened, Part, RankFile
from ucformat.formats.megatron.settings import Settings
from ucformat.formats.megatron.split import How
from ucformat.pickles.unpickle import StoredTensor
from ucformat.views import View

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_CORE_VERSION, _OLD_VERSION = 3.0, 0.0  # what Megatron takes for the version of files that say none
_HEADED = {"linear_qkv": 3, "linear_kv": 2}
"""Layers whose rows are of several kinds, and of how many."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A local parameter."""

    rank: int
    """Index into the grid's ranks."""
    part: int
    key: str


@dataclass(slots=True)
class Join:
    """A parameter of the model: its shards in order, other copies of each, and how they join."""

    name: str
    shards: list[Shard]
    how: How
    copies: list[list[Shard]] = field(default_factory=list)
    """For each shard, where else the same bytes must be."""

    def view(self, of: Callable[[Shard], View]) -> View:
        """The parameter, or its state, whose shards `of` gives. Raises ValueError when they don't fit each other."""
        return self.how([of(shard) for shard in self.shards])


class Joins:
    """All parameters of a grid of ranks. Raises FormatError and UnsupportedError naming parameters that don't fit."""

    def __init__(self, opened: Opened, grid: Grid, settings: Settings) -> None:
        self.opened, self.grid, self.settings = opened, grid, settings
        self.found: dict[str, Join] = {}
        self._index = {rank.path: i for i, rank in enumerate(grid.ranks)}
        first = grid.first_layers()
        for v in range(grid.virtual):
            for pp in range(grid.pp):
                self._dense(pp, v, first[pp, v])
                for ep in range(grid.ep):
                    self._experts(pp, v, ep, first[pp, v])
        self.dropped = self._drop_tied_copy()
        self._check_copies()

    def tensor(self, shard: Shard) -> StoredTensor:
        return self.grid.ranks[shard.rank].parts[shard.part].tensors[shard.key]

    def weight(self, shard: Shard) -> View:
        return self.opened.view(self.tensor(shard))

    def _dense(self, pp: int, v: int, first: dict[str, int]) -> None:
        holders = self.grid.dense(pp)
        part = holders[0][0].parts[v]
        for key in _alike([rank.parts[v] for ranks in holders for rank in ranks], _is_dense):
            name = names.with_layer(key, first)
            how = self._how(key, part, len(holders), holders[0][0])
            self._add(name, key, v, holders, how, whole=split.is_replicated(key))

    def _experts(self, pp: int, v: int, ep: int, first: dict[str, int]) -> None:
        holders = self.grid.experts(pp, ep)
        part = holders[0][0].parts[v]
        for key in _alike([rank.parts[v] for ranks in holders for rank in ranks], lambda name: not _is_dense(name)):
            name = names.with_layer(key, first)
            stacked = names.STACKED_EXPERTS.fullmatch(name)
            if stacked:
                local = self._local_experts(key, part)
                for e in range(local):
                    which = int(stacked["which"])
                    own = f"{stacked['before']}.local_experts.{ep * local + e}.linear_fc{which}.weight"
                    self._add(own, key, v, holders, self._grouped(key, part, e, local))
            else:
                own = names.with_expert(name, ep * self._count_experts(key, part))
                self._add(own, key, v, holders, self._how(key, part, len(holders), holders[0][0]), whole=split.is_replicated(key))

    def _add(self, name: str, key: str, v: int, holders: Sequence[Sequence[RankFile]], how: How, *, whole: bool = False) -> None:
        """Note a parameter with its shards; one that all tensor ranks hold whole, or that is known already, has more copies."""
        shards = [[Shard(self._index[rank.path], v, key) for rank in ranks] for ranks in holders]
        if whole:
            shards = [[shard for group in shards for shard in group]]
        known = self.found.get(name)
        if known is None:
            self.found[name] = Join(name, [group[0] for group in shards], how, [group[1:] for group in shards])
        elif len(known.shards) == len(shards):
            for copies, group in zip(known.copies, shards, strict=True):
                copies += group
        else:
            raise FormatError(
                self.tensor_file(shards[0][0]), f"{name} is cut in {len(shards)}, and elsewhere in {len(known.shards)}"
            )

    def tensor_file(self, shard: Shard) -> str:
        return self.grid.ranks[shard.rank].path

    # -- how shards join ------------------------------------------------------------------------------------------

    def _how(self, key: str, part: Part, shards: int, rank: RankFile) -> How:
        if split.rule_of(key) == split.GATED and shards > 1 and self.settings.interleaved:
            raise UnsupportedError(part.file, f"{key}: gate and up rows alternate ({self.settings.interleaved})")
        how = split.how_to_join(key, part.tensors, shards, part.file)
        layer = key.rpartition(".")[0].rpartition(".")[2]
        version = self._version(rank)
        if layer not in _HEADED or version >= 2:
            return how
        heads = self.settings.number("num_attention_heads")
        groups = self.settings.number("num_query_groups")
        if heads is None or (groups not in (None, 1, heads)) or heads % shards:
            say = f"{key} is in the order of rows of checkpoint_version {version:g}"
            raise UnsupportedError(part.file, f"{say}, which arguments with num_attention_heads must explain")
        rows = part.tensors[key].shape[0]
        if rows % (_HEADED[layer] * (heads // shards)):
            raise FormatError(
                part.file, f"{key} has {rows} rows, no multiple of {_HEADED[layer]} for each of {heads // shards} heads"
            )
        return split.reordered(version, _HEADED[layer], heads // shards, how)

    def _version(self, rank: RankFile) -> float:
        found = rank.rest.get("checkpoint_version")
        if isinstance(found, (int, float)):
            return float(found)
        return _OLD_VERSION if rank.old else _CORE_VERSION

    def _count_experts(self, key: str, part: Part) -> int:
        """Experts of this rank in the layer of a parameter."""
        found = names.expert_of(key)
        assert found is not None
        return len({e[1] for name in part.tensors if (e := names.expert_of(name)) and e[0] == found[0]})

    def _local_experts(self, key: str, part: Part) -> int:
        """Experts in a parameter that holds all of a rank's: by the router, which has a row for each expert of the model."""
        router = part.tensors.get(key.rpartition(".experts.")[0] + ".router.weight")
        count = router.shape[0] if router is not None and len(router.shape) == 2 else self.settings.number("num_experts")
        if count is None or count % self.grid.ep:
            raise UnsupportedError(part.file, f"nothing says how many experts {key} holds")
        return count // self.grid.ep

    def _grouped(self, key: str, part: Part, expert: int, experts: int) -> How:
        stem, which = key[:-1], int(key[-1])
        one, two = part.tensors.get(f"{stem}1"), part.tensors.get(f"{stem}2")
        router = part.tensors.get(key.rpartition(".experts.")[0] + ".router.weight")
        if one is None or two is None:
            raise FormatError(part.file, f"{stem}1 and {stem}2 belong together, and one is missing")
        hidden = router.shape[1] if router is not None and len(router.shape) == 2 else one.shape[0]
        sizes = [_numel(tensor) for tensor in (one, two)]
        if any(size % (experts * hidden) for size in sizes) or sizes[0] not in (sizes[1], 2 * sizes[1]):
            raise FormatError(
                part.file, f"{stem}1 and {stem}2 hold {sizes} items, not those of {experts} experts of width {hidden}"
            )
        return partial(split.grouped_expert, which, expert, experts, hidden, sizes[0] == 2 * sizes[1])

    # -- copies ---------------------------------------------------------------------------------------------------

    def _drop_tied_copy(self) -> str | None:
        """Leave out the output layer's weight where it is the embedding's; what to say of it."""
        embedding, output = self.found.get(EMBEDDING), self.found.get(OUTPUT)
        if embedding is None or output is None or self.settings.tied is False:
            return None
        same = len(embedding.shards) == len(output.shards) and all(
            self.opened.same(self.tensor(a), self.tensor(b)) for a, b in zip(embedding.shards, output.shards, strict=True)
        )
        if not same:
            if self.settings.tied:
                where = self.tensor_file(output.shards[0])
                raise FormatError(where, f"{OUTPUT} is tied to {EMBEDDING} by the arguments, and their values differ")
            return None
        for copies, shard, more in zip(embedding.copies, output.shards, output.copies, strict=True):
            copies += [shard, *more]
        del self.found[OUTPUT]
        return f"{OUTPUT} is the copy of {EMBEDDING} that the last pipeline stage has: read once, as tied"

    def _check_copies(self) -> None:
        for join in self.found.values():
            for shard, copies in zip(join.shards, join.copies, strict=True):
                for copy in copies:
                    if not self.opened.same(self.tensor(shard), self.tensor(copy)):
                        where = f"{self.tensor_file(shard)} and {self.tensor_file(copy)}"
                        raise FormatError(
                            where, f"{join.name} must be the same in both, and differs: the ranks have drifted apart"
                        )


def _is_dense(name: str) -> bool:
    return names.expert_of(name) is None and names.STACKED_EXPERTS.fullmatch(name) is None


def _alike(parts: Sequence[Part], wanted: Callable[[str], bool]) -> Iterator[str]:
    """Names that the parts of all these ranks have. Raises FormatError when one lacks a name that others have."""
    chosen = [[name for name in part.tensors if wanted(name)] for part in parts]
    for part, held in zip(parts, chosen, strict=True):
        odd = set(held) ^ set(chosen[0])
        if odd:
            raise FormatError(part.file, f"{min(odd)} is in this file or in {parts[0].file}, not in both: of different runs?")
    yield from chosen[0]


def _numel(tensor: StoredTensor) -> int:
    total = 1
    for n in tensor.shape:
        total *= n
    return total

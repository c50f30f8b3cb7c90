"""Optimizer state that is stored by buckets (`dp_reshardable`), by parameter: whatever the parallelism of the run to come.

A bucket's tensor is what a model-parallel rank's buffer held. Which parameter lies where in it follows from the order in
which modules register parameters, and is proven: master weights must round to the weights of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.megatron import stage
from ucformat.formats.megatron.buffers import Local, Placed, buffers, in_buckets
from ucformat.formats.megatron.evidence import agree
from ucformat.formats.megatron.flat_state import is_parameter
from ucformat.formats.megatron.joins import EMBEDDING, OUTPUT
from ucformat.formats.megatron.names import expert_of
from ucformat.formats.megatron.ranks import Opened
from ucformat.formats.megatron.registration import Order, orders
from ucformat.formats.megatron.settings import Settings
from ucformat.formats.megatron.stage import Sizes
from ucformat.naming import MASTER
from ucformat.views import View

_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)


@dataclass(slots=True)
class Buffer:
    """A buffer of a model-parallel rank: kind of state → tensor of each bucket."""

    dtype: str
    state: dict[str, dict[int, View]] = field(default_factory=dict)

    def buckets(self, kind: str) -> list[View]:
        return [view for _, view in sorted(self.state[kind].items())]


Groups = dict[int, dict[int, dict[int, Buffer]]]
"""Optimizer → model-parallel rank → number of the buffer → buffer."""


def find(opened: Opened, keys: Iterable[str]) -> Groups:
    """The buckets among the keys of a checkpoint."""
    found: Groups = {}
    by_torch = {kind.torch_name: kind.name for kind in DTYPES.values() if kind.torch_name != "uint8" or kind.name == "U8"}
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        dtype = by_torch.get(match["dtype"], match["dtype"])
        of_rank = found.setdefault(int(match["chain"] or 0), {}).setdefault(int(match["group"]), {})
        buffer = of_rank.setdefault(int(match["buffer"]), Buffer(dtype))
        kind = MASTER if match["kind"] == "param" else match["kind"]
        buffer.state.setdefault(kind, {})[int(match["bucket"])] = opened.rewrite.view(key)
    return found


def states(
    opened: Opened, groups: Groups, weights: Mapping[str, View], settings: Settings, tensor_size: int
) -> dict[str, dict[str, View]]:
    """State by kind and parameter. `tensor_size`: how the shards of the weights are cut, where no arguments say.

    Raises FormatError and UnsupportedError where nothing proves what lies where.
    """
    if not groups:
        return {}
    run = _Run(opened, weights, settings, _sizes(opened, groups, settings, tensor_size, weights))
    found: dict[str, dict[str, View]] = {}
    for chain, of_ranks in sorted(groups.items()):
        experts = None if run.sizes.ep == 1 else bool(chain)
        for kind, held in run.read(of_ranks, experts).items():
            found.setdefault(kind, {}).update(held)
    lost = {name for name in weights if is_parameter(name)} - set(found.get(MASTER, {}))
    if lost:
        opened.remarks.append(f"the optimizer has no state of {', '.join(sorted(lost)[:8])}")
    return found


def _sizes(opened: Opened, groups: Groups, settings: Settings, tensor_size: int, weights: Mapping[str, View]) -> Sizes:
    """Sizes of the parallel groups. Raises FormatError when they are not those of the buckets."""
    where = opened.store.url
    tp = settings.number("tensor_model_parallel_size") or tensor_size
    has_experts = any(expert_of(name) for name in weights)
    dense = groups[min(groups)]
    if len(dense) % tp:
        raise FormatError(where, f"buckets of {len(dense)} model-parallel ranks, with tensor size {tp}")
    pp = len(dense) // tp
    told = settings.number("pipeline_model_parallel_size")
    if told not in (None, pp):
        raise FormatError(where, f"buckets of {len(dense)} model-parallel ranks, with tensor size {tp} and pipeline size {told}")
    ep = (settings.number("expert_model_parallel_size") or 1) if has_experts else 1
    etp = settings.number("expert_tensor_parallel_size") or tp
    if len(groups) == 2 and ep == 1:
        etp = settings.number("expert_tensor_parallel_size") or 1
        ep = len(groups[max(groups)]) // pp // etp
    if len(groups) > (2 if ep > 1 else 1) or (ep > 1 and len(groups[max(groups)]) != etp * ep * pp):
        raise FormatError(where, f"buckets of {len(groups)} optimizers, with expert size {ep}")
    virtual = {len(of_rank) // len({buffer.dtype for buffer in of_rank.values()}) for of_rank in dense.values()}
    return Sizes(tp, pp, ep, etp, settings.number("virtual_pipeline_model_parallel_size") or min(virtual))


@dataclass(frozen=True, slots=True)
class _Token:
    """A local parameter: one of the model, or (stacked) the same layer of all local experts."""

    names: tuple[str, ...]
    shard: int


class _Run:
    """The run that wrote a checkpoint, as far as its buffers depend on it."""

    def __init__(self, opened: Opened, weights: Mapping[str, View], settings: Settings, sizes: Sizes) -> None:
        self.opened, self.weights, self.sizes, self.where = opened, weights, sizes, opened.store.url
        numbers = [int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")]
        self.stages = stage.layer_counts(max(numbers, default=-1) + 1, sizes, settings, self.where)
        self.tied = OUTPUT not in weights and EMBEDDING in weights and settings.tied is not False and sizes.pp > 1
        experts = [e[1] for name in weights if (e := expert_of(name))]
        self.local_experts = (max(experts, default=-1) + 1) // sizes.ep
        self.parts: dict[tuple[int, int], list[str]] = {}
        for name in weights:
            if is_parameter(name):
                self.parts.setdefault(stage.part_of(name, self.stages, sizes), []).append(name)
        if self.tied:
            self.parts.setdefault((sizes.pp - 1, sizes.virtual - 1), []).append(OUTPUT)

    def read(self, of_ranks: Mapping[int, Mapping[int, Buffer]], experts: bool | None) -> dict[str, dict[str, View]]:
        """State of one optimizer's parameters: of the experts, of all others, or (None) of both."""
        shards: dict[str, dict[str, dict[int, View]]] = {}
        for group, held in sorted(of_ranks.items()):
            for kind, name, shard, view in self._of_rank(group, held, experts):
                shards.setdefault(kind, {}).setdefault(name, {})[shard] = view
        found: dict[str, dict[str, View]] = {}
        for kind, by_name in shards.items():
            for name, by_shard in by_name.items():
                if name != OUTPUT or not self.tied:
                    ordered = [view for _, view in sorted(by_shard.items())]
                    found.setdefault(kind, {})[name] = stage.join(name, ordered, self._gated(name))
        return found

    def _place(self, group: int, experts: bool | None) -> tuple[int, int, int]:
        """Tensor rank, expert rank and stage of a model-parallel rank."""
        if experts:
            shard, rest = group % self.sizes.etp, group // self.sizes.etp
            return shard, rest % self.sizes.ep, rest // self.sizes.ep
        return group % self.sizes.tp, 0, group // self.sizes.tp

    def _of_rank(self, group: int, held: Mapping[int, Buffer], experts: bool | None) -> Iterator[tuple[str, str, int, View]]:
        """(kind, parameter, shard, view) of all state of one rank, in the first order that is proven."""
        shard, expert, pp = self._place(group, experts)
        stored = [buffer for _, buffer in sorted(held.items())]
        tried = 0
        for order in orders(experts=any(expert_of(name) for name in self.weights) and experts is not False):
            parts = [list(self._locals(order, pp, v, shard, expert, experts)) for v in range(self.sizes.virtual)]
            expected = buffers(parts)
            if [dtype for dtype, _ in expected] != [buffer.dtype for buffer in stored]:
                continue
            found = [self._proven(params, buffer) for (_, params), buffer in zip(expected, stored, strict=True)]
            tried += 1
            if all(placed is not None for placed in found):
                for placed, buffer in zip(found, stored, strict=True):
                    yield from self._views(placed or [], buffer)
                return
        why = "in none of the orders that Megatron registers parameters in do the master weights round to the model's"
        raise UnsupportedError(self.where, f"optimizer state of model-parallel rank {group}: {why} ({tried} fit its buffers)")

    def _locals(self, order: Order, pp: int, v: int, shard: int, expert: int, experts: bool | None) -> Iterator[Local[_Token]]:
        done: set[str] = set()
        for name in order.sorted(self.parts.get((pp, v), [])):
            found = expert_of(name)
            if name in done or (experts is not None and experts != (found is not None)):
                continue
            if found is not None and found[1] // self.local_experts != expert:
                continue
            names: tuple[str, ...] = (name,)
            if found is not None and order.experts == "stacked":
                mine = range(expert * self.local_experts, (expert + 1) * self.local_experts)
                names = tuple(f"{found[0]}.local_experts.{e}.{found[2]}" for e in mine)
            done.update(names)
            token = _Token(names, shard)
            view = self._weight(token, name)
            shape = view.shape if len(names) == 1 else (len(names), *reversed(view.shape))
            yield Local(token, shape, view.dtype, alone=self.tied and name in (EMBEDDING, OUTPUT))

    def _weight(self, token: _Token, name: str) -> View:
        """The part of a weight that the rank held."""
        of = self.sizes.etp if expert_of(name) else self.sizes.tp
        whole = self.weights[EMBEDDING if name == OUTPUT and self.tied else name]
        return stage.cut(name, whole, token.shard, of, self._gated(name), self.where)

    def _gated(self, name: str) -> bool:
        """Whether this is the first layer of a gated MLP."""
        layer, _, what = name.rpartition(".")
        second = self.weights.get(layer.removesuffix("linear_fc1") + "linear_fc2.weight")
        if not layer.endswith("linear_fc1") or what not in ("weight", "bias") or second is None:
            return False
        return self.weights[name].shape[0] == 2 * second.shape[1]

    def _proven(self, params: Sequence[Local[_Token]], buffer: Buffer) -> list[Placed[_Token]] | None:
        """Where parameters lie in a buffer, if their master weights are those of the model."""
        if MASTER not in buffer.state:
            raise FormatError(self.where, "a buffer of the optimizer has no master weights")
        masters = buffer.buckets(MASTER)
        for placed in in_buckets(params, [view.shape[0] for view in masters]):
            pairs = [
                (view, self._weight(one.local.token, name))
                for one in placed
                for name, view in self._apart(one, masters[one.bucket])
            ]
            if agree(self.opened.store, self.opened.rewrite.files, pairs):
                return placed
        return None

    def _apart(self, one: Placed[_Token], bucket: View) -> Iterator[tuple[str, View]]:
        """State of each parameter in a placed one, out of its bucket."""
        view = bucket.narrow(0, one.at, one.local.items).reshape(*one.local.shape)
        names = one.local.token.names
        if len(names) == 1:
            yield names[0], view
        else:
            yield from ((name, view.select(0, i).transpose()) for i, name in enumerate(names))

    def _views(self, placed: Sequence[Placed[_Token]], buffer: Buffer) -> Iterator[tuple[str, str, int, View]]:
        sizes = [view.shape[0] for view in buffer.buckets(MASTER)]
        for kind in buffer.state:
            buckets = buffer.buckets(kind)
            if [view.shape[0] for view in buckets] != sizes:
                raise FormatError(self.where, f"the optimizer's {kind} is laid out otherwise than its master weights")
            for one in placed:
                for name, view in self._apart(one, buckets[one.bucket]):
                    yield kind, name, one.local.token.shard, view

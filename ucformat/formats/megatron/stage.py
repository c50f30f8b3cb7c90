"""Which parameters each model-parallel rank of a distributed checkpoint held, and which part of each: from its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucformat.errors import UnsupportedError
from ucformat.formats.megatron import split
from ucformat.formats.megatron.names import LAYER
from ucformat.formats.megatron.settings import Settings
from ucformat.views import View, concat


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the parallel groups: tensor, pipeline, expert, tensor within experts, and model parts of a rank."""

    tp: int
    pp: int
    ep: int
    etp: int
    virtual: int


def layer_counts(layers: int, sizes: Sizes, settings: Settings, where: str) -> dict[tuple[int, int], range]:
    """For each pipeline stage and model part, its layers. Raises UnsupportedError where the arguments don't say."""
    if settings.held.get("pipeline_model_parallel_layout") and sizes.pp > 1:
        raise UnsupportedError(where, "its layers are spread over stages by pipeline_model_parallel_layout, which is not read")
    counts = _counts(layers, sizes, settings)
    if sum(map(sum, counts)) != layers or any(n < 0 for stage in counts for n in stage):
        how = f"{layers} layers are spread over {sizes.pp} stages of {sizes.virtual} parts"
        raise UnsupportedError(where, f"nothing says how {how}")
    found: dict[tuple[int, int], range] = {}
    done = 0
    for v in range(sizes.virtual):
        for pp in range(sizes.pp):
            found[pp, v] = range(done, done + counts[pp][v])
            done += counts[pp][v]
    return found


def _counts(layers: int, sizes: Sizes, settings: Settings) -> list[list[int]]:
    """Layers of each part of each stage, as Megatron-core deals them out."""
    first = settings.number("decoder_first_pipeline_num_layers")
    last = settings.number("decoder_last_pipeline_num_layers")
    per: list[int] = []
    if first is not None or last is not None:
        given = {0: first, sizes.pp - 1: last} if sizes.pp > 1 else {}
        fixed = {stage: n for stage, n in given.items() if n is not None}
        rest = sizes.pp - len(fixed)
        share = (layers - sum(fixed.values())) // rest if rest else 0
        per = [fixed.get(stage, share) for stage in range(sizes.pp)]
        return [[n // sizes.virtual] * sizes.virtual for n in per]
    head = bool(settings.flag("account_for_embedding_in_pipeline_split"))
    tail = bool(settings.flag("account_for_loss_in_pipeline_split"))
    each = (layers + head + tail) // (sizes.pp * sizes.virtual)
    counts = [[each] * sizes.virtual for _ in range(sizes.pp)]
    counts[0][0] -= head
    counts[-1][-1] -= tail
    return counts


def part_of(name: str, stages: Mapping[tuple[int, int], range], sizes: Sizes) -> tuple[int, int]:
    """The pipeline stage and model part that holds a parameter."""
    match = LAYER.fullmatch(name)
    if match is not None and not match["stack"].startswith("mtp"):
        return next(place for place, held in stages.items() if int(match["index"]) in held)
    return (0, 0) if name.startswith("embedding.") else (sizes.pp - 1, sizes.virtual - 1)


def cut(name: str, view: View, rank: int, of: int, gated: bool, where: str) -> View:
    """The part of a parameter that tensor rank `rank` of `of` held. Raises UnsupportedError where no rule says."""
    kind = split.rule_of(name)
    if of == 1 or kind == split.REPLICATED:
        return view
    axis = view.ndim - 1 if kind == split.COLUMNS else 0
    pieces = of * (2 if kind == split.GATED and gated else 1)
    if kind is None or view.shape[axis] % pieces:
        raise UnsupportedError(where, f"nothing says how {name} of shape {list(view.shape)} was cut over {of} tensor ranks")
    width = view.shape[axis] // pieces
    if pieces == of:
        return view.narrow(axis, rank * width, width)
    return concat([view.narrow(0, rank * width, width), view.narrow(0, (of + rank) * width, width)])


def join(name: str, shards: Sequence[View], gated: bool) -> View:
    """The parameter again, of all ranks' parts."""
    kind = split.rule_of(name)
    if len(shards) == 1 or kind == split.REPLICATED:
        return shards[0]
    if kind == split.GATED and gated:
        return split.gated(shards)
    return concat(shards, shards[0].ndim - 1 if kind == split.COLUMNS else 0)

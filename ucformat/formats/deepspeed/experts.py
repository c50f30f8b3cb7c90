"""Native mixture of experts: which rank trains which experts, and the global names of those.

A rank counts its own experts from 0 (`deepspeed_experts.<local>`); rank e of expert parallelism has experts e*n to e*n+n-1 of
the model's. The files of expert weights are named by the global number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.errors import FormatError, MissingFileError
from ucformat.formats.deepspeed.files import RankFiles
from ucformat.formats.deepspeed.optim import mapping
from ucformat.formats.deepspeed.records import Opened

_NAME = re.compile(r"(?P<before>(?:.*\.)?deepspeed_experts\.)(?P<index>\d+)(?P<after>\..*)")


def is_expert(name: str) -> bool:
    """Whether a parameter is one of an expert."""
    return _NAME.fullmatch(name) is not None


def rename_experts(shapes: Mapping[str, tuple[int, ...]], share: int, shares: int) -> dict[str, tuple[int, ...]]:
    """A group's parameters with local numbers of experts made global, for share number `share` of `shares`."""
    local: dict[str, set[int]] = {}
    for name in shapes:
        if match := _NAME.fullmatch(name):
            local.setdefault(match["before"], set()).add(int(match["index"]))
    renamed: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        match = _NAME.fullmatch(name)
        if match is not None and shares > 1:
            name = f"{match['before']}{share * len(local[match['before']]) + int(match['index'])}{match['after']}"
        renamed[name] = shape
    return renamed


def expert_orders(world: int, count: int) -> list[list[list[int]]]:
    """For each order that DeepSpeed knows: the ranks that hold each share of the experts, `count` ranks a share.

    Ranks e, e + EP, e + 2 EP… hold share e; with `use_data_before_expert_parallelism`, consecutive ones do.
    """
    shares = world // count
    strided = [list(range(share, world, shares)) for share in range(shares)]
    consecutive = [list(range(share * count, (share + 1) * count)) for share in range(shares)]
    return [strided] if strided == consecutive else [strided, consecutive]


def check_counts(counts: Sequence[int], shapes: Sequence[Mapping[str, object]], world: int, file: str, source: str) -> None:
    """Check that each group is spread over all ranks, or over an equal part of them when it holds experts.

    Raises FormatError.
    """
    for g, count in enumerate(counts):
        shared = g < len(shapes) and bool(shapes[g]) and all(map(is_expert, shapes[g]))
        if count != world and not (shared and 0 < count < world and world % count == 0):
            found = f"partitioned over {sorted(set(counts))} ranks"
            raise FormatError(file, f"{found}, and {source} says {world}: left over from another run?")


def expert_weights(opened: Opened, files: RankFiles, mp: int, total: object) -> dict[str, Any]:
    """Weights in the expert files of one model-parallel rank, by name. `total`: experts of each layer, as the model file says.

    Raises MissingFileError and FormatError that name a file too few, or of other experts than it should hold.
    """
    held = files.experts.get(mp, {})
    url = files.store.url
    layers = sorted({layer for layer, _ in held})
    counts = [n for n in (total if isinstance(total, list) else [total] * len(layers)) if type(n) is int]
    sample = f"layer_0_expert_0_mp_rank_{mp:02d}_model_states.pt"
    if not held:
        raise MissingFileError(f"{url}/{sample}", "the files of the experts' weights are missing")
    if len(counts) != len(layers):
        missing = next((n for n in range(len(counts)) if n not in layers), None)
        why = f"the model file counts {len(counts)} layers of experts, and there are files of layers {layers[:16]}"
        if missing is None:
            raise FormatError(f"{url}/{next(iter(held.values()))}", f"{why}: left over from another run?")
        raise MissingFileError(f"{url}/layer_{missing}_expert_0_mp_rank_{mp:02d}_model_states.pt", why)
    for layer, count in zip(layers, counts, strict=True):
        there = [expert for at, expert in held if at == layer]
        for expert in range(count):
            if expert not in there:
                name = f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
                raise MissingFileError(
                    f"{url}/{name}", f"the file of expert {expert} is missing: the model file says {count} of them"
                )
        if odd := [expert for expert in there if expert >= count]:
            why = f"the file of an expert {odd[0]}, and the model file says {count} of them: left over from another run?"
            raise FormatError(f"{url}/{held[layer, odd[0]]}", why)
    weights: dict[str, Any] = {}
    for ((_, expert), path), contents in zip(held.items(), opened.trees(list(held.values())), strict=True):
        for name, value in mapping(contents, path, "the expert file").items():
            match = _NAME.fullmatch(name) if isinstance(name, str) else None
            if match is None or int(match["index"]) != expert or name in weights:
                raise FormatError(
                    path, f"holds {name!r:.100}, which is no weight of expert {expert}, or one that another file holds"
                )
            weights[name] = value
    return weights

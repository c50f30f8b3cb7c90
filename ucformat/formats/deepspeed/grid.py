"""The grid of pipeline stages and tensor ranks: their shards as one catalog, their optimizers' values as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucformat.catalog import Catalog
from ucformat.formats.deepspeed.join import TensorJoin, join_stages
from ucformat.formats.deepspeed.optim import mapping
from ucformat.formats.deepspeed.per_rank import unite_each
from ucformat.formats.deepspeed.placement import Rules
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.shards import Degrees, Shard
from ucformat.formats.deepspeed.zero import OptimizerState

_SHOWN = 6


def join_shards(opened: Opened, shards: Sequence[Shard], degrees: Degrees) -> Catalog:
    """One catalog of all model-parallel ranks' tensors. Raises FormatError, UnsupportedError."""
    named = not any(map(_is_numbered, shards))
    if not named:
        opened.remarks.append(
            "the optimizer's state has no names: that of each model-parallel rank is kept as deepspeed/mp_rank_<n>/…"
        )
    tree, path = shards[0].files.tree, shards[0].files.paths[0]
    rules = Rules(tree.get("universal_checkpoint_info") or {}, path)
    stages: list[Catalog] = []
    labels: list[str] = []
    for stage in range(degrees.pp):
        row = shards[stage * degrees.tp : (stage + 1) * degrees.tp]
        labels.append(row[0].label)
        if degrees.tp == 1:
            stages.append(row[0].catalog)
            continue
        parameters = {name for shard in row for name in shard.parameters}
        joined = TensorJoin(opened, rules, [shard.label for shard in row], named)
        stages.append(joined.join([shard.catalog for shard in row], parameters))
    if degrees.tp > 1 and (unused := rules.unused()):
        shown = ", ".join(unused[:_SHOWN]) + ("…" if len(unused) > _SHOWN else "")
        opened.remarks.append(f"patterns of universal_checkpoint_info that match no parameter: {shown}")
    return join_stages(opened, stages, labels, rules.on_first_stage, named=named)


def _is_numbered(shard: Shard) -> bool:
    """Whether nothing proved the names of an optimizer's state (ZeRO-0)."""
    return "state" in shard.optimizer.values or "param_groups" in shard.optimizer.extra


def unite_optimizers(opened: Opened, shards: Sequence[Shard]) -> OptimizerState:
    """The optimizer's values on all model-parallel ranks as one: what differs between them is kept for each."""
    if len(shards) == 1:
        return shards[0].optimizer
    found = OptimizerState()
    files, coords = [shard.paths[0] for shard in shards], [shard.coords for shard in shards]
    found.extra = unite_each(opened, [shard.optimizer.extra for shard in shards], files, "the optimizer's", coords)
    for shard in shards:
        if shard.optimizer.per_rank:
            found.per_rank[shard.label] = dict(shard.optimizer.per_rank)
    if any(map(_is_numbered, shards)):
        found.per_rank |= {shard.label: {"optimizer": shard.optimizer.values} for shard in shards}
        return found
    names = dict.fromkeys(name for shard in shards for name in shard.optimizer.values if name != "param_groups")
    for name in names:
        holding = [shard for shard in shards if name in shard.optimizer.values]
        held = [mapping(shard.optimizer.values[name], shard.paths[0], name) for shard in holding]
        where = [shard.coords for shard in holding]
        found.values[name] = unite_each(opened, held, [shard.paths[0] for shard in holding], f"of {name!r} the state", where)
    found.values["param_groups"] = _param_groups(opened, shards)
    return found


def _param_groups(opened: Opened, shards: Sequence[Shard]) -> list[dict[str, object]]:
    """Param groups with the parameters of all ranks: those with the same place and settings are one group."""
    rows = [(shard, _groups(shard)) for shard in shards]
    if len({len(groups) for _, groups in rows}) > 1:  # a stage without parameters of some kind
        return [group for _, groups in rows for group in groups]
    united: list[dict[str, object]] = []
    for g in range(len(rows[0][1])):
        held = [groups[g] for _, groups in rows]
        names = list(dict.fromkeys(name for group in held for name in group["params"]))
        hyper = [{key: value for key, value in group.items() if key != "params"} for group in held]
        files, coords = [shard.paths[0] for shard, _ in rows], [shard.coords for shard, _ in rows]
        united.append({**unite_each(opened, hyper, files, f"of param group {g} the hyper-parameter", coords), "params": names})
    return united


def _groups(shard: Shard) -> list[dict[str, Any]]:
    groups = shard.optimizer.values.get("param_groups")
    return groups if isinstance(groups, list) else []

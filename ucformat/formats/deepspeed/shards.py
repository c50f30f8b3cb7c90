"""What each model-parallel rank's files hold, as a catalog of its own: the shards that `join` puts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucformat.catalog import Catalog
from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats.deepspeed.experts import check_counts, expert_weights, is_expert
from ucformat.formats.deepspeed.files import LATER, RankFiles, expect_model_ranks, expect_ranks
from ucformat.formats.deepspeed.model import Model, add_sliced, add_whole, parse_model
from ucformat.formats.deepspeed.optim import RankOptim, mapping, parse
from ucformat.formats.deepspeed.per_rank import Coords
from ucformat.formats.deepspeed.pipeline import stage_modules
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.shuffle import round_robin, unshuffled
from ucformat.formats.deepspeed.zero import OptimizerState, Shapes, shapes_of


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along the pipeline and the tensor axis. Rank `mp` is at stage `mp // tp`, tensor rank `mp % tp`."""

    pp: int
    tp: int

    def coords(self, mp: int) -> dict[str, int]:
        """Mesh coordinates, of the axes that are longer than 1."""
        at = {"pp": mp // self.tp, "tp": mp % self.tp}
        return {axis: at[axis] for axis in at if getattr(self, axis) > 1}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model files of one model-parallel rank: one, or under ZeRO-3 one for each data-parallel rank."""

    paths: Sequence[str]
    trees: Sequence[Mapping[Any, Any]]

    @property
    def tree(self) -> Mapping[Any, Any]:
        return self.trees[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one model-parallel rank holds, under canonical names, with its own shapes."""

    label: str
    coords: Coords
    files: ModelFiles
    model: Model
    catalog: Catalog
    optimizer: OptimizerState
    paths: Sequence[str]
    """Of the optimizer files, or of the model file."""

    @property
    def parameters(self) -> set[str]:
        """Names of its parameters, as opposed to buffers."""
        return {*self.model.tensors, *self.model.trained} - set(self.model.buffers)


def count(tree: Mapping[Any, Any], key: str) -> int:
    """A positive number in a model file, or 0."""
    value = tree.get(key)
    return value if type(value) is int and value > 0 else 0


def open_models(opened: Opened, files: RankFiles, mp: int) -> ModelFiles:
    """The model files of one model-parallel rank. Raises MissingFileError, FormatError."""
    held = files.model[mp]
    if 0 not in held:
        first = f"{files.store.url}/zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt"
        raise MissingFileError(first, "the model file of rank 0 is missing")
    paths = list(held.values())
    trees = [mapping(contents, path, "the model file") for contents, path in zip(opened.trees(paths), paths, strict=True)]
    return ModelFiles(paths, trees)


def degrees_of(tree: Mapping[Any, Any], files: RankFiles) -> Degrees:
    """Ranks along the axes, as the first model file says, and checked against the files that are there.

    Raises FormatError, MissingFileError that name a file too few or too many.
    """
    dims = tree.get("checkpoint_parallel_dimensions")
    dims = dims if isinstance(dims, dict) else {}
    pp, tp = count(dims, "pp_degree"), count(dims, "tp_degree")
    total = pp * tp or count(tree, "mp_world_size") or len(files.model)
    source = "the model file (checkpoint_parallel_dimensions)" if pp * tp else "the model file (mp_world_size)"
    expect_model_ranks(files, total, source)
    if not pp * tp:
        piped = tree.get("module", ...) is None
        tp = len(files.layers) if piped and files.layers else 1 if piped else total
        pp = total // tp
    if pp * tp != total or (files.layers_by_rank and sorted(files.layers) != list(range(tp))):
        path = next(iter(files.model[0].values()))
        raise FormatError(
            f"{files.store.url}/{path}",
            f"{total} model-parallel ranks, and layer files of tensor ranks {sorted(files.layers)[:16]}",
        )
    return Degrees(pp, tp)


def open_shards(opened: Opened, files: RankFiles, models: Sequence[ModelFiles], degrees: Degrees) -> list[Shard]:
    """The shards of all model-parallel ranks, in order. Raises what reading any of them does."""
    ranks = [_open_ranks(opened, files, models[mp].tree, mp) for mp in range(len(models))]
    modules = _modules(opened, files, models, ranks, degrees)
    return [
        _shard(opened.fork() if len(models) > 1 else opened, files, models[mp], ranks[mp], modules[mp], mp, degrees)
        for mp in range(len(models))
    ]


def _shard(
    opened: Opened,
    files: RankFiles,
    held: ModelFiles,
    ranks: Sequence[RankOptim],
    module: object,
    mp: int,
    degrees: Degrees,
) -> Shard:
    model = parse_model(held.tree, held.paths[0], ranks, module)
    found = add_sliced(opened, model, ranks, held.trees[1:]) if files.sliced else add_whole(opened, model, ranks)
    _unshuffle(found, held.tree, len(ranks))
    label = f"mp_rank_{mp:02d}"
    catalog = opened.build()
    paths = [rank.path for rank in ranks] or held.paths[:1]
    return Shard(label, degrees.coords(mp), held, model, catalog, found, paths)


def _unshuffle(found: OptimizerState, tree: Mapping[Any, Any], world: int) -> None:
    """Parameters of each group in the optimizer's order, where the run dealt them out to ranks in its buffers."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    groups = found.values.get("param_groups")
    if not world or not isinstance(zero, dict) or not round_robin(zero) or not isinstance(groups, list):
        return
    for group in groups:
        if not any(map(is_expert, group["params"])):
            group["params"] = unshuffled(group["params"], world)


def _modules(
    opened: Opened, files: RankFiles, models: Sequence[ModelFiles], ranks: Sequence[Sequence[RankOptim]], degrees: Degrees
) -> list[object]:
    """The weights of each model-parallel rank: in its model file, in layer files, or in expert files beside them."""
    if models[0].tree.get("module", ...) is not None and not files.layers:
        return [_with_experts(opened, files, held, mp) for mp, held in enumerate(models)]
    modules: list[object] = [None] * len(models)
    for tp in range(degrees.tp):
        stages = [pp * degrees.tp + tp for pp in range(degrees.pp)]
        trained = [_trained(models[mp], ranks[mp]) for mp in stages]
        for mp, module in zip(stages, stage_modules(opened, files, trained, tp), strict=True):
            modules[mp] = module
    return modules


def _with_experts(opened: Opened, files: RankFiles, held: ModelFiles, mp: int) -> object:
    module, total = held.tree.get("module"), held.tree.get("num_experts")
    has_experts = any(type(n) is int and n > 1 for n in (total if isinstance(total, list) else [total]))
    if not has_experts and not files.experts:
        return module
    weights = expert_weights(opened, files, mp, total)
    if both := set(weights) & set(mapping(module, held.paths[0], "module")):
        raise FormatError(held.paths[0], f"holds {min(both)!r}, which an expert file holds as well")
    return {**mapping(module, held.paths[0], "module"), **weights}


def _trained(held: ModelFiles, ranks: Sequence[RankOptim]) -> Shapes:
    groups = shapes_of(held.tree.get("param_shapes"), held.paths[0])
    if groups is None and ranks:
        groups = shapes_of(ranks[0].shapes, ranks[0].path)
    return {name: shape for group in groups or [] for name, shape in group.items()}


def _open_ranks(opened: Opened, files: RankFiles, tree: Mapping[Any, Any], mp: int) -> list[RankOptim]:
    """The optimizer files of a model-parallel rank, once they are known to be all there and to belong together."""
    world, url, held = count(tree, "dp_world_size"), files.store.url, files.optim.get(mp, {})
    if not held:
        if files.sliced or tree.get("param_shapes"):
            first = f"{url}/zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt"
            raise MissingFileError(first, "the optimizer files of this ZeRO run are missing")
        return []
    source = "the model file (dp_world_size)"
    if not world:
        world, source = _partition_count(opened, held), "the first optimizer file (partition_count)"
    expect_ranks(held, world, url, source)
    if files.sliced:
        expect_ranks(files.model[mp], world, url, source)
    paths = list(held.values())
    ranks = [
        replace(parse(contents, path), dp=dp) for dp, (contents, path) in enumerate(zip(opened.trees(paths), paths, strict=True))
    ]
    shapes = shapes_of(tree.get("param_shapes"), paths[0]) or []
    for rank in ranks:
        check_counts(rank.counts, [] if files.sliced else shapes, world, rank.path, source)
        if rank.sliced != files.sliced:
            raise FormatError(rank.path, "of another ZeRO stage than the model file: left over from another run?")
    return ranks


def _partition_count(opened: Opened, held: Mapping[int, str]) -> int:
    """The number of ranks that the first optimizer file knows of, for versions whose model file does not say."""
    path = next(iter(held.values()))
    return max(parse(opened.trees([path])[0], path).counts, default=len(held))


def refuse(tree: Mapping[Any, Any], url: str) -> None:
    """Raise UnsupportedError for kinds that only the contents give away."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    zero = zero if isinstance(zero, dict) else {}
    mics = zero.get("mics_shard_size")
    if tree.get("ds_autoep_layers") or tree.get("autoep_layers"):
        raise UnsupportedError(url, f"a DeepSpeed checkpoint with AutoEP experts: {LATER}")
    offload = zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("device") == "nvme":
        raise UnsupportedError(url, f"a DeepSpeed checkpoint whose optimizer state was offloaded to NVMe: {LATER}")
    if type(mics) is int and mics > 0:
        raise UnsupportedError(url, f"a DeepSpeed checkpoint sharded in groups of {mics} ranks (MiCS): {LATER}")

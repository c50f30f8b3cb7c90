"""Reader of legacy Megatron checkpoints: `mp_rank_*` folders with one `model_optim_rng.pt` for each model-parallel rank.

Tensor, pipeline (with virtual stages) and expert parallel shards join as views, so parameters have the names and shapes of
the whole model. What the files leave open (is an MLP gated? is a folder's number a stage or an expert rank?) is decided by
shapes and contents, and compared with the run's arguments where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucformat.catalog import Catalog, Notes
from ucformat.errors import FormatError
from ucformat.formats.megatron import grid as grids
from ucformat.formats.megatron.beside import placed, values_beside
from ucformat.formats.megatron.groups import add_groups
from ucformat.formats.megatron.joins import Joins
from ucformat.formats.megatron.optimizer import read_states
from ucformat.formats.megatron.ranks import Opened, open_ranks, settings_of
from ucformat.formats.megatron.settings import Settings
from ucformat.storage.store import Store
from ucformat.values.tree import join_name
from ucformat.views import View

ORIGIN = "megatron"


def open_legacy(store: Store) -> Catalog:
    """The catalog of an iteration's folder. Reads the directory and pickle of each file; of tensors at most their checksums.

    Raises MissingFileError, FormatError and UnsupportedError naming files and parameters that are missing or don't fit.
    """
    opened = Opened(store)
    ranks = open_ranks(opened)
    settings = settings_of(ranks)
    grid = grids.arrange(opened, ranks, settings)
    _check_layers(grid, settings, store.url)
    joins = Joins(opened, grid, settings)
    if joins.dropped:
        opened.remarks.append(joins.dropped)
    weights: dict[str, View] = {}
    for name, join in joins.found.items():
        try:
            weights[name] = join.view(joins.weight)
        except ValueError as error:
            raise FormatError(joins.tensor_file(join.shards[0]), f"the shards of {name} don't fit each other: {error}") from None
    views = {join_name("model", name): view for name, view in weights.items()}
    found = values_beside(opened, ranks)
    states = read_states(opened, grid, joins, settings)
    for kind, held in states.items():
        views.update((join_name("optimizer", name, kind), view) for name, view in held.items())
    records = [rank.rest["optimizer"] for rank in ranks if rank.rest.get("optimizer") is not None]
    add_groups(opened, found, records, states, views, {name: view.ndim for name, view in weights.items()})
    values, more = placed(opened, found)
    views.update(more)
    step = values.get("step")
    notes = Notes(ORIGIN, step if type(step) is int else None, dict(grids.stages(grid)), tuple(opened.remarks))
    return opened.rewrite.build(views, {}, values, notes)


def _check_layers(grid: grids.Grid, settings: Settings, url: str) -> None:
    """The layers of the main stack are as many as the arguments say. Raises FormatError."""
    told = settings.number("num_layers")
    layers: Mapping[str, int] = grid.layers()
    main = layers.get("decoder.layers", layers.get("encoder.layers"))
    if told is not None and main is not None and main != told:
        raise FormatError(url, f"its files hold {main} layers, and its arguments say {told}")

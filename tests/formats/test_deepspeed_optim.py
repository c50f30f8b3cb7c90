"""Optimizer files of older versions and other optimizers, made from real ones by small edits."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucformat
from tests.formats.deepspeed_fixtures import (
    MORE,
    assert_same,
    copy_of,
    edit,
    load,
    model_file,
    open_kind,
    optimizer_files,
    parameters_with_state,
    tag_of,
)
from ucformat.errors import UnsupportedError
from ucformat.reshard.reading.lazy import read
from ucformat.values.codec import RankLocal


def test_one_dict_of_shapes_is_one_group(tmp_path: Path) -> None:
    """Before DeepSpeed 0.5.4."""
    run = copy_of("z1n3", tmp_path)
    edit(model_file(run), lambda tree: tree.update(param_shapes=tree["param_shapes"][0]))
    assert_same(run, "z1n3")


def test_one_dict_of_shapes_is_spread_over_the_sub_groups_of_zero3(tmp_path: Path) -> None:
    run = copy_of("z3two", tmp_path)
    edit(
        model_file(run), lambda tree: tree.update(param_shapes={n: s for group in tree["param_shapes"] for n, s in group.items()})
    )
    assert_same(run, "z3two")


def test_shapes_in_the_optimizer_file_are_found(tmp_path: Path) -> None:
    """Before DeepSpeed 0.6.0."""
    run = copy_of("z2two", tmp_path)
    shapes = load(model_file(run))["param_shapes"]
    edit(model_file(run), lambda tree: tree.pop("param_shapes"))
    for file in optimizer_files(run):
        edit(file, lambda tree: tree.update(param_shapes=shapes))
    assert_same(run, "z2two")


def test_plain_tuples_are_shapes_too(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    edit(
        model_file(run),
        lambda tree: tree.update(param_shapes=[{n: tuple(s) for n, s in g.items()} for g in tree["param_shapes"]]),
    )
    assert_same(run, "z1n3")


def test_what_old_versions_left_out_is_not_needed(tmp_path: Path) -> None:
    """No world size, paddings, stage or alignment; file names without the underscore."""
    run = copy_of("z1n3", tmp_path)
    edit(
        model_file(run),
        lambda tree: [
            tree.pop(key) for key in ("dp_world_size", "checkpoint_parallel_dimensions", "shared_params", "buffer_names")
        ],
    )
    for file in optimizer_files(run):
        edit(
            file,
            lambda tree: [
                tree["optimizer_state_dict"].pop(key) for key in ("group_paddings", "param_alignment_paddings", "zero_stage")
            ],
        )
        file.rename(file.with_name(file.name.replace("_optim", "optim")))
    assert_same(run, "z1n3")
    assert open_kind(run).notes.mesh == {"dp": 3}


@pytest.mark.parametrize("where", ["state", "param_groups"])
def test_a_step_that_is_a_number_becomes_each_parameters_tensor(where: str, tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam."""
    run = copy_of("z2two", tmp_path)

    def change(tree: dict[str, Any]) -> None:
        inner = tree["optimizer_state_dict"]["base_optimizer_state"]
        for g, state in inner["state"].items():
            state.pop("step")
            (state if where == "state" else inner["param_groups"][g])["step"] = 3

    for file in optimizer_files(run):
        edit(file, change)
    catalog = open_kind(run)
    assert {name.split("/")[1] for name in catalog.names if name.endswith("/step")} == parameters_with_state(catalog)
    assert torch.equal(read(catalog, "optimizer/ln.bias/step"), torch.tensor(3.0))
    assert isinstance(catalog.values, dict)
    assert all("step" not in group for group in catalog.values["optimizer"]["param_groups"])
    assert_same(run, "z2two")


def add_table(tree: dict[str, Any], rank: int) -> None:
    tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["absmax"] = torch.full((5,), rank)


def test_state_of_another_length_is_kept_as_it_is(tmp_path: Path) -> None:
    """Quantisation tables and the like belong to a rank's whole buffer."""
    run = copy_of("z1n3", tmp_path)
    for rank, file in enumerate(optimizer_files(run)):
        edit(file, partial(add_table, rank=rank))
    catalog = open_kind(run)
    assert torch.equal(read(catalog, "deepspeed/optimizer_state/0/absmax/2"), torch.full((5,), 2))
    assert any("absmax" in remark for remark in catalog.notes.remarks)
    assert_same(run, "z1n3")


def test_scalar_state_that_differs_between_ranks_is_kept_for_each() -> None:
    """Adafactor's RMS is a statistic of a rank's own buffer."""
    catalog = open_kind(MORE / "z1adafactor")
    assert not [name for name in catalog.names if name.startswith("optimizer/") and name.endswith("/RMS")]
    assert isinstance(catalog.values, dict)
    for g in (0, 1):
        item = catalog.values["deepspeed"]["optimizer_state"][str(g)]["RMS"]
        assert isinstance(item, RankLocal)
        assert item.coords == ({"dp": 0}, {"dp": 1}, {"dp": 2})
        for rank, file in enumerate(optimizer_files(MORE / "z1adafactor")):
            expected = load(file)["optimizer_state_dict"]["base_optimizer_state"]["state"][g]["RMS"]
            assert torch.equal(read(catalog, f"deepspeed/optimizer_state/{g}/RMS/{rank}"), expected)
    assert any("'RMS'" in remark and "differs between ranks" in remark for remark in catalog.notes.remarks)


@pytest.mark.parametrize(("kind", "where"), [("z1n3", "base_optimizer_state"), ("z3n3", "optimizer_state_dict")])
def test_a_hyper_parameter_that_differs_between_ranks_is_kept_for_each(kind: str, where: str, tmp_path: Path) -> None:
    """Somebody edited one rank's file: whose value holds is not for a reader to decide."""
    run = copy_of(kind, tmp_path)
    edit(optimizer_files(run)[1], lambda tree: tree["optimizer_state_dict"][where]["param_groups"][0].update(lr=0.5))
    edit(optimizer_files(run)[2], lambda tree: tree["optimizer_state_dict"].update(clip_grad=7.0))
    catalog = open_kind(run)
    assert isinstance(catalog.values, dict)
    group = catalog.values["optimizer"]["param_groups"][0]
    assert isinstance(group["lr"], RankLocal)
    assert group["lr"].values == (0.01, 0.5, 0.01)
    assert group["weight_decay"] == 0.1
    assert catalog.values["deepspeed"]["optimizer"]["clip_grad"].values[2] == 7.0
    assert any("'lr' differs between ranks: 0.01 on rank 0, 0.5 on rank 1" in remark for remark in catalog.notes.remarks)
    with pytest.raises(UnsupportedError, match="lr differed between the 3 ranks"):
        net = torch.nn.Linear(2, 2)
        ucformat.load(str(run), into={"model": net, "optimizer": torch.optim.AdamW(net.parameters())}, strict=False)


def test_what_a_client_keeps_in_every_ranks_model_file_is_kept_for_each(tmp_path: Path) -> None:
    """ZeRO-3 has a model file per rank: RNG states differ, and are no rank's but its own."""
    run = copy_of("z3n3", tmp_path)
    for rank, file in enumerate(sorted(tag_of(run).glob("*model_states.pt"))):
        own = {"rng": {"torch": torch.full((8,), rank)}, "tokens": 12, "data_sampler": {"at": rank}}
        edit(file, partial(dict.update, **own))
    catalog = open_kind(run)
    assert isinstance(catalog.values, dict)
    assert catalog.values["client"]["tokens"] == 12
    assert catalog.values["client"]["iteration"] == 3
    assert [item["at"] for item in catalog.values["data"].values] == [0, 1, 2]
    assert torch.equal(read(catalog, "client/rng/2/torch"), torch.full((8,), 2))


def test_an_empty_parameter_is_there(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)

    def change(tree: dict[str, Any]) -> None:
        tree["module"]["none"] = torch.empty(0, 4)
        tree["module"]["other"] = torch.empty(3, 0)
        tree["shared_params"]["other"] = "none"  # DeepSpeed believes so, since empty tensors have one address

    edit(model_file(run), change)
    catalog = open_kind(run)
    assert read(catalog, "model/none").shape == (0, 4)
    assert read(catalog, "model/other").shape == (3, 0)


def test_scheduler_sampler_arguments_and_client_tensors_are_kept(tmp_path: Path) -> None:
    run = copy_of("z2two", tmp_path)
    client = {
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.01]},
        "data_sampler": {"consumed": 12},
        "args": argparse.Namespace(hidden_size=7, lr=0.01),
        "rng": {"torch": torch.arange(5, dtype=torch.uint8), "numpy": np.arange(3.0)},
        "tokens": 1 << 40,
    }
    edit(model_file(run), lambda tree: tree.update(client))
    catalog = open_kind(run)
    values = catalog.values
    assert isinstance(values, dict)
    assert values["scheduler"] == client["lr_scheduler"]
    assert values["data"] == client["data_sampler"]
    assert values["args"] == client["args"]
    assert values["client"]["tokens"] == client["tokens"]
    assert torch.equal(read(catalog, "client/rng/torch"), torch.arange(5, dtype=torch.uint8))
    assert torch.equal(read(catalog, "client/rng/numpy"), torch.arange(3.0, dtype=torch.float64))
    assert_same(run, "z2two")


def test_sub_groups_belong_to_the_only_param_group_when_it_lists_none(tmp_path: Path) -> None:
    run = copy_of("z3n3", tmp_path)
    for file in optimizer_files(run):
        edit(file, lambda tree: tree["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0].update(params=[]))
    assert_same(run, "z3n3")

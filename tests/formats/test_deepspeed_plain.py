"""ZeRO-0: numbered optimizer state gets its names when they are proven, and never by a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ucformat
from tests.formats.deepspeed_fixtures import DATA, MORE, copy_of, edit, load, model_file, open_kind, optimizer_files
from tests.formats.test_deepspeed import Net
from ucformat.errors import FormatError
from ucformat.formats.deepspeed.evidence import settle
from ucformat.reshard.reading.lazy import read


def optimizer_of(kind: Path) -> dict[str, Any]:
    """The inner optimizer's state dict, as torch loads it."""
    optimizer = load(model_file(kind))["optimizer"]
    inner: dict[str, Any] = optimizer.get("optimizer_state_dict", optimizer)
    return inner


@pytest.mark.parametrize("kind", ["z0bf16", "z0fp16", "z0bf16two"])
def test_numbered_state_is_found_under_the_names_the_optimizer_was_given(kind: str) -> None:
    """The training script's own order: matrices first where there are two groups, tied and frozen ones left out."""
    catalog = open_kind(DATA / kind)
    tree = load(model_file(DATA / kind))
    optimizer = optimizer_of(DATA / kind)
    names = [name for name in tree["module"] if name != "scale" and not (kind == "z0bf16two" and name.startswith("fc1"))]
    if len(optimizer["param_groups"]) == 2:
        names.sort(key=lambda name: tree["module"][name].dim() == 1)
    assert sum(len(group["params"]) for group in optimizer["param_groups"]) == len(names)
    for index, state in optimizer["state"].items():
        for key, value in state.items():
            assert torch.equal(read(catalog, f"optimizer/{names[index]}/{key}"), value), (names[index], key)
    masters = [tensor for group in tree["optimizer"]["fp32_groups"] for tensor in group]
    for name, tensor in zip(names, masters, strict=True):
        assert torch.equal(read(catalog, f"optimizer/{name}/fp32"), tensor)


@pytest.mark.parametrize("kind", ["z0twinsbf16", "z0twinsfused"])
def test_state_goes_to_the_parameter_whose_weight_its_master_rounds_to(kind: str) -> None:
    """Layers of equal shapes, listed for the optimizer in another order than in the model."""
    catalog = open_kind(MORE / kind)
    truth = {
        name: tensor for name, tensor in load_file(MORE / kind / "truth.safetensors").items() if not name.startswith("__lp__")
    }
    assert len(truth) == 30
    for name, expected in truth.items():
        assert torch.equal(read(catalog, f"optimizer/{name}"), expected), name
    assert not any("number" in remark for remark in catalog.notes.remarks)


@pytest.mark.parametrize(
    "run", [DATA / "z0", DATA / "z0two", DATA / "z0sgd", DATA / "z0frozen", MORE / "z0twins"], ids=lambda p: p.name
)
def test_state_that_nothing_proves_keeps_its_numbers(run: Path) -> None:
    """fp32 has no master weights, and several parameters have one shape: named by order, twins would get each other's state."""
    catalog = open_kind(run)
    optimizer = optimizer_of(run)
    assert isinstance(catalog.values, dict)
    assert catalog.values["optimizer"]["param_groups"] == optimizer["param_groups"]
    assert optimizer["state"]
    for index, state in optimizer["state"].items():
        for key, value in state.items():
            assert torch.equal(read(catalog, f"optimizer/state/{index}/{key}"), value)
            assert catalog.values["optimizer"]["state"][index][key].name == f"optimizer/state/{index}/{key}"
    stored = {name.split("/")[1] for name in catalog.names if name.startswith("optimizer/")}
    assert stored == {"state"}
    assert any("nothing proves which is which" in remark for remark in catalog.notes.remarks)


def test_numbered_state_loads_into_an_optimizer_that_lists_its_parameters_alike() -> None:
    """Here the training script listed them in the order of the model, which only its author knows."""
    net = Net()
    adam = torch.optim.AdamW(net.parameters())
    assert ucformat.load(str(DATA / "z0"), into={"model": net, "optimizer": adam}).step == 3
    for number, parameter in enumerate(net.parameters()):
        assert torch.equal(adam.state[parameter]["exp_avg"], optimizer_of(DATA / "z0")["state"][number]["exp_avg"])


def test_shapes_prove_names_when_no_two_parameters_have_the_same(tmp_path: Path) -> None:
    """Whatever the order: here the optimizer lists them backwards."""
    run = copy_of("z0", tmp_path)
    shapes = {"a": (2, 3), "b": (3,), "c": (4, 2)}

    def change(tree: dict[str, Any]) -> None:
        tree["module"] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        state = {i: {"exp_avg": torch.full(shapes[name], float(i))} for i, name in enumerate("cba")}
        tree["optimizer"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}

    edit(model_file(run), change)
    catalog = open_kind(run)
    assert [float(read(catalog, f"optimizer/{name}/exp_avg").flatten()[0]) for name in "abc"] == [2.0, 1.0, 0.0]
    assert isinstance(catalog.values, dict)
    assert catalog.values["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["c", "b", "a"]}]


def test_equal_weights_of_one_shape_are_not_told_apart(tmp_path: Path) -> None:
    """A norm's weights are ones for long in bf16, and their masters differ already."""
    run = copy_of("z0bf16", tmp_path)

    def change(tree: dict[str, Any]) -> None:
        for i, name in enumerate(tree["module"]):
            if name in ("ln.weight", "fc1.bias"):  # both of 11 items
                tree["module"][name].fill_(1)
                tree["optimizer"]["fp32_groups"][0][i].detach().fill_(1 + i * 1e-5)

    edit(model_file(run), change)
    catalog = open_kind(run)
    assert "optimizer/ln.weight/fp32" not in catalog.names
    state = optimizer_of(run)["state"]
    assert all(torch.equal(read(catalog, f"optimizer/state/{i}/exp_avg"), state[i]["exp_avg"]) for i in state)


def test_a_master_that_is_nobodys_rounded_weight_gets_no_name(tmp_path: Path) -> None:
    run = copy_of("z0bf16", tmp_path)
    edit(model_file(run), lambda tree: tree["module"]["fc1.weight"].add_(1))
    catalog = open_kind(run)
    assert any("nothing proves which is which" in remark for remark in catalog.notes.remarks)
    assert "optimizer/fc1.weight/fp32" not in catalog.names
    assert torch.equal(read(catalog, "deepspeed/optimizer_state/1/fp32"), load(model_file(run))["optimizer"]["fp32_groups"][0][1])
    assert "optimizer/state/1/exp_avg" in catalog.names
    assert "optimizer/emb.weight/fp32" in catalog.names  # proven all the same: an export in fp32 takes it


def test_names_in_the_file_that_values_disprove_are_not_taken(tmp_path: Path) -> None:
    run = copy_of("z0bf16", tmp_path)
    names = [name for name in load(model_file(run))["module"] if name != "scale"]
    names[3], names[4] = names[4], names[3]  # ln.weight and ln.bias
    inner = "optimizer_state_dict"
    edit(model_file(run), lambda tree: tree["optimizer"][inner]["param_groups"][0].update(param_names=names))
    catalog, plain = open_kind(run), open_kind(DATA / "z0bf16")
    assert torch.equal(read(catalog, "optimizer/ln.bias/exp_avg"), read(plain, "optimizer/ln.bias/exp_avg"))


@pytest.mark.parametrize("kind", ["z1bf16", "z2n2"])
def test_flat_buffers_in_another_order_than_the_file_says_are_refused(kind: str, tmp_path: Path) -> None:
    """ln.weight and ln.bias are of one shape: only their values tell that they changed places."""
    run = copy_of(kind, tmp_path)

    def change(tree: dict[str, Any]) -> None:
        swap = {"ln.weight": "ln.bias", "ln.bias": "ln.weight"}
        tree["param_shapes"] = [type(tree["param_shapes"][0])((swap.get(n, n), s) for n, s in tree["param_shapes"][0].items())]

    edit(model_file(run), change)
    with pytest.raises(FormatError, match=r"is that of 'ln\.(weight|bias)': param_shapes is not the order"):
        open_kind(run)


def test_weights_that_are_only_said_to_be_tied_stay_two(tmp_path: Path) -> None:
    run = copy_of("z2tied", tmp_path)
    edit(model_file(run), lambda tree: tree["module"].update({"head.weight": tree["module"]["head.weight"] + 1}))
    catalog, plain = open_kind(run), open_kind(DATA / "z2tied")
    assert torch.equal(read(catalog, "model/head.weight"), read(plain, "model/emb.weight") + 1)
    assert any("tied" in remark and "head.weight" in remark for remark in catalog.notes.remarks)


def test_weights_that_were_changed_behind_the_optimizers_back_are_named(tmp_path: Path) -> None:
    run = copy_of("z1bf16", tmp_path)
    edit(model_file(run), lambda tree: tree["module"]["fc2.bias"].add_(1))
    remarks = open_kind(run).notes.remarks
    assert any("fc2.bias" in remark and "rounded master weights" in remark for remark in remarks)
    assert not any("rounded master weights" in remark for remark in open_kind(DATA / "z1bf16").notes.remarks)
    assert optimizer_files(run)


def test_names_that_the_optimizer_keeps_are_taken(tmp_path: Path) -> None:
    """torch optimizers built from named_parameters() save `param_names`."""
    run = copy_of("z0frozen", tmp_path)
    names = ["emb.weight", "ln.weight", "ln.bias", "fc2.weight", "fc2.bias", "head.weight"]
    edit(model_file(run), lambda tree: tree["optimizer"]["param_groups"][0].update(param_names=names))
    catalog = open_kind(run)
    state = load(model_file(run))["optimizer"]["state"]
    assert torch.equal(read(catalog, "optimizer/ln.bias/exp_avg"), state[2]["exp_avg"])
    assert isinstance(catalog.values, dict)
    assert catalog.values["optimizer"]["param_groups"][0]["params"] == names


def test_a_fused_optimizers_flat_buffer_is_cut_into_parameters(tmp_path: Path) -> None:
    """FP16_Optimizer with a fused inner optimizer: the layout of its state_dict, with z0bf16's numbers in it."""
    run = copy_of("z0bf16", tmp_path)
    optimizer = load(model_file(run))["optimizer"]
    inner = optimizer["optimizer_state_dict"]
    masters = [tensor for group in optimizer["fp32_groups"] for tensor in group]
    flat = {key: torch.cat([state[key].flatten() for state in inner["state"].values()]) for key in ("exp_avg", "exp_avg_sq")}
    fused = {
        "cur_scale": 1.0,
        "optimizer_state_dict": {"state": {0: flat}, "param_groups": [{"lr": 0.01, "step": 4, "params": [0]}]},
        "fp32_groups_flat": [torch.cat([tensor.flatten() for tensor in masters])],
    }
    edit(model_file(run), lambda tree: tree.update(optimizer=fused))
    catalog, plain = open_kind(run), open_kind(DATA / "z0bf16")
    assert catalog.names == plain.names
    assert all(torch.equal(read(catalog, name), read(plain, name)) for name in plain.names)


def test_fused_groups_that_fit_several_names_are_kept_under_their_number(tmp_path: Path) -> None:
    """Where weights are all alike, nothing says which three of four vectors were trained."""
    run = copy_of("z0fusedfrozen", tmp_path)

    def make_alike(tree: dict[str, Any]) -> None:
        for weight in (*tree["module"].values(), *tree["optimizer"]["fp32_groups_flat"]):
            weight.detach().zero_()

    edit(model_file(run), make_alike)
    catalog = open_kind(run)
    assert not [name for name in catalog.names if name.startswith("optimizer/")]
    state = load(model_file(run))["optimizer"]["optimizer_state_dict"]["state"]
    assert torch.equal(read(catalog, "deepspeed/optimizer_state/1/exp_avg"), state[1]["exp_avg"])
    assert any("number" in remark for remark in catalog.notes.remarks)


def test_a_model_without_optimizer_is_its_weights(tmp_path: Path) -> None:
    run = copy_of("z0", tmp_path)
    edit(model_file(run), lambda tree: tree.update(optimizer=None))
    catalog = open_kind(run)
    assert {name.split("/")[0] for name in catalog.names} == {"model"}
    assert torch.equal(read(catalog, "model/ln.bias"), read(open_kind(DATA / "z0"), "model/ln.bias"))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_shapes_alone_name_an_entry_just_when_no_other_order_of_the_list_fits(shapes: list[int], data: st.DataObject) -> None:
    names = [f"p{i}" for i in range(len(shapes))]
    listed = data.draw(st.lists(st.sampled_from(range(len(shapes))), unique=True))
    candidates = [[[name for name, n in zip(names, shapes, strict=True) if n == shapes[i]] for i in listed]]
    assert settle(candidates)[0] == [names[i] if shapes.count(shapes[i]) == 1 else None for i in listed]


def test_one_tensor_of_zero_0_is_read_by_its_range() -> None:
    catalog = open_kind(DATA / "z0bf16")
    assert read(catalog, "optimizer/emb.weight/exp_avg").shape == (13, 7)
    assert len({name.split("/")[1] for name in catalog.names if name.endswith("exp_avg")}) == 8

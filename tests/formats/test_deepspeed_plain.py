"""ZeRO-0: numbered optimizer state gets its names, when just one assignment fits, and never by a guess."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.deepspeed_fixtures import DATA, copy_of, edit, load, model_file, open_kind
from ucformat.formats import deepspeed
from ucformat.formats.deepspeed.plain import Numbered, assign
from ucformat.formats.source import locate
from ucformat.pickles.unpickle import StoredStorage, StoredTensor, open_torch_zip
from ucformat.reshard.reading.lazy import read
from ucformat.storage.open import open_store

SHAPES = {
    "emb.weight": 2,
    "fc1.weight": 2,
    "fc1.bias": 1,
    "ln.weight": 1,
    "ln.bias": 1,
    "fc2.weight": 2,
    "fc2.bias": 1,
    "head.weight": 2,
}


@pytest.mark.parametrize("kind", ["z0", "z0bf16", "z0fp16", "z0two", "z0sgd", "z0bf16two"])
def test_numbered_state_is_found_under_the_names_the_optimizer_was_given(kind: str) -> None:
    """The training script's own order: matrices first where there are two groups, tied and frozen ones left out."""
    catalog = open_kind(DATA / kind)
    tree = load(model_file(DATA / kind))
    optimizer = tree["optimizer"].get("optimizer_state_dict", tree["optimizer"])
    names = [name for name in tree["module"] if name != "scale" and not (kind == "z0two" and name == "head.weight")]
    if kind == "z0bf16two":
        names = [name for name in names if not name.startswith("fc1")]
    if len(optimizer["param_groups"]) == 2:
        names.sort(key=lambda name: tree["module"][name].dim() == 1)
    assert sum(len(group["params"]) for group in optimizer["param_groups"]) == len(names)
    for index, state in optimizer["state"].items():
        for key, value in state.items():
            assert torch.equal(read(catalog, f"optimizer/{names[index]}/{key}"), value), (names[index], key)
    masters = [tensor for group in tree["optimizer"].get("fp32_groups", []) for tensor in group]
    for name, tensor in zip(names, masters, strict=False):
        assert torch.equal(read(catalog, f"optimizer/{name}/fp32"), tensor)
    if not masters:
        assert catalog.find("optimizer/ln.bias/fp32") == catalog.find("model/ln.bias")


def test_state_that_fits_several_names_is_kept_under_its_number() -> None:
    """Frozen fc1.bias has the shape of ln.weight and ln.bias, and nothing says which two of the three were trained."""
    catalog = open_kind(DATA / "z0frozen")
    tree = load(model_file(DATA / "z0frozen"))
    assert not [name for name in catalog.names if name.startswith("optimizer/")]
    for index, state in tree["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(read(catalog, f"deepspeed/optimizer_state/{index}/{key}"), value)
    assert any("number" in remark for remark in catalog.notes.remarks)
    assert isinstance(catalog.values, dict)
    assert catalog.values["deepspeed"]["optimizer"]["param_groups"][0]["lr"] == 0.01


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


def stored(shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of that shape in some file; its bytes are not looked at here."""
    path = model_file(DATA / "z0")
    tree = open_torch_zip(open_store(str(path.parent)), path.name).tree
    storage = tree["module"]["emb.weight"].storage
    assert isinstance(storage, StoredStorage)
    return StoredTensor("F32", shape, tuple(1 for _ in shape), 0, storage)


def ways(names: list[str], shapes: list[int], groups: list[list[int | None]]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All assignments, by brute force: choose names for every entry, each group's in the order of the model."""
    total = sum(map(len, groups))
    for chosen in permutations(range(len(names)), total):
        at, parts = 0, []
        for group in groups:
            part = chosen[at : at + len(group)]
            at += len(group)
            if list(part) != sorted(part) or any(want not in (None, shapes[i]) for i, want in zip(part, group, strict=True)):
                break
            parts.append(tuple(names[i] for i in part))
        else:
            yield tuple(parts)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
def test_an_assignment_is_made_just_when_there_is_one(shapes: list[int], data: st.DataObject) -> None:
    names = [f"p{i}" for i in range(len(shapes))]
    entries = st.lists(st.one_of(st.none(), st.integers(1, 3)), max_size=3)
    groups = data.draw(st.lists(entries, min_size=1, max_size=2))
    tensors = {name: stored((n,)) for name, n in zip(names, shapes, strict=True)}
    numbered = [[Numbered(0, None, None if n is None else (n,)) for n in group] for group in groups]
    found = assign(tensors, numbered, lambda name, entry: True)
    every = set(ways(names, shapes, groups)) if sum(map(len, groups)) <= len(names) else set()
    assert found == ([list(part) for part in next(iter(every))] if len(every) == 1 else None)


def test_a_large_model_in_two_groups_is_named_quickly() -> None:
    sizes = [(512, 64), (64,), (64, 512), (512,), (64, 64)] * 200
    tensors = {f"p{i}": stored(shape) for i, shape in enumerate(sizes)}
    groups = [[Numbered(i, None, t.shape) for i, t in enumerate(tensors.values()) if len(t.shape) == n] for n in (2, 1)]
    found = assign(tensors, groups, lambda name, entry: True)
    assert found is not None
    assert found[1] == [name for name, tensor in tensors.items() if len(tensor.shape) == 1]


def test_one_tensor_of_zero_0_is_read_by_its_range() -> None:
    assert deepspeed.detect(locate(str(DATA / "z0")))
    catalog = open_kind(DATA / "z0")
    assert set(SHAPES) == {name.split("/")[1] for name in catalog.names if name.endswith("exp_avg")}
    assert all(len(catalog.spec(f"optimizer/{name}/exp_avg").shape) == ndim for name, ndim in SHAPES.items())

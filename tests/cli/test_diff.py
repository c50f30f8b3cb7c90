"""`ucconvert diff` exits 0 when two checkpoints are equal and 1 when they differ."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import write_native
from tests.cli.calls import Program, spawn


def test_a_converted_checkpoint_equals_its_source(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    assert ucconvert(src, tmp_path / "out", "--to", "hf").status == 0
    answer = ucconvert("diff", src, tmp_path / "out", "--select", "model/*")
    assert answer.status == 0
    assert answer.out == "equal: 4 tensors, 224 B compared bit for bit\n"
    answer = ucconvert("diff", src, tmp_path / "out")
    assert answer.status == 1
    assert "optimizer/norm/exp_avg: only in a\n" in answer.out


def test_differences_are_listed(ucconvert: Program, tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([1.0, 2.1])}, tmp_path / "b.safetensors")
    answer = ucconvert("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert answer.status == 1
    assert "model/w: values: 1 of 2 items differ, first at [1], largest difference 0.1\n" in answer.out
    assert "1 difference: 1 tensor, 8 B compared bit for bit\n" in answer.out
    assert ucconvert("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--atol", "0.2").status == 0
    assert ucconvert("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--rtol", "0.01").status == 1
    result = json.loads(ucconvert("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").out)
    assert result["differences"][0]["name"] == "model/w"


def test_dtypes_and_values_are_compared_as_asked(ucconvert: Program, tmp_path: Path) -> None:
    write_native(tmp_path / "a", {"w": torch.ones(2)}, values={"step": 1})
    write_native(tmp_path / "b", {"w": torch.ones(2).bfloat16()}, values={"step": 2})
    assert ucconvert("diff", tmp_path / "a", tmp_path / "b").status == 1
    assert ucconvert("diff", tmp_path / "a", tmp_path / "b", "--ignore-dtype").status == 0
    answer = ucconvert("diff", tmp_path / "a", tmp_path / "b", "--ignore-dtype", "--values")
    assert answer.status == 1
    assert "values:step: values: 1 and 2\n" in answer.out


def test_a_negative_tolerance_is_wrong_usage(ucconvert: Program, src: Path) -> None:
    assert ucconvert("diff", src, src, "--atol", "-1").status == 2


def test_status_of_the_real_program(src: Path, tmp_path: Path) -> None:
    write_native(tmp_path / "other", {"w": torch.ones(2)})
    assert spawn("diff", src, src).status == 0
    assert spawn("diff", src, tmp_path / "other").status == 1


def test_an_exclusion_that_matches_nothing_is_an_error(ucconvert: Program, src: Path) -> None:
    answer = ucconvert("diff", src, src, "--exclude", "optimzer/*")
    assert answer.status == 1
    assert "no name matches 'optimzer/*'" in answer.err


def test_select_and_exclude_count_for_values_too(ucconvert: Program, tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "params": ["w"]}]
    write_native(tmp_path / "a", {"model/w": torch.ones(2)}, values={"step": 1, "optimizer": {"param_groups": groups, "x": 1}})
    write_native(tmp_path / "b", {"model/w": torch.ones(2)}, values={"step": 2, "optimizer": {"param_groups": groups, "x": 2}})
    both = (tmp_path / "a", tmp_path / "b", "--values")
    assert ucconvert("diff", *both).status == 1
    answer = ucconvert("diff", *both, "--exclude", "step")
    assert (answer.status, answer.out.splitlines()[0]) == (1, "values:optimizer/x: values: 1 and 2")
    assert ucconvert("diff", *both, "--exclude", "step", "--exclude", "optimizer/x").status == 0
    assert ucconvert("diff", *both, "--select", "model", "--select", "optimizer/param_groups").status == 0
    assert "values:step" in ucconvert("diff", *both, "--select", "step").out


def test_a_selection_that_means_nothing_is_no_proof_of_equality(ucconvert: Program, src: Path) -> None:
    answer = ucconvert("diff", src, src, "--select", "modle/*")
    assert answer.status == 1
    assert "no name matches 'modle/*' [UnsupportedError]" in answer.err


def test_many_differences_alike_are_one_line_with_what_to_do(ucconvert: Program, tmp_path: Path) -> None:
    state = {f"model/layers.{i}.w": torch.full((4,), 1 / 3 + i) for i in range(60)}
    write_native(tmp_path / "a", {**state, "only": torch.ones(1)})
    write_native(tmp_path / "b", {name: tensor.bfloat16() for name, tensor in state.items()})
    answer = ucconvert("diff", tmp_path / "a", tmp_path / "b")
    assert answer.status == 1
    lines = answer.out.splitlines()
    assert lines[0].startswith("60 names: dtype: F32 and BF16: model/layers.0.w, ")
    assert lines[1:] == ["only: only in a", "61 differences (60 dtype, 1 only in a): no tensor was compared"]
    assert "--ignore-dtype --rtol" in answer.err
    answer = ucconvert("diff", tmp_path / "a", tmp_path / "b", "--ignore-dtype", "--rtol", "0.01", "--exclude", "only")
    assert (answer.status, answer.out) == (0, "equal: 60 tensors, 960 B compared as numbers\n")
    assert len(json.loads(ucconvert("diff", tmp_path / "a", tmp_path / "b", "--json").out)["differences"]) == 61


def test_comparing_nothing_is_no_equality(ucconvert: Program, tmp_path: Path) -> None:
    write_native(tmp_path / "a", {}, values={"step": 1})
    answer = ucconvert("diff", tmp_path / "a", tmp_path / "a")
    assert (answer.status, answer.out.split(":")[0]) == (1, "nothing was compared")
    assert ucconvert("diff", tmp_path / "a", tmp_path / "a", "--values").status == 0

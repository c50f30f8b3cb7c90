"""`ucconvert inspect` shows all that the metadata says, and reads nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.checkpoints import flip, shards_of, write_native
from tests.cli.calls import Program


def test_the_head_says_format_step_mesh_and_sizes(ucconvert: Program, src: Path) -> None:
    head = ucconvert("inspect", src).out.splitlines()[0]
    assert head == f"{src}: native, step 7, mesh dp2, 4 tensors, 224 B, 6 fragments in 2 files"


def test_the_tree_shows_names_dtypes_shapes_sizes_and_fragments(ucconvert: Program, src: Path) -> None:
    lines = [" ".join(line.split()) for line in ucconvert("inspect", src).out.splitlines()]
    assert "model/" in lines
    assert "layers.0.w F32 [6, 4] 96 B 3 fragments" in lines
    assert "norm F32 [4] 16 B" in lines
    assert "optimizer/" in lines
    assert "norm/" in lines
    assert "exp_avg F32 [4] 16 B" in lines
    assert "model/tied → model/norm" in lines
    assert "values: step, args" in lines


def test_fragments_and_values_are_shown_when_asked(ucconvert: Program, src: Path) -> None:
    out = ucconvert("inspect", src, "--fragments", "--values").out
    assert "[2:4, 0:4] at shards." in out
    assert "args/lr = 0.5" in out
    assert "step = 7" in out


def test_a_checkpoint_of_tensors_alone_is_said_to_have_no_values(ucconvert: Program, tmp_path: Path) -> None:
    write_native(tmp_path / "ck", {"w": torch.zeros(2)})
    assert ucconvert("inspect", tmp_path / "ck", "--values").out.splitlines()[-1] == "values: none"


def test_select_and_limit_shorten_the_list(ucconvert: Program, src: Path) -> None:
    out = ucconvert("inspect", src, "--select", "model/*", "--limit", "1").out
    assert "layers.0.w" in out
    assert "layers.1.w" not in out
    assert "and 2 more tensors" in out


def test_json_holds_everything(ucconvert: Program, src: Path) -> None:
    document = json.loads(ucconvert("inspect", src, "--json", "--fragments").out)
    assert (document["format"], document["step"], document["mesh"], document["nbytes"]) == ("native", 7, {"dp": 2}, 224)
    assert document["aliases"] == {"model/tied": "model/norm"}
    assert document["fragments"] == 6
    row = next(row for row in document["tensors"] if row["name"] == "model/layers.0.w")
    assert (row["dtype"], row["shape"], row["nbytes"], row["fragments"]) == ("F32", [6, 4], 96, 3)
    assert [box["offset"] for box in row["boxes"]] == [[0, 0], [2, 0], [4, 0]]


def test_tensor_bytes_are_not_read(ucconvert: Program, tmp_path: Path) -> None:
    write_native(tmp_path / "ck", {"w": torch.zeros(100_000)})
    flip(shards_of(tmp_path / "ck") / "00000.safetensors", 200_000)
    assert ucconvert("inspect", tmp_path / "ck").status == 0


def test_a_selection_that_means_nothing_is_an_error(ucconvert: Program, src: Path) -> None:
    assert ucconvert("inspect", src, "--select", "modle/*").status == 1
    answer = ucconvert("inspect", src, "--select", "step", "--values")
    assert answer.status == 0
    assert "step = 7" in answer.out
    assert "args" not in answer.out

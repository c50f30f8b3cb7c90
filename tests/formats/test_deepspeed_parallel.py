"""Real DeepSpeed runs with pipeline, tensor and expert parallelism, against what the live engines held when they saved them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.deepspeed_fixtures import DATA, PARALLEL, edit, load, open_kind, tag_of
from tests.formats.test_deepspeed import cuts
from ucformat.box import Box, flaw
from ucformat.catalog import Catalog
from ucformat.errors import FormatError, MissingFileError, UcformatError, UnsafePickleError, UnsupportedError
from ucformat.reshard.reading.lazy import read

ROOT = DATA / "parallel"


def copy_of(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / kind, tmp_path / kind))


def assert_true(catalog: Catalog, kind: str) -> None:
    """Every tensor equals the live one bit for bit, and there are no others."""
    live = load_file(ROOT / kind / "truth.safetensors")
    names = set()
    for name, expected in live.items():
        if name.startswith("__lp__/"):
            full = f"model/{name[7:]}"
            got = read(catalog, full)
            low = torch.bfloat16 if "bf16" in kind else torch.float32
            assert torch.equal(got.to(low).float(), expected), full
        else:
            full = f"optimizer/{name}"
            got = read(catalog, full)
            assert got.dtype == expected.dtype, full
            assert torch.equal(got, expected), full
        names.add(full)
    others = {name for name in catalog.names if name not in names and not name.endswith("/step")}
    assert {name.rpartition(".")[2] for name in others} <= {"scale", "model/scale"}
    assert all(torch.equal(read(catalog, name), torch.tensor([1.5])) for name in others)


@pytest.mark.parametrize("kind", PARALLEL)
def test_state_equals_the_live_one_bit_for_bit_and_nothing_is_left_over(kind: str) -> None:
    catalog = open_kind(ROOT / kind)
    assert_true(catalog, kind)
    for i, spec in enumerate(catalog.tensors):
        rows, ndim = catalog.fragments.rows(i), len(spec.shape)
        assert flaw(Box.whole(spec.shape), catalog.fragments.offset[rows, :ndim], catalog.fragments.length[rows, :ndim]) is None


@pytest.mark.parametrize("kind", PARALLEL)
def test_groups_name_every_parameter_and_steps_are_kept(kind: str) -> None:
    catalog = open_kind(ROOT / kind)
    assert isinstance(catalog.values, dict)
    groups = catalog.values["optimizer"]["param_groups"]
    names = [name for group in groups for name in group["params"]]
    assert sorted(names) == sorted({n.split("/")[1] for n in catalog.names if n.endswith("/fp32") and n not in catalog.aliases})
    assert all(float(read(catalog, f"optimizer/{name}/step")) == catalog.notes.step for name in names)
    assert catalog.values["client"]["iteration"] == catalog.values["step"] == catalog.notes.step
    if "two" in kind:
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.1), (0.005, 0.0)]
        assert [{len(catalog.spec(f"model/{name}").shape) for name in group["params"]} for group in groups] == [{2}, {1}]


def test_axes_are_noted() -> None:
    assert open_kind(ROOT / "pp2tp2").notes.mesh == {"pp": 2, "dp": 1, "tp": 2}
    assert open_kind(ROOT / "tp2z3bf16").notes.mesh == {"dp": 2, "tp": 2}
    assert open_kind(ROOT / "ep2").notes.mesh == {"dp": 4}


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("kind", ["pp2tiedbf16", "tp2two", "tp2z3bf16", "ep2"])
def test_loads_onto_other_numbers_of_ranks(kind: str, ranks: int) -> None:
    catalog = open_kind(ROOT / kind)
    for spec in catalog.tensors:
        whole = read(catalog, spec.name)
        for how in ("rows", "columns", "flat"):
            for boxes in cuts(spec.shape, ranks, how):
                for box in boxes:
                    assert torch.equal(read(catalog, spec.name, box), whole[box.slices]), f"{spec.name} {box}"


EMPTY = "layer_02-"
"""The files of a layer without parameters: nothing is lost with them."""


def rank_files() -> list[tuple[str, str]]:
    files = [(kind, path.name) for kind in PARALLEL for path in sorted(tag_of(ROOT / kind).iterdir())]
    return [(kind, name) for kind, name in files if not name.startswith(EMPTY)]


@pytest.mark.parametrize(("kind", "name"), rank_files())
def test_a_missing_file_is_named(kind: str, name: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    (tag_of(run) / name).unlink()
    # which layer's file held a tied weight is not written down
    shown = r"layer_\*-model_00.*tied" if "tied" in kind and name.startswith("layer_00") else re.escape(name)
    with pytest.raises(MissingFileError, match=shown):
        open_kind(run)


EXTRA = [
    ("pp2tiedbf16", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"),
    ("pp2tiedbf16", "mp_rank_01_model_states.pt", "mp_rank_02_model_states.pt"),
    ("pp2tp2", "zero_pp_rank_0_mp_rank_03_optim_states.pt", "zero_pp_rank_0_mp_rank_04_optim_states.pt"),
    ("pp2tp2", "layer_01-model_00-model_states.pt", "layer_01-model_states.pt"),
    ("pp2tp2", "layer_01-model_01-model_states.pt", "layer_01-model_02-model_states.pt"),
    ("tp2z3bf16", "zero_pp_rank_1_mp_rank_01_model_states.pt", "zero_pp_rank_2_mp_rank_01_model_states.pt"),
    ("ep2", "layer_1_expert_1_mp_rank_00_model_states.pt", "layer_1_expert_2_mp_rank_00_model_states.pt"),
    ("ep2", "layer_0_expert_1_mp_rank_00_model_states.pt", "layer_2_expert_0_mp_rank_00_model_states.pt"),
]


@pytest.mark.parametrize(("kind", "name", "extra"), EXTRA)
def test_a_file_too_many_is_an_error_that_names_it(kind: str, name: str, extra: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    shutil.copy(tag_of(run) / name, tag_of(run) / extra)
    shown = "layer" if extra.startswith("layer_2") or "model_02" in extra else extra
    with pytest.raises(FormatError, match=shown):
        open_kind(run)


MIXED = [
    ("pp2tp2", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_02_optim_states.pt"),
    ("pp2tp2", "mp_rank_00_model_states.pt", "mp_rank_02_model_states.pt"),
    ("ep2", "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt"),
    ("tp2two", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
]


@pytest.mark.parametrize(("kind", "name", "place"), MIXED)
def test_a_file_in_the_place_of_another_rank_is_an_error(kind: str, name: str, place: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    shutil.copy(tag_of(run) / name, tag_of(run) / place)
    with pytest.raises((FormatError, MissingFileError)):
        open_kind(run)


class Bomb:
    """Its pickle runs a command when it is loaded by Python's own unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(("kind", "name"), [pair for pair in rank_files() if pair[0] in ("pp2tp2", "tp2z3bf16", "ep2")])
def test_a_pickle_that_would_run_code_is_refused_in_every_file(kind: str, name: str, tmp_path: Path) -> None:
    run, marker = copy_of(kind, tmp_path), tmp_path / "ran"
    torch.save({"module": Bomb(marker), "optimizer_state_dict": Bomb(marker)}, tag_of(run) / name, pickle_module=pickle)
    with pytest.raises(UnsafePickleError, match="system"):
        open_kind(run)
    assert not marker.exists()


# --- tensor parallelism --------------------------------------------------------------------------------------------

TENSOR = [kind for kind in PARALLEL if kind.startswith("tp2")]


def change_info(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for file in tag_of(run).glob("*model_states.pt"):
        edit(file, lambda tree: change(tree["universal_checkpoint_info"]))


@pytest.mark.parametrize("kind", TENSOR)
def test_without_universal_info_tensor_ranks_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    for file in tag_of(run).glob("*model_states.pt"):
        edit(file, lambda tree: tree.pop("universal_checkpoint_info"))
    with pytest.raises(UnsupportedError, match=r"2 tensor-parallel ranks.*universal_checkpoint_info"):
        open_kind(run)


@pytest.mark.parametrize("kind", TENSOR)
def test_patterns_alone_say_the_same_as_the_affine_map(kind: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    change_info(run, lambda info: info.pop("affine_map"))
    assert_true(open_kind(run), kind)


def _of_old_version(info: dict[str, Any]) -> None:
    info.pop("affine_map")
    info.pop("sub_param_shard_widths")
    info["universal_checkpoint_version"] = 0.2
    for entry in info["parameter_with_sub_params"]:
        entry["shape"] = [3, *entry["shape"][1:]]


def test_old_versions_that_count_equal_parts_are_read(tmp_path: Path) -> None:
    run = copy_of("tp2two", tmp_path)
    change_info(run, _of_old_version)
    assert_true(open_kind(run), "tp2two")


def test_parts_of_unequal_width_need_their_widths(tmp_path: Path) -> None:
    run = copy_of("tp2gqabf16", tmp_path)
    change_info(run, lambda info: [info.pop("affine_map"), info.pop("sub_param_shard_widths")])
    with pytest.raises(FormatError, match="sub_param_shard_widths"):
        open_kind(run)


def test_replicas_that_drifted_apart_are_refused_by_name(tmp_path: Path) -> None:
    run = copy_of("tp2frozen", tmp_path)
    file = next(tag_of(run).glob("*mp_rank_01_model_states.pt"))
    edit(file, lambda tree: tree["module"]["embed.weight"].add_(1))
    with pytest.raises(FormatError, match=re.escape("model/embed.weight")):
        open_kind(run)


def test_buffers_that_differ_are_kept_for_each_rank(tmp_path: Path) -> None:
    run = copy_of("tp2frozen", tmp_path)
    file = next(tag_of(run).glob("*mp_rank_01_model_states.pt"))
    edit(file, lambda tree: tree["module"]["scale"].add_(1))
    catalog = open_kind(run)
    assert "model/scale" not in catalog.names
    kept = [float(read(catalog, f"deepspeed/mp_rank_0{rank}/model/scale")) for rank in (0, 1)]
    assert kept == [1.5, 2.5]
    assert any("model/scale" in remark for remark in catalog.notes.remarks)


def test_means_and_vocabularies_are_what_their_patterns_say(tmp_path: Path) -> None:
    run = copy_of("tp2frozen", tmp_path)

    def change(info: dict[str, Any]) -> None:
        info.pop("affine_map")
        info["tp_replicated_parameter_patterns"].remove(r"^layers\.0\.ln\.bias$")
        info["tp_replicated_parameter_patterns"].remove(r"^head\.weight$")
        info["parameter_to_average_patterns"] = [r".*ln\.bias"]
        info["vocabulary_parameter_patterns"] = [r"head\.weight"]
        info["original_vocab_size"] = 20

    change_info(run, change)
    file = next(tag_of(run).glob("*mp_rank_01_model_states.pt"))

    def drift(tree: dict[str, Any]) -> None:
        tree["module"]["layers.0.ln.bias"].add_(1)

    edit(file, drift)
    ranks = [load(next(tag_of(run).glob(f"*mp_rank_0{rank}_model_states.pt")))["module"] for rank in (0, 1)]
    catalog = open_kind(run)
    mean = (ranks[0]["layers.0.ln.bias"] + ranks[1]["layers.0.ln.bias"]) / 2
    assert torch.equal(read(catalog, "model/layers.0.ln.bias"), mean)
    # the same on both ranks, and nothing says so: replicas all the same, whose 13 rows are fewer than the vocabulary
    assert torch.equal(read(catalog, "model/head.weight"), ranks[0]["head.weight"])
    assert any("mean" in remark for remark in catalog.notes.remarks)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no dict": lambda info: info.update(affine_map=[1]),
    "a piece beyond the shard": lambda info: _piece(info).update(dest=[1 << 40, [1, 1]]),
    "negative strides": lambda info: _piece(info).update(dest=[0, [-1, 1]]),
    "a piece of text": lambda info: _piece(info).update(shape="x"),
    "a scale": lambda info: _piece(info).update(scale=0.5),
    "a newer version": lambda info: info["affine_map"].update(version=2),
    "two patterns for one": lambda info: info["affine_map"]["params"].update({"embed": {}}),
    "a pattern that takes for ever": lambda info: info.update(parameter_to_average_patterns=["(a+)+$"]),
    "a pattern that is none": lambda info: info.update(parameter_to_average_patterns=["("]),
    "a pattern that is a number": lambda info: info.update(parameter_to_average_patterns=[5]),
    "unsupported": lambda info: info.update(autotp_unsupported_parameter_patterns={"embed": "too odd"}),
    "other ranks": lambda info: _entry(info)["ranks"].pop(1),
}


def _entry(info: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = info["affine_map"]["params"][r"^embed\.weight$"]
    return entry


def _piece(info: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = _entry(info)["ranks"][0]["pieces"][0]
    return piece


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_nonsense_in_the_universal_info_is_a_typed_error(what: str, tmp_path: Path) -> None:
    run = copy_of("tp2two", tmp_path)
    change_info(run, HOSTILE[what])
    with pytest.raises(UcformatError):
        open_kind(run)


# --- pipelines and experts -----------------------------------------------------------------------------------------


def test_tied_weights_of_two_stages_must_be_equal_unless_the_first_is_said_to_count(tmp_path: Path) -> None:
    run = copy_of("pp2tiedbf16", tmp_path)
    last = sorted(tag_of(run).glob("*mp_rank_01_optim_states.pt"))

    def change(tree: dict[str, Any]) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"].add_(1)

    for file in last:
        edit(file, change)
    catalog = open_kind(run)
    assert any("differs between pipeline stages" in remark for remark in catalog.notes.remarks)
    name = "optimizer/tied_modules.embed.word_embeddings.weight/exp_avg"
    assert torch.equal(read(catalog, name), load_file(ROOT / "pp2tiedbf16" / "truth.safetensors")[name[10:]])
    change_info_of_pipes(run)
    with pytest.raises(FormatError, match="tied between pipeline stages"):
        open_kind(run)


def change_info_of_pipes(run: Path) -> None:
    for file in tag_of(run).glob("mp_rank*model_states.pt"):
        edit(file, lambda tree: tree["universal_checkpoint_info"].update(pipeline_replicated_parameter_patterns=[]))


@pytest.mark.parametrize("kind", ["ep2", "ep2bf16"])
def test_whose_experts_a_rank_trained_is_proven_by_their_values(kind: str, tmp_path: Path) -> None:
    """With `use_data_before_expert_parallelism` consecutive ranks train the same experts: as if ranks 1 and 2 changed places.

    What all ranks share is laid out by rank: it has to change back.
    """
    run = copy_of(kind, tmp_path)
    one, two = sorted(tag_of(run).glob("*optim_states.pt"))[1:3]
    first, second = load(one), load(two)
    bodies = [tree["optimizer_state_dict"] for tree in (first, second)]
    states = [body["base_optimizer_state"]["state"] for body in bodies]
    for g in range(1, len(states[0])):
        states[0][g], states[1][g] = states[1][g], states[0][g]
        masters = [body["single_partition_of_fp32_groups"] for body in bodies]
        masters[0][g], masters[1][g] = masters[1][g], masters[0][g]
    torch.save(first, one)
    torch.save(second, two)
    assert_true(open_kind(run), kind)


def test_masters_of_experts_that_fit_nobody_are_refused(tmp_path: Path) -> None:
    run = copy_of("ep2", tmp_path)
    file = sorted(tag_of(run).glob("*optim_states.pt"))[1]
    edit(file, lambda tree: tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].add_(1))
    with pytest.raises(FormatError, match="experts"):
        open_kind(run)

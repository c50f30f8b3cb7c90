"""What is refused, and how: other kinds of DeepSpeed checkpoints, missing and left-over files, damaged and hostile ones."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.deepspeed_fixtures import DATA, copy_of, edit, model_file, open_kind, optimizer_files, tag_of
from ucformat import formats
from ucformat.errors import (
    ChecksumError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    UcformatError,
    UnsafePickleError,
    UnsupportedError,
)
from ucformat.formats import deepspeed
from ucformat.formats.source import locate

EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "AutoEP": lambda tree: tree.update(ds_autoep_layers=[{"layer": 0}]),
    "MiCS": lambda tree: tree["ds_config"]["zero_optimization"].update(mics_shard_size=2),
}


GAPS: dict[str, Callable[[dict[str, Any]], object]] = {
    "layer_00-model_states.pt": lambda tree: tree.update(module=None),
    "mp_rank_01_model_states.pt": lambda tree: tree.update(mp_world_size=2, checkpoint_parallel_dimensions=None),
    "mp_rank_02_model_states.pt": lambda tree: tree.update(checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 3}),
    "layer_0_expert_0_mp_rank_00_model_states.pt": lambda tree: tree.update(num_experts=[4]),
}


@pytest.mark.parametrize("name", sorted(GAPS))
def test_files_that_the_model_file_speaks_of_and_are_not_there_are_named(name: str, tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    edit(model_file(run), GAPS[name])
    if name == "mp_rank_02_model_states.pt":
        shutil.copy(model_file(run), model_file(run).with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(MissingFileError, match=name):
        open_kind(run)


@pytest.mark.parametrize("word", sorted(EDITS))
def test_kinds_that_only_the_contents_show_are_refused_by_name(word: str, tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    edit(model_file(run), EDITS[word])
    with pytest.raises(UnsupportedError, match=word):
        open_kind(run)


def test_state_offloaded_to_nvme_is_refused_by_name(tmp_path: Path) -> None:
    run = copy_of("z3n3", tmp_path)
    (tag_of(run) / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (tag_of(run) / "offloaded_tensors" / "rank00" / "0.swp").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="NVMe"):
        open_kind(run)


def rank_files(kind: str) -> list[tuple[str, str]]:
    return [(kind, path.name) for path in sorted(tag_of(DATA / kind).iterdir())]


@pytest.mark.parametrize(
    ("kind", "name"), [*rank_files("z1n3"), *rank_files("z3n3"), *rank_files("z1n12")[::4], *rank_files("bf16opt")]
)
def test_a_missing_file_is_named(kind: str, name: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    (tag_of(run) / name).unlink()
    with pytest.raises(MissingFileError, match=re.escape(name)):
        open_kind(run)


def test_missing_optimizer_files_of_a_zero_run_are_named(tmp_path: Path) -> None:
    run = copy_of("z2two", tmp_path)
    for file in optimizer_files(run):
        file.unlink()
    with pytest.raises(MissingFileError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt"):
        open_kind(run)


@pytest.mark.parametrize(("kind", "which"), [("z1n3", "optim"), ("z2n3bf16", "optim"), ("z3n3", "optim"), ("z3n3", "model")])
def test_a_file_of_one_rank_too_many_is_named(kind: str, which: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    last = next(path for path in tag_of(run).iterdir() if "rank_2" in path.name and which in path.name)
    extra = last.with_name(last.name.replace("rank_2", "rank_3"))
    shutil.copy(last, extra)
    with pytest.raises(FormatError, match=re.escape(extra.name)):
        open_kind(run)


def test_a_file_of_another_run_in_a_ranks_place_is_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tag_of(DATA / "z1n12") / name, tag_of(run) / name)
    with pytest.raises(FormatError, match=name):
        open_kind(run)


def test_a_file_of_another_step_in_a_ranks_place_is_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    file = optimizer_files(run)[2]
    edit(file, lambda tree: tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(step=torch.tensor(2.0)))
    with pytest.raises(FormatError, match=f"{file.name}.*step 2"):
        open_kind(run)


def test_a_file_of_another_stage_in_a_ranks_place_is_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tag_of(DATA / "z3n3") / name, tag_of(run) / name)
    with pytest.raises(FormatError, match=name):
        open_kind(run)


@pytest.mark.parametrize("length", [0, 100, 128])
def test_a_slice_of_another_length_is_named(length: int, tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    file = optimizer_files(run)[1]
    edit(file, lambda tree: tree["optimizer_state_dict"].update(single_partition_of_fp32_groups=[torch.zeros(length)]))
    with pytest.raises(FormatError, match=file.name):
        open_kind(run)


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "gone": lambda state: state.pop("exp_avg"),
    "all gone": lambda state: state.clear(),
    "of another dtype": lambda state: state.update(exp_avg=state["exp_avg"].double()),
    "of another length": lambda state: state.update(exp_avg=state["exp_avg"][:-3].clone()),
    "a number": lambda state: state.update(exp_avg=1.0),
    "a step that is a number here alone": lambda state: state.update(step=3),
}


@pytest.mark.parametrize("what", sorted(STATES))
@pytest.mark.parametrize("kind", ["z1n3", "z3n3"])
def test_state_of_one_rank_that_is_unlike_the_others_is_an_error(kind: str, what: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)

    def change(tree: dict[str, Any]) -> None:
        body = tree["optimizer_state_dict"]
        STATES[what](body.get("base_optimizer_state", body.get("optimizer_state_dict"))["state"][0])

    edit(optimizer_files(run)[1], change)
    with pytest.raises(FormatError, match=r"optim_states\.pt"):
        open_kind(run)


def test_two_files_of_one_rank_are_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    file = optimizer_files(run)[1]
    shutil.copy(file, file.with_name("bf16_" + file.name))
    with pytest.raises(FormatError, match=f"{file.name}.*second"):
        open_kind(run)


def test_model_files_of_two_stages_are_refused(tmp_path: Path) -> None:
    run = copy_of("z3n3", tmp_path)
    shutil.copy(model_file(run), tag_of(run) / "mp_rank_00_model_states.pt")
    with pytest.raises(FormatError, match="left over"):
        open_kind(run)


def test_shapes_that_are_not_those_of_the_model_are_refused(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    edit(model_file(run), lambda tree: tree["param_shapes"][0].update({"fc2.weight": torch.Size([11, 7])}))
    with pytest.raises(FormatError, match=re.escape("fc2.weight")):
        open_kind(run)


def test_a_parameter_in_two_groups_is_refused(tmp_path: Path) -> None:
    run = copy_of("z2two", tmp_path)

    def change(tree: dict[str, Any]) -> None:
        shapes = tree["param_shapes"]
        shapes[1] = {("emb.weight" if name == "ln.bias" else name): shape for name, shape in shapes[1].items()}

    edit(model_file(run), change)
    with pytest.raises(FormatError, match=re.escape("emb.weight")):
        open_kind(run)


@pytest.mark.parametrize("kind", ["z0", "z1n3", "z3n3"])
def test_truncated_files_are_refused_and_named(kind: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    for file in [model_file(run), *optimizer_files(run)]:  # nothing is needed of the other model files of ZeRO-3
        whole = file.read_bytes()
        for keep in (0, 10, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:keep])
            with pytest.raises((FormatError, UnsupportedError), match=file.name):
                open_kind(run)
        file.write_bytes(whole)


@pytest.mark.parametrize("kind", ["z1n3", "z3n3"])
def test_a_damaged_pickle_is_refused_and_named(kind: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    for file in (model_file(run), optimizer_files(run)[-1]):
        whole = file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        at = info.header_offset + 200
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises((FormatError, ChecksumError), match=file.name):
            open_kind(run)
        file.write_bytes(whole)


class Bomb:
    """Its pickle runs a command when it is loaded by Python's own unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    file, marker = optimizer_files(run)[0], tmp_path / "ran"
    torch.save({"optimizer_state_dict": Bomb(marker)}, file, pickle_module=pickle)
    with pytest.raises(UnsafePickleError, match="system"):
        open_kind(run)
    assert not marker.exists()


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no dict": lambda tree: tree.update(module=[1, 2]),
    "shapes of text": lambda tree: tree.update(param_shapes=["x"]),
    "negative shape": lambda tree: tree["param_shapes"][0].update({"emb.weight": (-13, -7)}),
    "shape of floats": lambda tree: tree["param_shapes"][0].update({"emb.weight": (13.0, 7.0)}),
    "names that are numbers": lambda tree: tree["module"].update({5: torch.zeros(1)}),
    "shared with a number": lambda tree: tree.update(shared_params={"a": 5}),
    "a million ranks": lambda tree: tree.update(dp_world_size=1 << 40),
    "huge shape": lambda tree: tree["param_shapes"][0].update({"emb.weight": (1 << 40, 1 << 40)}),
    "no groups": lambda tree: tree.update(param_shapes=[]),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_nonsense_in_the_model_file_is_a_typed_error(what: str, tmp_path: Path) -> None:
    for kind in ("z1n3", "z3n3"):
        run = copy_of(kind, tmp_path)
        edit(model_file(run), HOSTILE[what])
        with pytest.raises(UcformatError):
            open_kind(run)


OPTIM: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda body: body.clear(),
    "weights of text": lambda body: body.update(single_partition_of_fp32_groups=["x"], fp32_flat_groups=["x"]),
    "no groups": lambda body: body.update(single_partition_of_fp32_groups=[], fp32_flat_groups=[]),
    "matrix": lambda body: body.update(
        single_partition_of_fp32_groups=[torch.zeros(2, 63)], fp32_flat_groups=[torch.zeros(2, 63)]
    ),
    "count": lambda body: body.update(partition_count="three"),
}


@pytest.mark.parametrize("what", sorted(OPTIM))
@pytest.mark.parametrize("kind", ["z1n3", "z3n3"])
def test_nonsense_in_an_optimizer_file_is_a_typed_error_that_names_it(kind: str, what: str, tmp_path: Path) -> None:
    run = copy_of(kind, tmp_path)
    for file in (optimizer_files(run)[0], optimizer_files(run)[2]):
        whole = file.read_bytes()
        edit(file, lambda tree: OPTIM[what](tree["optimizer_state_dict"]))
        with pytest.raises(UcformatError, match=r"optim_states\.pt"):
            open_kind(run)
        file.write_bytes(whole)


@pytest.mark.parametrize("text", ["../z1n12/global_step3", "/etc", "", ".", "a\0b", "x" * 5000, "global_step9"])
def test_latest_never_leads_out_of_the_folder(text: str, tmp_path: Path) -> None:
    copy_of("z1n12", tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest").write_text(text)
    source = locate(str(run))
    assert not deepspeed.detect(source)
    with pytest.raises(NotACheckpointError):
        deepspeed.open_catalog(source)


@pytest.mark.parametrize("text", ["global_step9", "../z1n3/global_step3", ""])
def test_latest_that_leads_nowhere_is_an_error_that_names_both(text: str, tmp_path: Path) -> None:
    """Another step would be opened in silence."""
    run = copy_of("z1n3", tmp_path)
    (run / "latest").write_text(text)
    with pytest.raises(MissingFileError, match=r"latest.*there is global_step3: give that folder") as caught:
        formats.open_catalog(str(run))
    assert text != "global_step9" or "global_step9" in str(caught.value)
    formats.open_catalog(str(run / "global_step3"))


def test_latest_of_a_run_whose_tags_are_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step9")
    (tmp_path / "zero_to_fp32.py").write_text("")
    with pytest.raises(MissingFileError, match="global_step9"):
        formats.open_catalog(str(tmp_path))


def test_several_tags_without_latest_are_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    (run / "latest").unlink()
    (run / "global_step3").rename(run / "global_step30")
    formats.open_catalog(str(run))
    copy_of("z2n2", tmp_path)
    (tmp_path / "z2n2" / "global_step3").rename(run / "global_step200")
    with pytest.raises(NotACheckpointError, match=r"which of global_step200, global_step30 to take"):
        formats.open_catalog(str(run))


@pytest.mark.parametrize("kind", ["z2exclude", "z3exclude"])
def test_weights_that_were_left_out_on_saving_are_said_to_be(kind: str) -> None:
    assert any("exclude_frozen_parameters" in remark for remark in open_kind(DATA / kind).notes.remarks)
    for other in ("z2frozen", "z3frozen", "z1frozen", "z3n3", "z0", "bf16opt"):
        assert not any("exclude_frozen_parameters" in remark for remark in open_kind(DATA / other).notes.remarks), other


def test_foreign_folders_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "model.pt").write_bytes(b"")
    assert not deepspeed.detect(locate(str(tmp_path)))
    assert not deepspeed.detect(locate(str(tmp_path / "model.safetensors")))

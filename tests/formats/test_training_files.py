"""Directories of Hugging Face's Trainer and of accelerate are training state, not only weights. Made by the programs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ucformat
from tests.formats.deepspeed_fixtures import copy_of
from ucformat import formats
from ucformat.errors import FormatError
from ucformat.reshard.reading.lazy import read
from ucformat.values.codec import RankLocal


class Counter:
    """A user's object that accelerate saves along."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to take back."""


@pytest.fixture
def accelerated(tmp_path: Path) -> tuple[Path, torch.optim.Optimizer]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(str(tmp_path / "state"))
    return tmp_path / "state", optimizer


def check_accelerated(path: str, folder: Path, optimizer: torch.optim.Optimizer) -> None:
    catalog = formats.open_catalog(path)
    values: Any = catalog.values
    saved = optimizer.state_dict()
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(read(catalog, f"optimizer/state/{number}/{key}"), value)
    assert values["optimizer"]["param_groups"] == saved["param_groups"]
    assert values["scheduler"] == torch.load(folder / "scheduler.bin")
    assert values["custom"] == {"0": {"seen": 7}}
    assert isinstance(values["rng"], RankLocal)
    assert values["rng"].coords == ({"dp": 0},)
    states: Any = values["rng"].values[0]
    assert states["random_state"][0] == random.Random().getstate()[0]
    assert {"model/0.weight", "model/1.bias"} <= set(catalog.names)


def test_an_accelerate_state_is_read_as_training_state(accelerated: tuple[Path, torch.optim.Optimizer], tmp_path: Path) -> None:
    folder, optimizer = accelerated
    check_accelerated(str(folder), folder, optimizer)
    report = ucformat.convert(str(folder), str(tmp_path / "native"), "native")
    assert (report.left_out, report.values_left_out) == ((), ())
    check_accelerated(str(tmp_path / "native"), folder, optimizer)


def test_only_the_model_goes_into_a_model_and_the_rest_is_named(
    accelerated: tuple[Path, torch.optim.Optimizer], tmp_path: Path
) -> None:
    report = ucformat.convert(str(accelerated[0]), str(tmp_path / "hf"), "hf")
    assert {name.split("/")[0] for name in report.left_out} == {"optimizer", "rng"}
    assert {"custom", "optimizer", "rng", "scheduler"} <= set(report.values_left_out)


def trainer_folder(path: Path) -> Path:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    arguments = transformers.TrainingArguments(
        str(path), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 8
    transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows).train()
    return path / "checkpoint-2"


@pytest.mark.filterwarnings("ignore")  # those of transformers and what it imports
def test_a_trainers_checkpoint_is_read_as_training_state(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "out")
    catalog = formats.open_catalog(str(folder))
    values: Any = catalog.values
    saved = torch.load(folder / "optimizer.pt")
    assert catalog.notes.step == 2
    assert len(values["optimizer"]["param_groups"]) == 2  # with weight decay and without
    for number, state in saved["state"].items():
        assert torch.equal(read(catalog, f"optimizer/state/{number}/exp_avg"), state["exp_avg"])
    assert values["trainer_state"] == json.loads((folder / "trainer_state.json").read_text())
    assert values["scheduler"]["last_epoch"] == 2
    assert torch.equal(read(catalog, "rng/0/cpu"), torch.load(folder / "rng_state.pth", weights_only=False)["cpu"])
    assert any("TrainingArguments" in remark for remark in catalog.notes.remarks)
    report = ucformat.convert(str(folder), str(tmp_path / "native"), "native")
    assert (report.left_out, report.values_left_out) == ((), ())


def test_each_ranks_rng_is_its_own(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    for rank in (0, 1, 10):
        torch.save({"cpu": torch.full((3,), rank)}, tmp_path / f"rng_state_{rank}.pth")
    catalog = formats.open_catalog(str(tmp_path))
    rng = catalog.values["rng"]  # type: ignore[index]
    assert rng.coords == ({"dp": 0}, {"dp": 1}, {"dp": 10})
    assert read(catalog, "rng/2/cpu").tolist() == [10, 10, 10]


def test_the_trainers_files_beside_a_deepspeed_run_are_read_too(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    torch.save({"last_epoch": 3}, run / "scheduler.pt")
    for rank in range(3):
        torch.save({"cpu": torch.full((3,), rank)}, run / f"rng_state_{rank}.pth")
    (run / "trainer_state.json").write_text('{"global_step": 3}')
    catalog = formats.open_catalog(str(run))
    plain = formats.open_catalog(str(run / "global_step3"))
    values: Any = catalog.values
    assert values["scheduler"] == {"last_epoch": 3}
    assert values["trainer_state"] == {"global_step": 3}
    assert read(catalog, "rng/1/cpu").tolist() == [1, 1, 1]
    assert all(torch.equal(read(catalog, name), read(plain, name)) for name in plain.names)


def test_a_file_that_is_not_read_is_named_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert any("not read: optimizer.pt" in remark for remark in formats.open_catalog(str(tmp_path)).notes.remarks)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(FormatError, match=r"trainer_state\.json.*malformed"):
        formats.open_catalog(str(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what stock DCP says to one process
@pytest.mark.parametrize("sharded", [True, False])
def test_what_accelerate_saves_under_fsdp_is_read_as_one_state(sharded: bool, tmp_path: Path) -> None:
    """In the folders and files of its `save_fsdp_model` and `save_fsdp_optimizer`."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    if sharded:
        state_dict_saver.save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
        state_dict_saver.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    else:
        torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
        torch.save(state, tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.bin")
    torch.save({"torch_manual_seed": torch.arange(4)}, tmp_path / "random_states_0.pkl")
    live = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    other = torch.optim.AdamW(live.parameters())
    into: dict[str, Any] = {"model": live, "optimizer": other, "scheduler": {"last_epoch": 0}}
    ucformat.load(str(tmp_path), into=into)
    assert into["scheduler"] == {"last_epoch": 3}
    for (name, mine), theirs in zip(live.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"]), name
    assert other.param_groups[0]["lr"] == 0.1

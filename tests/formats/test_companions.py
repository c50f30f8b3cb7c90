"""Everything small that describes a model goes along; nothing that runs by itself does, and nothing takes weights' place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import ucformat
from tests.cli.calls import Program
from ucformat.containers.envelope import seal
from ucformat.errors import ChecksumError, FormatError, MissingFileError, UcformatError
from ucformat.formats.native.manifest import FileRecord, decode_record, encode_record
from ucformat.formats.native.shard import hex_digest
from ucformat.reshard.convert import convert
from ucformat.storage.open import open_store


@pytest.fixture
def ucconvert(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


GO = {
    "config.json",
    "source.spm",
    "target.spm",
    "bpe.codes",
    "tekken.json",
    "helper_of_remote_code.py",
    "inner/package/more.py",
    "additional_chat_templates/rag.jinja",
    "generation_config.json",
    "speaker.npy",
    "assets/picture.png",
    "README.md",
}
STAY = {
    "extra.bin",
    "notes.pt",
    "flax_model.msgpack",
    "tf_model.h5",
    "model.gguf",
    "onnx/model.onnx",
    "lib.so",
    "odd.dat",  # a pickle by its content
    ".gitattributes",
    "runs/events.out",
    "checkpoint-7/trainer_state.json",
}


def model(folder: Path, names: set[str] = GO | STAY) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}" if name.endswith("config.json") else f"this is {name}")
    if "odd.dat" in names:
        (folder / "odd.dat").write_bytes(pickle.dumps(print))
    save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("between", [(), ("native",), ("dcp",), ("native", "dcp", "native")])
def test_everything_small_goes_along_and_what_stays_is_listed(between: tuple[str, ...], tmp_path: Path) -> None:
    source, said = model(tmp_path / "in"), ""
    for number, to in enumerate((*between, "hf")):
        report = convert(str(source), str(tmp_path / str(number)), to)
        source, said = tmp_path / str(number), said + " ".join(report.remarks)
    assert files_of(source) == GO | {"model.safetensors"}
    assert all((source / name).read_bytes() == (tmp_path / "in" / name).read_bytes() for name in GO)
    assert [name for name in STAY if (name.partition("/")[0] + "/" if "/" in name else name) not in said] == []
    assert "helper_of_remote_code.py" in said, "program code that travels is mentioned"


@pytest.mark.parametrize("named", ["model.safetensors", "model.safetensors.index.json"])
def test_they_go_along_with_a_file_that_is_named(named: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "in", GO)
    if named.endswith(".json"):
        (folder / named).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors"}}))
    convert(str(folder / named), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == GO | {"model.safetensors"}


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    model(tmp_path / "blobs", GO)
    for name in (*GO, "model.safetensors"):
        link = tmp_path / "snapshots/abc" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "blobs" / name)
    convert(str(tmp_path / "snapshots/abc"), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == GO | {"model.safetensors"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_what_stays_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert(str(model(tmp_path / "in")), str(tmp_path / "out"), "hf")
    assert sum("notes.pt" in record.getMessage() for record in caplog.records) == 1


def test_training_state_is_read_and_describes_no_model(tmp_path: Path) -> None:
    folder = model(tmp_path / "in", {"config.json"})
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    report = convert(str(folder), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors", "config.json"}
    assert set(report.values_left_out) == {"scheduler", "trainer_state"}


def test_files_beside_weights_that_are_no_models_directory_stay(tmp_path: Path) -> None:
    folder = model(tmp_path / "downloads", {"letter.txt", "taxes.csv"})
    convert(str(folder), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors"}


def hostile(path: Path, name: str, data: bytes = b"evil") -> Path:
    """A native checkpoint whose commit record says that `name` goes along with the model."""
    ucformat.save(str(path), {"model": {"w": torch.ones(2)}})
    file = path / "companions" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    store = open_store(str(path))
    record = decode_record(store.read("ucf.json"), "ucf.json")
    companion = FileRecord(f"companions/{name}", len(data), hex_digest(data))
    store.put("ucf.json", encode_record(msgspec.structs.replace(record, companions=(companion,))))
    return path


@pytest.mark.parametrize(
    "name", ["model.safetensors", "MODEL.safetensors", "pytorch_model.bin", "x.pkl", "model.safetensors.index.json"]
)
def test_companions_of_a_hostile_checkpoint_are_never_weights_or_pickles(name: str, tmp_path: Path) -> None:
    source = hostile(tmp_path / "in", name)
    report = convert(str(source), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors"}
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [1, 1]
    assert any(name in text for text in report.remarks)


@pytest.mark.parametrize("data", [pickle.dumps({"a": 1}, protocol=4), b"\x7fELF\x02", b"MZ\x90\x00"])
def test_companions_that_are_pickles_or_programs_by_content_stay(data: bytes, tmp_path: Path) -> None:
    report = convert(str(hostile(tmp_path / "in", "vocab.txt", data)), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors"}
    assert any("vocab.txt" in text for text in report.remarks)


@pytest.mark.parametrize("name", ["model.safetensors/x.txt", "Model.Safetensors/config.json"])
def test_a_companion_in_the_place_of_weights_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="place of weights"):
        convert(str(hostile(tmp_path / "in", name)), str(tmp_path / "out"), "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../escaped.txt", "a/../b", "/etc/x"])
def test_companions_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    source = hostile(tmp_path / "in", "plain.txt")
    store = open_store(str(source))
    record = json.loads(store.read("ucf.json"))["record"]
    record["companions"][0]["file"] = f"companions/{name}"
    store.put("ucf.json", seal(json.dumps(record).encode()))
    with pytest.raises(UcformatError):
        convert(str(source), str(tmp_path / "out"), "hf")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "escaped.txt").exists()


def test_a_damaged_companion_is_not_copied(tmp_path: Path) -> None:
    convert(str(model(tmp_path / "in", {"config.json"})), str(tmp_path / "n"), "native")
    next((tmp_path / "n").glob("companions*/config.json")).write_text("{\n}")
    with pytest.raises(ChecksumError, match=r"config\.json"):
        convert(str(tmp_path / "n"), str(tmp_path / "out"), "hf")


# -- of a live save ----------------------------------------------------------------------------------------------------


def test_a_live_save_is_exported_with_the_files_of_a_model_directory(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"config.json", "tokenizer.json"})
    ucformat.save(str(tmp_path / "run"), {"model": {"w": torch.zeros(2)}})
    report = convert(str(tmp_path / "run"), str(tmp_path / "bare"), "hf")
    assert any("--companions" in text for text in report.remarks)
    report = convert(str(tmp_path / "run"), str(tmp_path / "out"), "hf", companions=str(folder))
    assert files_of(tmp_path / "out") == {"model.safetensors", "config.json", "tokenizer.json"}
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [0, 0]
    assert not any("--companions" in text for text in report.remarks)
    with pytest.raises(MissingFileError):
        (tmp_path / "empty").mkdir()
        convert(str(tmp_path / "run"), str(tmp_path / "x"), "hf", companions=str(tmp_path / "empty"))


def test_a_live_save_with_companions_is_exported_without_naming_them_again(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"config.json", "tokenizer.json"})
    state = {"model": {"w": torch.zeros(2)}}
    for step in (1, 2):
        ucformat.save(str(tmp_path / "run"), state, step=step, keep=1, companions=str(folder))
    convert(str(tmp_path / "run"), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors", "config.json", "tokenizer.json"}
    with pytest.raises(MissingFileError):
        ucformat.save(str(tmp_path / "other"), state, companions=str(tmp_path / "nowhere"))
    assert not (tmp_path / "other/ucf.json").exists()


def test_a_live_save_of_an_adapter_becomes_one(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "adapter_config.json").write_text("{}")
    names = ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight")
    ucformat.save(str(tmp_path / "run"), {"model": {name: torch.zeros(2) for name in names}})
    convert(str(tmp_path / "run"), str(tmp_path / "out"), "hf", companions=str(base))
    assert files_of(tmp_path / "out") == {"adapter_model.safetensors", "adapter_config.json"}


def test_the_command_line_takes_companions_and_names_that_keep_their_dtype(tmp_path: Path, ucconvert: Program) -> None:
    folder = model(tmp_path / "base", {"config.json"})
    ucformat.save(str(tmp_path / "run"), {"model": {"w": torch.zeros(2), "norm": torch.zeros(2)}})
    answer = ucconvert(
        tmp_path / "run", tmp_path / "out", "--to", "hf", "--companions", folder, "--dtype", "bf16", "--keep-dtype", "norm"
    )
    assert answer.status == 0, answer.err
    found = load_file(tmp_path / "out/model.safetensors")
    assert (found["w"].dtype, found["norm"].dtype) == (torch.bfloat16, torch.float32)
    assert (tmp_path / "out/config.json").exists()

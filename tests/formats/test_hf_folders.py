"""A model's weights in subfolders belong to it, and weight files keep the names that their library looks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import bits
from ucformat import formats
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats import hf
from ucformat.formats.source import locate
from ucformat.reshard.convert import convert
from ucformat.reshard.diff import diff

DENSE = "2_Dense/model.safetensors"


def put(path: Path, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"})


def say(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def sentence_model(folder: Path, weight: float) -> Path:
    """As sentence-transformers lays a model out: a transformer at the top, pooling without weights, a dense layer."""
    put(folder / "model.safetensors", x=torch.full((4,), weight))
    put(folder / DENSE, **{"linear.weight": torch.full((2, 2), weight)})
    say(folder / "config.json", {"model_type": "bert"})
    say(folder / "1_Pooling/config.json", {"word_embedding_dimension": 4})
    say(folder / "2_Dense/config.json", {"in_features": 2})
    say(folder / "modules.json", [{"idx": i, "path": path} for i, path in enumerate(["", "1_Pooling", "2_Dense"])])
    return folder


def pipeline(folder: Path) -> Path:
    """As diffusers lays a pipeline out."""
    say(
        folder / "model_index.json",
        {"_class_name": "P", "unet": ["diffusers", "U"], "text": ["transformers", "T"], "off": [None] * 2},
    )
    put(folder / "unet/diffusion_pytorch_model.safetensors", a=torch.ones(3))
    put(folder / "text/model.safetensors", a=torch.zeros(2))
    say(folder / "unet/config.json", {})
    say(folder / "text/config.json", {})
    say(folder / "scheduler/scheduler_config.json", {})
    return folder


def weights(folder: Path) -> dict[str, dict[str, bytes]]:
    """Path of each weight file → its tensors."""
    found = sorted(path for path in folder.rglob("*.safetensors") if "companions" not in path.parts)
    return {
        path.relative_to(folder).as_posix(): {name: bits(tensor) for name, tensor in sorted(load_file(path).items())}
        for path in found
    }


def around(folder: Path, tmp_path: Path) -> Path:
    """HF → native → DCP → native → HF."""
    convert(str(folder), str(tmp_path / "n1"), "native")
    convert(str(tmp_path / "n1"), str(tmp_path / "d"), "dcp")
    convert(str(tmp_path / "d"), str(tmp_path / "n2"), "native")
    convert(str(tmp_path / "n2"), str(tmp_path / "out"), "hf")
    return tmp_path / "out"


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [lambda path: sentence_model(path, 1.0), pipeline], ids=["modules", "pipeline"])
def test_weights_in_subfolders_come_back_where_they_were(make: object, tmp_path: Path) -> None:
    assert callable(make)
    model = make(tmp_path / "model")
    out = around(model, tmp_path)
    assert weights(out) == weights(model)
    assert files_of(out) == files_of(model)


def test_overwriting_replaces_weights_in_subfolders(tmp_path: Path) -> None:
    one, other = sentence_model(tmp_path / "one", 1.0), sentence_model(tmp_path / "other", 2.0)
    convert(str(one), str(other), "hf", overwrite=True)
    assert weights(other) == weights(one)
    convert(str(one / "model.safetensors"), str(other), "hf", overwrite=True)
    assert DENSE not in files_of(other), "a dense layer of the old model must not stay beside the new transformer"


def test_a_difference_in_a_subfolder_is_a_difference(tmp_path: Path) -> None:
    one, other = sentence_model(tmp_path / "one", 1.0), sentence_model(tmp_path / "other", 1.0)
    put(other / DENSE, **{"linear.weight": torch.zeros(2, 2)})
    found = diff(formats.open_catalog(str(one)), formats.open_catalog(str(other)))
    assert [item.name for item in found.differences] == ["model/2_Dense/linear.weight"]


def test_modules_of_a_router_and_pickled_modules_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "router"
    say(folder / "modules.json", [{"path": ""}, {"path": "1_Router"}])
    put(folder / "model.safetensors", x=torch.ones(1))
    say(folder / "1_Router/router_config.json", {"types": {"query_0_Dense": "D", "doc_0_Dense": "D"}, "structure": {}})
    put(folder / "1_Router/query_0_Dense/model.safetensors", w=torch.ones(2))
    (folder / "1_Router/doc_0_Dense").mkdir()
    torch.save({"w": torch.zeros(2)}, folder / "1_Router/doc_0_Dense/pytorch_model.bin")
    names = formats.open_catalog(str(folder)).names
    assert names == ["model/1_Router/doc_0_Dense/w", "model/1_Router/query_0_Dense/w", "model/x"]
    out = around(folder, tmp_path)
    assert list(weights(out)) == [
        "1_Router/doc_0_Dense/model.safetensors",
        "1_Router/query_0_Dense/model.safetensors",
        "model.safetensors",
    ]


def test_a_model_that_lies_in_a_folder_of_another_is_no_part_of_it(tmp_path: Path) -> None:
    folder = sentence_model(tmp_path / "model", 1.0)
    put(folder / "checkpoint-5/model.safetensors", x=torch.zeros(4))
    put(folder / "elsewhere/model.safetensors", x=torch.zeros(4))
    assert len(formats.open_catalog(str(folder)).names) == 2
    report = convert(str(folder), str(tmp_path / "out"), "hf")
    assert any("checkpoint-5/, elsewhere/" in text for text in report.remarks)
    convert(str(sentence_model(tmp_path / "new", 2.0)), str(folder), "hf", overwrite=True)
    assert {"checkpoint-5/model.safetensors", "elsewhere/model.safetensors"} <= files_of(folder)


def test_a_pipeline_names_the_part_whose_weights_are_missing(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "p")
    (folder / "unet/diffusion_pytorch_model.safetensors").unlink()
    assert any("unet" in text for text in formats.open_catalog(str(folder)).notes.remarks)


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b"])
def test_a_list_of_modules_that_leads_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    folder = sentence_model(tmp_path / "model", 1.0)
    say(folder / "modules.json", [{"path": path}])
    if path == "/etc":
        assert formats.open_catalog(str(folder)).names == ["model/x"]  # slashes around a path are dropped: no such folder
        return
    with pytest.raises(FormatError, match="does not stay inside"):
        formats.open_catalog(str(folder))


def test_folders_that_hostile_notes_name_are_refused(tmp_path: Path) -> None:
    from tests.formats.test_hf import job
    from ucformat.catalog import Notes

    notes = Notes(origin_layout={"hf:../out": "model"})
    with pytest.raises(FormatError, match="does not stay inside"):
        hf.write(job(tmp_path / "x", {"model/../out/a": torch.ones(1)}, notes=notes))


STEMS = [
    "model",
    "diffusion_pytorch_model",
    "adapter_model",
    "open_clip_model",
    "pytorch_lora_weights",
    "consolidated",
    "model.fp16",
]


@pytest.mark.parametrize("stem", STEMS)
def test_the_name_of_the_weight_file_comes_back(stem: str, tmp_path: Path) -> None:
    put(tmp_path / "in" / f"{stem}.safetensors", a=torch.ones(4), b=torch.zeros(4))
    assert list(weights(around(tmp_path / "in", tmp_path))) == [f"{stem}.safetensors"]


@pytest.mark.parametrize(("stem", "index"), [("model.fp16", "model.safetensors.index.fp16.json"), ("consolidated", None)])
def test_shards_and_index_are_written_under_it(stem: str, index: str | None, tmp_path: Path) -> None:
    put(tmp_path / "in" / f"{stem}.safetensors", a=torch.ones(4), b=torch.zeros(4))
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "hf", max_file_bytes=16)
    assert files_of(tmp_path / "out") == {
        f"{stem}-00001-of-00002.safetensors",
        f"{stem}-00002-of-00002.safetensors",
        index or f"{stem}.safetensors.index.json",
    }
    assert list(formats.open_catalog(str(tmp_path / "out")).names) == ["model/a", "model/b"]


def test_an_adapter_stays_in_one_file_whatever_the_limit(tmp_path: Path) -> None:
    put(tmp_path / "in/adapter_model.safetensors", a=torch.ones(4), b=torch.zeros(4))
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "hf", max_file_bytes=16)
    assert list(weights(tmp_path / "out")) == ["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("pickled", "stem"),
    [("pytorch_model", "model"), ("open_clip_pytorch_model", "open_clip_model"), ("adapter_model", "adapter_model")],
)
def test_pickled_weights_become_what_the_same_library_looks_for(pickled: str, stem: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "in" / f"{pickled}.bin")
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {f"{stem}.safetensors"}


def test_a_name_that_no_library_looks_for_becomes_the_usual_one(tmp_path: Path) -> None:
    put(tmp_path / "in/flux-dev.safetensors", a=torch.ones(4))
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors"}
    assert any("flux-dev" in text for text in report.remarks)


def test_the_configuration_of_an_adapter_never_goes_without_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    put(folder / "model.safetensors", a=torch.ones(2))
    put(folder / "adapter_model.safetensors", a=torch.ones(2))
    say(folder / "config.json", {})
    say(folder / "adapter_config.json", {})
    report = convert(str(folder), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == {"model.safetensors", "config.json"}
    assert any("adapter_config.json" in text for text in report.remarks)


def test_a_pipeline_without_any_weights_is_no_checkpoint(tmp_path: Path) -> None:
    say(tmp_path / "p/model_index.json", {"unet": ["a", "b"]})
    say(tmp_path / "p/unet/config.json", {})
    assert not hf.detect(locate(str(tmp_path / "p")))


def test_modules_without_end_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    put(folder / "model.safetensors", a=torch.ones(1))
    say(folder / "modules.json", [{"path": f"{i}"} for i in range(1100)])
    for i in range(1100):
        (folder / str(i)).mkdir()
    with pytest.raises(UnsupportedError, match="folders"):
        formats.open_catalog(str(folder))


def test_modules_of_a_sentence_model_stay_in_one_file_each(tmp_path: Path) -> None:
    folder = sentence_model(tmp_path / "in", 1.0)
    put(folder / DENSE, a=torch.ones(4), b=torch.ones(4))
    report = convert(str(folder), str(tmp_path / "out"), "hf", max_file_bytes=16)
    assert [path for path in weights(tmp_path / "out") if "/" in path] == [DENSE]
    assert any(DENSE in text for text in report.remarks)


def test_a_single_file_says_what_it_has_no_place_for(tmp_path: Path) -> None:
    report = convert(str(sentence_model(tmp_path / "in", 1.0)), str(tmp_path / "out.pt"), "torchsave")
    assert any("modules.json" in text for text in report.remarks)
    assert any("2_Dense" in text for text in report.remarks)

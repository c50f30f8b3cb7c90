"""Any format becomes any other bit for bit, in bounded memory, or nothing is written at all."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ucformat
from tests.checkpoints import bits, flip, open_native, shards_of, split_evenly, write_native
from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog, Notes
from ucformat.errors import (
    ChecksumError,
    CoverageError,
    ExistsError,
    LayoutError,
    MissingFileError,
    NotACheckpointError,
    UnsupportedError,
)
from ucformat.formats.native import attempt
from ucformat.reshard.convert import convert, prepare
from ucformat.reshard.reading.lazy import read
from ucformat.reshard.selection.mesh_layout import parse
from ucformat.reshard.verify import verify
from ucformat.storage.open import open_store

State = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what stock DCP says to one process


def training_state() -> State:
    torch.manual_seed(1)
    return {
        "model/layers.0.w": torch.randn(12, 8),
        "model/layers.1.w": torch.randn(12, 8).bfloat16(),
        "model/layers.2.w": torch.randn(5, 7, dtype=torch.float64),
        "model/scale": torch.tensor(3.5),
        "model/count": torch.tensor(7),
        "model/mask": torch.tensor([True, False, True]),
        "model/fp8": torch.randn(6).to(torch.float8_e4m3fn),
        "optimizer/layers.0.w/exp_avg": torch.randn(12, 8),
        "optimizer/layers.0.w/step": torch.tensor(10.0),
    }


VALUES = {"step": 10, "optimizer": {"param_groups": [{"lr": 0.1, "params": ["layers.0.w"]}]}}


@pytest.fixture
def src(tmp_path: Path) -> str:
    """A native checkpoint of a small training state, its tensors cut and spread over three shards."""
    state = training_state()
    tiling = {"model/layers.0.w": split_evenly((12, 8), 1, 3), "optimizer/layers.0.w/exp_avg": split_evenly((12, 8), 0, 5)}
    write_native(tmp_path / "src", state, tiling, shards=3, values=VALUES, notes=Notes(step=10))
    return str(tmp_path / "src")


def opened(path: Path | str) -> Catalog:
    return formats.open_catalog(str(path))


def contents(path: Path | str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    catalog = opened(path)
    return {s.name: (s.dtype, s.shape, bits(read(catalog, s.name))) for s in catalog.tensors}


def model_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.startswith("model/")}


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["native", "dcp", "torchsave"])
def test_formats_for_training_keep_every_tensor_and_the_values(src: str, tmp_path: Path, to: str) -> None:
    dst = tmp_path / ("out.pt" if to == "torchsave" else "out")
    report = convert(src, str(dst), to)
    assert contents(dst) == contents(src)
    assert report.left_out == ()
    values = opened(dst).values
    assert isinstance(values, dict)
    assert values["step"] == 10
    assert values["optimizer"]["param_groups"] == VALUES["optimizer"]["param_groups"]  # type: ignore[index]


def test_hf_keeps_the_model_and_says_what_it_left_out(src: str, tmp_path: Path) -> None:
    report = convert(src, str(tmp_path / "out"), "hf")
    assert contents(tmp_path / "out") == model_of(contents(src))
    assert report.left_out == ("optimizer/layers.0.w/exp_avg", "optimizer/layers.0.w/step")
    assert any("values left out: optimizer, step" in text for text in report.remarks)


def test_a_container_that_only_held_tensors_is_no_value_left_out(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "a"), {"model": torch.nn.Linear(2, 2).state_dict(), "more": [torch.ones(2)], "lr": 0.1})
    report = convert(str(tmp_path / "a"), str(tmp_path / "out"), "hf")
    assert report.values_left_out == ("lr",)
    assert report.left_out == ("more/0",)


def test_a_chain_through_all_formats_ends_where_it_began(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    state = {name.removeprefix("model/"): t for name, t in training_state().items() if name.startswith("model/")}
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    (tmp_path / "hf/config.json").write_text("{}")
    before = tmp_path / "hf"
    for number, to in enumerate(["native", "dcp", "native", "hf", "dcp", "hf"]):
        convert(str(before), str(tmp_path / f"{number}"), to, max_file_bytes=500)
        before = tmp_path / f"{number}"
    found: State = {}
    for file in before.glob("*.safetensors"):
        found |= load_file(file)
    assert {name: bits(t) for name, t in found.items()} == {name: bits(t) for name, t in state.items()}
    assert (before / "config.json").read_text() == "{}"


def test_0d_scalars_come_out_as_they_went_in(tmp_path: Path) -> None:
    state = {"s": torch.tensor(3.5), "i": torch.tensor(-4), "b": torch.tensor(True)}
    state_dict_saver.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    convert(str(tmp_path / "dcp"), str(tmp_path / "out"), "hf")
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: (t.item(), t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.item(), t.dtype, t.shape) for name, t in state.items()
    }


def test_an_export_merged_from_pipeline_stages_is_complete(tmp_path: Path) -> None:
    """Stage 0 has the embedding; stage 1 the norm and a head that is tied to the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    state = {f"model/{name}": t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    first = sorted(name for name in state if "embed" in name or "layers.0" in name)
    ordered = {name: state[name] for name in (*first, *(name for name in state if name not in first))}
    write_native(
        tmp_path / "src",
        ordered,
        shards=2,
        aliases={"model/lm_head.weight": "model/model.embed_tokens.weight"},
        notes=Notes(mesh={"pp": 2}),
    )
    config.save_pretrained(tmp_path / "src/companions")
    convert(str(tmp_path / "src"), str(tmp_path / "out"), "hf", max_file_bytes=10_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            assert shard.metadata()["format"] == "pt"
            assert not held.keys() & set(shard.keys())
            held |= dict.fromkeys(shard.keys(), file.name)
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 8 == 0
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert {k: bits(v) for k, v in again.state_dict().items()} == {k: bits(v) for k, v in model.state_dict().items()}


# -- choices ---------------------------------------------------------------------------------------------------------


def test_dtype_converts_the_models_floats_only(src: str, tmp_path: Path) -> None:
    convert(src, str(tmp_path / "out"), "native", dtype="bf16", exclude=["model/fp8"])
    before, after = opened(src), opened(tmp_path / "out")
    for spec in (spec for spec in before.tensors if spec.name != "model/fp8"):
        floats = spec.name.startswith("model/") and spec.dtype in ("F64", "F32", "F16", "BF16")
        assert after.spec(spec.name).dtype == ("BF16" if floats else spec.dtype)
        expected = read(before, spec.name)
        expected = expected.bfloat16() if floats else expected
        assert bits(read(after, spec.name)) == bits(expected)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "F8_E4M3", "nonsense", ""])
def test_other_dtypes_are_refused(src: str, tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UnsupportedError, match="dtype"):
        convert(src, str(tmp_path / "out"), "native", dtype=dtype)


def test_select_and_exclude_choose_names_and_values(src: str, tmp_path: Path) -> None:
    report = convert(src, str(tmp_path / "out"), "native", select=["model"], exclude=["*.w"])
    assert set(contents(tmp_path / "out")) == {"model/scale", "model/count", "model/mask", "model/fp8"}
    assert len(report.left_out) == 5
    assert opened(tmp_path / "out").values == {}
    convert(src, str(tmp_path / "again"), "native", exclude=["optimizer/*"])
    assert opened(tmp_path / "again").values == {"step": 10}


@pytest.mark.parametrize(
    ("select", "exclude"), [(["nothing/*"], []), (["model/*", "modle/*"], []), ([], ["*"]), ([], ["optimzer/*"])]
)
def test_a_choice_that_matches_nothing_is_an_error(src: str, tmp_path: Path, select: list[str], exclude: list[str]) -> None:
    with pytest.raises(UnsupportedError):
        convert(src, str(tmp_path / "out"), "native", select=select, exclude=exclude)


def test_a_tied_name_may_be_all_that_is_selected(tmp_path: Path) -> None:
    write_native(tmp_path / "src", {"model/embed": torch.ones(3)}, aliases={"model/head": "model/embed"})
    convert(str(tmp_path / "src"), str(tmp_path / "out"), "hf", select=["model/head"])
    assert load_file(tmp_path / "out/model.safetensors")["head"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("to", ["native", "dcp"])
def test_a_layout_gives_every_rank_its_file(src: str, tmp_path: Path, to: str) -> None:
    convert(src, str(tmp_path / "out"), to, layout=parse("dp=2,tp=2"))
    catalog = opened(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(src)
    assert len(catalog.files) == 4
    rows = catalog.fragments.rows(catalog.find("model/layers.0.w"))
    assert [str(catalog.fragments.box(row, 2)) for row in range(rows.start, rows.stop)] == [
        "[0:3, 0:8]",
        "[3:6, 0:8]",
        "[6:9, 0:8]",
        "[9:12, 0:8]",
    ]
    if to == "dcp":
        loaded = {"model": {"layers.0.w": torch.zeros(12, 8)}}
        state_dict_loader.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
        assert torch.equal(loaded["model"]["layers.0.w"], training_state()["model/layers.0.w"])


def test_a_layout_is_refused_where_it_has_no_meaning(src: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="layout"):
        convert(src, str(tmp_path / "out"), "hf", layout=parse("tp=2"))
    with pytest.raises(LayoutError):
        convert(src, str(tmp_path / "out"), "native", layout=parse('{"mesh": {"tp": 2}, "rules": [{"match": "*", "tp": 5}]}'))


# -- nothing is written unless all is well -----------------------------------------------------------------------------


def test_preparing_writes_nothing_and_tells_what_would_happen(src: str, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.rglob("*"))
    conversion = prepare(src, str(tmp_path / "out"), "hf", max_file_bytes=400)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    model = {name: t for name, t in training_state().items() if name.startswith("model/")}
    assert conversion.written_bytes == conversion.read_bytes == sum(t.nbytes for t in model.values())
    assert sum(conversion.writes()) == conversion.written_bytes
    assert len(conversion.writes()) > 1
    assert {share.path for share in conversion.reads} <= {f"{shards_of(src).name}/0000{i}.safetensors" for i in range(3)}


def test_a_hole_is_found_before_anything_is_written(tmp_path: Path) -> None:
    state_dict_saver.save({"w": torch.randn(4, 4), "b": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([8, 4])
    path.write_bytes(pickle.dumps(metadata))
    for to in ("native", "hf", "dcp"):
        with pytest.raises(CoverageError, match=r"'w': box \[4:8, 0:4\]") as caught:
            convert(str(tmp_path / "dcp"), str(tmp_path / "out"), to)
        assert caught.value.missing == Box((4, 0), (4, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_damage_leaves_no_output(src: str, tmp_path: Path, to: str) -> None:
    catalog = open_native(open_store(src))
    row = catalog.fragments.rows(catalog.find("model/layers.0.w")).start
    flip(Path(src) / catalog.files[int(catalog.fragments.file[row])].path, int(catalog.fragments.start[row]))
    with pytest.raises(ChecksumError, match=r"layers\.0\.w"):
        convert(src, str(tmp_path / "out"), to)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    with pytest.raises((NotACheckpointError, MissingFileError)):
        opened(tmp_path / "out")


def test_a_flipped_bit_in_a_torch_file_is_found_while_converting(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3_000_000)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", 11_000_000)
    with pytest.raises(ChecksumError, match="w"):
        convert(str(tmp_path / "x.pt"), str(tmp_path / "out"), "native")
    with pytest.raises((NotACheckpointError, MissingFileError)):
        opened(tmp_path / "out")


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_a_destination_in_use_is_refused_and_replaced_only_when_asked(src: str, tmp_path: Path, to: str) -> None:
    dst = str(tmp_path / ("out.pt" if to == "torchsave" else "out"))
    convert(src, dst, to, select=["model/scale"])
    with pytest.raises(ExistsError):
        convert(src, dst, to)
    assert len(opened(dst).tensors) == 1
    convert(src, dst, to, overwrite=True)
    assert len(opened(dst).tensors) > 1


def test_native_replaces_a_checkpoint_of_another_format_wholly(src: str, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    write_companions(tmp_path / "with", config="new")
    for to in ("hf", "dcp"):
        before = tmp_path / f"before-{to}"
        write_companions(before, config="old", tokenizer="old")
        convert(str(before), str(dst), to, overwrite=True)
        convert(str(tmp_path / "with"), str(dst), "native", overwrite=True)
        assert not list(dst.glob("*.distcp")) + list(dst.glob("model*")) + list(dst.glob("*config.json"))
        assert verify(opened(dst)).ok
        convert(str(dst), str(tmp_path / f"again-{to}"), "hf")
        assert (tmp_path / f"again-{to}/config.json").read_text() == "new"
        assert not (tmp_path / f"again-{to}/tokenizer.json").exists()


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
@pytest.mark.parametrize("before", ["hf", "dcp"])
def test_replacing_keeps_what_is_no_part_of_the_old_checkpoint(src: str, tmp_path: Path, before: str, to: str) -> None:
    dst = tmp_path / "out"
    convert(src, str(dst), before, max_file_bytes=300)
    old = {path.name for path in dst.iterdir()}
    (dst / "logs").mkdir()
    (dst / "logs/a.log").write_text("mine")
    (dst / "notes.txt").write_text("mine")
    convert(src, str(dst), to, overwrite=True)
    convert(src, str(tmp_path / "fresh"), to)
    new = {path.name for path in (tmp_path / "fresh").iterdir()}
    assert len(old) > 2
    assert {_plain(path.name) for path in dst.iterdir()} == {*map(_plain, new), "notes.txt", "logs"}
    assert [(dst / name).read_text() for name in ("notes.txt", "logs/a.log")] == ["mine", "mine"]
    assert contents(dst) == contents(tmp_path / "fresh")


def _plain(name: str) -> str:
    """Without the token."""
    return name.partition(".")[0] if name.startswith("shards.") else name


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_checkpoints_of_other_frameworks_are_never_replaced(src: str, tmp_path: Path, to: str) -> None:
    (tmp_path / "run/global_step1").mkdir(parents=True)
    (tmp_path / "run/latest").write_text("global_step1")
    (tmp_path / "run/global_step1/mp_rank_00_model_states.pt").write_text("weeks of work")
    for dst in (tmp_path / "run", tmp_path / "run/global_step1"):
        with pytest.raises(UnsupportedError, match="deepspeed, which is never replaced"):
            convert(src, str(dst), to, overwrite=True)
    assert (tmp_path / "run/global_step1/mp_rank_00_model_states.pt").read_text() == "weeks of work"


def test_a_failed_replacement_leaves_the_old_checkpoint_and_its_companions(src: str, tmp_path: Path, monkeypatch: Any) -> None:
    write_companions(tmp_path / "old", config="old")
    write_companions(tmp_path / "new", config="new", tokenizer="new")
    dst = str(tmp_path / "out")
    convert(str(tmp_path / "old"), dst, "native")
    before = sorted(path.relative_to(tmp_path) for path in Path(dst).rglob("*"))

    def broken(*_: object) -> bytes:
        raise OSError("broken")

    monkeypatch.setattr(attempt, "build_index", broken)
    with pytest.raises(OSError, match="broken"):
        convert(str(tmp_path / "new"), dst, "native", overwrite=True)
    assert sorted(path.relative_to(tmp_path) for path in Path(dst).rglob("*")) == before
    assert verify(opened(dst)).ok
    monkeypatch.undo()
    convert(str(tmp_path / "new"), dst, "native", overwrite=True)
    convert(dst, str(tmp_path / "hf"), "hf")
    assert {name: (tmp_path / "hf" / name).read_text() for name in ("config.json", "tokenizer.json")} == {
        "config.json": "new",
        "tokenizer.json": "new",
    }


def write_companions(path: Path, **texts: str) -> None:
    """A Hugging Face model with files of these names and texts."""
    path.mkdir()
    save_file({"w": torch.ones(2)}, path / "model.safetensors")
    for name, text in texts.items():
        (path / f"{name}.json").write_text(text)


def test_what_is_no_checkpoint_is_never_replaced(src: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/me.jpg").write_bytes(b"jpg")
    for to in ("native", "hf", "dcp"):
        with pytest.raises(UnsupportedError, match="no checkpoint"):
            convert(src, str(tmp_path / "photos"), to, overwrite=True)
    assert (tmp_path / "photos/me.jpg").read_bytes() == b"jpg"


def test_source_and_destination_must_differ(src: str) -> None:
    with pytest.raises(UnsupportedError, match="same"):
        convert(src, src + "/", "native", overwrite=True)


def test_unknown_formats_and_sources_are_refused(src: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="gguf"):
        convert(src, str(tmp_path / "out"), "gguf")
    with pytest.raises(MissingFileError):
        convert(str(tmp_path / "gone"), str(tmp_path / "out"), "native")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a")
    with pytest.raises(NotACheckpointError):
        convert(str(tmp_path / "text"), str(tmp_path / "out"), "native")


def test_object_stores_are_read_and_written(src: str) -> None:
    for url in ("memory://test_convert/a", "memory://test_convert/b"):
        open_store(url).remove()
    convert(src, "memory://test_convert/a", "native")
    convert("memory://test_convert/a", "memory://test_convert/b", "hf")
    assert contents("memory://test_convert/b") == model_of(contents(src))


KILLED = """
import sys, threading
from ucformat.reshard import convert as module
fill, calls = module.CatalogFill.__call__, []
def slow(self, parts):
    calls.append(1)
    if len(calls) > 1:
        print("half", flush=True)
        threading.Event().wait()
    fill(self, parts)
module.CatalogFill.__call__ = slow
module.convert(*sys.argv[1:], max_file_bytes=300)
"""


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_killed_conversion_leaves_no_checkpoint_and_can_be_run_again(src: str, tmp_path: Path, to: str) -> None:
    dst = str(tmp_path / "out")
    with subprocess.Popen([sys.executable, "-c", KILLED, src, dst, to], stdout=subprocess.PIPE, cwd=os.getcwd()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    with pytest.raises((NotACheckpointError, MissingFileError)):
        opened(dst)
    convert(src, dst, to)
    assert model_of(contents(dst)) == model_of(contents(src))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


MEASURED = """
import resource, sys, torch
from ucformat import formats
from ucformat.reshard.convert import convert
formats.open_catalog(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(*sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, to: str) -> None:
    (tmp_path / "big").mkdir()
    save_file({"w": torch.zeros(40_000_000), "v": torch.zeros(1000, 20_000)}, tmp_path / "big/model.safetensors")  # 240 MB
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "big"), str(tmp_path / "out"), to],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout) < 120_000  # KiB


def test_companions_of_a_hugging_face_model_travel_to_dcp_and_back(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text('{"a": 1}')
    convert(str(tmp_path / "hf"), str(tmp_path / "dcp"), "dcp")
    assert (tmp_path / "dcp/companions/config.json").exists()
    convert(str(tmp_path / "dcp"), str(tmp_path / "out"), "hf")
    assert (tmp_path / "out/config.json").read_text() == '{"a": 1}'


def test_companions_of_a_checkpoint_inside_a_run_travel(tmp_path: Path) -> None:
    write_native(tmp_path / "run/step-00000003", {"model/a": torch.ones(2)})
    (tmp_path / "run/step-00000003/companions").mkdir()
    (tmp_path / "run/step-00000003/companions/config.json").write_text("{}")
    convert(str(tmp_path / "run"), str(tmp_path / "out"), "hf")
    assert (tmp_path / "out/config.json").exists()

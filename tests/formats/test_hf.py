"""Hugging Face directories: index and files must agree, and what is written loads with safetensors and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

import ucformat
from tests.checkpoints import bits, shards_of, write_native
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.dtypes import DTYPES, from_torch
from ucformat.errors import ExistsError, FormatError, MissingFileError, UcformatError, UnsupportedError
from ucformat.formats import hf, sidecar_files
from ucformat.formats.hf import folders
from ucformat.formats.hf.layout import lay_out
from ucformat.formats.source import Source, locate
from ucformat.formats.target import Companions, OutputBox, WriteJob
from ucformat.reshard.reading.fill import TensorFill
from ucformat.reshard.reading.lazy import read
from ucformat.storage.local import LocalStore
from ucformat.storage.open import open_store

State = Mapping[str, torch.Tensor]


def job(path: Path | str, state: State, **more: object) -> WriteJob:
    specs = [TensorSpec(name, from_torch(t.dtype).name, tuple(t.shape)) for name, t in state.items()]
    fill = TensorFill(list(state.values()), [spec.kind for spec in specs])
    return WriteJob(open_store(str(path)), [OutputBox(s, Box.whole(s.shape)) for s in specs], fill, **more)  # type: ignore[arg-type]


def loaded(path: Path | str) -> dict[str, torch.Tensor]:
    """Canonical name → tensor, by our reader."""
    catalog = hf.open_catalog(locate(str(path)))
    return {name: read(catalog, name) for name in catalog.names}


def strict(path: Path) -> dict[str, torch.Tensor]:
    """Name → tensor, by safetensors; also checks what other loaders rely on: format, alignment, a complete index."""
    found: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 8 == 0
        for name, tensor in load_file(file).items():
            assert name not in found
            found[name], where[name] = tensor, file.name
    index = path / "model.safetensors.index.json"
    assert index.exists() == (len(set(where.values())) > 1)
    if index.exists():
        tree = json.loads(index.read_text())
        assert tree["weight_map"] == where
        assert tree["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files and their index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 2)}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"c": torch.arange(3)}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 56}, "weight_map": {"a": first, "b": first, "c": second}})
    )
    return folder


def edit_index(folder: Path, **entries: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    for name, file in entries.items():
        if file is None:
            del tree["weight_map"][name]
        else:
            tree["weight_map"][name] = file
    path.write_text(json.dumps(tree))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_every_dtype_of_safetensors_is_read_bit_for_bit(tmp_path: Path) -> None:
    state = {}
    for kind in DTYPES.values():
        if kind.stored == kind.name and not kind.name.startswith("F6_"):
            raw = torch.randint(0, 2 if kind.name == "BOOL" else 256, (3 * 4 * kind.itemsize,), dtype=torch.uint8)
            state[kind.name] = raw.view(kind.torch).reshape(3, 4)
    save_file(state, tmp_path / "x.safetensors")
    found = loaded(tmp_path / "x.safetensors")
    assert {name: bits(t) for name, t in found.items()} == {f"model/{name}": bits(t) for name, t in state.items()}
    assert {t.dtype for t in found.values()} == {t.dtype for t in state.values()}


def test_sharded_checkpoint_is_read_with_and_without_naming_the_index(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json"):
        assert hf.detect(locate(str(path)))
        assert {name: t.tolist() for name, t in loaded(path).items()} == {
            "model/a": [0, 1, 2, 3],
            "model/b": [[1, 1], [1, 1]],
            "model/c": [0, 1, 2],
        }
    assert hf.open_catalog(locate(str(sharded))).notes.remarks == ()


def test_numbered_shards_without_an_index_are_read_when_all_are_there(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert set(loaded(sharded)) == {"model/a", "model/b", "model/c"}
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match="model-00001-of-00002"):
        hf.open_catalog(locate(str(sharded)))


def test_diffusers_names_are_found(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unet"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "diffusion_pytorch_model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert loaded(folder)["model/a"].tolist() == [1.0]
    assert "fp16" in hf.open_catalog(locate(str(folder))).notes.remarks[0]


def test_several_sets_of_weights_are_refused_rather_than_guessed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(UnsupportedError, match=r"one\.safetensors"):
        hf.open_catalog(locate(str(tmp_path)))
    assert loaded(tmp_path / "two.safetensors")["model/a"].tolist() == [0.0]


def test_a_file_that_the_index_names_and_is_not_there_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match="model-00002-of-00002"):
        hf.open_catalog(locate(str(sharded)))


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    save_file({"c": torch.arange(3), "a": torch.zeros(4)}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="'a' is in"):
        hf.open_catalog(locate(str(sharded)))


def test_an_index_that_names_a_tensor_that_is_nowhere_is_refused(sharded: Path) -> None:
    edit_index(sharded, d="model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="'d' is not in"):
        hf.open_catalog(locate(str(sharded)))


def test_an_index_that_names_the_wrong_file_is_refused(sharded: Path) -> None:
    edit_index(sharded, a="model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="'a' is in"):
        hf.open_catalog(locate(str(sharded)))


def test_tensors_that_the_index_forgot_are_taken_and_told(sharded: Path) -> None:
    edit_index(sharded, b=None)
    catalog = hf.open_catalog(locate(str(sharded)))
    assert "model/b" in catalog.names
    assert "not in model.safetensors.index.json" in catalog.notes.remarks[0]


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x.safetensors", "", "x.bin"]
)
def test_an_index_that_names_files_elsewhere_is_refused(sharded: Path, file: str) -> None:
    edit_index(sharded, a=file)
    with pytest.raises(FormatError, match=r"index\.json"):
        hf.open_catalog(locate(str(sharded)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 10_000, "\ud800"])
def test_a_malformed_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(FormatError, match=r"index\.json"):
        hf.open_catalog(locate(str(sharded)))


def test_a_name_twice_in_the_index_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"a":', '"a": "model-00002-of-00002.safetensors", "a":'))
    with pytest.raises(FormatError, match="twice"):
        hf.open_catalog(locate(str(sharded)))


def test_tied_names_of_save_model_come_back_as_aliases(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    save_model(model, str(tmp_path / "model.safetensors"))
    catalog = hf.open_catalog(locate(str(tmp_path)))
    assert len(catalog.tensors) == 1
    assert set(catalog.names) == {"model/embed.weight", "model/head.weight"}
    assert torch.equal(read(catalog, "model/head.weight"), model.embed.weight.detach())


def test_metadata_that_is_no_alias_is_kept_through_a_round_trip(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt", "modelspec.title": "A"})
    catalog = hf.open_catalog(locate(str(tmp_path)))
    hf.write(job(tmp_path / "out", {"model/a": torch.ones(1)}, values=catalog.values))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "modelspec.title": "A"}


def test_other_formats_built_on_safetensors_are_not_taken_for_hf(tmp_path: Path) -> None:
    write_native(tmp_path / "native", {"model/a": torch.ones(3)})
    assert not hf.detect(locate(str(tmp_path / "native")))
    assert not hf.detect(locate(str(shards_of(tmp_path / "native") / "00000.safetensors")))
    (tmp_path / "dcp").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "dcp/shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": "{}"})
    assert not hf.detect(locate(str(tmp_path / "dcp")))


def test_detection_never_raises_on_foreign_input(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "y.txt").write_bytes(b"text")
    for file in (None, "x.safetensors", "y.txt", "gone.safetensors"):
        assert hf.detect(Source(LocalStore(str(tmp_path)), file)) in (True, False)


# -- writing ---------------------------------------------------------------------------------------------------------


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model/layers.10.w": torch.randn(8, 4),
        "model/layers.2.w": torch.randn(8, 4, dtype=torch.float64).t(),
        "model/scalar": torch.tensor(3.5),
        "model/flag": torch.tensor(True),
        "model/count": torch.tensor(7),
        "model/empty": torch.empty(0, 3),
        "model/half": torch.randn(3).bfloat16(),
        "model/small": torch.arange(3, dtype=torch.uint8),
    }


@pytest.mark.parametrize("limit", [1 << 30, 300, 1])
def test_what_is_written_opens_strictly_and_equals(tmp_path: Path, limit: int) -> None:
    state = mixed()
    hf.write(job(tmp_path / "out", state, max_file_bytes=limit))
    found = strict(tmp_path / "out")
    assert {f"model/{name}": bits(t) for name, t in found.items()} == {name: bits(t) for name, t in state.items()}
    assert {name: bits(t) for name, t in loaded(tmp_path / "out").items()} == {name: bits(t) for name, t in state.items()}


def test_0d_scalars_of_every_kind_survive(tmp_path: Path) -> None:
    hf.write(job(tmp_path / "out", {"s": torch.tensor(3.5), "i": torch.tensor(-4), "b": torch.tensor(True)}))
    found = strict(tmp_path / "out")
    assert (found["s"].item(), found["i"].item(), found["b"].item()) == (3.5, -4, True)
    assert all(t.shape == () for t in found.values())


def test_files_respect_the_limit_and_keep_layers_in_their_order(tmp_path: Path) -> None:
    state = {f"model/layers.{i}.w": torch.full((100,), float(i)) for i in range(12)}
    hf.write(job(tmp_path / "out", state, max_file_bytes=1000))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    files = [index[f"layers.{i}.w"] for i in range(12)]
    assert files == sorted(files)
    assert len(set(files)) == 6


def test_only_the_model_goes_in_and_prefixes_go(tmp_path: Path) -> None:
    state = {
        "model/a.b": torch.ones(1),
        "model/x/y": torch.ones(2),
        "model/p%2Fq": torch.ones(3),
        "optimizer/a.b/exp_avg": torch.ones(1),
    }
    hf.write(job(tmp_path / "out", state))
    assert set(strict(tmp_path / "out")) == {"a.b", "x.y", "p/q"}
    assert "model/p%2Fq" in loaded(tmp_path / "out")


def test_names_without_a_model_all_go_in(tmp_path: Path) -> None:
    hf.write(job(tmp_path / "out", {"encoder/w": torch.ones(1), "decoder/w": torch.ones(1)}))
    assert set(strict(tmp_path / "out")) == {"encoder.w", "decoder.w"}


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"both be called 'a\.b'"):
        hf.write(job(tmp_path / "out", {"model/a/b": torch.ones(1), "model/a.b": torch.ones(1)}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex32)])
def test_dtypes_that_safetensors_lacks_are_refused_before_anything_is_written(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="no dtype"):
        hf.write(job(tmp_path / "out", {"model/a": torch.ones(1), "model/z": tensor}))
    assert list(tmp_path.iterdir()) == []


def test_a_tied_tensor_is_stored_once_and_its_other_name_recorded(tmp_path: Path) -> None:
    state = {"model/embed.weight": torch.randn(4, 2), "model/norm": torch.ones(2)}
    hf.write(job(tmp_path / "out", state, aliases={"model/head.weight": "model/embed.weight", "optimizer/x": "model/norm"}))
    assert set(strict(tmp_path / "out")) == {"embed.weight", "norm"}
    with safe_open(tmp_path / "out/model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert bits(loaded(tmp_path / "out")["model/head.weight"]) == bits(state["model/embed.weight"])


def test_order_in_a_file_is_widest_first_so_that_everything_is_aligned(tmp_path: Path) -> None:
    for file in lay_out(job(tmp_path, mixed())):
        for number, start in zip(file.image.piece.tolist(), file.image.start.tolist(), strict=True):
            assert start % list(mixed().values())[number].element_size() == 0


def test_an_existing_directory_is_refused_and_untouched(tmp_path: Path) -> None:
    hf.write(job(tmp_path / "out", {"model/a": torch.ones(1)}))
    with pytest.raises(ExistsError):
        hf.write(job(tmp_path / "out", {"model/a": torch.zeros(1)}))
    assert loaded(tmp_path / "out")["model/a"].tolist() == [1.0]
    hf.write(job(tmp_path / "out", {"model/a": torch.zeros(1)}, overwrite=True))
    assert loaded(tmp_path / "out")["model/a"].tolist() == [0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_while_writing_leaves_what_was_there(tmp_path: Path, overwrite: bool) -> None:
    if overwrite:
        hf.write(job(tmp_path / "out", {"model/a": torch.ones(1)}))
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def broken(parts: object) -> None:
        raise OSError("no more")

    spec = TensorSpec("model/a", "F32", (1,))
    with pytest.raises(OSError, match="no more"):
        hf.write(WriteJob(open_store(str(tmp_path / "out")), [OutputBox(spec, Box.whole((1,)))], broken, overwrite=overwrite))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_object_stores_hold_nothing_after_a_failure_and_everything_after_success() -> None:
    url = "memory://test_hf/out"
    open_store(url).remove()

    def broken(parts: object) -> None:
        raise OSError("no more")

    spec = TensorSpec("model/a", "F32", (1,))
    with pytest.raises(OSError, match="no more"):
        hf.write(WriteJob(open_store(url), [OutputBox(spec, Box.whole((1,)))], broken))
    assert open_store(url).list() == []
    hf.write(job(url, mixed(), max_file_bytes=100))
    assert {name: bits(t) for name, t in loaded(url).items()} == {name: bits(t) for name, t in mixed().items()}


def test_twenty_thousand_tiny_tensors_are_written_and_read(tmp_path: Path) -> None:
    hf.write(job(tmp_path / "out", {f"model/t{i}": torch.full((2,), float(i)) for i in range(20_000)}))
    found = strict(tmp_path / "out")
    assert len(found) == 20_000
    assert found["t19999"].tolist() == [19999.0, 19999.0]


# -- companions ------------------------------------------------------------------------------------------------------

COMPANIONS = {
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "modules.json",
    "README.md",
    "source.spm",
    "notes.json",
    "1_Pooling/config.json",
    "additional_chat_templates/rag.jinja",
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name in (
        *COMPANIONS,
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "other/model.safetensors",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]" if name == "modules.json" else "{}" if name == "config.json" else name)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return folder


def gather(folder: Path) -> Companions:
    """The files that travel along with the model in `folder`, as a conversion finds them."""
    source = locate(str(folder))
    return sidecar_files.gather(source, folders.parts(source.store), hf.weight_files(source))


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_configuration_and_tokenizer_travel_and_weights_do_not(model_folder: Path, tmp_path: Path) -> None:
    hf.write(job(tmp_path / "out", {"model/a": torch.ones(1)}, companions=gather(model_folder)))
    assert files_of(tmp_path / "out") == COMPANIONS | {"model.safetensors"}
    assert (tmp_path / "out/1_Pooling/config.json").read_text() == "1_Pooling/config.json"


def test_companions_survive_a_format_that_keeps_them_in_a_folder(model_folder: Path, tmp_path: Path) -> None:
    between = open_store(str(tmp_path / "between"))
    assert sidecar_files.carry(gather(model_folder), between, sidecar_files.PREFIX)
    assert files_of(tmp_path / "between/companions") == COMPANIONS
    hf.write(job(tmp_path / "out", {"model/a": torch.ones(1)}, companions=sidecar_files.gather(Source(between))))
    assert files_of(tmp_path / "out") == COMPANIONS | {"model.safetensors"}


def test_a_companion_that_is_too_large_is_left_and_told(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_files, "MAX_BYTES", 10)
    found = gather(model_folder)
    sidecar_files.carry(found, open_store(str(tmp_path / "out")))
    assert any("tokenizer.json" in text for text in found.remarks)
    assert "tokenizer.json" not in files_of(tmp_path / "out")


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny GPT-2 with random weights, embedding and head tied, as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=101, n_embd=16, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("limit", [1 << 30, 5_000])
@pytest.mark.parametrize("kept", ["transformer.wte.weight", "lm_head.weight"])
def test_transformers_loads_what_is_written(gpt2: tuple[Path, Any], tmp_path: Path, limit: int, kept: str) -> None:
    from transformers import GPT2LMHeadModel

    folder, model = gpt2
    tied = {"transformer.wte.weight", "lm_head.weight"}
    state = {f"model/{name}": t for name, t in model.state_dict().items() if name == kept or name not in tied}
    aliases = {f"model/{(tied - {kept}).pop()}": f"model/{kept}"}
    hf.write(job(tmp_path / "out", state, aliases=aliases, companions=gather(folder), max_file_bytes=limit))
    strict(tmp_path / "out")
    answer: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    again, info = answer
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {k: bits(v) for k, v in again.state_dict().items()} == {k: bits(v) for k, v in model.state_dict().items()}
    assert again.lm_head.weight is again.transformer.wte.weight


def test_what_transformers_writes_in_shards_is_read(gpt2: tuple[Path, Any], tmp_path: Path) -> None:
    _, model = gpt2
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    state = {f"model/{name}": bits(t) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: bits(t) for name, t in loaded(tmp_path / "shards").items()} == state


def test_errors_are_all_of_one_family(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"garbage that is long enough")
    with pytest.raises(UcformatError):
        hf.open_catalog(locate(str(sharded)))


def test_metadata_of_the_files_needs_no_place_in_a_live_state(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors", {"format": "pt", "made_by": "somebody"})
    layer = torch.nn.Linear(3, 2, bias=False)
    ucformat.load(str(tmp_path), into={"model": layer})
    assert torch.equal(layer.weight.detach(), torch.ones(2, 3))

"""DCP: stock checkpoints read exactly and by range, damaged ones refused, and what we write loads in stock DCP."""

from __future__ import annotations

import collections
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.checkpoints import CountingStore
from tests.formats.dcp_ranks import UNEVEN, full
from tests.formats.test_torchsave import TORCH_DTYPES, bits, random_bits
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import (
    ChecksumError,
    CoverageError,
    DTypeMismatchError,
    ExistsError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    UcformatError,
    UnrepresentableError,
    UnsafePickleError,
    UnsupportedError,
    VersionError,
)
from ucformat.formats import dcp as our_dcp
from ucformat.formats import open_catalog
from ucformat.formats.dcp import writer as dcp_writer
from ucformat.formats.source import Source
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import CatalogFill
from ucformat.reshard.reading.lazy import read
from ucformat.storage.open import open_store
from ucformat.values.codec import ArrayRef, Opaque, TensorRef

# stock DCP without a process group warns that it runs in a single process
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")


def stock(path: Path, state: dict[str, Any], **more: Any) -> Catalog:
    """Save with stock DCP, open with ours."""
    save(state, checkpoint_id=path, no_dist=True, **more)
    return opened(path)


def opened(path: Path) -> Catalog:
    source = Source(open_store(str(path)))
    assert our_dcp.detect(source)
    return our_dcp.open_catalog(source)


def job(catalog: Catalog, path: Path, pieces: list[OutputBox] | None = None, **more: Any) -> WriteJob:
    pieces = [OutputBox(spec, Box.whole(spec.shape)) for spec in catalog.tensors] if pieces is None else pieces
    fill = CatalogFill(catalog, pieces, [piece.name for piece in pieces])
    return WriteJob(open_store(str(path)), pieces, fill, catalog.values, catalog.aliases, **more)


def load_stock(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    load(state, checkpoint_id=path, no_dist=True)
    return state


def edit_metadata(path: Path, edit: Callable[[torch_metadata.Metadata], None]) -> None:
    """Change the metadata of a real checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1].parameters())}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TORCH_DTYPES, ids=lambda kind: kind.name)
def test_every_dtype_round_trips_bit_for_bit(tmp_path: Path, kind: Any) -> None:
    tensor = random_bits(kind.torch, 3, 4)
    catalog = stock(tmp_path / "a", {"d": {"w": tensor}})
    assert bits(read(catalog, "d/w")) == bits(tensor)
    our_dcp.write(job(catalog, tmp_path / "b"))
    back = load_stock(tmp_path / "b", {"d": {"w": random_bits(kind.torch, 3, 4)}})["d"]["w"]
    assert bits(back) == bits(tensor)


def test_dcp_noncontiguous_tensor_honours_stride(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    catalog = stock(
        tmp_path / "a", {"model": {"t": weight.t(), "v": weight[::2, 1:3], "p": weight.view(2, 2, 6).permute(2, 0, 1)}}
    )
    assert torch.equal(read(catalog, "model/t"), weight.t())
    assert torch.equal(read(catalog, "model/v"), weight[::2, 1:3])
    assert torch.equal(read(catalog, "model/p"), weight.view(2, 2, 6).permute(2, 0, 1))
    assert torch.equal(read(catalog, "model/t", Box((2, 1), (3, 2))), weight.t()[2:5, 1:3])


def test_scalars_and_empty_tensors_are_themselves(tmp_path: Path) -> None:
    tree = {"s": torch.tensor(3.5), "i": torch.tensor(7), "b": torch.tensor(True), "e": torch.empty(0, 3)}
    catalog = stock(tmp_path / "a", {"model": tree})
    assert read(catalog, "model/s").item() == 3.5
    assert read(catalog, "model/i").item() == 7
    assert read(catalog, "model/b").item() is True
    assert read(catalog, "model/e").shape == (0, 3)
    our_dcp.write(job(catalog, tmp_path / "b"))
    back = load_stock(tmp_path / "b", {"model": {"s": torch.tensor(0.0), "i": torch.tensor(0), "e": torch.empty(0, 3)}})
    assert (back["model"]["s"].item(), back["model"]["i"].item()) == (3.5, 7)


def test_values_keep_their_places_and_types(tmp_path: Path) -> None:
    tree = {
        "l": [torch.ones(2), 5, {"x": torch.zeros(1), "y": "text"}],
        "plain": [1, 2.5],
        "t": (1, torch.arange(3)),
        "rng": {"np": np.arange(4), "n": np.int64(3)},
        "o": collections.OrderedDict(a=1),
        "none": None,
        "a.b": {"c": 1},
        "step": 12,
    }
    catalog = stock(tmp_path / "a", tree)
    assert catalog.values == {
        "l": [TensorRef("l/0"), 5, {"x": TensorRef("l/2/x"), "y": "text"}],
        "plain": [1, 2.5],
        "t": (1, TensorRef("t/1")),
        "rng": {"np": ArrayRef("rng/np"), "n": np.int64(3)},
        "o": {"a": 1},
        "none": None,
        "a.b": {"c": 1},
        "step": 12,
    }
    assert torch.equal(read(catalog, "t/1"), torch.arange(3))
    assert torch.equal(read(catalog, "rng/np"), torch.arange(4))
    assert catalog.notes.step == 12


@pytest.mark.parametrize("key", ["optimizer", "optim", "optim_state"])
@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_state_gets_canonical_names(tmp_path: Path, flat: bool, key: str) -> None:
    model, optimizer = model_and_optimizer()
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    catalog = stock(tmp_path / "a", {"model": model.state_dict(), key: states})
    truth: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for name, held in truth.items():
        for state, tensor in held.items():
            assert torch.equal(read(catalog, f"optimizer/{name}/{state}"), tensor)
    assert all(name.startswith(("model/", "optimizer/")) for name in catalog.names)
    values: Any = catalog.values
    groups = values["optimizer"]["param_groups"]
    assert [(group["lr"], group["params"]) for group in groups] == [
        (0.1, ["0.weight", "0.bias"]),
        (0.001, ["1.weight", "1.bias"]),
    ]
    assert groups[0]["betas"] == (0.9, 0.999)


def test_flat_model_beside_its_optimizer_gets_canonical_names(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    states: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    catalog = stock(tmp_path / "a", {**model.state_dict(), "optimizer": states, "train_state": {"step": 3}})
    assert torch.equal(read(catalog, "model/0.weight"), model.state_dict()["0.weight"])
    assert torch.equal(read(catalog, "optimizer/0.weight/exp_avg"), states["state.0.weight.exp_avg"])
    assert all(name.startswith(("model/", "optimizer/")) for name in catalog.names)


def test_what_is_ambiguous_keeps_its_names(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"w": torch.ones(1), "optim": {"anything": torch.ones(2)}, "optimizer": {"x": torch.ones(3)}})
    assert catalog.names == ["optim/anything", "optimizer/x", "w"]


def test_reading_rows_reads_only_their_bytes(tmp_path: Path) -> None:
    weight = torch.randn(4000, 256)
    stock(tmp_path / "a", {"model": {"w": weight}})
    store = CountingStore(str(tmp_path / "a"))
    catalog = our_dcp.open_catalog(Source(store))
    assert store.total < 20_000  # the metadata, and both ends of one item
    store.read_bytes.clear()
    box = Box((500, 0), (40, 256))
    assert torch.equal(read(catalog, "model/w", box), weight[500:540])
    assert store.total <= 40 * 256 * 4 + 8192


@pytest.mark.slow
def test_20000_tiny_tensors_open_and_read(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"m": {f"w{i}": torch.full((2,), float(i)) for i in range(20_000)}})
    assert len(catalog.tensors) == 20_000
    assert read(catalog, "m/w19999").tolist() == [19999.0, 19999.0]


# --- sharded by real ranks -----------------------------------------------------------------------------------------


def run_ranks(world: int, folder: Path, *actions: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.dcp_ranks", str(folder), *actions]
    workers = [subprocess.Popen(command, env={**env, "RANK": str(rank)}, cwd=root) for rank in range(world)]
    assert [worker.wait(timeout=240) for worker in workers] == [0] * world


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that 4 ranks saved with stock DCP."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(4, folder, "save_stock")
    return folder


def test_uneven_and_empty_shards_are_read_whole(sharded: Path) -> None:
    catalog = opened(sharded / "uneven")
    for name, shape in UNEVEN.items():
        assert torch.equal(read(catalog, f"model/{name}"), full(name, *shape)), name
    assert torch.equal(read(catalog, "model/replicated"), full("replicated", 5))
    assert catalog.values == {"model": {"mine": {"rank": 7, "list": [1, 2]}}}


def test_two_mesh_dimensions_on_one_tensor_dimension(sharded: Path) -> None:
    catalog = opened(sharded / "grid")
    assert torch.equal(read(catalog, "model/square"), full("square", 10, 7))
    rows = catalog.fragments.rows(catalog.find("model/square"))
    assert rows.stop - rows.start == 4


def test_fsdp_times_tp_checkpoint_equals_the_full_tensors(sharded: Path) -> None:
    truth = torch.load(sharded / "truth.pt", weights_only=True)
    catalog = opened(sharded / "fsdp_tp")
    assert catalog.names == sorted(truth)
    for name, tensor in truth.items():
        assert torch.equal(read(catalog, name), tensor), name


def test_ranks_write_together_and_stock_ranks_load(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, "write_ours", "fail")
    assert sorted(name for name in os.listdir(tmp_path / "ours")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert torch.equal(read(opened(tmp_path / "ours"), "model/w"), full("w", 9, 4))
    assert "no space left" in (tmp_path / "failed.0").read_text()
    assert "no space left" in (tmp_path / "failed.1").read_text()
    assert sorted(os.listdir(tmp_path)) == ["failed.0", "failed.1", "ours"]


# --- damage --------------------------------------------------------------------------------------------------------


def test_uncovered_region_is_an_error_before_any_read(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(8, 4)}})

    def halve(metadata: torch_metadata.Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.w"]
        entry.size = torch.Size((16, 4))

    edit_metadata(tmp_path / "a", halve)
    catalog = opened(tmp_path / "a")
    for file in tmp_path.glob("a/*.distcp"):
        file.unlink()  # nothing may be read any more
    with pytest.raises(CoverageError, match=r"'model/w'.*8:16"):
        read(catalog, "model/w")


def test_chunk_without_a_place_is_uncovered(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(8, 4), "v": torch.ones(1)}})

    def forget(metadata: torch_metadata.Metadata) -> None:
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.w"}

    edit_metadata(tmp_path / "a", forget)
    catalog = opened(tmp_path / "a")
    assert read(catalog, "model/v").item() == 1
    with pytest.raises(CoverageError, match="model/w"):
        read(catalog, "model/w")


def test_flipped_bit_names_tensor_and_bytes(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.full((64,), 2.0), "v": torch.ones(64)}})
    path = next(tmp_path.glob("a/*.distcp"))
    raw = bytearray(path.read_bytes())
    at = raw.index(torch.full((64,), 2.0).numpy().tobytes()) + 100
    raw[at] ^= 1
    path.write_bytes(raw)
    catalog = opened(tmp_path / "a")
    assert torch.equal(read(catalog, "model/v"), torch.ones(64))
    with pytest.raises(ChecksumError, match="model/w") as caught:
        read(catalog, "model/w")
    assert caught.value.start <= at < caught.value.stop


def test_dtype_that_differs_from_the_metadata_names_the_tensor(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4, dtype=torch.bfloat16)}})

    def retype(metadata: torch_metadata.Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.w"]
        entry.properties.dtype = torch.float32

    edit_metadata(tmp_path / "a", retype)
    with pytest.raises(DTypeMismatchError, match=r"model/w.*BF16.*F32"):
        opened(tmp_path / "a")


def test_shape_that_differs_from_the_metadata_names_the_tensor(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4, 2)}})

    def reshape(metadata: torch_metadata.Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.w"]
        entry.size = torch.Size((2, 4))
        entry.chunks[0].sizes = torch.Size((2, 4))

    edit_metadata(tmp_path / "a", reshape)
    with pytest.raises(FormatError, match="model/w"):
        opened(tmp_path / "a")


def test_missing_file_is_an_early_error_that_names_it(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    (tmp_path / "a" / "__0_0.distcp").unlink()
    with pytest.raises(MissingFileError, match="__0_0"):
        opened(tmp_path / "a")


def test_every_truncation_of_a_file_is_one_typed_error(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}, "n": 1})
    path = tmp_path / "a" / "__0_0.distcp"
    raw = path.read_bytes()
    for length in range(0, len(raw), 97):
        path.write_bytes(raw[:length])
        with pytest.raises(FormatError, match="truncated"):
            opened(tmp_path / "a")
    path.write_bytes(raw)
    metadata = (tmp_path / "a" / ".metadata").read_bytes()
    for length in range(1, len(metadata), 41):
        (tmp_path / "a" / ".metadata").write_bytes(metadata[:length])
        with pytest.raises(FormatError):
            opened(tmp_path / "a")


def test_zero_byte_file_is_fine(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    (tmp_path / "a" / "__1_0.distcp").write_bytes(b"")
    assert torch.equal(read(opened(tmp_path / "a"), "model/w"), torch.ones(4))


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "..\\b"])
def test_item_outside_the_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})

    def point(metadata: torch_metadata.Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    edit_metadata(tmp_path / "a", point)
    with pytest.raises(FormatError, match="outside the checkpoint"):
        opened(tmp_path / "a")


@pytest.mark.parametrize(("field", "value"), [("offset", -5), ("length", 0), ("length", -1), ("offset", 1 << 62), ("offset", 3)])
def test_item_at_impossible_bytes_is_refused(tmp_path: Path, field: str, value: int) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})

    def point(metadata: torch_metadata.Metadata) -> None:
        for info in metadata.storage_data.values():
            setattr(info, field, value)

    edit_metadata(tmp_path / "a", point)
    with pytest.raises(FormatError):
        opened(tmp_path / "a")


@pytest.mark.parametrize("offsets", [(7, 0), (-1, 0), (0,)])
def test_chunk_outside_its_tensor_is_refused(tmp_path: Path, offsets: tuple[int, ...]) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4, 2)}})

    def move(metadata: torch_metadata.Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.w"]
        entry.chunks[0].offsets = torch.Size(offsets)
        metadata.storage_data = {
            torch_metadata.MetadataIndex(k.fqn, offsets if k.fqn == "model.w" else k.offset): v
            for k, v in metadata.storage_data.items()
        }

    edit_metadata(tmp_path / "a", move)
    with pytest.raises(FormatError):
        opened(tmp_path / "a")


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_hostile_metadata_runs_nothing(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    edit_metadata(tmp_path / "a", lambda metadata: metadata.state_dict_metadata.update(x=Evil(tmp_path / "marker")))  # type: ignore[call-overload]
    with pytest.raises(UnsafePickleError, match=r"\.metadata"):
        opened(tmp_path / "a")
    assert not (tmp_path / "marker").exists()


def test_hostile_value_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match=r"distcp.*posix\.system"):
        stock(tmp_path / "a", {"model": {"w": torch.ones(4)}, "x": Evil(tmp_path / "marker")})
    assert not (tmp_path / "marker").exists()


class Custom:
    """Pickled by reference; never imported by the reader."""

    def __init__(self) -> None:
        self.x = 1


def test_unknown_class_is_shown_by_name_and_never_written(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"model": {"w": torch.ones(4)}, "x": Custom()})
    values: Any = catalog.values
    assert isinstance(values["x"], Opaque)
    assert values["x"].class_name.endswith("Custom")
    assert "Custom" in catalog.notes.remarks[0]
    with pytest.raises(UnrepresentableError, match=r"state at x: a .*Custom"):
        our_dcp.write(job(catalog, tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_unknown_version_is_refused(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    edit_metadata(tmp_path / "a", lambda metadata: setattr(metadata, "version", "2.0.0"))
    with pytest.raises(VersionError, match=r"2\.0\.0"):
        opened(tmp_path / "a")


def test_metadata_per_rank_is_refused_with_advice(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    (tmp_path / "a" / ".metadata").rename(tmp_path / "a" / "__0.metadata")
    with pytest.raises(UnsupportedError, match="use_collectives"):
        opened(tmp_path / "a")


def test_megatron_checkpoint_is_left_to_its_own_reader(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 1}, tmp_path / "a" / "common.pt")
    assert open_catalog(str(tmp_path / "a")).notes.origin == "megatron"


def test_two_chunks_at_one_offset_are_refused_unless_equal(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4, 2)}})

    def add(metadata: torch_metadata.Metadata, rows: int) -> None:
        entry: Any = metadata.state_dict_metadata["model.w"]
        entry.chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows, 2))))

    edit_metadata(tmp_path / "a", lambda metadata: add(metadata, 4))
    assert torch.equal(read(opened(tmp_path / "a"), "model/w"), torch.ones(4, 2))
    edit_metadata(tmp_path / "a", lambda metadata: add(metadata, 0))
    assert torch.equal(read(opened(tmp_path / "a"), "model/w"), torch.ones(4, 2))
    edit_metadata(tmp_path / "a", lambda metadata: add(metadata, 2))
    with pytest.raises(FormatError, match=r"model.w"):
        opened(tmp_path / "a")


def test_interrupted_save_is_no_checkpoint(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    (tmp_path / "a" / ".metadata").rename(tmp_path / "a" / ".metadata.tmp")
    with pytest.raises(NotACheckpointError):
        open_catalog(str(tmp_path / "a"))


def test_damaged_metadata_never_raises_anything_else(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"model": {"w": torch.ones(4, 3), "l": [torch.ones(1), {"x": 1}]}, "n": 1})
    path = tmp_path / "a" / ".metadata"
    raw = path.read_bytes()
    random = np.random.default_rng(0)
    for at in random.integers(0, len(raw), 300):
        damaged = bytearray(raw)
        damaged[at] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            opened(tmp_path / "a")
        except UcformatError:
            pass


def test_any_damaged_byte_of_a_file_is_an_error_or_harmless(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    whole = stock(tmp_path / "a", {"model": {"w": weight}, "n": {"x": [1, 2]}})
    path = tmp_path / "a" / "__0_0.distcp"
    raw = path.read_bytes()
    errors = 0
    random = np.random.default_rng(0)
    for at in random.choice(len(raw), 400, replace=False):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            catalog = opened(tmp_path / "a")
            assert torch.equal(read(catalog, "model/w"), weight), at
            assert catalog.values == whole.values, at
        except UcformatError:
            errors += 1
    assert errors > 100


def test_one_file_per_item_is_read(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.randn(4, 3), "v": torch.randn(2)}, "n": 5}
    catalog = stock(tmp_path / "a", tree, storage_writer=FileSystemWriter(tmp_path / "a", single_file_per_rank=False))
    assert torch.equal(read(catalog, "model/w"), tree["model"]["w"])  # type: ignore[index]
    assert catalog.values == {"n": 5}


# --- writing -------------------------------------------------------------------------------------------------------


def test_training_state_round_trips_through_stock_load(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    tree: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "l": [torch.ones(2), {"k": 3}],
    }
    tree |= {"t": (1, torch.arange(3)), "args": {"betas": (0.9, 0.99), "none": None}, "np": np.arange(3), "step": 5}
    catalog = stock(tmp_path / "a", dict(tree))
    our_dcp.write(job(catalog, tmp_path / "b"))
    again = opened(tmp_path / "b")
    assert again.tensors == catalog.tensors
    assert again.values == catalog.values

    def blank(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.zeros_like(x)
        if isinstance(x, dict):
            return {key: blank(value) for key, value in x.items()}
        return [blank(value) for value in x] if isinstance(x, list) else None

    back = load_stock(tmp_path / "b", blank(tree))
    for name, tensor in model.state_dict().items():
        assert torch.equal(back["model"][name], tensor)
    truth: Any = get_optimizer_state_dict(model, optimizer)
    for name, held in truth["state"].items():
        assert all(torch.equal(back["optimizer"]["state"][name][key], value) for key, value in held.items())
    assert back["optimizer"]["param_groups"] == truth["param_groups"]
    assert torch.equal(back["t"][1], torch.arange(3))
    assert np.array_equal(back["np"], np.arange(3))
    assert (back["args"], back["step"], back["l"][1]) == (tree["args"], 5, {"k": 3})


def test_tied_tensor_is_written_under_each_name(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"model": {"w": torch.arange(4.0)}})
    write = job(catalog, tmp_path / "b")
    our_dcp.write(WriteJob(write.store, write.targets, write.fill, {}, {"model/tied": "model/w"}))
    back = load_stock(tmp_path / "b", {"model": {"w": torch.zeros(4), "tied": torch.zeros(4)}})["model"]
    assert torch.equal(back["tied"], torch.arange(4.0))


def test_large_tensor_is_cut_into_chunks_along_dimension_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 4096)
    tensor = torch.randn(100, 30)
    catalog = stock(tmp_path / "a", {"model": {"w": tensor}})
    our_dcp.write(job(catalog, tmp_path / "b"))
    again = opened(tmp_path / "b")
    assert len(again.fragments) == 3
    assert torch.equal(read(again, "model/w"), tensor)
    assert torch.equal(load_stock(tmp_path / "b", {"model": {"w": torch.zeros(100, 30)}})["model"]["w"], tensor)


def test_pieces_of_any_boxes_become_chunks(tmp_path: Path) -> None:
    tensor = torch.randn(5, 6)
    catalog = stock(tmp_path / "a", {"model": {"w": tensor}})
    spec = catalog.spec("model/w")
    pieces = [OutputBox(spec, Box(*box)) for box in (((0, 0), (5, 2)), ((0, 2), (2, 4)), ((2, 2), (3, 4)))]
    our_dcp.write(job(catalog, tmp_path / "b", pieces, layout=[[0], [1, 2]]))
    assert sorted(os.listdir(tmp_path / "b")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert torch.equal(read(opened(tmp_path / "b"), "model/w"), tensor)
    assert torch.equal(load_stock(tmp_path / "b", {"model": {"w": torch.zeros(5, 6)}})["model"]["w"], tensor)


def test_file_size_limit_spreads_items_over_files(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"model": {f"w{i}": torch.full((100,), float(i)) for i in range(20)}})
    our_dcp.write(job(catalog, tmp_path / "b", max_file_bytes=8000))
    assert len(list(tmp_path.glob("b/*.distcp"))) > 2
    assert read(opened(tmp_path / "b"), "model/w19")[0].item() == 19


def test_names_with_one_flat_key_are_refused(tmp_path: Path) -> None:
    stock(tmp_path / "a", {"x": {"a.b": torch.ones(1)}})
    catalog = opened(tmp_path / "a")
    renamed = catalog.rename(lambda name: "x/a/b")
    write, other = job(catalog, tmp_path / "b"), job(renamed, tmp_path / "b")
    both = WriteJob(write.store, [*write.targets, *other.targets], write.fill)
    with pytest.raises(UnsupportedError, match=r"x\.a\.b"):
        our_dcp.write(both)
    assert not (tmp_path / "b").exists()


def test_existing_checkpoint_is_kept_unless_overwriting(tmp_path: Path) -> None:
    catalog = stock(tmp_path / "a", {"model": {"w": torch.ones(4)}})
    stock(tmp_path / "b", {"model": {"w": torch.zeros(4)}})
    with pytest.raises(ExistsError):
        our_dcp.write(job(catalog, tmp_path / "b"))
    assert read(opened(tmp_path / "b"), "model/w").sum() == 0
    our_dcp.write(job(catalog, tmp_path / "b", overwrite=True))
    assert read(opened(tmp_path / "b"), "model/w").sum() == 4

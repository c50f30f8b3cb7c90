"""torch.save files: stock files read exactly, and what we write loads in stock torch."""

from __future__ import annotations

import argparse
import os
import pathlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.torchfiles import rewrite
from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.containers.zip_write import Outgoing, RecordWriter, pickle_tree, write_head, write_tail
from ucformat.dtypes import DTYPES
from ucformat.errors import (
    ChecksumError,
    ExistsError,
    FormatError,
    UcformatError,
    UnrepresentableError,
    UnsafePickleError,
    UnsupportedError,
)
from ucformat.formats import torchsave
from ucformat.formats.source import Source
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import CatalogFill
from ucformat.reshard.reading.lazy import read
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes
from ucformat.values.codec import ArrayRef, Opaque, RankLocal, TensorRef

TORCH_DTYPES = [kind for kind in DTYPES.values() if not kind.name.startswith("F6_")]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern, NaNs included; bools are 0 or 1."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    raw = torch.randint(0, 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def opened(path: Path) -> Catalog:
    source = Source(open_store(str(path.parent)), path.name)
    assert torchsave.detect(source)
    return torchsave.open_catalog(source)


def saved(path: Path, tree: object) -> Catalog:
    torch.save(tree, path)
    return opened(path)


def written(catalog: Catalog, path: Path, pieces: list[OutputBox] | None = None, **more: Any) -> None:
    pieces = [OutputBox(spec, Box.whole(spec.shape)) for spec in catalog.tensors] if pieces is None else pieces
    fill = CatalogFill(catalog, pieces, [piece.name for piece in pieces])
    store = open_store(str(path.parent))
    torchsave.write(WriteJob(store, pieces, fill, catalog.values, catalog.aliases, file=path.name, **more))


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("kind", TORCH_DTYPES, ids=lambda kind: kind.name)
def test_every_dtype_round_trips_bit_for_bit(tmp_path: Path, kind: Any) -> None:
    tensor = random_bits(kind.torch, 3, 4)
    catalog = saved(tmp_path / "x.pt", {"d": {"w": tensor}})
    assert catalog.spec("d/w") == TensorSpec("d/w", kind.name, (3, 4))
    assert bits(read(catalog, "d/w")) == bits(tensor)
    written(catalog, tmp_path / "y.pt")
    for mmap in (False, True):
        back = torch.load(tmp_path / "y.pt", weights_only=True, mmap=mmap)["d"]["w"]
        assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_scalars_and_empty_tensors_round_trip(tmp_path: Path) -> None:
    tree = {"d": {"s": torch.tensor(3.5), "i": torch.tensor(7), "e": torch.empty(0, 3), "f": torch.empty(2, 0, 4)}}
    catalog = saved(tmp_path / "x.pt", tree)
    assert read(catalog, "d/s").item() == 3.5
    assert read(catalog, "d/i").item() == 7
    assert read(catalog, "d/f").shape == (2, 0, 4)
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)
    assert {k: (v.shape, v.dtype) for k, v in back["d"].items()} == {k: (v.shape, v.dtype) for k, v in tree["d"].items()}
    assert back["d"]["s"].item() == 3.5


def test_views_honour_offset_and_stride(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "rows": base[1:],
        "column": base[:, 1, 2],
        "expanded": base[0, 0, :1].expand(6),
        "steps": base.reshape(-1)[3::7],
    }
    catalog = saved(tmp_path / "x.pt", {"d": views})
    for name, view in views.items():
        assert torch.equal(read(catalog, f"d/{name}"), view), name
    box = Box((1, 1, 0), (3, 2, 3))
    assert torch.equal(read(catalog, "d/transposed", box), views["transposed"][box.slices])


def test_tied_tensors_are_one_tensor_and_stay_tied(tmp_path: Path) -> None:
    w = torch.randn(4, 4)
    catalog = saved(tmp_path / "x.pt", {"model": {"head": w, "embed": w}, "ema": {"embed": w}, "t": {"w": w.t()}})
    assert catalog.aliases == {"model/head": "model/embed", "ema/embed": "model/embed"}
    assert [spec.name for spec in catalog.tensors] == ["model/embed", "t/w"]
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)
    assert back["model"]["head"].data_ptr() == back["model"]["embed"].data_ptr() == back["ema"]["embed"].data_ptr()
    assert torch.equal(back["t"]["w"], w.t())


def test_values_and_tensors_in_lists_keep_their_places(tmp_path: Path) -> None:
    tree = {"l": [torch.ones(2), 5, {"x": torch.zeros(1)}], "i": {0: torch.ones(1), "k": 2}, "t": (1, None), "e": {}, "n": "text"}
    catalog = saved(tmp_path / "x.pt", tree)
    assert catalog.values == {
        "l": [TensorRef("l/0"), 5, {"x": TensorRef("l/2/x")}],
        "i": {0: TensorRef("i/0"), "k": 2},
        "t": (1, None),
        "e": {},
        "n": "text",
    }
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)
    assert back["t"] == (1, None)
    assert back["e"] == {}
    assert torch.equal(back["l"][0], torch.ones(2))
    assert torch.equal(back["i"][0], torch.ones(1))


def test_optimizer_by_index_becomes_by_name_where_the_file_tells(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [("weight", model.weight)]}, {"params": [("bias", model.bias)], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    catalog = saved(tmp_path / "x.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3})
    assert torch.equal(read(catalog, "optimizer/bias/exp_avg"), optimizer.state[model.bias]["exp_avg"])
    values: Any = catalog.values
    assert [(group["params"], group["lr"]) for group in values["optimizer"]["param_groups"]] == [
        (["weight"], 1e-3),
        (["bias"], 0.5),
    ]
    assert catalog.notes.step == 3
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)["optimizer"]
    assert torch.equal(back["state"]["weight"]["exp_avg_sq"], optimizer.state[model.weight]["exp_avg_sq"])
    assert back["param_groups"][1]["params"] == ["bias"]


def test_bare_state_dict_is_the_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    catalog = saved(tmp_path / "pytorch_model.bin", model.state_dict())
    assert catalog.names == sorted(f"model/{name}" for name in model.state_dict())
    assert catalog.values == {}
    for name, tensor in model.state_dict().items():
        assert torch.equal(read(catalog, f"model/{name}"), tensor)


def test_numpy_arrays_and_other_values_come_along(tmp_path: Path) -> None:
    tree = {
        "rng": {"keys": np.arange(4, dtype=np.uint32), "pos": np.int64(3)},
        "args": argparse.Namespace(p=pathlib.PurePosixPath("a")),
    }
    catalog = saved(tmp_path / "x.pt", tree)
    values: Any = catalog.values
    assert values["rng"] == {"keys": ArrayRef("rng/keys"), "pos": np.int64(3)}
    assert torch.equal(read(catalog, "rng/keys"), torch.arange(4).to(torch.uint32))
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)
    assert back["rng"]["pos"] == 3
    assert back["args"] == {"p": "a"}
    assert torch.equal(back["rng"]["keys"], torch.arange(4).to(torch.uint32))


class Custom:
    def __init__(self) -> None:
        self.x = torch.ones(2)


def test_unknown_class_is_shown_by_name_and_never_written(tmp_path: Path) -> None:
    catalog = saved(tmp_path / "x.pt", {"a": {"w": torch.ones(1), "thing": Custom()}})
    values: Any = catalog.values
    assert isinstance(values["a"]["thing"], Opaque)
    assert "Custom" in catalog.notes.remarks[0]
    with pytest.raises(UnrepresentableError, match=r"state at a/thing: a .*Custom"):
        written(catalog, tmp_path / "y.pt")
    assert not (tmp_path / "y.pt").exists()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = torch.nn.Linear(2, 3)
        self.body = torch.nn.Sequential(first, torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = first.weight
        self.register_buffer("scratch", torch.ones(1), persistent=False)


def test_pickled_module_is_read_as_its_state_dict(tmp_path: Path) -> None:
    net = Net()
    for tree, prefix in ((net, "model"), ({"epoch": 3, "net": net}, "net")):
        catalog = saved(tmp_path / "x.pt", tree)
        assert catalog.names == sorted(f"{prefix}/{name}" for name in net.state_dict())
        for name, tensor in net.state_dict().items():
            assert torch.equal(read(catalog, f"{prefix}/{name}"), tensor)
        assert "Net" in catalog.notes.remarks[0]


def test_rank_local_items_survive(tmp_path: Path) -> None:
    catalog = saved(tmp_path / "x.pt", {"d": {"w": torch.ones(1)}})
    held = RankLocal("keep", ({"dp": 0}, None), ({"seed": 1}, {"seed": 2}))
    written(replace(catalog, values={"rng": held}), tmp_path / "y.pt")
    assert opened(tmp_path / "y.pt").values == {"rng": held}


def test_file_that_is_one_tensor_or_list_has_a_name(tmp_path: Path) -> None:
    assert torch.equal(read(saved(tmp_path / "x.pt", torch.arange(3)), "value"), torch.arange(3))
    assert torch.equal(read(saved(tmp_path / "y.pt", [torch.arange(3)]), "value/0"), torch.arange(3))


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path) -> None:
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    }
    for what, tensor in odd.items():
        catalog = saved(tmp_path / "x.pt", {"a": {"w": tensor}})
        with pytest.raises(UnsupportedError, match=f"a/w.*{what}"):
            read(catalog, "a/w")


def test_legacy_file_is_recognised_and_refused_with_advice(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="re-save"):
        opened(tmp_path / "x.pt")


def test_other_files_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.bin").write_bytes(b"hello")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("readme", "x")
    for name in ("a.pt", "b.bin", "c.zip", "missing.pt"):
        assert not torchsave.detect(Source(open_store(str(tmp_path)), name))
    assert not torchsave.detect(Source(open_store(str(tmp_path))))


def test_flipped_bit_in_tensor_data_names_tensor_and_bytes(tmp_path: Path) -> None:
    catalog = saved(tmp_path / "x.pt", {"d": {"a": torch.ones(100), "b": torch.full((100,), 2.0)}})
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    at = raw.index(torch.full((100,), 2.0).numpy().tobytes()) + 17
    raw[at] ^= 4
    (tmp_path / "x.pt").write_bytes(raw)
    catalog = opened(tmp_path / "x.pt")
    assert torch.equal(read(catalog, "d/a"), torch.ones(100))
    with pytest.raises(ChecksumError) as caught:
        read(catalog, "d/b")
    assert caught.value.start <= at < caught.value.stop
    assert "d/b" in str(caught.value)


def test_any_damaged_byte_is_an_error_or_harmless(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    whole = saved(tmp_path / "x.pt", {"d": {"w": weight, "n": [1, "two"]}})
    raw = (tmp_path / "x.pt").read_bytes()
    errors = 0
    random = np.random.default_rng(0)
    for at in random.choice(len(raw), 400, replace=False):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << random.integers(8)
        (tmp_path / "x.pt").write_bytes(damaged)
        try:
            catalog = torchsave.open_catalog(Source(open_store(str(tmp_path)), "x.pt"))
            assert torch.equal(read(catalog, "d/w"), weight), at
            assert catalog.values == whole.values, at
        except UcformatError:
            errors += 1
    assert errors > 100


def test_missing_record_and_truncation_are_format_errors(tmp_path: Path) -> None:
    torch.save({"a": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()

    def drop(records: dict[str, bytes]) -> None:
        del records["x/data/0"]

    rewrite(tmp_path / "x.pt", drop)
    with pytest.raises(FormatError, match="no record"):
        opened(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(raw[:-30])
    with pytest.raises(FormatError, match="truncated"):
        opened(tmp_path / "x.pt")


def test_hostile_file_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    with pytest.raises(UnsafePickleError):
        saved(tmp_path / "x.pt", {"w": torch.ones(1), "e": Evil()})
    assert not (tmp_path / "marker").exists()


# --- writing -------------------------------------------------------------------------------------------------------


def test_slabs_are_joined_into_whole_tensors(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3)
    catalog = saved(tmp_path / "x.pt", {"d": {"w": tensor}})
    spec = catalog.spec("d/w")
    pieces = [OutputBox(spec, Box((start, 0), (n, 3))) for start, n in ((5, 2), (0, 4), (4, 1))]
    written(catalog, tmp_path / "y.pt", pieces)
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True)["d"]["w"], tensor)
    with pytest.raises(UnsupportedError, match="no slab"):
        written(catalog, tmp_path / "z.pt", [OutputBox(spec, Box((0, 0), (7, 1))), OutputBox(spec, Box((0, 1), (7, 2)))])
    assert not (tmp_path / "z.pt").exists()


def test_existing_file_is_kept_unless_overwriting(tmp_path: Path) -> None:
    catalog = saved(tmp_path / "x.pt", {"d": {"w": torch.ones(2)}})
    (tmp_path / "y.pt").write_bytes(b"precious")
    with pytest.raises(ExistsError):
        written(catalog, tmp_path / "y.pt")
    assert (tmp_path / "y.pt").read_bytes() == b"precious"
    written(catalog, tmp_path / "y.pt", overwrite=True)
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True)["d"]["w"], torch.ones(2))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(parts: object) -> None:
        raise FormatError("source", "damaged")

    spec = TensorSpec("d/w", "F32", (4,))
    with pytest.raises(FormatError, match="damaged"):
        torchsave.write(WriteJob(open_store(str(tmp_path)), [OutputBox(spec, Box.whole((4,)))], fail, file="y.pt"))
    assert os.listdir(tmp_path) == []


def test_equal_state_gives_equal_files_with_good_checksums(tmp_path: Path) -> None:
    catalog = saved(tmp_path / "x.pt", {"d": {f"w{i}": torch.randn(50) for i in range(30)}, "n": [1, 2]})
    written(catalog, tmp_path / "y.pt")
    written(opened(tmp_path / "y.pt"), tmp_path / "z.pt")
    assert (tmp_path / "y.pt").read_bytes() == (tmp_path / "z.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "y.pt") as archive:
        assert archive.testzip() is None


def test_tensor_beyond_4_gib_loads_in_stock_torch(tmp_path: Path) -> None:
    leaf = Outgoing("0", "U8", ((5 << 30) + 3,))
    with open(tmp_path / "x.pt", "wb") as file:

        def put(start: int, data: Bytes) -> None:
            os.pwrite(file.fileno(), data.data, start)

        out = RecordWriter(put, "top")
        write_head(out, pickle_tree({"big": leaf}))
        out.begin("data/0", leaf.nbytes)
        out.skip()  # a hole in a sparse file: zeros
        out.end()
        write_tail(out)
    back = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)["big"]
    assert back.shape == leaf.shape
    assert back[-1].item() == 0
    assert opened(tmp_path / "x.pt").tensors[0].shape == leaf.shape


@pytest.mark.slow
def test_20000_tiny_tensors_round_trip(tmp_path: Path) -> None:
    tree = {f"w{i}": torch.full((3,), float(i)) for i in range(20_000)}
    catalog = saved(tmp_path / "x.pt", {"d": tree})
    assert len(catalog.tensors) == 20_000
    written(catalog, tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)["d"]
    assert all(torch.equal(back[name], tensor) for name, tensor in tree.items())

"""The specification: its schema is that of the code, its example is valid, and it alone is enough to read a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import safetensors
import torch

from specs.generate import LAYOUT_SCHEMA, SCHEMA, layout_text, text
from specs.readers.python.ucf_reader import BYTES, RECORD, Checkpoint, header, unseal
from specs.readers.python.ucf_snapshot import Snapshot, open_any
from tests.checkpoints import shards_of
from tests.snapshot.rigs import slotfill
from ucformat import values
from ucformat.box import Box, flat_range
from ucformat.catalog import Notes, TensorSpec
from ucformat.dtypes import DTYPES, from_torch
from ucformat.formats import native
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import TensorFill
from ucformat.reshard.reading.lazy import read
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.open import open_store
from ucformat.values.decoding import TAGS

SLOT = {"$ref": "#/$defs/SlotFile", "$defs": json.loads(text())["$defs"]}
SPEC = SCHEMA.with_name("format.md").read_text()


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits, also those that are no number."""
    kind = DTYPES[dtype]
    out: torch.Tensor = kind.empty(shape)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (out.numel() * kind.itemsize,), dtype=torch.uint8, generator=generator)
    out.view(-1).view(torch.uint8).copy_(raw)
    return out


def raw_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tiles(shape: tuple[int, ...]) -> list[Box]:
    """Boxes of two flat halves and of an L-shaped rest: what ZeRO makes of a tensor, in an order of no meaning."""
    n = int(np.prod(shape))
    return [*flat_range(shape, 5 * n // 7, n), *flat_range(shape, 0, n // 3), *flat_range(shape, n // 3, 5 * n // 7)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """A native checkpoint with all that the format has: its directory, tensors, and values."""
    tensors = {f"model/{name}": random_tensor(name, (7, 6, 12), i) for i, name in enumerate(DTYPES)}
    tensors |= {
        "__metadata__": random_tensor("I16", (5,), 99),
        "model/zero-d": random_tensor("F32", (), 100),
        "model/empty": random_tensor("BF16", (0, 4), 101),
        "model/whole": random_tensor("BF16", (300, 1000), 102),
        "model/whole[0:7, 0:6, 0:12]": random_tensor("U8", (3,), 103),
        "optimizer/näme/exp_avg": random_tensor("F32", (1000, 200), 104),
    }
    whole = {"model/zero-d", "model/empty", "model/whole", *(f"model/{name}" for name in DTYPES if name.startswith("F6_"))}
    targets, views = [], []
    for name, x in tensors.items():
        kind = name.removeprefix("model/")
        spec = TensorSpec(name, kind if kind in DTYPES else from_torch(x.dtype).name, tuple(x.shape))
        for box in [Box.whole(spec.shape)] if name in whole else tiles(spec.shape):
            targets.append(OutputBox(spec, box))
            views.append(x[box.slices])
    state = {"step": 7, "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["näme"]}]}, "m": {0: None}}
    root = tmp_path_factory.mktemp("written") / "step-00000007"
    native.write(
        WriteJob(
            open_store(str(root)),
            targets,
            TensorFill(views, [DTYPES[target.spec.dtype] for target in targets]),
            values=state,
            aliases={"model/tied": "model/whole"},
            notes=Notes("native", 7, {"dp": 2, "tp": 3}),
            max_file_bytes=500_000,
        )
    )
    return root, tensors, state


def test_the_schema_file_is_what_the_types_of_the_code_say() -> None:
    assert SCHEMA.read_text() == text(), "run: python -m specs.generate"
    assert LAYOUT_SCHEMA.read_text() == layout_text(), "run: python -m specs.generate"


def test_every_example_of_ucf_json_in_the_specification_is_valid() -> None:
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", SPEC, re.DOTALL) if '"ucf"' in block]
    assert examples
    assert len(examples) == 2
    for example in examples:
        slot = "rank" in example["record"]
        jsonschema.validate(example, SLOT if slot else json.loads(text()))


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slots of two ranks: step 5 whole, and hashed on one of them; of step 6 and of step 7 one rank's part, of two starts."""
    home = tmp_path_factory.mktemp("taken")
    owned = [slotfill.pieces(rank, 2) for rank in (0, 1)]
    for run, steps in (("a", ((4, 5, 6), (4, 5))), ("b", ((), (6,)))):
        for rank in (0, 1):
            with SlotSet.create(home, rank, 2, owned[rank], 3, run=run) as slots:
                for step in steps[rank]:
                    slot = slotfill.take(slots, owned[rank], step, settled=False)
                    assert slot is not None
                    if (rank, step) == (1, 5):
                        assert slotfill.hash_slot(slots, slot) is not None
                        slots.settle(5, whole=True)
    return home


def test_the_records_of_slots_satisfy_the_schema(taken: Path) -> None:
    records = [json.loads(path.read_text()) for path in taken.glob("rank-*/slot-*.json")]
    assert sorted((r["record"]["rank"], r["record"]["step"]) for r in records) == [(0, 4), (0, 5), (0, 6), (1, 4), (1, 5), (1, 6)]
    for record in records:
        jsonschema.validate(record, SLOT)
    broken = {**records[0], "record": {key: value for key, value in records[0]["record"].items() if key != "world"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SLOT)


def test_the_specification_lists_the_fields_of_a_slots_record() -> None:
    section = SPEC[SPEC.index("### 7.1") : SPEC.index("### 7.2")]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| (.*) \|$", section, re.MULTILINE)
    listed = {name: "OPTIONAL" in meaning for names, meaning in rows for name in re.findall(r"`(\w+)`", names)}
    slot = json.loads(text())["$defs"]["SlotRecord"]
    assert listed == {name: name not in slot["required"] for name in slot["properties"]}


def test_a_reader_made_from_the_specification_alone_reads_the_newest_complete_snapshot(taken: Path) -> None:
    found = open_any(taken)
    assert isinstance(found, Snapshot)
    assert [(r["step"], r["rank"], r["run"], "table_digest" in r) for r in found.shards] == [
        (5, 0, "a", False),
        (5, 1, "a", True),
    ]
    catalog = slotfill.opened(taken)
    assert catalog.notes.step == 5
    assert found.tensors.keys() == {spec.name for spec in catalog.tensors}
    assert found.aliases.keys() == catalog.aliases.keys()
    for name in (*found.tensors, *found.aliases):
        check(found.read(name), read(catalog, name))
    assert found.values == {"step": 5}
    assert not found.verified


def test_every_example_of_a_value_decodes_to_what_the_specification_says() -> None:
    rows = re.findall(r"^\| `(\{.*?\})` \| `(.*?)` \|", SPEC, re.MULTILINE)
    assert {next(iter(json.loads(row[0]))) for row in rows} == TAGS
    assert any("first" in json.loads(row[0]).get("$rank_local", ()) for row in rows)
    for written_as, python in rows:
        names = {"torch": torch, "np": np, **vars(values)} | {
            m: __import__(m) for m in ("math", "pathlib", "argparse", "collections")
        }
        expected = eval(python, names)
        assert repr(values.decode(written_as.encode(), "spec")) == repr(expected)
        assert json.loads(values.encode(expected)) == json.loads(written_as)


def test_the_specification_lists_the_dtypes_of_the_code() -> None:
    rows = re.findall(r"^\| ((?:`[A-Z0-9_]+`(?:, )?)+) \| (\d+) \|", SPEC, re.MULTILINE)
    listed = {name: int(size) for names, size in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {name: kind.itemsize for name, kind in DTYPES.items()} == BYTES


def test_a_written_checkpoint_satisfies_the_schema(written: tuple[Path, dict[str, torch.Tensor], dict[str, Any]]) -> None:
    root, _, _ = written
    schema = json.loads(text())
    jsonschema.validate(json.loads((root / "ucf.json").read_text()), schema)
    for path in shards_of(root).glob("0*"):
        note, _ = header(path.read_bytes(), path.stat().st_size, path)
        jsonschema.validate(note, {"$ref": "#/$defs/ShardNote", "$defs": schema["$defs"]})


def test_a_reader_made_from_the_specification_alone_reads_every_tensor_bit_for_bit(
    written: tuple[Path, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    root, tensors, state = written
    found = Checkpoint(root)
    record = found.record
    assert found.tensors.keys() == tensors.keys()
    assert len(record["shards"]) > 1
    for name, x in tensors.items():
        check(found.read(name), x)
    check(found.read("model/tied"), tensors["model/whole"])
    assert values.decode(json.dumps(record["values"]).encode(), "f") == state
    assert (record["step"], record["mesh"]) == (7, {"dp": 2, "tp": 3})


def check(found: tuple[str, list[int], bytes], x: torch.Tensor) -> None:
    dtype, shape, items = found
    assert DTYPES[dtype].torch == x.dtype
    assert tuple(shape) == tuple(x.shape)
    assert items == raw_bytes(x)


def test_any_safetensors_reader_opens_the_shards_and_the_index(
    written: tuple[Path, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    root, _, _ = written
    seen: set[str] = set()
    for path in [shards_of(root) / "index.safetensors", *shards_of(root).glob("0*")]:
        with safetensors.safe_open(str(path), framework="np") as file:
            assert file.metadata()["format"] == "pt"
            seen.update(file.keys())
    assert {"model/whole", "model/empty", "model/zero-d", "tensor.name"} <= seen


def test_shards_and_index_start_their_data_on_a_page(written: tuple[Path, dict[str, torch.Tensor], dict[str, Any]]) -> None:
    root, _, _ = written
    for shard in unseal(root / "ucf.json", RECORD)["shards"]:
        assert shard["data_start"] % 4096 == shard["table_start"] % 4096 == shard["size"] % 4096 == 0
        entries = header((root / shard["file"]).read_bytes(), shard["size"], root)[1]
        assert min(start for _, _, start, _ in entries.values()) == shard["data_start"]


def test_shards_alone_tell_which_box_of_which_tensor_each_entry_is(
    written: tuple[Path, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    """Section 4.3: a lost index can be rebuilt; here by the plain reader's means."""
    root, tensors, _ = written
    volume = dict.fromkeys(tensors, 0)
    for path in shards_of(root).glob("0*"):
        data = path.read_bytes()
        note, entries = header(data, len(data), path)
        for key, (dtype, shape, start, stop) in entries.items():
            if key.startswith("__ucf__."):
                continue
            said = note["entries"].get(key, {"tensor": key, "dtype": dtype, "shape": None, "offset": [0] * len(shape)})
            kind = DTYPES[said["dtype"]]
            length = kind.item_shape(shape[: len(shape) - len(kind.tail)])
            x = tensors[said["tensor"]]
            box = Box(tuple(said["offset"]), length)
            assert data[start:stop] == raw_bytes(x[box.slices])
            volume[said["tensor"]] += box.volume
    assert volume == {name: x.numel() for name, x in tensors.items()}

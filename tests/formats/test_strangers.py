"""What no reader takes is named, with the folder to give or the program to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ucformat import formats
from ucformat.errors import NotACheckpointError, UnsupportedError

DATA = Path(__file__).parent.parent / "data"


def why(path: Path) -> str:
    with pytest.raises(NotACheckpointError) as caught:
        formats.open_catalog(str(path))
    return caught.value.why


def put(path: Path, data: bytes = b"something") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("model.gguf", b"GGUF\3\0\0\0", "gguf_file"),
        ("no-suffix", b"GGUF\3\0\0\0", "gguf_file"),
        ("tf_model.h5", b"\x89HDF\r\n", "from_tf"),
        ("flax_model.msgpack", b"\x81", "from_flax"),
        ("model.onnx", b"\x08\x07", "exported from"),
        ("model.nemo", b"tar", "unpack"),
    ],
)
def test_files_of_other_programs_are_named_alone_and_in_a_folder(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    assert said in why(put(tmp_path / "in" / name, data))
    if "." in name:
        assert said in why(tmp_path / "in")


def test_the_output_of_a_trainer_names_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        put(tmp_path / f"run/checkpoint-{step}/trainer_state.json")
    assert "checkpoint-1000" in why(tmp_path / "run")


def test_the_cache_of_the_hub_names_the_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    put(root / "snapshots/abc/config.json")
    put(root / "snapshots/def/config.json")
    put(root / "blobs/1")
    put(root / "refs/main", b"abc\n")
    assert "give snapshots/abc" in why(root)
    assert "models--org--name" in why(tmp_path)


def test_folders_with_weights_are_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save_file({"a": torch.ones(1)}, tmp_path / name / "adapter_model.safetensors")
    assert "give one of first, second" in why(tmp_path)


def test_what_is_not_known_is_answered_with_the_formats_that_are(tmp_path: Path) -> None:
    put(tmp_path / "letter.txt")
    assert "known: " in why(tmp_path)


def test_checkpoints_of_nemo_name_the_part_to_give(tmp_path: Path) -> None:
    put(tmp_path / "two/weights/common.pt")
    put(tmp_path / "two/context/model.yaml")
    assert "give the folder weights" in why(tmp_path / "two")
    put(tmp_path / "one/model_config.yaml")
    put(tmp_path / "one/model_weights.ckpt")
    assert "give model_weights.ckpt" in why(tmp_path / "one")


def test_a_bytecheckpoint_run_is_named_with_its_exporter(tmp_path: Path) -> None:
    """Real metadata of ByteCheckpoint 0.0.2."""
    metadata = (DATA / "bytecheckpoint" / "metadata").read_bytes()
    put(tmp_path / "global_step_0/model/.metadata", metadata)
    put(tmp_path / "global_step_0/extra_state/extra_state_rank_0.pt")
    put(tmp_path / "latest_checkpointed_iteration.txt", b"0")
    assert "merge_bcp.py" in why(tmp_path)
    assert "merge_bcp.py" in why(tmp_path / "global_step_0")
    with pytest.raises(UnsupportedError, match=r"merge_bcp\.py"):
        formats.open_catalog(str(tmp_path / "global_step_0" / "model"))

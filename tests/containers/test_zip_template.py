"""Files made of a template are those that would have been written one by one."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch

from ucformat.containers.zip_template import ZipTemplate
from ucformat.containers.zip_write import Outgoing, pickle_tree
from ucformat.storage.local import LocalStore


def test_a_filled_template_is_a_file_of_torch_save_with_right_checksums() -> None:
    leaves = [Outgoing("0", "F32", (3, 5)), Outgoing("1", "I64", ()), Outgoing("2", "BF16", (0, 2))]
    template = ZipTemplate.of("archive", pickle_tree({"a": leaves[0], "b": leaves[1], "c": leaves[2]}), leaves)
    for seed in (1, 2):
        a, b = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)), torch.tensor(seed)
        raw = a.numpy().reshape(-1).view(np.uint8)
        image = template.filled([[raw[:7], raw[7:]], [b.numpy().reshape(1).view(np.uint8)], []])
        assert zipfile.ZipFile(io.BytesIO(image)).testzip() is None
        found = torch.load(io.BytesIO(image), weights_only=True)
        assert torch.equal(found["a"], a)
        assert torch.equal(found["b"], b)
        assert (found["c"].shape, found["c"].dtype) == ((0, 2), torch.bfloat16)


def test_files_that_are_put_together_are_there(tmp_path: Path) -> None:
    files = {f"{i % 7}/{i}": bytes([i]) * i for i in range(100)}
    LocalStore(str(tmp_path / "out")).put_all(iter(files.items()))
    assert {path: (tmp_path / "out" / path).read_bytes() for path in files} == files

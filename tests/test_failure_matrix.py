"""Failure is symmetric: whichever I/O operation of whichever rank fails, all ranks end alike and nothing is damaged or left.

Every verb runs on two ranks. One operation (open, write, fsync, rename, link, unlink, scandir, mkdir, stat, read…) of one rank
raises EIO. Then both ranks have succeeded, or both raised the same class; what was there before verifies; what is said to have
succeeded is there; and `ucformat.prune`, or doing it again, leaves nothing of the failed attempt.

Always on is every `STRIDE`th operation. All of them: `UCFORMAT_MATRIX=1 python -m pytest tests/test_failure_matrix.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.failures import VERBS, matrix
from tests.reshard.ranks import on_ranks

STRIDE = 7


def _check(folder: Path, stride: int) -> None:
    wrong = on_ranks(2, matrix, str(folder), stride)[0]
    assert sorted(wrong) == sorted(VERBS)
    told = [f"{verb}: {line}" for verb, lines in wrong.items() for line in lines]
    assert not told, "\n".join(["", *told])


def test_all_ranks_end_alike_whichever_operation_fails(tmp_path: Path) -> None:
    _check(tmp_path, STRIDE)


@pytest.mark.matrix
@pytest.mark.skipif("UCFORMAT_MATRIX" not in os.environ, reason="takes minutes: set UCFORMAT_MATRIX=1")
def test_all_ranks_end_alike_at_every_single_operation(tmp_path: Path) -> None:
    _check(tmp_path, 1)

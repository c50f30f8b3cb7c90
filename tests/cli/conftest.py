"""The program and a checkpoint for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calls import Program, small


@pytest.fixture
def ucconvert(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return small(tmp_path / "src")

"""The demo's own machinery: a step that fails or hangs is told, never passed over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.proof import DemoError, Proofs, run


def test_a_failing_command_raises_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"(?s)exit code 3.*what went wrong"):
        run([sys.executable, "-c", "import sys; print('what went wrong', file=sys.stderr); sys.exit(3)"], tmp_path / "log", 30)


def test_a_hanging_command_is_ended_and_told(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"(?s)not done after 1 s.*still here"):
        run(
            [sys.executable, "-c", "import sys, time; print('still here', file=sys.stderr, flush=True); time.sleep(60)"],
            tmp_path / "log",
            1,
        )


def test_one_unproven_row_fails_the_demo() -> None:
    proofs = Proofs(Console(quiet=True))
    seen = [proofs.passed]
    for passed in (True, False, True):
        proofs.check("claim", "evidence", passed)
        seen.append(proofs.passed)
    assert seen == [False, True, False, False], "nothing proven is no success either"

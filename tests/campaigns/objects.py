"""An S3 server behind a bad line: writers are killed between requests, or requests are dropped, cut and refused."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import threading
import traceback
import uuid
from pathlib import Path

import ucformat
from tests.campaigns.samples import Content, content, state
from tests.campaigns.writing import NEW, OLD
from tests.s3 import weed
from tests.s3.bucket import environment, settings
from tests.s3.proxy import Proxy, Request, Verdict
from ucformat.errors import UcformatError

_STATE = struct.Struct("<dqqq")  # share of requests that go wrong, writes so far, write to kill after, process to kill
_WRONG: tuple[Verdict, ...] = ("drop", "drop answer", "cut answer", "fail")
_KINDS = ("save", "steps", "native", "hf", "dcp")
_MOST_WRITES = {"save": 14, "steps": 24, "native": 14, "hf": 24, "dcp": 14}
"""Of one write; a number beyond the last means that nobody is killed."""


class Line:
    """The way to the server: a proxy in a process of its own, so that those who use it may fork. `url` leads through it."""

    def __init__(self, upstream: str) -> None:
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        come, go = os.pipe()
        alive, self._held = os.pipe()  # its end is the end of all who may use the proxy
        if os.fork() == 0:
            os.close(self._held)
            os.close(come)
            try:
                proxy = Proxy(upstream)
                proxy.judge, proxy.answered = self._judge, self._answered
                os.write(go, proxy.url.encode())
                os.close(go)
                os.read(alive, 1)
            finally:
                os._exit(0)
        os.close(go)
        os.close(alive)
        with os.fdopen(come, "rb") as file:
            self.url = file.read().decode()
        self._lock = threading.Lock()

    def set(self, wrong: float, kill_after: int = 0, process: int = 0) -> None:
        self._shared[: _STATE.size] = _STATE.pack(wrong, 0, kill_after, process)

    def _judge(self, request: Request) -> Verdict:
        wrong = _STATE.unpack(self._shared[: _STATE.size])[0]
        return random.choice(_WRONG) if random.random() < wrong else "pass"

    def _answered(self, request: Request) -> None:
        if request.writes:
            wrong, writes, at, process = _STATE.unpack(self._shared[: _STATE.size])
            self._shared[: _STATE.size] = _STATE.pack(wrong, writes + 1, at, process)
            if writes + 1 == at and process:
                os.kill(process, signal.SIGKILL)


class Objects:
    """A trial: one write, over an old checkpoint or none, on a bad line or killed; then the line is good again."""

    def __init__(self, work: Path) -> None:
        self.direct = weed.endpoint()
        self.line = Line(self.direct)
        self.sources = {salt: work / f"source-{salt}" for salt in (OLD, NEW)}
        self.contents: dict[tuple[str, int], Content] = {}
        for salt, path in self.sources.items():
            ucformat.save(path, state(salt))
            for kind in _KINDS:
                place = str(work / f"{kind}-{salt}")
                self._write(kind, place, salt)
                self.contents[kind, salt] = content(place)[0]

    def _write(self, kind: str, url: str, salt: int) -> None:
        if kind == "save":
            ucformat.save(url, state(salt), overwrite=True)
        elif kind == "steps":
            ucformat.save(url, state(salt), step=salt, keep=1, overwrite=True)
        else:
            ucformat.convert(self.sources[salt], url, kind, max_file_bytes=1000, overwrite=True)

    def __call__(self, random: random.Random) -> str:
        kind, old, killed = random.choice(_KINDS), random.random() < 0.6, random.random() < 0.7
        wrong, at = random.choice([0.01, 0.03, 0.1]), random.randrange(1, _MOST_WRITES[kind])
        folder = uuid.uuid4().hex
        url = f"s3://{weed.BUCKET}/{folder}/x"
        try:
            with environment(**settings(self.direct)):
                if old:
                    self._write(kind, url, OLD)
            how = f"{kind}, old there: {old}, " + (f"killed after write {at}" if killed else f"{wrong:.0%} of requests go wrong")
            said = self._killed(kind, url, at) if killed else self._on_a_bad_line(kind, url, wrong)
            with environment(**settings(self.direct)):
                failed = said.startswith("untyped") or self._check(kind, url, old=old, done=said == "ok")
            return f"{said if failed is True else failed} ({how}: {said})" if failed else ""
        finally:
            self._remove(folder)

    def _killed(self, kind: str, url: str, at: int) -> str:
        gate, go = os.pipe()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.close(go)
                os.read(gate, 1)  # until the line knows whom to kill
                with environment(**settings(self.line.url)):
                    self._write(kind, url, NEW)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.line.set(0.0, at, process)
        os.close(gate)
        os.close(go)
        ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self.line.set(0.0)
        return {0: "ok", -signal.SIGKILL: "killed"}.get(ended, f"untyped: ended with {ended}")

    def _on_a_bad_line(self, kind: str, url: str, wrong: float) -> str:
        self.line.set(wrong)
        try:
            with environment(**settings(self.line.url)):
                self._write(kind, url, NEW)
        except UcformatError as error:
            return type(error).__name__
        except Exception as error:
            return f"untyped: {type(error).__name__}: {error}"
        finally:
            self.line.set(0.0)
        return "ok"

    def _check(self, kind: str, url: str, *, old: bool, done: bool) -> str:
        now = self._found(kind, url)
        if now == 0:
            return f"wrong: {kind}: neither the old nor the new"
        if done and now != NEW:
            return f"lost: {kind}: said to be written, and not there"
        if now is None and old:
            return f"lost: {kind}: neither the old nor the new can be read"
        self._write(kind, url, NEW)
        return "" if self._found(kind, url) == NEW else f"lost: {kind}: written again, and not there"

    def _found(self, kind: str, url: str) -> int | None:
        """The salt of what can be read; 0 for something else, None for nothing."""
        try:
            held, _ = content(url)
        except UcformatError:
            return None
        return next((salt for salt in (OLD, NEW) if held == self.contents[kind, salt]), 0)

    def _remove(self, folder: str) -> None:
        client = weed.plain_client(self.direct)
        for found in client.list_objects_v2(Bucket=weed.BUCKET, Prefix=f"{folder}/").get("Contents", ()):
            client.delete_object(Bucket=weed.BUCKET, Key=found["Key"])

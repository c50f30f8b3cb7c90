"""A real S3 server in this process that counts what is written, and kills a client after a chosen write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from ucformat.storage.open import open_store

_CLIENT = """
import json, os, sys
import s3fs, torch.distributed.checkpoint, safetensors
from ucformat import api
from ucformat.cli.app import run
for line in sys.stdin:
    process = os.fork()
    if not process:
        os._exit(run(json.loads(line)))
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Server:
    """`bucket` is the URL of a bucket of its own: all servers of a process have the same contents."""

    def __init__(self) -> None:
        self.bucket = f"s3://bucket-{uuid.uuid4().hex}"
        self.writes = 0
        self.after_write: Callable[[], None] = lambda: None
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer = list(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self.writes += 1
            self.after_write()
        return answer

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def watched(self, look: Callable[[], None]) -> Iterator[None]:
        """Have `look` called after each write; what it raises is raised at the end."""
        errors: list[BaseException] = []

        def after() -> None:
            try:
                look()
            except BaseException as error:
                errors.append(error)

        self.writes, self.after_write = 0, after
        try:
            yield
        finally:
            self.after_write = lambda: None
        if errors:
            raise errors[0]


@contextmanager
def serving() -> Iterator[Server]:
    """A server that is this process' S3."""
    import s3fs

    server = Server()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
    }
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(server.bucket)
    try:
        yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
        server.stop()


class Clients:
    """Processes of `ucconvert`, forked from one that has its imports behind it. Killed ones are killed by SIGKILL."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, *args: str, kill_after: int = 0) -> int:
        """The exit status of `ucconvert args`, or minus the signal: killed when the server has done `kill_after` writes."""
        process, known = [0], threading.Event()

        def kill() -> None:
            if self._server.writes == kill_after:
                assert known.wait(60)
                os.kill(process[0], signal.SIGKILL)

        self._server.writes, self._server.after_write = 0, kill
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps(args), file=self._parent.stdin, flush=True)
        while not (line := self._parent.stdout.readline()).strip().isdigit():
            assert line, "the parent of the clients is gone"
        process[0] = int(line)
        known.set()
        *_, status = iter(self._lines())
        self._server.after_write = lambda: None
        return status

    def _lines(self) -> Iterator[int]:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            if line.strip().lstrip("-").isdigit():
                yield int(line)
                return

    def close(self) -> None:
        self._parent.communicate(timeout=60)


def objects(url: str, folder: str = "") -> dict[str, bytes]:
    """Path → bytes of everything below a prefix."""
    store = open_store(url)
    found: dict[str, bytes] = {}
    for name in store.list(folder.rstrip("/")):
        path = folder + name
        found |= objects(url, path) if name.endswith("/") else {path: store.read(path)}
    return found

"""Processes of `ucconvert` that a test runs against the S3 server, and kills after a chosen write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.s3.bucket import Server
from tests.s3.proxy import Request

_CLIENT = """
import json, os, sys
import botocore.session, torch.distributed.checkpoint, safetensors
from ucformat import api
from ucformat.cli.app import run
for line in sys.stdin:
    process = os.fork()
    if not process:
        os._exit(run(json.loads(line)))
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


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

        def kill(request: Request) -> None:
            if self._server.writes == kill_after:
                assert known.wait(60)
                os.kill(process[0], signal.SIGKILL)

        with self._server.after_writes(kill):
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            print(json.dumps(args), file=self._parent.stdin, flush=True)
            while not (line := self._parent.stdout.readline()).strip().isdigit():
                assert line, "the parent of the clients is gone"
            process[0] = int(line)
            known.set()
            *_, status = iter(self._lines())
        return status

    def _lines(self) -> Iterator[int]:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            if line.strip().lstrip("-").isdigit():
                yield int(line)
                return

    def close(self) -> None:
        self._parent.communicate(timeout=60)

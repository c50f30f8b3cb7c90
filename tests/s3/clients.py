"""Processes of `ucconvert` that a test runs against the S3 server, and kills after a chosen write."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from tests.s3.bucket import Server
from tests.s3.proxy import Request
from tests.scripts import forked


def convert(args: Sequence[str], env: dict[str, str]) -> None:
    """Run `ucconvert`, in a process of its own."""
    from ucformat.cli.app import run

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ.update(env)
    os._exit(run(list(args)))


class Clients:
    """Processes of `ucconvert` beside a server. Killed ones are killed by SIGKILL."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def run(self, *args: str, kill_after: int = 0) -> int:
        """The exit status of `ucconvert args`, or minus the signal: killed when the server has done `kill_after` writes."""
        process = forked().Process(target=convert, args=(args, dict(os.environ)), daemon=True)
        known = threading.Event()

        def kill(request: Request) -> None:
            if self._server.writes == kill_after:
                assert known.wait(60)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)

        with self._server.after_writes(kill):
            process.start()
            known.set()
            process.join()
        assert process.exitcode is not None
        return process.exitcode

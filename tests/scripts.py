"""Scripts that tests run in processes of their own, and kill: forked from one that has its imports behind it, in milliseconds.

For what an interpreter does when it begins or ends, start one: a forked script ends without what `atexit` was given.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

END_S = 240.0  # for a script, on a busy machine


def forked() -> ForkServerContext:
    """Processes that start in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


class Script:
    """A script that runs. `send` writes a line to its standard input; `stdout` is what it prints."""

    def __init__(self, code: str, *args: object, env: Mapping[str, str] | None = None) -> None:
        read_out, write_out = os.pipe()
        read_in, write_in = os.pipe()
        theirs = Connection(read_in, writable=False), Connection(write_out, readable=False)
        settings = {**os.environ, **(env or {})}
        self.process: ForkServerProcess = forked().Process(
            target=_run, args=(code, [str(arg) for arg in args], settings, *theirs), daemon=True
        )
        self.process.start()
        for end in theirs:
            end.close()
        self.stdout, self._stdin = os.fdopen(read_out), os.fdopen(write_in, "w")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, line: str = "") -> None:
        print(line, file=self._stdin, flush=True)

    def wait(self) -> int:
        """The exit status, or minus the signal. Raises TimeoutError."""
        return self.end()[0]

    def end(self) -> tuple[int, str]:
        """The exit status, or minus the signal, and all that it printed. Raises TimeoutError."""
        self.process.join(END_S)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"a script is not done after {END_S} s")
        with self.stdout, self._stdin:
            return self.process.exitcode, self.stdout.read().strip()


def _run(code: str, args: list[str], env: dict[str, str], stdin: Connection, stdout: Connection) -> None:
    for number, end in enumerate((stdin, stdout)):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.stdin, sys.stdout = ["script", *args], os.fdopen(0), os.fdopen(1, "w")
    try:
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()

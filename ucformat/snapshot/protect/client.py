"""The trainer's side of protecting its versions: a thread that starts the process, and learns what became of each version.

Training never waits for it. A process that is slow, hanging or dead costs versions that are not protected, and these are
counted; it is started again on the same address, which the other ranks know.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ucformat.formats.snapshot import rank_name
from ucformat.snapshot.keeper.client import KILL_S, LONGEST_PAUSE_S, NICENESS, describe_exit
from ucformat.snapshot.keeper.messages import Inbox, send
from ucformat.snapshot.protect.messages import (
    EVENTS,
    Begin,
    Cancel,
    Event,
    Protect,
    Protected,
    ProtectOptions,
    Ready,
    Stranger,
    Unprotected,
)

_PROGRAM = f"import os; os.nice({NICENESS}); from ucformat.snapshot.protect.process import main; main()"
LOG = "protect.log"
LOOK_S = 0.5  # between looks whether to end
GRACE_S = 60.0  # beyond the time for one version, before a process that gives no sign of life is killed

Done = Callable[[int, str], None]
"""Called once for each version, in their order, by another thread: its step, and why it is not protected; empty if it is."""


class Protector(threading.Thread):
    """Protects one rank's versions. `protect` may be called from any thread."""

    def __init__(self, options: ProtectOptions, listener: socket.socket, done: Done, warn: Callable[[str, str], None]) -> None:
        super().__init__(name="ucf-protector", daemon=True)
        self._options, self._listener, self._done, self._warn = options, listener, done, warn
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        """Steps that were ordered and not answered, ascending."""
        self._since = 0.0
        self._orders = -1
        self._closing, self._started = threading.Event(), threading.Event()
        self._tried = threading.Event()
        self.restarts = 0

    def protect(self, step: int, slot: int) -> None:
        """Have the version in a slot protected; `done` is called when that is known."""
        with self._lock:
            self._waiting.append(step)
            self._since = time.monotonic() if len(self._waiting) == 1 else self._since
            sent = self._orders >= 0 and send(self._orders, Protect(step, slot))
        if not sent:
            self._answer(step, "the process that protects versions is not running")

    def cancel(self, step: int) -> bool:
        """The version is lost to another rank: nothing more is said of it. False when it was answered, or never ordered."""
        with self._lock:
            if step not in self._waiting:
                return False
            self._waiting.remove(step)
            self._since = time.monotonic()
            if self._orders >= 0:
                send(self._orders, Cancel(step))
            return True

    def await_start(self, seconds: float) -> bool:
        """Wait until the first process has started, but no longer than it lives; whether it has.

        Versions that are taken before that fill the slots, where they can't be protected yet and keep newer ones out.
        """
        self._tried.wait(seconds)
        return self._started.is_set()

    @property
    def longest_s(self) -> float:
        """After so many seconds, it is known whether a version is protected."""
        return self._options.timeout_s + GRACE_S

    @property
    def pending(self) -> bool:
        """Whether the fate of a version is open."""
        with self._lock:
            return bool(self._waiting)

    def close(self) -> None:
        """End the process; what it has not done is unprotected."""
        self._closing.set()
        with self._lock:
            self._close_orders()
        self.join()
        self._listener.close()
        self._give_up("it was closed")

    def run(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            began = time.monotonic()
            try:
                why = self._live()
            except OSError as error:
                why = f"it can't be started: {error}"
            self._tried.set()
            if self._closing.is_set():
                return
            self.restarts += 1
            self._warn("protect", f"the process that protects versions is started again: {why}")
            self._give_up(why)
            pause = 0.0 if time.monotonic() - began > LONGEST_PAUSE_S else min(2 * pause or 0.5, LONGEST_PAUSE_S)

    # -- one process -----------------------------------------------------------------------------------------------

    def _live(self) -> str:
        """Start the process and pass on what it says until it ends; how it ended. Raises OSError."""
        process, events = self._spawn()
        inbox: Inbox[Event] = Inbox(events, EVENTS.decode)
        try:
            while not inbox.closed:
                inbox.wait(LOOK_S)
                for event in inbox.take():
                    self._note(event)
                if self._hangs() or self._closing.is_set():
                    break
        finally:
            with self._lock:
                self._close_orders()
            os.close(events)
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return f"it {describe_exit(process.returncode)}"

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """A fresh interpreter, as for the keeper: nothing of the trainer is forked, run again or pickled."""
        orders, my_orders = os.pipe()
        my_events, events = os.pipe()
        passed = (orders, events, self._listener.fileno())
        path = os.pathsep.join(dict.fromkeys(map(os.path.abspath, sys.path)))
        quiet = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        folder = Path(self._options.directory, rank_name(self._options.rank))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / LOG, "wb") as log:
                process = subprocess.Popen(  # noqa: S603  # our own module, no shell
                    [sys.executable, "-c", _PROGRAM, *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
                    env={**os.environ, **quiet},
                    start_new_session=True,
                )
        except OSError:
            os.close(my_orders)
            os.close(my_events)
            raise
        finally:
            os.close(orders)
            os.close(events)
        os.set_blocking(my_orders, False)
        send(my_orders, Begin(self._options, os.getpid()))
        with self._lock:
            self._orders = my_orders
        return process, my_events

    def _hangs(self) -> bool:
        with self._lock:
            return bool(self._waiting) and time.monotonic() > self._since + self._options.timeout_s + GRACE_S

    def _close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
        self._orders = -1

    # -- what became of versions -----------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._started.set()
            self._tried.set()
        elif isinstance(event, Protected):
            self._answer(event.step, "")
        elif isinstance(event, Unprotected):
            self._answer(event.step, event.why)
        elif isinstance(event, Stranger):
            self._warn("stranger", event.why)
        else:
            with self._lock:
                self._since = time.monotonic()

    def _answer(self, step: int, why: str) -> None:
        with self._lock:
            if step not in self._waiting:
                return
            self._waiting.remove(step)
            self._since = time.monotonic()
        self._done(step, why)

    def _give_up(self, why: str) -> None:
        with self._lock:
            steps, self._waiting = list(self._waiting), deque()
        for step in steps:
            self._done(step, f"the process that protects versions ended: {why}")

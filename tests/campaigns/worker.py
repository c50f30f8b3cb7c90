"""Runs trials in a forked worker that may hang, crash or take too much memory, and says which trial did.

The worker is forked from a warm process, so that a trial costs milliseconds. It tells the trial that it is at through shared
memory; when that does not change for a while the worker is killed, and another goes on behind it.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable

import torch

from tests.campaigns.tally import Tally
from ucformat.errors import UcformatError

HANG_S = 120.0  # far beyond any trial, on a machine that is busy with other things
MEMORY_BYTES = 1 << 30  # that a trial may take beyond what the worker had
_CAP_BYTES = 6 << 30  # of address space beyond that of a warm process: torch maps much that it never touches
_POLL_S = 0.02
_STATE = struct.Struct("<qd")

Trial = Callable[[random.Random], str]
"""One trial; "" or what went wrong."""


def generator(seed: int, name: str, trial: int) -> random.Random:
    """The random numbers of one trial: the same whatever was run before it."""
    return random.Random(f"{seed}/{name}/{trial}")  # to be repeatable, not secret


def run(name: str, trial: Trial, seed: int, seconds: float, *, first: int = 0, count: int | None = None) -> Tally:
    """Run trials first, first + 1, … until `seconds` have passed or `count` were run."""
    tally = Tally(name)
    deadline = time.monotonic() + seconds
    at, last = first, None if count is None else first + count
    while time.monotonic() < deadline and at != last:
        at = _shift(tally, trial, seed, at, last, deadline)
    return tally


def _shift(tally: Tally, trial: Trial, seed: int, first: int, last: int | None, deadline: float) -> int:
    """Let one worker run trials until it is done, dies or hangs; the number of the next trial."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    shared[: _STATE.size] = _STATE.pack(first, time.monotonic())
    come, go = os.pipe()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        os.close(come)
        _work(tally.name, trial, seed, first, last, deadline, shared, go)
    os.close(go)
    lines: list[bytes] = []
    with os.fdopen(come, "rb") as results:
        status = _watch(pid, shared, results.fileno(), lines)
    done = first - 1
    for number, outcome in map(json.loads, b"".join(lines).splitlines()):
        tally.add(number, outcome)
        done = number
    at, _ = _STATE.unpack(shared[: _STATE.size])
    if status is None:
        tally.add(at, f"hang: no end within {HANG_S:g} s")
    elif status != 0 and at > done:
        tally.add(at, f"crash: the process ended with {status}")
    else:
        return done + 1
    return int(at) + 1


def _watch(pid: int, shared: mmap.mmap, results: int, lines: list[bytes]) -> int | None:
    """Collect what a worker says until it ends; its exit status, None when it had to be killed."""
    os.set_blocking(results, False)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        while True:
            try:
                data = os.read(results, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            lines.append(data)
        if ended:
            return os.waitstatus_to_exitcode(status)
        _, began = _STATE.unpack(shared[: _STATE.size])
        if time.monotonic() - began > HANG_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(_POLL_S)


def _work(name: str, trial: Trial, seed: int, first: int, last: int | None, deadline: float, shared: mmap.mmap, go: int) -> None:
    code = 1
    try:
        torch.set_num_threads(1)  # renews its thread pool, which no fork survives; several threads that do it at once fail
        base = _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (base + _CAP_BYTES, base + _CAP_BYTES))
        peak, at = _peak(), first
        while time.monotonic() < deadline and at != last:
            shared[: _STATE.size] = _STATE.pack(at, time.monotonic())
            outcome = attempt(trial, generator(seed, name, at))
            grown, peak = _peak() - peak, _peak()
            if not outcome and grown > MEMORY_BYTES:
                outcome = f"memory: {grown:,} bytes more"
            os.write(go, json.dumps([at, outcome]).encode() + b"\n")
            at += 1
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def attempt(trial: Trial, generator: random.Random) -> str:
    """A trial's outcome, errors included."""
    try:
        return trial(generator)
    except UcformatError as error:
        return f"untyped: the campaign itself met {type(error).__name__}: {error}"
    except MemoryError:
        return "memory: MemoryError"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"untyped: {type(error).__name__}: {str(error)[:200]} ({os.path.basename(place.filename)}:{place.lineno})"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE

"""One of four hosts vanishes for good, and training goes on from memory: `python -m examples.demo_failover`, about a minute.

Four hosts with a rank each train the GPT of `examples.elastic` as PP2×DP2, in FSDP2 shards that no two ranks share. All processes
of one host are killed and its memory is wiped. The other three go on in the same processes as DP3. Hosts are network namespaces
with a tmpfs each; where the kernel forbids these, directories and addresses of the loopback device.

Digests and losses come from the runs themselves; a run in one process, never interrupted, is the truth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.hosts import Machines
from examples.proof import DemoError, Proofs, environment, tail

HOSTS = 4
LOST = 2  # of the second stage
LOST_STEP, LAST_STEP = 9, 16
PATIENCE_S = 180.0  # for one run; on 2 quiet cores they take 12 and 40 s
TOLERANCE = 2e-4  # of a loss: another layout adds in another order
MEMORY = Path("/dev/shm")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the job, and the JSON lines that it prints."""

    process: subprocess.Popen[bytes]
    said: Path
    log: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.said.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == kind]


class Run:
    """A job on hosts. Ends with the block."""

    def __init__(self, machines: Machines, work: Path, hosts: int) -> None:
        self._machines, self._work, self.stack = machines, work, ExitStack()
        server = self._start(hosts, "serve", "--serve", ":0")
        self._until(server, lambda: bool(server.events("serving")))
        where = f"{machines.address(hosts)}:{server.events('serving')[0]['port']}"
        common = ("--meet", where, "--steps", str(LAST_STEP), "--hosts", f"{max(1, hosts - 1)}:{hosts}", "--digests")
        self.members = [
            self._start(
                host,
                f"host{host}",
                *(*common, "--address", machines.address(host), "--directory", str(machines.memory(host) / work.name)),
            )
            for host in range(hosts)
        ]

    def _start(self, host: int, name: str, *args: str) -> Member:
        said, log = self._work / f"{name}.json", self._work / f"{name}.log"
        with said.open("w") as out, log.open("w") as err:
            process = subprocess.Popen(
                [*self._machines.prefix(host), sys.executable, "-m", "examples.elastic", *args],
                stdout=out,
                stderr=err,
                env={**environment(self._work), "GLOO_SOCKET_IFNAME": self._machines.interface, "PYTHONPATH": str(ROOT)},
            )
        self.stack.callback(_end, process)
        return Member(process, said, log)

    def until_step(self, member: Member, step: int) -> None:
        self._until(member, lambda: any(event["step"] >= step for event in member.events("step")))

    def until_end(self, members: list[Member]) -> None:
        for member in members:
            try:
                status = member.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise DemoError(f"not done after {PATIENCE_S:.0f} s\n{tail(member.log)}") from None
            if status:
                raise DemoError(f"exit status {status}\n{tail(member.log)}")

    @staticmethod
    def _until(member: Member, condition: Any) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            if member.process.poll() is not None or time.monotonic() > limit:
                raise DemoError(
                    f"status {member.process.poll()} before its time, or after {PATIENCE_S:.0f} s\n{tail(member.log)}"
                )
            time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def running(machines: Machines, work: Path, hosts: int) -> Iterator[Run]:
    work.mkdir()
    run = Run(machines, work, hosts)
    with run.stack:
        yield run


def prove_failover(work: Path, proofs: Proofs) -> None:
    """A run that is never interrupted, in one process, and one that loses a host."""
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(prefix="ucformat-demo-", dir=MEMORY if MEMORY.is_dir() else work)
        machines = stack.enter_context(Machines(Path(stack.enter_context(place), "hosts"), HOSTS + 1))
        kind = "network namespaces" if machines.real else "directories, as namespaces are forbidden here"
        proofs.console.print(f"  {HOSTS} hosts of a rank each ({kind}), and one where they meet", highlight=False)
        with running(machines, work / "whole", 1) as whole:
            whole.until_end(whole.members)
            truth = {event["step"]: event for event in whole.members[0].events("step")}
        with running(machines, work / "failover", HOSTS) as run:
            run.until_step(run.members[LOST], LOST_STEP)
            machines.lose(LOST)
            _end(run.members[LOST].process)  # where hosts are directories
            lost_at = time.time()
            left = [member for host, member in enumerate(run.members) if host != LOST]
            run.until_end(left)
            judge(left, truth, lost_at, proofs)


def judge(left: list[Member], truth: dict[int, dict[str, Any]], lost_at: float, proofs: Proofs) -> None:
    first = left[0]
    before, after = first.events("resumed")
    steps = first.events("step")
    done = [event for event in steps if event["at"] < after["at"]]
    again = [event for event in steps if event["at"] > after["at"]]
    _judge_recovery(left, before, after, done, proofs)
    _judge_state(after, done, proofs)
    served = ", ".join(f"{nbytes / 2**20:.1f} MiB from {source}" for source, nbytes in after["served"].items())
    proofs.check(
        "its bytes come from the memory of the hosts that are left; what the lost one held is computed from parity",
        f"{served}; computed: rank {', '.join(map(str, after['computed']))}; seconds from the loss to the failed collective "
        f"{first.events('failed')[0]['at'] - lost_at:.1f}, to the new group {first.events('met')[1]['at'] - lost_at:.1f}, "
        f"to the restored state {after['at'] - lost_at:.1f}, to the next step {again[0]['at'] - lost_at:.1f}",
        after["source"] == "memory" and bool(after["computed"]) and "storage" not in after["served"],
    )
    apart = [abs(event["loss"] - truth[event["step"]]["loss"]) for event in again]
    samples = [event["samples"] for event in again]
    proofs.check(
        "no sample is lost or repeated, and the next losses are those of a run that was never interrupted",
        f"steps {again[0]['step']} to {again[-1]['step']}; losses differ by at most {max(apart):.1e}, as {before['layout']} and "
        f"{after['layout']} add in other orders",
        max(apart) < TOLERANCE
        and [event["step"] for event in again] == list(range(after["step"] + 1, LAST_STEP + 1))
        and samples == [truth[event["step"]]["samples"] for event in again],
    )


def _judge_recovery(
    left: list[Member], before: dict[str, Any], after: dict[str, Any], done: list[dict[str, Any]], proofs: Proofs
) -> None:
    known = max(event["restorable"] or 0 for member in left for event in member.events("left")[:1])
    pids = [sorted({event["pid"] for event in member.events("resumed")}) for member in left]
    lost = done[-1]["step"] - after["step"]
    proofs.check(
        f"one of {HOSTS} hosts vanishes with its memory: the others go on as {after['layout']} instead of {before['layout']}, "
        "from the newest protected step, without a restart",
        f"step {done[-1]['step']} was done, step {known} known to be protected, step {after['step']} restored: {lost} lost; "
        f"the same {sum(map(len, pids))} processes",
        after["step"] >= known > 0 and all(len(pid) == 1 for pid in pids) and after["layout"] != before["layout"],
    )


def _judge_state(after: dict[str, Any], done: list[dict[str, Any]], proofs: Proofs) -> None:
    tensors = next(event["tensors"] for event in done if event["step"] == after["step"])
    equal = sum(after["tensors"].get(name) == digest for name, digest in tensors.items())
    proofs.check(
        "the state is that after this step, bit for bit",
        f"{equal} of {len(tensors)} full tensors equal by SHA-256",
        equal == len(tensors) == len(after["tensors"]) > 0,
    )


def main() -> int:
    proofs = Proofs(Console(width=None if sys.stdout.isatty() else 140))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ucformat-demo-") as work:
        prove_failover(Path(work), proofs)
    proofs.show(f"a host is lost, {time.perf_counter() - began:.0f} s")
    return 0 if proofs.passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Hosts on one machine: a network namespace each, joined by a bridge, and a mount namespace with memory of its own.

Where the kernel forbids that (no root, or a container), hosts are directories and addresses of the loopback device: then a cut
or slow link can't be tried, and `Machines.real` is False.
"""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

_NETWORK = "10.213.77"
_NEWNET, _NEWNS = 0x40000000, 0x00020000


def can_namespaces() -> bool:
    """Whether this process may make network and mount namespaces."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False).returncode == 0


class Machines:
    """`count` hosts. `place` is a directory that is each host's own memory, under the same name on all of them."""

    def __init__(self, place: Path, count: int, megabytes: int = 64) -> None:
        self.place, self.count, self.real = place, count, can_namespaces()
        self._megabytes, self._name = megabytes, f"ucf{os.getpid() % 100_000}"
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._pids_of_holders: dict[int, int] = {}
        self._links: dict[int, str] = {}
        self._started = 0
        place.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Machines:
        if self.real:
            _ip("netns", "add", f"{self._name}-net")
            self._net("ip", "link", "add", "br0", "type", "bridge")
            self._net("ip", "link", "set", "br0", "up")
        for host in range(self.count):
            self.start(host)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in range(self.count):
            self.lose(host)
        if self.real:
            _ip("netns", "del", f"{self._name}-net")

    def portable(self) -> Machines:
        """The same for a process that enters a host."""
        other = copy.copy(self)
        other._holders = {}
        other._pids_of_holders = {host: holder.pid for host, holder in self._holders.items()}
        return other

    # -- a host ----------------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        return f"{_NETWORK}.{host + 1}" if self.real else f"127.0.0.{host + 1}"

    @property
    def interface(self) -> str:
        """That has a host's address."""
        return "eth0" if self.real else "lo"

    def memory(self, host: int) -> Path:
        """Its directory, as its own processes see it."""
        return self.place if self.real else self.place / f"host{host}"

    def start(self, host: int) -> None:
        """A host without processes, its memory empty."""
        if not self.real:
            self.memory(host).mkdir(exist_ok=True)
            return
        self._started += 1
        name, link = self._of(host), f"v{self._started}"  # the kernel removes the link of a lost host when it has time
        self._links[host] = link
        _ip("netns", "add", name)
        self._net("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._net("ip", "link", "set", link, "master", "br0", "up")
        for command in (
            ("addr", "add", f"{self.address(host)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", name, *command)
        mount = f"mount -t tmpfs -o size={self._megabytes}m tmpfs {self.place} && echo ready && exec sleep infinity"
        holder = subprocess.Popen(
            ["nsenter", f"--net=/var/run/netns/{name}", "unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        self._holders[host] = holder

    def enter(self, host: int) -> None:
        """Move this process, of a single thread, to a host."""
        if not self.real:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        pid = self._pids_of_holders[host]
        for path, kind in ((f"/proc/{pid}/ns/net", _NEWNET), (f"/proc/{pid}/ns/mnt", _NEWNS)):
            fd = os.open(path, os.O_RDONLY)
            if libc.setns(fd, kind):
                raise OSError(ctypes.get_errno(), f"can't enter {path}")
            os.close(fd)

    def prefix(self, host: int) -> list[str]:
        """What starts a command on a host."""
        if not self.real:
            return []
        pid = self._holders[host].pid
        return ["nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt"]

    def run(self, host: int, command: str) -> str:
        """What a shell command on a host prints."""
        return subprocess.run([*self.prefix(host), "sh", "-c", command], check=True, capture_output=True, text=True).stdout

    def lose(self, host: int) -> None:
        """All processes of a host are killed, and its memory is gone."""
        if not self.real:
            shutil.rmtree(self.memory(host), ignore_errors=True)
            return
        if host not in self._holders:
            return
        self.kill(host)
        holder = self._holders.pop(host)
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
        _ip("netns", "del", self._of(host))

    def kill(self, host: int) -> None:
        """Kill all processes of a host but its memory's holder."""
        holder = self._holders[host].pid
        limit = time.monotonic() + 20
        while pids := [pid for pid in self._pids(host) if pid != holder]:
            assert time.monotonic() < limit, pids
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)

    def cut(self, host: int, *, up: bool = False) -> None:
        """Cut the host's link, or mend it."""
        assert self.real
        self._net("ip", "link", "set", self._links[host], "up" if up else "down")

    def slow(self, host: int, megabits: int) -> None:
        """Slow down what the host sends."""
        assert self.real
        rate = ["rate", f"{megabits}mbit", "burst", "32kbit", "latency", "400ms"]
        subprocess.run([*self.prefix(host), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate], check=True)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _of(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _net(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", f"{self._name}-net", *command], check=True)

    def _pids(self, host: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self._of(host)], check=True, capture_output=True, text=True)
        return [pid for pid in map(int, found.stdout.split()) if _alive(pid)]


def _alive(pid: int) -> bool:
    """Whether a process is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)

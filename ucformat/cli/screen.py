"""What the verbs share about talking: sizes as text, progress, results, errors, and who of several ranks talks."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import typer

from ucformat.errors import printable

if TYPE_CHECKING:
    from ucformat.group import Group

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_BEYOND_JSON = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What JSON leaves in strings as it is, and a terminal acts on."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?", re.IGNORECASE)


def is_leader() -> bool:
    """Whether this process is the one that talks: rank 0 under torchrun, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """A line of the result, on standard output. Names come from files: what a terminal would act on is escaped."""
    if is_leader():
        typer.echo(printable(text))


def say_json(value: object) -> None:
    """The result as one JSON document on standard output."""
    if is_leader():
        text = msgspec.json.format(msgspec.json.encode(_text(msgspec.to_builtins(value))), indent=2).decode()
        typer.echo(_BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _text(value: object) -> object:
    """`value`, whose strings JSON can hold: the bytes of a file name need not be UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_text(key): _text(item) for key, item in value.items()}
    return [_text(item) for item in value] if isinstance(value, (list, tuple)) else value


def remark(text: str) -> None:
    """Something the user should know, on standard error."""
    if is_leader():
        typer.echo(f"note: {printable(text)}", err=True)


class _Notes(logging.Handler):
    """What the library logs as a warning is a remark here."""

    def emit(self, record: logging.LogRecord) -> None:
        remark(record.getMessage())


def listen() -> None:
    """Show the library's warnings as remarks."""
    log = logging.getLogger("ucformat")
    if not any(isinstance(handler, _Notes) for handler in log.handlers):
        log.addHandler(_Notes(logging.WARNING))
        log.propagate = False


def tell_error(error: Exception, expected: bool) -> None:
    """One line on standard error: the message, and the kind of error when it is not one of ours."""
    message = printable(" ".join(str(error).split()))
    if expected:
        typer.echo(f"error: {message} [{type(error).__name__}]", err=True)
    else:
        typer.echo(f"error: {type(error).__name__}: {message} (unexpected: --debug shows where)", err=True)


def bytes_text(nbytes: float) -> str:
    """Decimal units, three digits: `1.23 GB`."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """`500MB`, `4GiB`, `1048576` in bytes. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGTP".index(match[2].upper() or " ")) if match else 0
    if size <= 0:
        raise typer.BadParameter(f"{text!r} is no size: write 500MB, 4GiB or a number of bytes")
    return size


def count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, bytes/s and time left, on a terminal's standard error; yields a function that takes the bytes done."""
    if not is_leader() or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


def join_ranks() -> Group:
    """The ranks that torchrun started, over gloo; a group of one without it."""
    from ucformat.group import Group, current

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Group()
    import torch.distributed as dist

    if not dist.is_initialized():
        import_module("torch.distributed.checkpoint")  # later it would keep the group: see `reshard.fsdp.known`
        dist.init_process_group("gloo")
    return current()


def sweep_up() -> None:
    """Leave the process group, if `join_ranks` made one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
